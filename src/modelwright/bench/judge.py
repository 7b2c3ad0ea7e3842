"""Hold predictions against measurements: the planner's own, and those of accelerate's estimator beside them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from statistics import median
from typing import Any, TypeVar

from modelwright.bench.settings import Setting
from modelwright.plan.architecture import Movement, VisionShape, movement, shape_of
from modelwright.plan.calibration import Calibration, calibration_for
from modelwright.plan.estimate import SMALL
from modelwright.plan.gpus import Gpu
from modelwright.plan.memory import Fitted, memory
from modelwright.plan.shapes import KNOWN
from modelwright.plan.time import Pace, step_time
from modelwright.plan.work import Work
from modelwright.recipe.schema import Dpo, Sft

Run = dict[str, Any]
Coefficients = TypeVar("Coefficients", Pace, Fitted)
ROUNDS = 12000


def judge(runs: Sequence[Run], gpu: Gpu, fitted: Calibration) -> list[Run]:
    """Each measured run with what was predicted for it, and how far off that was."""
    return [{**run, **compared(run, gpu, fitted)} for run in runs if "failed" not in run]


def compared(run: Run, gpu: Gpu, fitted: Calibration) -> Run:
    """What the planner says of a run, beside what was measured."""
    work = work_of(Setting(**run["setting"]), run["plan"], gpu.name != "CPU")
    peak, rate = memory(work, fitted.memory), step_time(work, gpu, fitted.pace).rate
    told = {
        "predicted_bytes": round(peak.total),
        "predicted_at": peak.moment,
        "memory_error": round(peak.total / run["peak_bytes"] - 1, 4),
        "predicted_rate": round(rate, 1),
        "rate_error": round(rate / run["tokens_per_second"] - 1, 4),
    }
    peer = run.get("accelerate_bytes")
    return {**told, "accelerate_error": round(peer / run["peak_bytes"] - 1, 4) if peer else None}


def _parameters(setting: Setting) -> int:
    """Numbers in the model of a setting."""
    if setting.stage == "classify":
        return VisionShape("resnet18", "bench", width=setting.smaller.get("width", 64)).parameters
    return shape_of({**KNOWN[setting.model], **setting.smaller}, setting.model, "bench").parameters


def work_of(setting: Setting, plan: dict[str, Any], on_gpu: bool) -> Work:
    """The planner's view of a setting."""
    beside: dict[str, Any] = {
        "rows": plan["per_device"],
        "accumulation": plan["accumulation"],
        "precision": plan["precision"],
        "weights": plan.get("weights", "fp32"),
        "compiled": bool(setting.settings.get("torch_compile")),
        "on_gpu": on_gpu,
        "recorded": on_gpu and plan["precision"] != "fp16" and _parameters(setting) < SMALL,
        "checkpointing": bool(setting.settings.get("gradient_checkpointing")),
    }
    if setting.stage == "classify":
        images = VisionShape("resnet18", "bench", width=setting.smaller.get("width", 64))
        whole = Movement(images.parameters, images.parameters, 0, 0, True, False, False)
        resident = (setting.rows * 8 + 64) * (3072 + 8)
        return Work(images, whole, **beside, optimizer="adamw_torch", resident=resident)
    shape = shape_of({**KNOWN[setting.model], **setting.smaller}, setting.model, "bench")
    kind = Dpo if setting.stage == "dpo" else Sft
    parts = kind(**{name: value for name, value in setting.settings.items() if name in kind.model_fields})
    paired = setting.stage == "dpo"
    return Work(
        shape,
        movement(shape, parts),
        length=setting.length,
        learnt=0.5 if paired else 1.0,
        masked=paired,
        chunked_loss=not paired,
        **beside,
    )


def most_rows(setting: Setting, gpu: Gpu) -> int:
    """The most rows at once that the planner says fit: training with them must not run out of memory."""
    fitted, rows = calibration_for(gpu), 1
    plan = {"per_device": 1, "accumulation": 1, "precision": "bf16", "weights": "bf16"}
    while memory(work_of(setting, {**plan, "per_device": rows + 1}, True), fitted.memory).needed <= gpu.memory:
        rows += 1
    return rows


