"""Write docs/reference/verdicts.md: the planner's predictions for the claims about the five systems."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from modelwright.plan.calibrate import calibration_for
from modelwright.plan.choose import StageEstimate, choose_plan
from modelwright.plan.hardware import GPUS, Hardware, device_info_of, parse_hardware
from modelwright.plan.model_shape import SHIPPED_CONFIGS, ModelShape, shape_from_config
from modelwright.plan.stage import plan_stage
from modelwright.recipe.stage_specs import PretrainConfig, RowStats, SftConfig, TrainingConfig

GIB = 2**30

CLAIMED = (("A100-80", "bf16", "45–50"), ("H100", "bf16", "35–40"), ("H100", "fp8", "25–30"))
STEPS, BATCH, LENGTH = 100_000, 32, 2048
LAST_TWO = {"last_layers": 2, "lm_head": True}
"""Trained parts of the survival expert."""


@dataclass(frozen=True)
class Case:
    """The model, settings and rows of one claim."""

    shape: ModelShape
    """The model."""
    settings: TrainingConfig
    """The settings of the stage."""
    rows: RowStats
    """Its rows."""

    def estimate_on(self, target: str | Hardware) -> StageEstimate:
        """The case on given hardware."""
        hardware = parse_hardware(target) if isinstance(target, str) else target
        plan = plan_stage(self.settings, self.rows.count or 1, hardware.world_size, device_info_of(hardware))
        return choose_plan(plan, self.settings, self.shape, self.rows, hardware)


def page() -> str:
    """The page as Markdown."""
    parts = [_opening(), _production_hours(), _production_fit(), _four_times(), _five_minutes(), _landed_on_l4()]
    return "\n\n".join(parts) + "\n"


def _opening() -> str:
    known = calibration_for(GPUS["H200"])
    return f"""# Verdicts

<!-- written by docs.plan_verdicts; UPDATE_GOLDEN=1 python -m pytest tests/plan/test_plan_verdicts.py -->

The documents behind the [five systems](../systems.md) make claims about time, memory and speed. The planner's verdict
on each follows. Its coefficients were fitted to {known.runs} trainings on one {known.device}, with errors of up to
{known.max_rate_error:.0%} in speed and {known.max_memory_error:.0%} in memory. Other GPUs are predicted from their
data sheets; their hours may be off by a third, which changes no verdict."""


def production(precision: str, model: str = "llama-6b", **overrides: Any) -> Case:
    """Pretraining of the production pipeline's model."""
    settings = {"max_steps": STEPS, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 4,
            "max_length": LENGTH, "torch_compile": True, "precision": precision, **overrides}  # fmt: skip
    shape = shape_from_config(SHIPPED_CONFIGS[model], model, "the document")
    return Case(shape, PretrainConfig.model_validate(settings), RowStats(STEPS * BATCH, LENGTH, float(LENGTH)))


def _production_hours() -> str:
    lines = [
        "## 100,000 pretraining steps of the 7B model: 45–50 h on an A100, 35–40 h on an H100, 25–30 h with FP8",
        "",
        "The shape that is described (32 layers of 4096, 8 key-value heads, 50,304 tokens) has 6.08 billion "
        f"parameters. 100,000 steps of {BATCH} rows of {LENGTH:,} tokens are {STEPS * BATCH * LENGTH / 1e9:.2f} "
        "billion tokens.",
        "",
        "| one GPU | claimed | planned, ignoring memory | tokens/s | GPUs for the claim |",
        "|---|---|---|---|---|",
    ]
    for name, precision, claim in CLAIMED:
        endless_memory = replace(GPUS[name], memory=1e15)
        estimate = production(precision).estimate_on(Hardware(1, 1, endless_memory))
        hours = (estimate.seconds or 0.0) / 3600
        claimed_hours = float(claim.split("–")[1])
        speed = f"{estimate.time.tokens_per_second:,.0f}"
        lines.append(f"| {name}, {precision} | {claim} h | {hours:,.0f} h | {speed} | {hours / claimed_hours:.1f} |")
    lines += ["", "**Not on one GPU.** The claimed hours need as many GPUs as the last column says, all of them busy."]
    return "\n".join(lines)


def _production_fit() -> str:
    variants = (
        ("fp32 weights and moments, 16 bytes a parameter", {"param_dtype": "fp32"}),
        ("bf16 weights with exact masters, 14 bytes", {"param_dtype": "bf16"}),
        ("… and the first moment in bf16, 12 bytes", {"param_dtype": "bf16", "exp_avg_dtype": "bf16"}),
    )
    lines = [
        "## One 80 GB GPU holds it",
        "",
        "| variant | required | fits 80 GB | what would fit |",
        "|---|---|---|---|",
    ]
    for label, overrides in variants:
        estimate = production("bf16", gradient_checkpointing=True, **overrides).estimate_on("1xA100-80")
        alternatives = " · ".join(estimate.alternatives) if estimate.alternatives else "–"
        fits = f"yes, {estimate.plan.micro_batch_size} rows at once" if estimate.fits else "no"
        lines.append(f"| {label} | {estimate.memory.required / GIB:.0f} GiB of 79.1 | {fits} | {alternatives} |")
    verdict = "**Not as described**: fp32 weights with Adam do not fit; bf16 weights and a bf16 first moment do."
    return "\n".join([*lines, "", verdict])


