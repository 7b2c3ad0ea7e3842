"""The planner against the machine: predict memory and speed of many trainings, then measure each by the real engine."""

from __future__ import annotations

import gc
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from benchmarks import common
from benchmarks.fit import fit, left_out
from benchmarks.judge import accelerate_bytes, config_of, judge, most_rows, work_of
from benchmarks.plan_table import lines
from benchmarks.random_rows import RandomRows, random_images
from benchmarks.settings import CPU_SETTINGS, GPU_SETTINGS, UNSEEN, Setting
from modelwright.errors import UsageError, first_line
from modelwright.plan.calibration import OWN, calibration_for
from modelwright.plan.facts import Facts, card, probe
from modelwright.plan.memory import memory
from modelwright.plan.stage import StagePlan, plan_stage
from modelwright.runs.caches import cache_dir
from modelwright.runs.folder import write_json

__all__ = ["judged", "keep", "lines", "measure", "read_runs"]

SEED = 42
WARM_UP, TIMED, LONG, TIMED_IF_LONG = 5, 6, 0.4, 3
"""Steps before the clock counts, and on it; and how many of these where a step takes longer than so many seconds."""
STEPS = WARM_UP + TIMED + 1
STARVED = 0.75
"""Of the threads' time, the share below which other processes took the rest: the processor's own clock counts then."""
WANTED = "it wants a runs.json that benchmarks.plan --into FOLDER has written"


def measure(wanted: Sequence[str] = (), into: Path | None = None) -> dict[str, Any]:
    """Measure every setting, fit the coefficients to them, and judge all."""
    return judged(measure_all(wanted, into))


def judged(runs: dict[str, Any]) -> dict[str, Any]:
    """Measured runs with three predictions: by what was known before, fitted to all, and fitted to all others."""
    gpu, good = card(Facts(**runs["device"])), [run for run in runs["runs"] if "peak_bytes" in run]
    if not good:
        return {**runs, "judged": [], "calibration": {}}
    unseen = {setting.name for setting in UNSEEN}
    seen = [run for run in good if run["setting"]["name"] not in unseen] or good
    before = calibration_for(gpu)
    after = fit(seen, gpu, before)
    blind, others = judge(good, gpu, before), left_out(good, seen, gpu, after)
    told = [
        {**run, **_errors("before", first), **_errors("left_out", other)}
        for run, first, other in zip(judge(good, gpu, after), blind, others, strict=True)
    ]
    return {**runs, "judged": told, "calibration": {after.card: after.as_json()}}


def _errors(prefix: str, run: dict[str, Any]) -> dict[str, float]:
    return {f"{prefix}_{name}": run[name] for name in ("memory_error", "rate_error")}


def read_runs(paths: Sequence[Path]) -> dict[str, Any]:
    """What earlier measurements of one machine wrote with --into, together."""
    found: list[dict[str, Any]] = []
    for path in paths:
        try:
            told = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UsageError(f"--from {path} could not be read ({reason}); {WANTED}") from None
        if not isinstance(told, dict) or not {"device", "runs"} <= told.keys():
            raise UsageError(f"--from {path} holds no measured runs; {WANTED}")
        found.append(told)
    if len({told["device"]["name"] for told in found}) > 1:
        raise UsageError("--from: the runs were measured on different devices; judge those of one at a time")
    return {"device": found[-1]["device"], "runs": [run for told in found for run in told["runs"]]}


def keep(figures: dict[str, Any]) -> Path:
    """Keep the fitted coefficients for the plans of this machine."""
    path = cache_dir() / OWN
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    write_json(path, {**known, **figures["calibration"]})
    return path


def measure_all(wanted: Sequence[str] = (), into: Path | None = None) -> dict[str, Any]:
    """Measure every setting, each guarded, and write what is known after each one."""
    import torch

    on_gpu, facts = torch.cuda.is_available(), probe()
    runs: list[dict[str, Any]] = []
    for setting in (*GPU_SETTINGS, *UNSEEN) if on_gpu else CPU_SETTINGS:
        if wanted and not any(word in setting.name for word in wanted):
            continue
        began = time.perf_counter()
        setting, plan, run = planned(setting, facts)
        try:
            run |= measure_one(setting, plan)
            run["accelerate_bytes"] = accelerate_bytes(setting, plan.precision)
        except torch.OutOfMemoryError as error:
            run["ran_out"] = first_line(error)[:200]
        except Exception as error:  # one setting that fails must not take the others with it
            run["failed"] = f"{type(error).__name__}: {first_line(error)}"[:300]
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()
        runs.append({"setting": asdict(setting), "took": round(time.perf_counter() - began, 1), **run})
        print(json.dumps(runs[-1]), file=sys.stderr, flush=True)
        if into is not None:
            write_json(into / "runs.json", {"device": asdict(facts), "runs": runs})
    return {"device": asdict(facts), "runs": runs}


