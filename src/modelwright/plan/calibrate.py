"""Coefficients of the memory and time model, by the GPU on which they were measured, and their fit to measured runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from modelwright.plan.hardware import GpuSpec
from modelwright.plan.memory import (
    AUTO_GRAPHS_MAX_PARAMS,
    DEFAULT_MEMORY,
    MemoryCoefficients,
    StepWorkload,
    estimate_memory,
)
from modelwright.plan.model_shape import (
    SHIPPED_CONFIGS,
    ModelShape,
    ResNetShape,
    TrainableSummary,
    count_trainable,
    shape_from_config,
)
from modelwright.plan.step_time import DEFAULT_TIME, TimeCoefficients, step_time
from modelwright.recipe.stage_specs import STAGES
from modelwright.runs.caches import cache_dir
from modelwright.runs.folder import read_json_object

if TYPE_CHECKING:
    import numpy as np

    Vector = np.ndarray[Any, np.dtype[np.float64]]

SHIPPED = Path(__file__).parent / "calibration.json"
USER_FILE = "calibration-v2.json"
DEFAULT_ERROR = 0.35
"""Expected error of the rate on hardware without measured runs."""
OLD_GRAPHS_MAX_PARAMS = 2_000_000_000
"""Of runs whose plan has no such key."""
OTHER_CPU = "another processor"
CPU_MEMORY = MemoryCoefficients(fixed=1e5)
"""A CPU has no large matmul workspaces."""


@dataclass(frozen=True)
class Calibration:
    """The coefficients of one GPU or CPU, and their errors on the measured runs."""

    device: str
    """The GPU or CPU that was measured."""
    time: TimeCoefficients = DEFAULT_TIME
    """Coefficients of the time estimate."""
    memory: MemoryCoefficients = DEFAULT_MEMORY
    """Coefficients of the memory estimate."""
    runs: int = 0
    """Number of measured runs."""
    max_rate_error: float = DEFAULT_ERROR
    """Largest relative error of a predicted rate."""
    max_memory_error: float = 0.1
    """Largest relative error of a predicted peak memory."""

    def uncertainty(self, gpu: GpuSpec) -> tuple[float, str]:
        """Expected error of a predicted rate on this GPU, and why."""
        if not self.runs:
            return DEFAULT_ERROR, "a guess: no run was measured; modelwright plan --calibrate measures this machine"
        if self.device == OTHER_CPU:
            return DEFAULT_ERROR, "guessed from another processor; modelwright plan --calibrate measures this one"
        if self.device == gpu.name:
            return max(0.05, self.max_rate_error), f"fitted to {self.runs} measured runs on {self.device}"
        return DEFAULT_ERROR, f"by the data sheet of {gpu.name} and what {self.device} reaches of its own"

    def as_json(self) -> dict[str, Any]:
        """An entry of the calibration file."""
        return {
            "time": {name: float(f"{value:.5g}") for name, value in asdict(self.time).items()},
            "memory": {name: float(f"{value:.5g}") for name, value in asdict(self.memory).items()},
            "runs": self.runs,
            "max_rate_error": round(self.max_rate_error, 4),
            "max_memory_error": round(self.max_memory_error, 4),
        }


def calibration_for(gpu: GpuSpec) -> Calibration:
    """The coefficients of this GPU: the user's, the shipped ones, or those of the GPU with the most runs."""
    own, shipped = read_json_object(cache_dir() / USER_FILE), read_json_object(SHIPPED)
    known = {**shipped, **own}
    if gpu.name in known:
        return _calibration_from_json(gpu.name if gpu.name in own or gpu.name != "CPU" else OTHER_CPU, known[gpu.name])
    if gpu.name == "CPU":
        return Calibration("CPU", memory=CPU_MEMORY)
    measured = [name for name in known if name != "CPU"]
    best = max(measured, key=lambda name: int(known[name].get("runs", 0)), default=None)
    return _calibration_from_json(best, known[best]) if best else Calibration("none")


def _calibration_from_json(device: str, entry: dict[str, Any]) -> Calibration:
    time, memory = (
        {field.name: float(values[field.name]) for field in fields(kind) if field.name in values}
        for kind, values in ((TimeCoefficients, entry.get("time", {})), (MemoryCoefficients, entry.get("memory", {})))
    )
    return Calibration(
        device=device,
        time=TimeCoefficients(**time),
        memory=MemoryCoefficients(**memory),
        runs=int(entry.get("runs", 0)),
        max_rate_error=float(entry.get("max_rate_error", DEFAULT_ERROR)),
        max_memory_error=float(entry.get("max_memory_error", 0.1)),
    )


