"""What the planner says of the claims that the five systems were described with: a page of figures."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from modelwright.plan.architecture import Shape, shape_of
from modelwright.plan.calibration import calibration_for
from modelwright.plan.choose import choose
from modelwright.plan.estimate import Estimate, Rows
from modelwright.plan.gpus import GPUS, Machines, machines
from modelwright.plan.shapes import KNOWN
from modelwright.plan.sheet import facts_of
from modelwright.plan.stage import plan_stage
from modelwright.recipe.schema import Pretrain, Sft
from modelwright.recipe.training import Training

GIB = 2**30
CLAIMED = (("A100-80", "bf16", "45–50"), ("H100", "bf16", "35–40"), ("H100", "fp8", "25–30"))
STEPS, BATCH, LENGTH = 100_000, 32, 2048
LAST_TWO = {"last_layers": 2, "head": True}
"""What moves in the survival expert."""


@dataclass(frozen=True)
class Case:
    """One claim's arithmetic."""

    shape: Shape
    """The model."""
    settings: Training
    """How it is trained."""
    rows: Rows
    """On what."""

    def on(self, where: str | Machines) -> Estimate:
        """The case on a machine."""
        place = machines(where) if isinstance(where, str) else where
        plan = plan_stage(self.settings, self.rows.count or 1, place.world, facts_of(place))
        return choose(plan, self.settings, self.shape, self.rows, place)


def page() -> str:
    """The whole page as Markdown."""
    parts = [_opening(), _production_hours(), _production_fit(), _four_times(), _five_minutes(), _landed_on_l4()]
    return "\n\n".join(parts) + "\n"


def _opening() -> str:
    known = calibration_for(GPUS["H200"])
    return f"""# Verdicts

<!-- written by modelwright.plan.verdicts; UPDATE_GOLDEN=1 python -m pytest tests/plan/test_verdicts.py -->

The five systems were described with claims about time, memory and speed. This is what the planner says of them. Its
coefficients were fitted to {known.runs} trainings measured on one {known.card}; the largest error among those is
{known.spread:.0%} in speed and {known.memory_spread:.0%} in memory. Other cards are taken by their data sheets and what
the {known.card} reaches of its own, so their hours may be off by a third; no verdict below hangs on less."""


def production(precision: str, model: str = "llama-6b", **more: Any) -> Case:
    """Pretraining of the production pipeline's model."""
    told = {"max_steps": STEPS, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 4,
            "max_length": LENGTH, "torch_compile": True, "precision": precision, **more}  # fmt: skip
    shape = shape_of(KNOWN[model], model, "the document")
    return Case(shape, Pretrain.model_validate(told), Rows(STEPS * BATCH, LENGTH, float(LENGTH)))


def _production_hours() -> str:
    lines = [
        "## 100,000 pretraining steps of the 7B model: 45–50 h on an A100, 35–40 h on an H100, 25–30 h with FP8",
        "",
        "The shape that is described (32 layers of 4096, 8 key-value heads, 50,304 tokens) has 6.08 billion "
        f"parameters. 100,000 steps of {BATCH} rows of {LENGTH:,} tokens are {STEPS * BATCH * LENGTH / 1e9:.2f} "
        "billion tokens.",
        "",
        "| one card | claimed | planned, were memory no matter | tokens/s | cards for the claim |",
        "|---|---|---|---|---|",
    ]
    for name, precision, claim in CLAIMED:
        roomy = replace(GPUS[name], memory=1e15)
        found = production(precision).on(Machines(1, 1, roomy))
        hours = (found.seconds or 0.0) / 3600
        longest = float(claim.split("–")[1])
        lines.append(
            f"| {name}, {precision} | {claim} h | {hours:,.0f} h | {found.time.rate:,.0f} | {hours / longest:.1f} |"
        )
    lines += ["", "**Not on one card.** The claims want several times the arithmetic that one card does: the hours are "
              "those of a machine with as many cards as the last column says, all of them busy."]  # fmt: skip
    return "\n".join(lines)


