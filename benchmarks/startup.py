"""What a first answer costs: CPU-seconds of help and of a typing mistake, beside TRL's own command."""

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
from benchmarks.workloads import SEED, WORKS, Workload, build
from modelwright.data.sources import EMBEDDED_DATASETS
from modelwright.data.tokenizer import train_bpe
from modelwright.errors import UsageError
from modelwright.runs.folder import write_text
from modelwright.runs.journal import Event, read
from modelwright.stages.context import GracefulShutdown
from modelwright.stages.measure import random_shards

TRIES = 3
OURS_MISTYPED = """\
name: typo
model: {model_name_or_path: smollm2-135m-instruct}
data: {dataset_name: field-guide, columns: {question: prompt, answer: completion}}
sft: {learning_rat: 1e-4}
"""
MISTAKE = "learning_rat"
# without use_cpu a machine without a GPU is answered about that, and the mistake is never seen
THEIRS_MISTYPED = "model_name_or_path: some/model\ndataset_name: some/data\nuse_cpu: true\nlearning_rat: 1e-4\n"


def measure() -> dict[str, Any]:
    """Both programs in the same two situations; the ratio says how many times as much theirs takes."""
    ours, theirs = [sys.executable, "-m", "modelwright"], [str(Path(sys.executable).with_name("trl")), "sft"]
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as place:
        our_file, their_file = Path(place) / "ours.yaml", Path(place) / "theirs.yaml"
        our_file.write_text(OURS_MISTYPED, encoding="utf-8")
        their_file.write_text(THEIRS_MISTYPED, encoding="utf-8")
        for name, us, them in (
            ("help", [*ours, "--help"], [*theirs, "--help"]),
            ("typo", [*ours, "check", str(our_file)], [*theirs, "--config", str(their_file)]),
        ):
            figures[name] = {"modelwright": cost(us)}
            if Path(theirs[0]).exists():
                figures[name]["trl"] = cost(them)
                figures[name]["ratio"] = _ratio(**figures[name], mistake=MISTAKE if name == "typo" else "")
    return figures


def cost(command: Sequence[str]) -> dict[str, Any]:
    """Run a command a few times and take the least CPU time, since noise only ever adds; and its last words."""
    least = float("inf")
    for _ in range(TRIES):
        before = _children_seconds()
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        least = min(least, _children_seconds() - before)
    said = (done.stderr.strip() or done.stdout.strip()).splitlines() or [""]
    last = said[-1].replace(f"{tempfile.gettempdir()}/", "").strip()
    return {"cpu_seconds": round(least, 3), "exit_code": done.returncode, "last_line": last}


def lines(figures: dict[str, Any]) -> list[str]:
    """The figures as sentences."""
    return [f"{name}: modelwright {found['modelwright']['cpu_seconds']:.2f} CPU-s{_beside(found)}"
            for name, found in figures.items()]  # fmt: skip


def _beside(found: dict[str, Any]) -> str:
    peer = found.get("trl")
    if peer is None:
        return "; trl is not installed, so there is nothing to hold it against"
    if found["ratio"] is None:
        return f"; trl sft said something else ({peer['last_line']}), so the two cannot be held against each other"
    return f", trl sft {peer['cpu_seconds']:.2f} CPU-s, {found['ratio']:.0f} times as much"


def _ratio(modelwright: dict[str, Any], trl: dict[str, Any], mistake: str) -> float | None:
    """How many times as much theirs takes; None where one of them did not answer the mistake."""
    answered = all(mistake in side["last_line"] for side in (modelwright, trl))
    return round(trl["cpu_seconds"] / modelwright["cpu_seconds"], 1) if answered else None


def _children_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main(save: common.Save = False, as_json: common.Json = False) -> None:
    """CPU-seconds of help and of a typing mistake, beside the command of TRL."""
    common.report("start", measure, lines, save, as_json)


