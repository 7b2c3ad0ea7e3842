"""A recipe on several machines side by side: every stage, what it takes, what it costs, what had to change."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from modelwright.plan.architecture import Shape
from modelwright.plan.choose import choose
from modelwright.plan.estimate import Estimate, Rows, prices
from modelwright.plan.facts import Facts
from modelwright.plan.gpus import Machines
from modelwright.plan.stage import plan_stage
from modelwright.recipe.schema import Recipe

GIB = 2**30


@dataclass(frozen=True)
class StageSheet:
    """One stage on several machines."""

    stage: str
    """Its name."""
    shape: Shape
    """The model."""
    rows: Rows
    """What is known of its rows."""
    estimates: tuple[Estimate, ...]
    """One for each machine."""

    def as_json(self) -> dict[str, Any]:
        """Numbers as numbers."""
        return {
            "stage": self.stage,
            "model": self.shape.name,
            "shape_from": self.shape.source,
            "rows": self.rows.count,
            "longest_row": self.rows.longest,
            "mean_row": round(self.rows.mean, 1),
            "learnt_share": round(self.rows.learnt, 4),
            "rows_from": self.rows.source,
            "on": [estimate.as_json() for estimate in self.estimates],
        }


def stage_sheet(
    recipe: Recipe, stage: str, shape: Shape, rows: Rows, places: tuple[Machines, ...], own_prices: Path | None = None
) -> StageSheet:
    """Plan one stage on each machine."""
    settings, known = recipe.stages[stage], prices(own_prices)
    found = []
    for machines in places:
        plan = plan_stage(settings, rows.count or 1, machines.world, facts_of(machines))
        if rows.count is None:  # what was said of rows is about one that is not there
            plan = replace(plan, reasons=tuple(line for line in plan.reasons if "rows come several times" not in line))
        estimate = choose(plan, settings, shape, rows, machines)
        found.append(replace(estimate, price=known.get(machines.gpu.name)))
    return StageSheet(stage, shape, rows, tuple(found))


def facts_of(machines: Machines) -> Facts:
    """What a probe would say on such a machine."""
    gpu = machines.gpu
    device = "cpu" if gpu.name == "CPU" else "cuda"
    return Facts(device, gpu.name, round(gpu.memory), gpu.bf16 > gpu.fp32, gpu.bf16 or gpu.fp16)  # type: ignore[arg-type]


def lines(sheet: StageSheet) -> list[str]:
    """The sheet for people: a column for each machine, then what was changed."""
    moves, rows = sheet.estimates[0].moves, sheet.rows
    count = f"{rows.count:,} rows" if rows.count is not None else "rows not counted"
    size = "" if rows.longest == 1 else f" of about {rows.mean:,.0f} tokens, longest {rows.longest:,}"
    told = [f"{sheet.stage}: {moves} · {sheet.shape.source}", f"{count}{size} · {rows.source}", ""]
    table = [("", *(str(each.machines) for each in sheet.estimates))]
    table += [(name, *(cell(each) for each in sheet.estimates)) for name, cell in CELLS]
    names: list[str] = []
    for each in sheet.estimates:
        names += [name for name, size in each.memory.parts.items() if size > 5e7 and name not in names]
    parts = [(f"  {name}", *(_gib(each.memory.parts.get(name, 0.0)) for each in sheet.estimates)) for name in names]
    at = next(place for place, row in enumerate(table) if row[0] == "peak memory")
    table[at:at] = parts
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    told += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
    for each in sheet.estimates:
        said = [*each.plan.reasons, f"speed ± {each.sure:.0%}: {each.why_sure}"]
        if not each.fits:
            said.insert(0, f"does not fit; would fit: {' | '.join(each.mends) or 'nothing in the table'}")
        told += ["", *(f"{each.machines}: {line}" for line in said)]
    return told


def line(sheet: StageSheet) -> str:
    """The first machine of a sheet in one line."""
    each = sheet.estimates[0]
    steps = f"{each.plan.steps:,} steps, " if each.counted else ""
    needs = (
        f"{_gib(each.memory.needed)} of {_gib(each.machines.gpu.memory)}{'' if each.fits else ', which is too little'}"
    )
    return (
        f"{sheet.stage}: {steps}batch {_batch(each)}, {each.plan.precision}, {needs}, {each.time.rate:,.0f} tokens/s, "
        f"{_hours(each)}"
    )


def _gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB" if size else "-"


def _batch(each: Estimate) -> str:
    plan = each.plan
    return f"{plan.global_batch} = {plan.per_device} × {plan.world} × {plan.accumulation}"


def _hours(each: Estimate) -> str:
    if each.seconds is None:
        return "max_steps or rows unknown"
    return f"{each.seconds:,.0f} s" if each.seconds < 3600 else f"{each.seconds / 3600:,.1f} h"


CHECKPOINTED = {False: "none", "selective": "selective", True: "full"}
CELLS = (
    ("batch", _batch),
    ("steps", lambda each: f"{each.plan.steps:,}" if each.counted else "-"),
    ("precision", lambda each: f"{each.plan.precision}{' (tf32)' * each.plan.tf32}, weights {each.plan.weights}"),
    ("sharding", lambda each: each.plan.sharding if each.plan.world > 1 else "one card"),
    ("checkpointing", lambda each: CHECKPOINTED[each.plan.gradient_checkpointing]),
    ("peak memory", lambda each: f"{_gib(each.memory.total)} ({each.memory.moment})"),
    ("needs", lambda each: f"{_gib(each.memory.needed)} of {_gib(each.machines.gpu.memory)}"),
    ("fits", lambda each: "yes" if each.fits else "NO"),
    ("tokens/s", lambda each: f"{each.time.rate:,.0f}"),
    ("a step", lambda each: f"{each.time.seconds:.3g} s, waits for {each.time.bound}"),
    ("time", _hours),
    ("GPU-hours", lambda each: "-" if each.gpu_hours is None else f"{each.gpu_hours:,.2f}"),
    ("cost", lambda each: "-" if each.cost is None else f"${each.cost:,.2f} at ${each.price:g}/h"),
)
"""What the table shows, row by row."""