Run = dict[str, Any]
Coefficients = TypeVar("Coefficients", TimeCoefficients, MemoryCoefficients)
MAX_ITERATIONS = 40
LARGE_ERROR = 0.05
"""Errors above this are weighted by their fourth power, so that no run gets a large error."""
PRIOR_WEIGHT = 0.15
"""Penalty for moving a coefficient by a factor of e: those without data stay at their default."""


def fit(runs: Sequence[Run], gpu: GpuSpec, before: Calibration) -> Calibration:
    """Fit the coefficients to measured runs."""
    workloads = [run_workload(run, gpu) for run in runs]
    rates, peaks = [run["tokens_per_second"] for run in runs], [run["peak_bytes"] for run in runs]

    def rate_errors(time: TimeCoefficients) -> list[float]:
        predicted = [step_time(work, gpu, time).tokens_per_second for work in workloads]
        return [math.log(a / b) for a, b in zip(predicted, rates, strict=True)]

    def memory_errors(memory: MemoryCoefficients) -> list[float]:
        predicted = [estimate_memory(work, memory).total for work in workloads]
        return [math.log(a / b) for a, b in zip(predicted, peaks, strict=True)]

    # a step is bound by the device or by the host, so there are several minima: try two starts
    fits = [_gauss_newton(start, DEFAULT_TIME, rate_errors) for start in (before.time, DEFAULT_TIME)]
    time = min(fits, key=lambda fit: fit[1])[0]
    guess = DEFAULT_MEMORY if gpu.name != "CPU" else CPU_MEMORY
    result = Calibration(gpu.name, time, _gauss_newton(before.memory, guess, memory_errors)[0], runs=len(runs))
    compared = compare_with_measured(runs, gpu, result)
    rate_error, memory_error = (max(abs(run[key]) for run in compared) for key in ("rate_error", "memory_error"))
    return replace(result, max_rate_error=rate_error, max_memory_error=memory_error)


def _gauss_newton(
    start: Coefficients, guess: Coefficients, errors: Callable[[Coefficients], list[float]]
) -> tuple[Coefficients, float]:
    """Least squares over the logarithms of the coefficients by damped Gauss-Newton steps; returns the cost too."""
    import numpy as np

    names = [field.name for field in fields(guess)]
    anchor = np.array([math.log(getattr(guess, name)) for name in names])
    point = np.array([math.log(getattr(start, name)) for name in names])
    prior, damping = PRIOR_WEIGHT**2, 1e-3

    def coefficients_at(logs: Vector) -> Coefficients:
        return replace(guess, **{name: math.exp(value) for name, value in zip(names, logs, strict=True)})

    def errors_at(logs: Vector) -> Vector:
        return np.array(errors(coefficients_at(logs)))

    def cost(error: Vector, logs: Vector) -> float:
        return float((error**2 / 2 + error**4 / (4 * LARGE_ERROR**2)).sum() + prior * ((logs - anchor) ** 2).sum() / 2)

    current = errors_at(point)
    for _ in range(MAX_ITERATIONS):
        columns = [(errors_at(point + 1e-4 * direction) - current) / 1e-4 for direction in np.eye(len(names))]
        slopes = np.stack(columns, axis=1)
        weight = 1 + (current / LARGE_ERROR) ** 2
        curve = (slopes.T * weight) @ slopes + prior * np.eye(len(names))
        downhill = -(slopes.T @ (weight * current) + prior * (point - anchor))
        while damping < 1e6:
            step = np.linalg.solve(curve + damping * np.diag(np.diag(curve)), downhill).clip(-0.7, 0.7)
            candidate = errors_at(point + step)
            if cost(candidate, point + step) < cost(current, point):
                break
            damping *= 4
        else:
            break
        small = float(np.abs(step).max()) < 1e-4
        point, current, damping = point + step, candidate, max(damping / 5, 1e-6)
        if small:
            break
    return coefficients_at(point), cost(current, point)


def compare_with_measured(runs: Sequence[Run], gpu: GpuSpec, calibration: Calibration) -> list[Run]:
    """Each measured run with its prediction and relative errors."""
    return [{**run, **_prediction(run, gpu, calibration)} for run in runs if "peak_bytes" in run]


def _prediction(run: Run, gpu: GpuSpec, calibration: Calibration) -> Run:
    """The prediction of a run and its errors."""
    work = run_workload(run, gpu)
    peak, rate = estimate_memory(work, calibration.memory), step_time(work, gpu, calibration.time).tokens_per_second
    prediction = {
        "predicted_bytes": round(peak.total),
        "predicted_at": peak.peak_phase,
        "memory_error": round(peak.total / run["peak_bytes"] - 1, 4),
        "predicted_rate": round(rate, 1),
        "rate_error": round(rate / run["tokens_per_second"] - 1, 4),
    }
    peer = run.get("accelerate_bytes")
    return {**prediction, "accelerate_error": round(peer / run["peak_bytes"] - 1, 4) if peer else None}