def fit(runs: Sequence[Run], gpu: Gpu, before: Calibration) -> Calibration:
    """The coefficients that bring predictions nearest to the runs that are not held out."""
    good = [run for run in runs if "failed" not in run]
    taught = [run for run in good if not run["held_out"]] or good
    works = [work_of(Setting(**run["setting"]), run["plan"], gpu.name != "CPU") for run in taught]
    rates, peaks = [run["tokens_per_second"] for run in taught], [run["peak_bytes"] for run in taught]

    def slow(pace: Pace) -> float:
        off = _distance([step_time(work, gpu, pace).rate / rate for work, rate in zip(works, rates, strict=True)])
        return off + _moved(pace, Pace())

    def full(fitted: Fitted) -> float:
        off = _distance([memory(work, fitted).total / peak for work, peak in zip(works, peaks, strict=True)])
        return off + _moved(fitted, Fitted())

    pace, fitted = _search(before.pace, slow), _search(before.memory, full)
    found = Calibration(gpu.name, pace, fitted, runs=len(taught))
    judged = judge(taught, gpu, found)
    return replace(
        found,
        spread=max(abs(run["rate_error"]) for run in judged),
        memory_spread=max(abs(run["memory_error"]) for run in judged),
    )


def _distance(ratios: Sequence[float]) -> float:
    """How far predictions are off: the mean square of the logarithms, and the worst one."""
    logs = [abs(math.log(max(ratio, 1e-9))) for ratio in ratios]
    return sum(value**2 for value in logs) / len(logs) + 0.3 * max(logs) ** 2


def _moved(found: Coefficients, start: Coefficients) -> float:
    """A small price for leaving the start, so that what no run speaks of stays where it was."""
    names = [field.name for field in fields(start)]
    return 3e-4 * sum(math.log(getattr(found, name) / getattr(start, name)) ** 2 for name in names)


def _search(start: Coefficients, distance: Callable[[Coefficients], float]) -> Coefficients:
    """Try small changes of one or two coefficients, the same ones each time, and keep those that help."""
    draw, best, least, reach = random.Random(0), start, distance(start), 0.5
    names = [field.name for field in fields(start)]
    for turn in range(ROUNDS):
        reach = 0.5 * 0.02 ** (turn / ROUNDS)
        chosen = draw.sample(names, k=draw.choice((1, 1, 2)))
        changed = {name: getattr(best, name) * math.exp(draw.gauss(0.0, reach)) for name in chosen}
        tried = replace(best, **changed)
        if (now := distance(tried)) < least:
            best, least = tried, now
    return best


def accelerate_bytes(setting: Setting, precision: str) -> int | None:
    """What accelerate's estimator says that training takes; None where it is not installed or knows no such model."""
    try:
        import torch
        from accelerate.commands.estimate import estimate_training_usage  # type: ignore[import-untyped]
        from accelerate.utils import calculate_maximum_sizes  # type: ignore[import-untyped]

        from modelwright.bench.plan import config_of

        if setting.stage == "classify":
            return None
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config_of(setting))
        total, _ = calculate_maximum_sizes(model)
        said = estimate_training_usage(
            total, {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}.get(precision, precision)
        )
        return int(max(said.values()))
    except (ImportError, KeyError, ValueError, TypeError):
        return None


def lines(figures: dict[str, Any]) -> list[str]:
    """The table of predictions and measurements."""
    heads = ("measured", "planned", "off")
    told = [
        f"{'setting':<42} {heads[0]:>9} {heads[1]:>9} {heads[2]:>7}   {'tokens/s':>10} {heads[1]:>10} {heads[2]:>7}"
        "   accelerate"
    ]
    for run in figures["judged"]:
        peer = run.get("accelerate_error")
        mark = "*" if run["held_out"] else " "
        name, peaks = run["setting"]["name"], (run["peak_bytes"] / 1e9, run["predicted_bytes"] / 1e9)
        told.append(
            f"{name:<41}{mark} {peaks[0]:>7.2f}GB {peaks[1]:>7.2f}GB "
            f"{run['memory_error']:>+7.1%}   {run['tokens_per_second']:>10,.0f} {run['predicted_rate']:>10,.0f} "
            f"{run['rate_error']:>+7.1%}   " + (f"{peer:+.0%}" if peer is not None else "-")
        )
    told += [f"{run['setting']['name']}: failed, {run['failed']}" for run in figures["runs"] if "failed" in run]
    memory_off = [abs(run["memory_error"]) for run in figures["judged"]]
    rate_off = [abs(run["rate_error"]) for run in figures["judged"]]
    if memory_off:
        told.append(
            f"memory: median {median(memory_off):.1%} off, worst {max(memory_off):.1%}; "
            f"tokens/s: median {median(rate_off):.1%}, worst {max(rate_off):.1%}; * was not fitted to"
        )
    return told