MINUTE = 60.0
COMPILED = 2
"""Steps after which a first run has compiled all there is; nothing of it is saved."""
SAVES = 2
"""Checkpoints in the second run; the first of them also makes room for its copies."""
BETWEEN = 600
"""Steps between two saves on a GPU at least, about 15 s, so that none waits for the one before to be written."""
LONGEST_SECONDS = 240
LOOK_SECONDS = 0.1
EVENTS = ("run", "loading", "stage_started", "model", "plan", "step")
"""What the journal tells on the way to the first step, in order."""
DIES_WITH_US = """\
import runpy, sys
from modelwright.runs.heartbeat import die_with_parent
die_with_parent(int(sys.argv.pop(1)))
sys.argv[0] = "modelwright"
runpy.run_module("modelwright", run_name="__main__")
"""
Enough = Callable[[list[Event]], bool]


def measure_first_step(ways: Sequence[str], steps: int, data: Path | None, kernels: bool = False) -> dict[str, Any]:
    """Start cold, start warm; steps: those between two saves of the warm run."""
    import torch

    if ways:
        raise UsageError("--way is not for start: there is one way to start the command")
    on_gpu = torch.cuda.is_available()
    work, between = WORKS["0.5b" if on_gpu else "tiny"], max(steps, BETWEEN) if on_gpu else steps
    figures: dict[str, Any] = {"saves": []}
    shows: dict[str, tuple[int, Enough]] = {
        "cold": (10 * between, lambda events: len(_steps(events)) >= COMPILED),
        "warm": (between, lambda events: len(stalls(events)) >= SAVES),
    }
    progress, stopper = Progress("start"), GracefulShutdown()
    with stopper.handle_signals(), stopper.defer_to_step_end(), tempfile.TemporaryDirectory(dir=data) as place:
        _write_inputs(Path(place), work)
        progress.tell("a model and shards are on disk")
        for name, (apart, enough) in shows.items():
            command = Command(Path(place), work, name, apart)
            for figures[name] in command.follow(enough, stopper, progress):
                figures["saves"] = stalls(command.events)
            if stopper.requested():
                break
    return figures


def first_step_lines(figures: dict[str, Any]) -> Iterator[str]:
    """The figures as sentences."""
    for name in ("cold", "warm"):
        if name not in figures:
            yield f"  {name} start: cut short before its first step"
            continue
        told = figures[name]
        marks = ", ".join(f"{event} {second:.1f}" for event, second in told["marks"].items())
        yield f"  {name} start: {told['seconds']:.1f} s from the command to the end of the first step ({marks})"
    rate, waiting = (figures.get("warm", {}).get(name) for name in ("tokens_per_second", "waiting"))
    share = "" if waiting is None else f", {waiting:.2%} of the time waiting for rows"
    yield f"  then {rate:,.0f} tokens/s in the command itself{share}" if rate else "  too few steps to tell their speed"
    yield from (f"  {in_words(save)}" for save in figures["saves"])


def in_words(save: dict[str, Any]) -> str:
    """What a save cost."""
    return (
        f"save at step {save['step']}: training stood still {save['still']:.3f} s, and lost {save['slower']:.3f} "
        f"s in the {save['steps_meanwhile']} steps meanwhile, {save['share_of_a_minute']:.2%} of a minute; written "
        f"and read back in {save['written']:.1f} s"
    )


def _write_inputs(folder: Path, work: Workload) -> None:
    """The model with its tokenizer, and shards of random tokens."""
    import torch

    model = build(work).to("cpu", torch.bfloat16)  # as models are published, and half as much to write and read
    train_bpe(EMBEDDED_DATASETS["field-guide"].read_text(encoding="utf-8").splitlines(), 1024, folder / "model")
    model.save_pretrained(folder / "model")
    random_shards(folder / "shards", work.length, work.words)