def survival(trainable: Any, **overrides: Any) -> Case:
    """The fine-tune of the survival expert with these trained parts."""
    settings = {"trainable": trainable, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 2,
            "num_train_epochs": 4, "gradient_checkpointing": True, **overrides}  # fmt: skip
    shape = shape_from_config(SHIPPED_CONFIGS["smollm3-3b"], "smollm3-3b", "the document")
    return Case(shape, SftConfig.model_validate(settings), RowStats(2845, 400, 370.0, 0.13))


def _four_times() -> str:
    cases = (survival(LAST_TWO), survival({**LAST_TWO, "untie_lm_head": True}))
    lines = [
        "## SmolLM3-3B four times as fast on four L40S nodes",
        "",
        "Each step exchanges the gradients of 418.9 M weights. Every node has the same rows per step, so four nodes "
        "are at most four times as fast:",
        "",
        "| network between nodes | as described | untied head, frozen layers computed once |",
        "|---|---|---|",
    ]
    for gigabits in (10, 25, 100, 200):
        cells = []
        for each in cases:
            four = each.estimate_on(replace(parse_hardware("4x1xL40S"), network_bandwidth=gigabits * 1e9 / 8))
            cells.append(f"{four.time.tokens_per_second / each.estimate_on('1xL40S').time.tokens_per_second:.1f} ×")
        lines.append(f"| {gigabits} Gbit/s | {cells[0]} | {cells[1]} |")
    lines += ["", "**True on a fast network only.** The faster one GPU is, the more the network counts: with frozen "
              "layers computed once, one GPU may be faster than four."]  # fmt: skip
    return "\n".join(lines)


def _five_minutes() -> str:
    lines = [
        "## A small language model fine-tuned on three nodes, 3–5 epochs, in at most five minutes",
        "",
        "2,845 questions and answers of about 120 tokens, all weights, batch 48, five epochs, 25 Gbit/s:",
        "",
        "| model | 3 × T4 | 3 × L4 | 3 × L40S | 1 × L40S |",
        "|---|---|---|---|---|",
    ]
    settings = SftConfig.model_validate(
        {"global_batch_size": 48, "per_device_train_batch_size": 16, "num_train_epochs": 5}
    )
    for name in ("smollm2-135m", "smollm2-360m", "smollm2-1.7b"):
        shape = shape_from_config(SHIPPED_CONFIGS[name], name, "the hub")
        case = Case(shape, settings, RowStats(2845, 256, 120.0, 0.6))
        cells = []
        for target in ("3x1xT4", "3x1xL4", "3x1xL40S", "1xL40S"):
            estimate = case.estimate_on(target)
            cells.append(f"{estimate.seconds or 0.0:,.0f} s" if estimate.fits else "does not fit")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += ["", "Loading the model, the first step and saving take 20 to 60 seconds more. **True for the small "
              "models**; above a billion weights the network between the nodes takes most of the time."]  # fmt: skip
    return "\n".join(lines)


def _landed_on_l4() -> str:
    settings = SftConfig.model_validate(
        {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 4, "max_length": 2048}
    )
    partial = settings.model_copy(
        update={"trainable": SftConfig.model_validate({"trainable": {"last_layers": 2}}).trainable}
    )
    shape = shape_from_config(SHIPPED_CONFIGS["pythia-410m"], "pythia-410m", "the document")
    rows = RowStats(100_000, 2048, 2048.0)
    lines = [
        "## Planned for an L40S, landed on an L4, 45 of 48 GB asked for",
        "",
        "| pythia-410m, batch 64 = 16 × 4, rows of 2,048 | required on an L40S | on an L4 |",
        "|---|---|---|",
    ]
    for label, variant in (("all weights", settings), ("last two layers", partial)):
        case = Case(shape, variant, rows)
        large, small = case.estimate_on("1xL40S"), case.estimate_on("1xL4")
        alike = {line.replace("L40S", "L4") for line in large.plan.reasons}
        changed = [line for line in small.plan.reasons if line not in alike]
        required = f"{large.memory.required / GIB:.1f} of 44.4 GiB, {large.plan.micro_batch_size} rows at once"
        lines.append(f"| {label} | {required} | {'; '.join(changed) or 'as it is'} |")
    lines += ["", "The last two layers fit an L4 unchanged. **An L4 computes in bf16**: the change to fp16 that is "
              "described was not needed."]  # fmt: skip
    return "\n".join(lines)