def run_workload(run: Run, gpu: GpuSpec) -> StepWorkload:
    """The workload of a measured run."""
    return case_workload(PlanCase(**run["setting"]), run["plan"], gpu.name != "CPU")


def case_shape(case: PlanCase) -> ModelShape:
    """The model of a case."""
    if STAGES[case.stage].modality == "image":
        return ResNetShape("resnet18", "a case", width=case.smaller.get("width", 64))
    return shape_from_config({**SHIPPED_CONFIGS[case.model], **case.smaller}, case.model, "a case")


def case_workload(case: PlanCase, plan: dict[str, Any], on_gpu: bool) -> StepWorkload:
    """The workload of a case."""
    shape, precision = case_shape(case), plan["precision"]
    max_params = AUTO_GRAPHS_MAX_PARAMS if "cuda_graphs" in plan else OLD_GRAPHS_MAX_PARAMS
    graphs = case.settings.get("cuda_graphs") != "never" and shape.parameters < max_params
    options: dict[str, Any] = {
        "micro_batch_size": plan["micro_batch_size"],
        "gradient_accumulation_steps": plan["gradient_accumulation_steps"],
        "precision": precision,
        # older runs have no such key: torch's default is tf32 in convolutions only
        "tf32": plan.get("tf32", on_gpu and isinstance(shape, ResNetShape) and precision == "fp32"),
        "rowwise_fp8": precision == "fp8" and plan.get("fp8_scaling") == "rowwise",
        "param_dtype": plan.get("param_dtype", "fp32"),
        "compiled": bool(case.settings.get("torch_compile")) or (on_gpu and precision == "fp8"),
        "on_gpu": on_gpu,
        "cuda_graphs": on_gpu and precision != "fp16" and graphs,
        "checkpointing": case.settings.get("gradient_checkpointing", False),
        "counts_loading": False,  # the measured peak starts after loading
    }
    if isinstance(shape, ResNetShape):
        all_trainable = TrainableSummary(shape.parameters, shape.parameters, 0, 0, True, False, False)
        return StepWorkload(shape, all_trainable, **options, device_data_bytes=(case.rows * 8 + 64) * (3072 + 8))
    paired = STAGES[case.stage].row_format == "pairs"
    return StepWorkload(
        shape,
        count_trainable(shape, case.stage_settings()),
        seq_len=case.length,
        trained_fraction=0.5 if paired else 1.0,
        masked=paired and not on_gpu,
        shared_prompt=paired and on_gpu,
        chunked_loss=not paired,
        **options,
    )


@dataclass(frozen=True)
class PlanCase:
    """A training run with random weights and rows that is predicted and measured."""

    name: str
    """Name in the table."""
    model: str
    """A key of SHIPPED_CONFIGS, or resnet18."""
    rows: int
    """Rows per device; 0: `beyond` times as many as the planner predicts to fit."""
    length: int = 0
    """Tokens in a row."""
    stage: str = "sft"
    """A key of STAGES."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Keys of the stage in the recipe."""
    smaller: dict[str, Any] = field(default_factory=dict)
    """Keys of the config that differ."""
    beyond: float = 1.0
    """With rows 0: a multiple of the rows that fit; above 1 the run must go out of memory."""

    def stage_settings(self, **defaults: Any) -> Any:
        """The settings of the stage; a key that it does not have is left out."""
        config = STAGES[self.stage].config
        known = {key: value for key, value in self.settings.items() if key in config.model_fields}
        return config(**{**defaults, **known})


LAST_TWO = {"last_layers": 2, "lm_head": True}
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
"""Runs of `plan --calibrate` on a GPU; those that do not fit are left out."""
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
    PlanCase("large vocabulary 64", "smollm2-135m", 8, 64, settings=_FP32, smaller={**_TINY, "vocab_size": 16384}),
    PlanCase("ResNet-18 of width 16", "resnet18", 32, stage="classify", settings=_FP32, smaller={"width": 16}),
    PlanCase("ResNet-18 of width 8", "resnet18", 64, stage="classify", settings=_FP32, smaller={"width": 8}),
    PlanCase("tiny full 192, twice", "smollm2-135m", 4, 192,
            settings={**_FP32, "gradient_accumulation_steps": 2}, smaller=_TINY),
    PlanCase("larger LoRA 128", "smollm2-135m", 8, 128, settings={**_FP32, "trainable": "lora"}, smaller=_LARGER),
    PlanCase("larger LoRA 128 selective", "smollm2-135m", 8, 128,
            settings={**_FP32, "trainable": "lora", "gradient_checkpointing": "selective"}, smaller=_LARGER),
)  # fmt: skip
"""Runs of `plan --calibrate` on a CPU."""
