"""What decides the weights of a stage, so that resuming with something else is noticed and named."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any

from modelwright.errors import Refused, UsageError
from modelwright.recipe.schema import Recipe

FREE = frozenset({
    "logging_steps", "save_steps", "eval_steps", "save_total_limit", "per_device_eval_batch_size", "sharding",
    "gradient_checkpointing", "profile_memory", "keep_trunk", "share_prefix", "resume_from_checkpoint",
    "ddp_bucket_cap_mb", "save_in_background",
})  # fmt: skip
"""Settings that may change between two starts of one run: they do not decide what is learnt."""

CONTENTS = ("data.contents", "model.contents", "tokenizer.contents")
"""What the files themselves hold, by fingerprint."""


def wishes_of(recipe: Recipe, stage: str, data_fingerprint: str, model_fingerprint: str) -> dict[str, Any]:
    """Every setting that decides the weights, by its dotted name."""
    return {**settings_of(recipe, stage), CONTENTS[0]: data_fingerprint, CONTENTS[1]: model_fingerprint}


def settings_of(recipe: Recipe, stage: str) -> dict[str, Any]:
    """Those of the wishes that stand in the recipe itself; what data holds is known by its fingerprint alone."""
    settings = recipe.stages[stage].model_dump(mode="json", exclude={"data"})
    kept = {f"{stage}.{key}": value for key, value in settings.items() if key not in FREE}
    return {**flat(kept), "seed": recipe.seed}


def check_overrides(recipe: Recipe, allowed: Collection[str]) -> None:
    """An override must name something that decides the weights of some stage."""
    architecture = recipe.model.architecture
    made = flat({"model.architecture": architecture.model_dump()}) if architecture else {}
    known = [*CONTENTS, *made, *(key for stage in recipe.stages for key in settings_of(recipe, stage))]
    mappings = [f"{stage}.{name}" for stage, section in recipe.stages.items() for name in type(section).model_fields]
    for key in allowed:
        if key not in known and key.rpartition(".")[0] not in mappings:  # an entry that is there no more has no name
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise UsageError(f"--override {key} names nothing that decides the weights{hint}")


def refuse_changes(before: Mapping[str, Any], now: Mapping[str, Any], allowed: Collection[str]) -> list[str]:
    """Refuse to go on with other wishes; returns the changes that were allowed, to be recorded."""
    changed = [key for key in [*before, *(key for key in now if key not in before)] if before.get(key) != now.get(key)]
    refused = [key for key in changed if key not in allowed]
    if refused:
        named = "; ".join(_told(key, before.get(key), now.get(key)) for key in refused)
        options = " ".join(f"--override {key}" for key in refused)
        one_sided = any(key.count(".") == 1 and (key in before) != (key in now) for key in refused)
        older = "go on with the earlier modelwright that began it, " if one_sided else ""
        raise Refused(
            f"this run was started otherwise: {named}. Choose another output_dir, put it back, {older}or add {options}"
        )
    return [_told(key, before.get(key), now.get(key)) for key in changed]


def _told(key: str, before: Any, now: Any) -> str:
    return f"{key} changed" if key in CONTENTS else f"{key} was {before}, now {now}"


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by their dotted names."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found
