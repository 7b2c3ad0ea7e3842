"""Fit the planner's coefficients of memory and time to measured runs; numpy only, no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import numpy as np

from modelwright.plan.architecture import Movement, VisionShape, movement, shape_of
from modelwright.plan.calibration import CPU_MEMORY, Calibration
from modelwright.plan.estimate import SMALL
from modelwright.plan.gpus import Gpu
from modelwright.plan.memory import Fitted, memory
from modelwright.plan.shapes import KNOWN
from modelwright.plan.time import Pace, step_time
from modelwright.plan.work import Work
from modelwright.recipe.schema import Dpo, Sft

Run = dict[str, Any]
Coefficients = TypeVar("Coefficients", Pace, Fitted)
Vector = np.ndarray[Any, np.dtype[np.float64]]
TURNS = 40
WORST = 0.05
"""An error above this counts by its fourth power rather than its second: no run may be sacrificed to the others."""
HOLD = 0.15
"""Of leaving a guess by a factor of e, the price in errors: what no run speaks of stays where it was."""


def fit(runs: Sequence[Run], gpu: Gpu, before: Calibration) -> Calibration:
    """The coefficients that bring predictions nearest to the runs."""
    works = [run_work(run, gpu) for run in runs]
    rates, peaks = [run["tokens_per_second"] for run in runs], [run["peak_bytes"] for run in runs]

    def slow(pace: Pace) -> list[float]:
        return [math.log(step_time(work, gpu, pace).rate / rate) for work, rate in zip(works, rates, strict=True)]

    def full(fitted: Fitted) -> list[float]:
        return [math.log(memory(work, fitted).total / peak) for work, peak in zip(works, peaks, strict=True)]

    guess = Fitted() if gpu.name != "CPU" else CPU_MEMORY
    pace = min((_nearest(start, Pace(), slow) for start in (before.pace, Pace())), key=lambda found: found[1])[0]
    found = Calibration(gpu.name, pace, _nearest(before.memory, guess, full)[0], runs=len(runs))
    judged = compare_with_measured(runs, gpu, found)
    return replace(
        found,
        spread=max(abs(run["rate_error"]) for run in judged),
        memory_spread=max(abs(run["memory_error"]) for run in judged),
    )


def _nearest(
    start: Coefficients, guess: Coefficients, errors: Callable[[Coefficients], list[float]]
) -> tuple[Coefficients, float]:
    """Least squares over the logarithms of the coefficients, by damped Gauss-Newton steps; with the price that is left.

    A step waits for the device or for the host, and so there are several valleys: where it ends depends on the start.
    """
    names = [field.name for field in fields(guess)]
    anchor = np.array([math.log(getattr(guess, name)) for name in names])
    place = np.array([math.log(getattr(start, name)) for name in names])
    hold, damping = HOLD**2, 1e-3

    def made(where: Vector) -> Coefficients:
        return replace(guess, **{name: math.exp(value) for name, value in zip(names, where, strict=True)})

    def off(where: Vector) -> Vector:
        return np.array(errors(made(where)))

    def price(error: Vector, where: Vector) -> float:
        return float((error**2 / 2 + error**4 / (4 * WORST**2)).sum() + hold * ((where - anchor) ** 2).sum() / 2)

    now = off(place)
    for _ in range(TURNS):
        slopes = np.stack([(off(place + 1e-4 * one) - now) / 1e-4 for one in np.eye(len(names))], axis=1)
        weight = 1 + (now / WORST) ** 2
        curve = (slopes.T * weight) @ slopes + hold * np.eye(len(names))
        downhill = -(slopes.T @ (weight * now) + hold * (place - anchor))
        while damping < 1e6:
            step = np.linalg.solve(curve + damping * np.diag(np.diag(curve)), downhill).clip(-0.7, 0.7)
            then = off(place + step)
            if price(then, place + step) < price(now, place):
                break
            damping *= 4
        else:
            break
        small = float(np.abs(step).max()) < 1e-4
        place, now, damping = place + step, then, max(damping / 5, 1e-6)
        if small:
            break
    return made(place), price(now, place)


def compare_with_measured(runs: Sequence[Run], gpu: Gpu, fitted: Calibration) -> list[Run]:
    """Each measured run with its prediction, and the relative error."""
    return [{**run, **_predicted(run, gpu, fitted)} for run in runs if "peak_bytes" in run]


def _predicted(run: Run, gpu: Gpu, fitted: Calibration) -> Run:
    """The prediction of a run and its error against what was measured."""
    work = run_work(run, gpu)
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


def run_work(run: Run, gpu: Gpu) -> Work:
    """The planner's `Work` of a measured run."""
    return work_of(PlanCase(**run["setting"]), run["plan"], gpu.name != "CPU")


