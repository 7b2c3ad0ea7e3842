"""Startup cost: CPU-seconds of help and of a typo against TRL's command; time to the first training step."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import common
from benchmarks.common import Progress
from benchmarks.workloads import SEED, WORKLOADS, Workload, random_llama
from modelwright.data.sources import EMBEDDED_DATASETS
from modelwright.data.tokenizer import train_bpe
from modelwright.errors import UsageError
from modelwright.runs.folder import write_text
from modelwright.runs.journal import Event, read
from modelwright.stages.context import GracefulShutdown
from modelwright.stages.measure import random_shards

REPEATS = 3
OUR_TYPO = """\
name: typo
model: {model_name_or_path: smollm2-135m-instruct}
data: {dataset_name: field-guide, columns: {question: prompt, answer: completion}}
sft: {learning_rat: 1e-4}
"""
TYPO = "learning_rat"
# without use_cpu a machine without a GPU gets an error about that instead
TRL_TYPO = "model_name_or_path: some/model\ndataset_name: some/data\nuse_cpu: true\nlearning_rat: 1e-4\n"


def measure() -> dict[str, Any]:
    """Both commands with --help and with a misspelt setting; the ratio is theirs over ours."""
    ours, theirs = [sys.executable, "-m", "modelwright"], [str(Path(sys.executable).with_name("trl")), "sft"]
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        our_file, their_file = Path(folder) / "ours.yaml", Path(folder) / "theirs.yaml"
        our_file.write_text(OUR_TYPO, encoding="utf-8")
        their_file.write_text(TRL_TYPO, encoding="utf-8")
        for name, us, them in (
            ("help", [*ours, "--help"], [*theirs, "--help"]),
            ("typo", [*ours, "check", str(our_file)], [*theirs, "--config", str(their_file)]),
        ):
            figures[name] = {"modelwright": cost(us)}
            if Path(theirs[0]).exists():
                figures[name]["trl"] = cost(them)
                figures[name]["ratio"] = _ratio(**figures[name], mistake=TYPO if name == "typo" else "")
    return figures


def cost(command: Sequence[str]) -> dict[str, Any]:
    """The smallest CPU time of some runs, since noise only adds; and the last line of output."""
    smallest = float("inf")
    for _ in range(REPEATS):
        before = _children_seconds()
        process = subprocess.run(command, capture_output=True, text=True, check=False)
        smallest = min(smallest, _children_seconds() - before)
    output = (process.stderr.strip() or process.stdout.strip()).splitlines() or [""]
    last = output[-1].replace(f"{tempfile.gettempdir()}/", "").strip()
    return {"cpu_seconds": round(smallest, 3), "exit_code": process.returncode, "last_line": last}


def lines(figures: dict[str, Any]) -> list[str]:
    """The figures as sentences."""
    return [f"{name}: modelwright {figure['modelwright']['cpu_seconds']:.2f} CPU-s{_comparison(figure)}"
            for name, figure in figures.items()]  # fmt: skip


def _comparison(figure: dict[str, Any]) -> str:
    peer = figure.get("trl")
    if peer is None:
        return f"; {common.NO_TRL}"
    if figure["ratio"] is None:
        return f"; trl sft answered something else ({peer['last_line']}), so the two cannot be compared"
    return f", trl sft {peer['cpu_seconds']:.2f} CPU-s, {figure['ratio']:.0f} times as much"


def _ratio(modelwright: dict[str, Any], trl: dict[str, Any], mistake: str) -> float | None:
    """Their CPU time over ours; None if one of them did not answer the typo."""
    answered = all(mistake in side["last_line"] for side in (modelwright, trl))
    return round(trl["cpu_seconds"] / modelwright["cpu_seconds"], 1) if answered else None


def _children_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main(save: common.Save = False, as_json: common.Json = False) -> None:
    """CPU-seconds of help and of a misspelt setting, compared with the command of TRL."""
    common.report("start", measure, lines, save, as_json)


MINUTE = 60.0
COMPILED = 2
"""Steps after which the first run has compiled everything; it saves nothing."""
SAVES = 2
"""Checkpoints in the second run; the first of them also allocates its buffers."""
BETWEEN = 600
"""Minimum steps between two saves on a GPU, about 15 s, so that no save waits for the one before."""
TIMEOUT_SECONDS = 240
POLL_SECONDS = 0.1
EVENTS = ("run", "loading", "stage_started", "model", "plan", "step")
"""Journal events before and at the first step, in order."""
RUN_WITH_PDEATHSIG = """\
import runpy, sys
from modelwright.runs.heartbeat import set_pdeathsig
set_pdeathsig(int(sys.argv.pop(1)))
sys.argv[0] = "modelwright"
runpy.run_module("modelwright", run_name="__main__")
"""
IsEnough = Callable[[list[Event]], bool]


def measure_first_step(variants: Sequence[str], steps: int, data: Path | None, kernels: bool = False) -> dict[str, Any]:
    """A start with empty compile caches, and one with warm ones; steps: between two saves of the warm run."""
    import torch

    if variants:
        raise UsageError("--variant is not for start: the command has no variants")
    on_gpu = torch.cuda.is_available()
    workload, between = WORKLOADS["0.5b" if on_gpu else "tiny"], max(steps, BETWEEN) if on_gpu else steps
    figures: dict[str, Any] = {"saves": []}
    starts: dict[str, tuple[int, IsEnough]] = {
        "cold": (10 * between, lambda events: len(_steps(events)) >= COMPILED),
        "warm": (between, lambda events: len(save_costs(events)) >= SAVES),
    }
    progress, shutdown = Progress("start"), GracefulShutdown()
    with shutdown.handle_signals(), shutdown.defer_to_step_end(), tempfile.TemporaryDirectory(dir=data) as folder:
        _write_inputs(Path(folder), workload)
        progress.log("model and shards are on disk")
        for name, (save_steps, enough) in starts.items():
            command = Command(Path(folder), workload, name, save_steps)
            for figures[name] in command.follow(enough, shutdown, progress):
                figures["saves"] = save_costs(command.events)
            if shutdown.requested():
                break
    return figures


def first_step_lines(figures: dict[str, Any]) -> Iterator[str]:
    """The figures as sentences."""
    for name in ("cold", "warm"):
        if name not in figures:
            yield f"  {name} start: cut short before its first step"
            continue
        start = figures[name]
        marks = ", ".join(f"{event} {second:.1f}" for event, second in start["marks"].items())
        yield f"  {name} start: {start['seconds']:.1f} s from the command to the end of the first step ({marks})"
    rate, waiting = (figures.get("warm", {}).get(name) for name in ("tokens_per_second", "waiting"))
    wait = "" if waiting is None else f", {waiting:.2%} of the time waiting for rows"
    yield (
        f"  then {rate:,.0f} tokens/s in the command itself{wait}" if rate else "  too few steps to measure their speed"
    )
    yield from (f"  {describe_save(save)}" for save in figures["saves"])


def describe_save(save: dict[str, Any]) -> str:
    """The cost of a save as a sentence."""
    return (
        f"save at step {save['step']}: training stood still {save['still']:.3f} s, and lost {save['slower']:.3f} "
        f"s in the {save['steps_meanwhile']} steps meanwhile, {save['share_of_a_minute']:.2%} of a minute; written "
        f"and read back in {save['written']:.1f} s"
    )


def _write_inputs(folder: Path, workload: Workload) -> None:
    """The model with its tokenizer, and shards of random tokens."""
    import torch

    model = random_llama(workload).to("cpu", torch.bfloat16)  # as models are published
    train_bpe(EMBEDDED_DATASETS["field-guide"].read_text(encoding="utf-8").splitlines(), 1024, folder / "model")
    model.save_pretrained(folder / "model")
    random_shards(folder / "shards", workload.length, workload.vocab_size)


def save_costs(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The cost of each asynchronous save: the blocked seconds, and slower steps while it was written."""
    steps = _steps(events)
    usual = median(step["step_seconds"] for step in steps) if steps else 0.0
    costs = []
    for started in (event for event in events if event["event"] == "checkpoint_started"):
        ended = next((e for e in events if e["event"] == "checkpoint_saved" and e["step"] == started["step"]), None)
        if ended is None or started["step"] == steps[-1]["step"] or ended["time"] + usual > steps[-1]["time"]:
            continue  # unfinished, or at the end of the stage: no step was trained meanwhile
        overlapping = [step for step in steps if started["time"] < step["time"] <= ended["time"] + usual]
        slower = sum(max(0.0, step["step_seconds"] - usual) for step in overlapping)
        still = started["seconds"] + ended["blocked_seconds"]
        costs.append({
            "step": started["step"], "still": round(still, 4), "slower": round(slower, 4),
            "steps_meanwhile": len(overlapping), "written": ended["seconds"],
            "share_of_a_minute": round((still + slower) / MINUTE, 5),
        })  # fmt: skip
    return costs


