"""Hold predictions against measurements: the planner's own, and those of accelerate's estimator beside them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.settings import Setting
from modelwright.plan.architecture import Movement, VisionShape, movement, shape_of
from modelwright.plan.calibration import Calibration
from modelwright.plan.estimate import SMALL
from modelwright.plan.gpus import Gpu
from modelwright.plan.memory import memory
from modelwright.plan.shapes import KNOWN
from modelwright.plan.time import step_time
from modelwright.plan.work import Work
from modelwright.recipe.schema import Dpo, Sft

Run = dict[str, Any]


def judge(runs: Sequence[Run], gpu: Gpu, fitted: Calibration) -> list[Run]:
    """Each run that has figures with what was predicted for it, and how far off that was."""
    return [{**run, **compared(run, gpu, fitted)} for run in runs if "peak_bytes" in run]


def compared(run: Run, gpu: Gpu, fitted: Calibration) -> Run:
    """What the planner says of a run, beside what was measured."""
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
    """The planner's view of a measured run."""
    return work_of(Setting(**run["setting"]), run["plan"], gpu.name != "CPU")


def _is_recorded(setting: Setting) -> bool:
    """Whether the engine records the steps of a setting."""
    return setting.settings.get("cuda_graphs") != "never" and _parameters(setting) < SMALL


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
        # runs from before it was a setting: torch's own way is tf32 in convolutions, and in no other products
        "tf32": plan.get("tf32", on_gpu and setting.stage == "classify" and plan["precision"] == "fp32"),
        "by_row": plan["precision"] == "fp8" and plan.get("scaling") == "rowwise",
        "weights": plan.get("weights", "fp32"),
        "compiled": bool(setting.settings.get("torch_compile")) or (on_gpu and plan["precision"] == "fp8"),
        "on_gpu": on_gpu,
        "recorded": on_gpu and plan["precision"] != "fp16" and _is_recorded(setting),
        "checkpointing": setting.settings.get("gradient_checkpointing", False),
        "arrives": False,  # the clock and the peak are set back when all is in its place
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
        masked=paired and not on_gpu,
        branched=paired and on_gpu,
        chunked_loss=not paired,
        **beside,
    )


def most_rows(setting: Setting, plan: dict[str, Any], gpu: Gpu, fitted: Calibration) -> int:
    """The most rows at once that the planner says fit: training with them must not run out of memory."""
    rows = 1
    while memory(work_of(setting, {**plan, "per_device": rows + 1}, True), fitted.memory).needed <= gpu.memory:
        rows += 1
    return rows


def accelerate_bytes(setting: Setting, precision: str) -> int | None:
    """What accelerate's estimator says that training takes; None where it is not installed or knows no such model."""
    try:
        import torch
        from accelerate.commands.estimate import estimate_training_usage  # type: ignore[import-untyped]
        from accelerate.utils import calculate_maximum_sizes  # type: ignore[import-untyped]

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


def config_of(setting: Setting) -> Any:
    """The transformers config of a setting's shape."""
    from transformers import CONFIG_MAPPING

    told = {**KNOWN[setting.model], **setting.smaller}
    family = str(told.pop("model_type"))
    if family == "gpt_neox":
        told = {key: value for key, value in told.items() if key not in ("num_key_value_heads", "head_dim")}
    told["max_position_embeddings"] = max(setting.length, 512)
    return CONFIG_MAPPING[family](**told, bos_token_id=0, eos_token_id=0, pad_token_id=0)
