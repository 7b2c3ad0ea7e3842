"""Whether a recipe can run on this machine: its data, its model, its memory, its disk and what it asks of torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from modelwright.data.size import size
from modelwright.data.sources import is_hub_name
from modelwright.launch import devices, doctor
from modelwright.launch.doctor import Check
from modelwright.plan.architecture import Shape
from modelwright.plan.choose import choose
from modelwright.plan.estimate import Rows, moves_of
from modelwright.plan.facts import card, probe
from modelwright.plan.gpus import Machines
from modelwright.plan.shapes import at_hand, find_shape
from modelwright.plan.stage import plan_stage
from modelwright.recipe.load import LoadedRecipe

Wanted = list[Callable[[], Check | list[Check]]]


def checks(loaded: LoadedRecipe | None) -> Wanted:
    """Everything to look at: the machine, and the recipe where there is one."""
    asked = loaded is not None and any(stage.torch_compile for stage in loaded.recipe.stages.values())
    needed = from_hub(loaded) if loaded else None
    folder = Path(loaded.recipe.run_dir) if loaded else Path()
    wanted: Wanted = [doctor.python, doctor.libraries, devices.torch_build, devices.devices, devices.speeds]
    wanted += [devices.attention, _named("compile", partial(devices.compiles, asked))]
    wanted += [_named("disk", partial(_disk, loaded, folder)), doctor.shared_memory, doctor.caches]
    wanted += [_named("hub", partial(doctor.hub, needed)), doctor.ports, doctor.clocks]
    if loaded:
        wanted += [_named(f"stage {stage}", partial(stage_fits, loaded, stage)) for stage in loaded.recipe.stages]
    return wanted


def from_hub(loaded: LoadedRecipe) -> str | None:
    """What a recipe names that only the hub has."""
    recipe, beside = loaded.recipe, loaded.path.parent
    model = recipe.model.model_name_or_path
    if model and model.count("/") == 1 and not at_hand(model, beside):
        return model
    names = [recipe.data_of(stage).dataset_name for stage in recipe.stages]
    return next((name for name in names if name and is_hub_name(name, beside)), None)


def stage_fits(loaded: LoadedRecipe, stage: str) -> Check:
    """Whether this machine's memory and arithmetic hold a stage."""
    recipe, beside = loaded.recipe, loaded.path.parent
    settings, facts = recipe.stages[stage], probe()
    seen, shape = size(recipe, stage, beside), find_shape(recipe, beside)
    rows = Rows(seen.rows, seen.longest, seen.mean, seen.learnt, seen.source, seen.resident)
    plan = plan_stage(settings, rows.count or 1, 1, facts)
    found = choose(plan, settings, shape, rows, Machines(1, 1, card(facts)))
    room = f"{found.memory.needed / 2**30:.1f} GiB of {found.machines.gpu.memory / 2**30:.1f}"
    told = f"foreseen {room}, {found.time.rate:,.0f} tokens/s ± {found.sure:.0%}"
    if not found.fits:
        return Check(f"stage {stage}", "fail", f"does not fit: {room}", " | ".join(found.mends), found.as_json())
    changed = [line for line in found.plan.reasons if "instead of" in line or "gradient checkpointing:" in line]
    return Check(f"stage {stage}", "ok", "; ".join([told, *changed]), facts=found.as_json())


def _disk(loaded: LoadedRecipe | None, folder: Path) -> Check:
    """Room for every checkpoint that is kept, one that is being written, and the model."""
    needed = 0.0
    if loaded:
        shape: Shape = find_shape(loaded.recipe, loaded.path.parent)
        for settings in loaded.recipe.stages.values():
            moves = moves_of(shape, settings)
            checkpoint = 4.0 * moves.trained * (3 if settings.optim == "adamw_torch" else 2)
            needed += checkpoint * (settings.save_total_limit + 2) + 4.0 * moves.total
    return doctor.disk(folder, needed)


def _named(name: str, check: Any) -> Any:
    """A check with a name to be called by where it breaks."""

    def look() -> Any:
        return check()

    look.__name__ = name
    return look