class Command:
    """`modelwright run` as a process of its own, which is killed when this one ends."""

    def __init__(self, folder: Path, workload: Workload, name: str, between: int) -> None:
        """between: steps between two saves."""
        import torch

        section = {
            "max_length": workload.length, "per_device_train_batch_size": workload.rows,
            "learning_rate": workload.learning_rate, "lr_scheduler_type": "constant", "logging_steps": 1,
            "torch_compile": torch.cuda.is_available(), "save_total_limit": 2, "async_save": "always",
            "save_steps": between, "max_steps": 10 * between,
        }  # fmt: skip
        recipe = {
            "name": name, "seed": SEED, "output_dir": str(folder / name), "pretrain": section,
            "model": {"model_name_or_path": str(folder / "model")}, "data": {"dataset_name": str(folder / "shards")},
        }  # fmt: skip
        self._recipe, self._errors = folder / f"{name}.yaml", folder / f"{name}.log"
        self._journal, self._name = folder / name / "journal.jsonl", name
        write_text(self._recipe, json.dumps(recipe))
        self.events: list[Event] = []
        """Its journal so far."""

    def follow(self, enough: IsEnough, shutdown: GracefulShutdown, progress: Progress) -> Iterator[dict[str, Any]]:
        """Run until the journal has enough or a stop is requested; yields the figures, and logs what is new."""
        logged: set[str] = set()
        began = time.time()
        for events in self._poll_journal(began):
            self.events = events
            for mark, text in self._news(began):
                if mark not in logged:
                    logged.add(mark)
                    progress.log(f"{self._name}: {text}")
            if _steps(events):
                yield self._figures(began)
            if enough(events) or shutdown.requested():
                return

    def _poll_journal(self, began: float) -> Iterator[list[Event]]:
        """The journal again and again while the command runs; it is killed when the caller stops iterating."""
        command = [sys.executable, "-c", RUN_WITH_PDEATHSIG, str(os.getpid()), "run", str(self._recipe)]
        with self._errors.open("wb") as errors:
            process = subprocess.Popen(
                [*command, "--log-format", "json"], stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True
            )
        try:
            while process.poll() is None and time.time() - began < TIMEOUT_SECONDS:
                yield list(read(self._journal)) if self._journal.exists() else []
                time.sleep(POLL_SECONDS)
            if process.returncode:
                errors_text = self._errors.read_text(encoding="utf-8", errors="replace").strip()[-500:]
                raise RuntimeError(f"modelwright run ended with {process.returncode}: {errors_text}")
            yield list(read(self._journal))
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # it need not save
            process.wait()

    def _news(self, began: float) -> Iterator[tuple[str, str]]:
        for kind, second in self._marks(began).items():
            yield (
                kind,
                f"the first step is done after {second:.1f} s" if kind == "step" else f"{kind} at {second:.1f} s",
            )
        for save in save_costs(self.events):
            yield f"save {save['step']}", describe_save(save)

    def _marks(self, began: float) -> dict[str, float]:
        """Seconds until the first event of each kind."""
        firsts = {kind: next((e["time"] for e in self.events if e["event"] == kind), None) for kind in EVENTS}
        return {kind: round(at - began, 2) for kind, at in firsts.items() if at is not None}

    def _figures(self, began: float) -> dict[str, Any]:
        marks, steps = self._marks(began), _steps(self.events)
        return {
            "seconds": marks["step"],
            "marks": marks,
            "first_step_seconds": steps[0]["step_seconds"],
            "tokens_per_second": steps[-1].get("tokens_per_second"),
            "waiting": steps[-1].get("data_wait_fraction"),
            "whole_seconds": round(time.time() - began, 1),
        }


def _steps(events: list[Event]) -> list[Event]:
    return [event for event in events if event["event"] == "step"]


if __name__ == "__main__":
    common.run(main)