def planned(setting: Setting, facts: Facts) -> tuple[Setting, StagePlan, dict[str, Any]]:
    """A setting with its rows and its plan, and what the planner says of its memory before it is tried."""
    gpu, fitted = card(facts), calibration_for(card(facts))
    plan = plan_stage(_settings(setting), 1, 1, facts)
    if not setting.rows:
        most = most_rows(setting, plan.as_json(), gpu, fitted)
        setting = replace(setting, rows=max(1, -(-int(1000 * setting.beyond * most) // 1000)))
        plan = plan_stage(_settings(setting), 1, 1, facts)
    needed = memory(work_of(setting, plan.as_json(), facts.device == "cuda"), fitted.memory).needed
    told = {"plan": plan.as_json(), "needed_bytes": round(needed), "said_to_fit": needed <= gpu.memory}
    return setting, plan, told


def measure_one(setting: Setting, plan: StagePlan) -> dict[str, Any]:
    """A few steps of the real engine: the peak of memory, and the median step once everything is warm."""
    import torch

    from modelwright.engine.loop import Engine
    from modelwright.engine.world import World

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    torch.manual_seed(SEED)
    settings = _settings(setting)
    task = _task(setting, settings, device)
    engine = Engine(task, settings, replace(plan, rows=task.rows), World(device=device), SEED)
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    tokens, seconds, warm_up = _timed(engine, 1 if on_gpu else torch.get_num_threads(), on_gpu)
    if engine.plan.per_device < plan.per_device:  # the engine would go on with smaller bites
        return {"ran_out": engine.changes[-1]}
    found: dict[str, Any] = {
        "step_seconds": [round(value, 6) for value in seconds],
        "warm_up_seconds": round(warm_up, 3),
        "tokens_per_step": tokens,
        "tokens_per_second": round(tokens / median(seconds), 2),
        "trained": sum(weight.numel() for weight in engine.weights.values()),
    }
    return {**found, **(_device_peak(engine) if on_gpu else _watched_peak(engine))}


def _timed(engine: Any, threads: int, on_gpu: bool) -> tuple[int, list[float], float]:
    """Tokens of a step, the seconds of each once warm, and those before."""
    marks, steps = [(time.perf_counter(), time.process_time())], engine.steps()
    planned, warm_up, tokens, wanted = engine.plan.per_device, WARM_UP if on_gpu else 2, 0, STEPS
    while len(marks) <= wanted and engine.plan.per_device == planned:
        tokens = next(steps).tokens
        marks.append((time.perf_counter(), time.process_time()))
        wanted = warm_up + (TIMED if marks[-1][0] - marks[-2][0] < LONG else TIMED_IF_LONG)
    seconds = []
    for (began, used), (ended, used_then) in pairwise(marks[warm_up:]):
        starved = not on_gpu and used_then - used < STARVED * threads * (ended - began)
        seconds.append((used_then - used) / threads if starved else ended - began)
    return tokens, seconds or [math.inf], marks[min(warm_up, len(marks) - 1)][0] - marks[0][0]


def _device_peak(engine: Any) -> dict[str, int]:
    """What the allocator of the GPU has seen since the first step."""
    import torch

    next(engine.steps())
    return {
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "steady_bytes": torch.cuda.memory_allocated(),
    }


def _watched_peak(engine: Any) -> dict[str, Any]:
    """On a CPU: the bytes of all tensors, watched over one more step."""
    from modelwright.engine.profile import Profiler

    profiler = Profiler(engine.task.module, engine.optimizer)
    with profiler.watching():
        next(engine.steps())
    told = profiler.as_json()
    return {"peak_bytes": told["peak_bytes"], "parts": told["parts"]}


def _settings(setting: Setting) -> Any:
    """What the recipe's section would be."""
    from modelwright.recipe.schema import Classify, Dpo, Sft

    kind: Any = {"sft": Sft, "dpo": Dpo, "classify": Classify}[setting.stage]
    known = {name: value for name, value in setting.settings.items() if name in kind.model_fields}
    told = {"max_steps": STEPS, "lr_scheduler_type": "constant", "learning_rate": 1e-5, **known}
    return kind(per_device_train_batch_size=max(1, setting.rows), **told)


def _task(setting: Setting, settings: Any, device: Any) -> Any:
    """The task of a setting over random rows."""
    if setting.stage == "classify":
        return random_images(setting.rows * 8, setting.smaller.get("width", 64), settings)
    model = _model(setting, settings, device)
    words = model.config.get_text_config().vocab_size
    rows = setting.rows * settings.gradient_accumulation_steps
    return RandomRows(model, settings, (rows, setting.length, words))


def _model(setting: Setting, settings: Any, device: Any) -> Any:
    """A model of the setting's shape with random weights, made ready as a stage makes it."""
    import torch
    from transformers import AutoModelForCausalLM

    from modelwright.models import text, trainable
    from modelwright.models.quiet import be_quiet

    be_quiet()
    config = config_of(setting)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    text.move(model, device, "auto")
    model = trainable.set_trainable(model, settings)
    if settings.gradient_checkpointing:
        trainable.recompute_activations(model, settings.gradient_checkpointing)
    return model.to(device)


def main(
    only: Annotated[list[str] | None, typer.Option("--only", metavar="WORD", help="Settings with this word.")] = None,
    into: Annotated[Path | None, typer.Option("--into", help="Write runs.json here after each setting.")] = None,
    again: Annotated[
        list[Path] | None, typer.Option("--from", help="Judge a runs.json again, or several, and measure nothing.")
    ] = None,
    save: common.Save = False,
    as_json: common.Json = False,
) -> None:
    """Memory and tokens per second as planned, beside what this machine measures."""
    if into:
        into.mkdir(parents=True, exist_ok=True)
    common.report(
        "plan", lambda: judged(read_runs(again)) if again else measure(only or (), into), lines, save, as_json
    )


if __name__ == "__main__":
    common.run(main)