def stalls(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What each save in the background cost: standing still, and steps that were slower while it was written."""
    steps = _steps(events)
    usual = median(step["step_seconds"] for step in steps) if steps else 0.0
    found = []
    for begun in (event for event in events if event["event"] == "saving"):
        ended = next((e for e in events if e["event"] == "saved" and e["step"] == begun["step"]), None)
        if ended is None or begun["step"] == steps[-1]["step"] or ended["time"] + usual > steps[-1]["time"]:
            continue  # it is not over, or it ended the stage: nothing is trained meanwhile
        meanwhile = [step for step in steps if begun["time"] < step["time"] <= ended["time"] + usual]
        slower = sum(max(0.0, step["step_seconds"] - usual) for step in meanwhile)
        still = begun["seconds"] + ended["waited"]
        found.append({
            "step": begun["step"], "still": round(still, 4), "slower": round(slower, 4),
            "steps_meanwhile": len(meanwhile), "written": ended["seconds"],
            "share_of_a_minute": round((still + slower) / MINUTE, 5),
        })  # fmt: skip
    return found


class Command:
    """`modelwright run` as a process of its own, which ends with us."""

    def __init__(self, folder: Path, work: Workload, name: str, between: int) -> None:
        """between: steps between two saves."""
        import torch

        section = {
            "max_length": work.length, "per_device_train_batch_size": work.rows, "learning_rate": work.learning_rate,
            "lr_scheduler_type": "constant", "logging_steps": 1, "torch_compile": torch.cuda.is_available(),
            "save_total_limit": 2, "save_in_background": "always", "save_steps": between,
            "max_steps": 10 * between,
        }  # fmt: skip
        wish = {
            "name": name, "seed": SEED, "output_dir": str(folder / name), "pretrain": section,
            "model": {"model_name_or_path": str(folder / "model")}, "data": {"dataset_name": str(folder / "shards")},
        }  # fmt: skip
        self._recipe, self._errors = folder / f"{name}.yaml", folder / f"{name}.log"
        self._journal, self._name = folder / name / "journal.jsonl", name
        write_text(self._recipe, json.dumps(wish))
        self.events: list[Event] = []
        """What its journal has told so far."""

    def follow(self, enough: Enough, stopper: GracefulShutdown, progress: Progress) -> Iterator[dict[str, Any]]:
        """Run until the journal shows enough or somebody asks to stop; figures as they come, and what is new told."""
        told: set[str] = set()
        began = time.time()
        for events in self._growing(began):
            self.events = events
            for mark, words in self._news(began):
                if mark not in told:
                    told.add(mark)
                    progress.tell(f"{self._name}: {words}")
            if _steps(events):
                yield self._figures(began)
            if enough(events) or stopper.requested():
                return

    def _growing(self, began: float) -> Iterator[list[Event]]:
        """The journal again and again while the command runs, which is ended when nobody asks for more."""
        command = [sys.executable, "-c", DIES_WITH_US, str(os.getpid()), "run", str(self._recipe)]
        with self._errors.open("wb") as errors:
            process = subprocess.Popen(
                [*command, "--log-format", "json"], stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True
            )
        try:
            while process.poll() is None and time.time() - began < LONGEST_SECONDS:
                yield list(read(self._journal)) if self._journal.exists() else []
                time.sleep(LOOK_SECONDS)
            if process.returncode:
                said = self._errors.read_text(encoding="utf-8", errors="replace").strip()[-500:]
                raise RuntimeError(f"modelwright run ended with {process.returncode}: {said}")
            yield list(read(self._journal))
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # nothing of it is kept, so it need not save
            process.wait()

    def _news(self, began: float) -> Iterator[tuple[str, str]]:
        for kind, second in self._marks(began).items():
            yield (
                kind,
                f"the first step is done after {second:.1f} s" if kind == "step" else f"{kind} at {second:.1f} s",
            )
        for save in stalls(self.events):
            yield f"save {save['step']}", in_words(save)

    def _marks(self, began: float) -> dict[str, float]:
        """Seconds until each kind of event was first told."""
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