def _production_fit() -> str:
    wishes = (
        ("fp32 weights and moments, 16 bytes a parameter", {"weights": "fp32"}),
        ("bf16 weights with exact masters, 14 bytes", {"weights": "bf16"}),
        ("… and the gradients' mean in bf16, 12 bytes", {"weights": "bf16", "exp_avg_dtype": "bf16"}),
    )
    lines = ["## One 80 GB card holds it", "", "| way | needs | fits 80 GB | what would fit |", "|---|---|---|---|"]
    for told, more in wishes:
        found = production("bf16", gradient_checkpointing=True, **more).on("1xA100-80")
        mends = " · ".join(found.mends) if found.mends else "–"
        fits = f"yes, {found.plan.per_device} rows at once" if found.fits else "no"
        lines.append(f"| {told} | {found.memory.needed / GIB:.0f} GiB of 79.1 | {fits} | {mends} |")
    verdict = "**Not as described**: fp32 masters with Adam do not fit; what does fit has to say so."
    return "\n".join([*lines, "", verdict])


def survival(trainable: Any, **more: Any) -> Case:
    """The fine-tune of the survival expert, with these weights moving."""
    told = {"trainable": trainable, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 2,
            "num_train_epochs": 4, "gradient_checkpointing": True, **more}  # fmt: skip
    shape = shape_of(KNOWN["smollm3-3b"], "smollm3-3b", "the document")
    return Case(shape, Sft.model_validate(told), Rows(2845, 400, 370.0, 0.13))


def _four_times() -> str:
    cases = (survival(LAST_TWO), survival({**LAST_TWO, "untie_head": True}))
    lines = [
        "## SmolLM3-3B four times as fast on four L40S nodes",
        "",
        "Each step exchanges the gradients of 418.9 M weights. The same rows a step on every node, so four nodes can "
        "be at most four times as fast:",
        "",
        "| network between nodes | as described | own head, frozen layers computed once |",
        "|---|---|---|",
    ]
    for gigabits in (10, 25, 100, 200):
        cells = []
        for each in cases:
            four = each.on(replace(machines("4x1xL40S"), network=gigabits * 1e9 / 8))
            cells.append(f"{four.time.rate / each.on('1xL40S').time.rate:.1f} ×")
        lines.append(f"| {gigabits} Gbit/s | {cells[0]} | {cells[1]} |")
    lines += ["", "**True on a fast network only**, and the faster one card is made, the more the network counts: with "
              "frozen layers computed once, one card may do best without the others."]  # fmt: skip
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
    settings = Sft.model_validate({"global_batch_size": 48, "per_device_train_batch_size": 16, "num_train_epochs": 5})
    for name in ("smollm2-135m", "smollm2-360m", "smollm2-1.7b"):
        case = Case(shape_of(KNOWN[name], name, "the hub"), settings, Rows(2845, 256, 120.0, 0.6))
        cells = []
        for where in ("3x1xT4", "3x1xL4", "3x1xL40S", "1xL40S"):
            found = case.on(where)
            cells.append(f"{found.seconds or 0.0:,.0f} s" if found.fits else "does not fit")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += ["", "Loading the model, the first step and saving come on top: 20 to 60 seconds. **True for the small "
              "ones**; from a billion weights on it is the network between the nodes that takes the time."]  # fmt: skip
    return "\n".join(lines)


def _landed_on_l4() -> str:
    settings = Sft.model_validate(
        {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 4, "max_length": 2048}
    )
    partial = settings.model_copy(update={"trainable": Sft.model_validate({"trainable": {"last_layers": 2}}).trainable})
    shape = shape_of(KNOWN["pythia-410m"], "pythia-410m", "the document")
    rows = Rows(100_000, 2048, 2048.0)
    lines = ["## Planned for an L40S, landed on an L4, 45 of 48 GB asked for", "",
             "| pythia-410m, batch 64 = 16 × 4, rows of 2,048 | L40S needs | on an L4 |", "|---|---|---|"]  # fmt: skip
    for told, wish in (("all weights", settings), ("last two layers", partial)):
        case = Case(shape, wish, rows)
        large, small = case.on("1xL40S"), case.on("1xL4")
        alike = {line.replace("L40S", "L4") for line in large.plan.reasons}
        changed = [line for line in small.plan.reasons if line not in alike]
        needs = f"{large.memory.needed / GIB:.1f} of 44.4 GiB, {large.plan.per_device} rows at once"
        lines.append(f"| {told} | {needs} | {'; '.join(changed) or 'as it is'} |")
    lines += ["", "The last two layers alone need no 45 GB, and no smaller card makes them change anything. **An L4 "
              "computes in bf16**: the change to fp16 that is described was not needed."]  # fmt: skip
    return "\n".join(lines)
