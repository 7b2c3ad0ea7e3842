"""The table of `plan`: a stage on several machines, with its memory, time and cost."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from modelwright.errors import UsageError
from modelwright.plan.choose import GIB, StageEstimate, choose_plan, num_cached_layers
from modelwright.plan.hardware import Hardware, device_info_of
from modelwright.plan.model_shape import ModelShape
from modelwright.plan.stage import plan_stage
from modelwright.recipe.schema import Recipe
from modelwright.recipe.stage_specs import RowStats, name_images, throughput_unit

PRICES_FILE = Path(__file__).parent / "prices.json"


def load_prices(path: Path | None) -> dict[str, float]:
    """Dollars per GPU-hour: the shipped figures, overridden by the user's file."""
    dollars = json.loads(PRICES_FILE.read_text(encoding="utf-8"))["dollars_per_gpu_hour"]
    if path is not None:
        try:
            prices = json.loads(path.read_text(encoding="utf-8"))
            dollars |= {name: float(value) for name, value in prices.get("dollars_per_gpu_hour", prices).items()}
        except (OSError, ValueError, AttributeError, TypeError) as error:
            wants = 'it wants JSON such as {"L4": 0.8, "H100": 3.5}'
            raise UsageError(f"--prices {path} could not be read ({error}); {wants}") from None
    return {str(name): float(value) for name, value in dollars.items()}


@dataclass(frozen=True)
class PlanTable:
    """One stage on several hardware targets."""

    stage: str
    """Name of the stage."""
    shape: ModelShape
    """The model."""
    rows: RowStats
    """Statistics of its rows."""
    estimates: tuple[StageEstimate, ...]
    """One per target."""

    def as_json(self) -> dict[str, Any]:
        """For `plan --json`."""
        return {
            "stage": self.stage,
            "model": self.shape.name,
            "shape_from": self.shape.source,
            "rows": self.rows.count,
            "longest_row": self.rows.max_length,
            "mean_row": round(self.rows.mean_length, 1),
            "trained_fraction": round(self.rows.trained_fraction, 4),
            "rows_from": self.rows.basis,
            "on": [name_images(estimate.as_json(), self.stage) for estimate in self.estimates],
        }


def plan_table(
    recipe: Recipe,
    stage: str,
    shape: ModelShape,
    rows: RowStats,
    targets: tuple[Hardware, ...],
    user_prices: Path | None = None,
) -> PlanTable:
    """Plan one stage on each target."""
    settings, dollars = recipe.stages[stage], load_prices(user_prices)
    estimates, caches_layers = [], num_cached_layers(shape, settings) > 0
    for hardware in targets:
        device_info = device_info_of(hardware)
        plan = plan_stage(settings, rows.count, hardware.world_size, device_info, caches_layers=caches_layers)
        estimate = choose_plan(plan, settings, shape, rows, hardware)
        estimates.append(replace(estimate, price=dollars.get(hardware.gpu.name)))
    return PlanTable(stage, shape, rows, tuple(estimates))


def format_table(table: PlanTable) -> list[str]:
    """The table as text: a column per target, then the reasons."""
    trainable, rows = table.estimates[0].trainable, table.rows
    count = f"{rows.count:,} rows" if rows.count is not None else "rows not counted"
    size = "" if rows.max_length == 1 else f" of about {rows.mean_length:,.0f} tokens, longest {rows.max_length:,}"
    lines = [f"{table.stage}: {trainable} · {table.shape.source}", f"{count}{size} · {rows.basis}", ""]
    cells = [("", *(str(each.hardware) for each in table.estimates))]
    unit = throughput_unit(table.stage)
    cells += [(name.format(unit=unit), *(cell(each) for each in table.estimates)) for name, cell in TABLE_ROWS]
    names: list[str] = []
    for each in table.estimates:
        names += [name for name, size in each.memory.components.items() if size > 5e7 and name not in names]
    memories = [each.memory.components for each in table.estimates]
    peak_row = next(index for index, row in enumerate(cells) if row[0] == "peak memory")
    cells[peak_row:peak_row] = [(f"  {name}", *(_gib(memory.get(name, 0.0)) for memory in memories)) for name in names]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    lines += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    for each in table.estimates:
        notes = [*each.plan.reasons, f"speed ± {each.relative_error:.0%}: {each.basis}"]
        if not each.fits:
            notes.insert(0, f"does not fit; would fit: {' | '.join(each.alternatives) or 'nothing in the table'}")
        lines += ["", *(f"{each.hardware}: {line}" for line in notes)]
    return lines


def summary_line(table: PlanTable) -> str:
    """The first target of a table in one line."""
    each = table.estimates[0]
    steps = f"{each.plan.steps:,} steps, " if each.steps_known else ""
    required = f"{_gib(each.memory.required)} of {_gib(each.hardware.gpu.memory)}"
    required += "" if each.fits else ", which is too little"
    speed = f"{each.time.tokens_per_second:,.0f} {throughput_unit(table.stage)}/s, {_hours(each)}"
    return f"{table.stage}: {steps}batch {_batch(each)}, {each.plan.precision}, {required}, {speed}"


def _gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB / 100 else f"{size / GIB * 1024:.2f} MiB" if size else "-"


def _batch(each: StageEstimate) -> str:
    plan = each.plan
    factors = (plan.micro_batch_size, plan.world_size, plan.gradient_accumulation_steps)
    return f"{plan.global_batch_size} = {' × '.join(map(str, factors))}"


def _hours(each: StageEstimate) -> str:
    if each.seconds is None:
        return "max_steps or rows unknown"
    return f"{each.seconds:,.0f} s" if each.seconds < 3600 else f"{each.seconds / 3600:,.1f} h"


CHECKPOINTING_NAMES = {False: "none", "selective": "selective", True: "full"}
TABLE_ROWS = (
    ("batch", _batch),
    ("steps", lambda each: f"{each.plan.steps:,}" if each.steps_known else "-"),
    ("precision", lambda each: f"{each.plan.precision}{' (tf32)' * each.plan.tf32}, weights {each.plan.param_dtype}"),
    ("sharding", lambda each: each.plan.sharding if each.plan.world_size > 1 else "one device"),
    ("checkpointing", lambda each: CHECKPOINTING_NAMES[each.plan.gradient_checkpointing]),
    ("peak memory", lambda each: f"{_gib(each.memory.total)} ({each.memory.peak_phase})"),
    ("required", lambda each: f"{_gib(each.memory.required)} of {_gib(each.hardware.gpu.memory)}"),
    ("fits", lambda each: "yes" if each.fits else "NO"),
    ("{unit}/s", lambda each: f"{each.time.tokens_per_second:,.0f}"),
    ("step time", lambda each: f"{each.time.seconds:.3g} s, bound by {each.time.bottleneck}"),
    ("time", _hours),
    ("GPU-hours", lambda each: "-" if each.gpu_hours is None else f"{each.gpu_hours:,.2f}"),
    ("cost", lambda each: "-" if each.cost is None else f"${each.cost:,.2f} at ${each.price:g}/h"),
)
"""Rows of the table: name, and the cell of an estimate."""