def _is_recorded(case: PlanCase) -> bool:
    """Whether the engine replays the steps of a case as a CUDA graph."""
    return case.settings.get("cuda_graphs") != "never" and _parameters(case) < SMALL


def _parameters(case: PlanCase) -> int:
    """Parameters of the model of a case."""
    if case.stage == "classify":
        return VisionShape("resnet18", "a case", width=case.smaller.get("width", 64)).parameters
    return shape_of({**KNOWN[case.model], **case.smaller}, case.model, "a case").parameters


def work_of(case: PlanCase, plan: dict[str, Any], on_gpu: bool) -> Work:
    """The planner's `Work` of a case."""
    beside: dict[str, Any] = {
        "rows": plan["per_device"],
        "accumulation": plan["accumulation"],
        "precision": plan["precision"],
        # runs from before it was a setting: torch's own way is tf32 in convolutions, and in no other products
        "tf32": plan.get("tf32", on_gpu and case.stage == "classify" and plan["precision"] == "fp32"),
        "by_row": plan["precision"] == "fp8" and plan.get("scaling") == "rowwise",
        "weights": plan.get("weights", "fp32"),
        "compiled": bool(case.settings.get("torch_compile")) or (on_gpu and plan["precision"] == "fp8"),
        "on_gpu": on_gpu,
        "recorded": on_gpu and plan["precision"] != "fp16" and _is_recorded(case),
        "checkpointing": case.settings.get("gradient_checkpointing", False),
        "arrives": False,  # the clock and the peak are set back when all is in its place
    }
    if case.stage == "classify":
        images = VisionShape("resnet18", "a case", width=case.smaller.get("width", 64))
        whole = Movement(images.parameters, images.parameters, 0, 0, True, False, False)
        resident = (case.rows * 8 + 64) * (3072 + 8)
        return Work(images, whole, **beside, optimizer="adamw_torch", resident=resident)
    shape = shape_of({**KNOWN[case.model], **case.smaller}, case.model, "a case")
    kind = Dpo if case.stage == "dpo" else Sft
    parts = kind(**{name: value for name, value in case.settings.items() if name in kind.model_fields})
    paired = case.stage == "dpo"
    return Work(
        shape,
        movement(shape, parts),
        length=case.length,
        learnt=0.5 if paired else 1.0,
        masked=paired and not on_gpu,
        branched=paired and on_gpu,
        chunked_loss=not paired,
        **beside,
    )


@dataclass(frozen=True)
class PlanCase:
    """One training that is predicted and measured, with random weights and rows."""

    name: str
    """Its row in the table."""
    model: str
    """A shape the planner knows, or resnet18."""
    rows: int
    """Rows per device; 0: as many as the planner says that fit, times `beyond`."""
    length: int = 0
    """Tokens in a row."""
    stage: str = "sft"
    """sft, dpo or classify."""
    settings: dict[str, Any] = field(default_factory=dict)
    """What the recipe's section says."""
    smaller: dict[str, Any] = field(default_factory=dict)
    """Keys of the shape that differ."""
    beyond: float = 1.0
    """Where rows is 0: of the rows that fit, this multiple; above 1 it must run out of memory."""


LAST_TWO = {"last_layers": 2, "head": True}
HALF_BILLION = {"num_hidden_layers": 14, "hidden_size": 1536, "intermediate_size": 4096, "num_attention_heads": 12,
                 "num_key_value_heads": 4}  # fmt: skip
GPU_CASES = (
    PlanCase("135M full 512", "smollm2-135m", 16, 512),
    PlanCase("135M full 2048 checkpointed", "smollm2-135m", 16, 2048, settings={"gradient_checkpointing": True}),
    PlanCase("135M full 2048 selective", "smollm2-135m", 16, 2048, settings={"gradient_checkpointing": "selective"}),
    PlanCase("135M full 2048 fp32", "smollm2-135m", 4, 2048, settings={"precision": "fp32", "tf32": False}),
    PlanCase("135M full 2048 tf32", "smollm2-135m", 4, 2048, settings={"precision": "fp32"}),
    PlanCase("410M last 2 layers 1024", "pythia-410m", 24, 1024, settings={"trainable": {"last_layers": 2}}),
    PlanCase("410M last 2 layers 512 fp16", "pythia-410m", 16, 512,
            settings={"trainable": {"last_layers": 2}, "precision": "fp16", "gradient_accumulation_steps": 2}),
    PlanCase("1.7B full 512 accumulated", "smollm2-1.7b", 8, 512, settings={"gradient_accumulation_steps": 4}),
    PlanCase("1.7B LoRA 1024 compiled", "smollm2-1.7b", 8, 1024, settings={"trainable": "lora", "torch_compile": True}),
    PlanCase("1.7B DPO full 1024", "smollm2-1.7b", 4, 1024, "dpo"),
    PlanCase("3B LoRA 2048", "smollm3-3b", 4, 2048, settings={"trainable": "lora"}),
    PlanCase("ResNet-18 fp32", "resnet18", 128, stage="classify", settings={"precision": "fp32"}),
    PlanCase("ResNet-18 bf16", "resnet18", 512, stage="classify"),
    PlanCase("0.5B full 512 compiled", "llama-6b", 8, 512, settings={"torch_compile": True}, smaller=HALF_BILLION),
)  # fmt: skip
"""What `plan --calibrate` measures on a GPU; what does not fit one is left out."""
_TINY = {"num_hidden_layers": 4, "hidden_size": 128, "intermediate_size": 384, "vocab_size": 2048,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}  # fmt: skip
_LARGER = {**_TINY, "num_hidden_layers": 6, "hidden_size": 256, "intermediate_size": 512}
_FP32 = {"precision": "fp32"}
CPU_CASES = (
    PlanCase("tiny full 128", "smollm2-135m", 8, 128, settings=_FP32, smaller=_TINY),
    PlanCase("tiny full 256 checkpointed", "smollm2-135m", 4, 256,
            settings={**_FP32, "gradient_checkpointing": True}, smaller=_TINY),
    PlanCase("tiny full 256 selective", "smollm2-135m", 4, 256,
            settings={**_FP32, "gradient_checkpointing": "selective"}, smaller=_TINY),
    PlanCase("tiny last 2 layers 256", "pythia-410m", 8, 256,
            settings={**_FP32, "trainable": {"last_layers": 2}}, smaller=_TINY),
    PlanCase("tiny last 2 + tied head 128", "smollm3-3b", 8, 128,
            settings={**_FP32, "trainable": LAST_TWO}, smaller=_TINY),
    PlanCase("tiny LoRA 256", "smollm3-3b", 4, 256, settings={**_FP32, "trainable": "lora"}, smaller=_TINY),
    PlanCase("tiny DPO 128", "smollm2-135m", 4, 128, "dpo", settings=_FP32, smaller=_TINY),
    PlanCase("tiny Gemma 128", "gemma-3-270m", 8, 128, settings=_FP32, smaller=_TINY),
    PlanCase("larger full 128", "smollm2-135m", 8, 128, settings=_FP32,
            smaller={**_TINY, "num_hidden_layers": 8, "hidden_size": 256, "intermediate_size": 768}),
    PlanCase("135M of 3 layers full 64", "smollm2-135m", 4, 64, settings=_FP32, smaller={"num_hidden_layers": 3}),
    PlanCase("135M of 10 layers full 96", "smollm2-135m", 4, 96, settings=_FP32, smaller={"num_hidden_layers": 10}),
    PlanCase("135M of 5 layers last 2 96", "smollm2-135m", 4, 96,
            settings={**_FP32, "trainable": {"last_layers": 2}}, smaller={"num_hidden_layers": 5}),
    PlanCase("wide words 64", "smollm2-135m", 8, 64, settings=_FP32, smaller={**_TINY, "vocab_size": 16384}),
    PlanCase("ResNet-18 of width 16", "resnet18", 32, stage="classify", settings=_FP32, smaller={"width": 16}),
    PlanCase("ResNet-18 of width 8", "resnet18", 64, stage="classify", settings=_FP32, smaller={"width": 8}),
    PlanCase("tiny full 192, twice", "smollm2-135m", 4, 192,
            settings={**_FP32, "gradient_accumulation_steps": 2}, smaller=_TINY),
    PlanCase("larger LoRA 128", "smollm2-135m", 8, 128, settings={**_FP32, "trainable": "lora"}, smaller=_LARGER),
    PlanCase("larger LoRA 128 selective", "smollm2-135m", 8, 128,
            settings={**_FP32, "trainable": "lora", "gradient_checkpointing": "selective"}, smaller=_LARGER),
)  # fmt: skip
"""What `plan --calibrate` measures on a CPU."""
