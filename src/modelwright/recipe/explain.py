"""Explain a recipe: the value, origin and meaning of every setting, and the JSON Schema for editors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from modelwright.errors import UsageError
from modelwright.recipe.diagnostics import closest_match
from modelwright.recipe.fields import (
    ConfigField,
    aliases_for,
    all_sections,
    canonical_key,
    child_fields,
    get_field,
    join_key,
    known_names,
)
from modelwright.recipe.load import LoadedRecipe
from modelwright.recipe.schema import NAME_PATTERN, Recipe
from modelwright.recipe.source import DEFAULT, Origin


@dataclass(frozen=True)
class SettingValue:
    """One setting of one recipe."""

    key: str
    """Dotted name."""
    value: Any
    """Its value as plain data."""
    origin: Origin
    """Where it was set."""
    description: str
    """Its description."""


@dataclass(frozen=True)
class Explanation:
    """One setting in detail."""

    setting: SettingValue
    """Its value and origin in the recipe."""
    expected: str
    """Its type in words."""
    default: Any
    """Its default."""
    required: bool
    """Whether it has no default."""
    choices: tuple[str, ...]
    """Its allowed words."""
    aliases: tuple[str, ...]
    """Its names in other tools and earlier versions."""


def list_settings(loaded: LoadedRecipe, section: str = "") -> tuple[SettingValue, ...]:
    """Every setting of a recipe, or of one section, in the order of the schema."""
    start = get_field(tuple(section.split(".")) if section else ())
    assert start is not None
    return tuple(_iter_settings(start, _value(loaded, section), loaded.origins))


def non_default_settings(loaded: LoadedRecipe) -> tuple[tuple[SettingValue, Any], ...]:
    """The settings that differ from their default, with that default."""
    changed = []
    for row in list_settings(loaded):
        setting = get_field(tuple(row.key.split(".")))
        default = None if setting is None else plain_default(setting)
        if row.value != default:
            changed.append((row, default))
    return tuple(changed)


def explain_setting(loaded: LoadedRecipe, key: str) -> Explanation:
    """One setting in detail."""
    setting = get_field(tuple(key.split(".")))
    assert setting is not None
    row = SettingValue(key, _value(loaded, key), loaded.origins.get(key, DEFAULT), setting.description)
    wants = setting.expected + (", or null" if setting.optional else "")
    default = row.value if row.origin == DEFAULT and row.value is not None else plain_default(setting)
    return Explanation(row, wants, default, setting.required, setting.choices, tuple(aliases_for(key)))


def resolve_key(key: str) -> str:
    """The full key of a dotted key, a bare name or an alias."""
    if get_field(tuple(canonical_key(key).split("."))) is not None:
        return canonical_key(key)
    names = [(section, name, ours) for section in all_sections() for name, ours in known_names(section).items()]
    candidates: dict[str, str] = {}
    for section, name, ours in sorted(names, key=lambda each: each[1] != each[2]):  # our names before aliases
        candidates.setdefault(name, join_key(section, ours))
    if key in candidates:
        return candidates[key]
    candidates |= {full: full for full in (join_key(section, name) for section, name, ours in names if name == ours)}
    close = closest_match(key, candidates, cutoff=0.6)
    hint = f"did you mean {candidates[close]}?" if close else f"sections are {', '.join(filter(None, all_sections()))}"
    raise UsageError(f"{key} is not a setting; {hint}")


def is_section(key: str) -> bool:
    """Whether a key has settings below it."""
    setting = get_field(tuple(key.split(".")))
    return setting is not None and (bool(setting.section) or setting.expected == "a mapping")


def json_schema() -> dict[str, Any]:
    """JSON Schema of a recipe file, for editors and agents."""
    schema = Recipe.model_json_schema()
    required = schema.pop("required")
    base = {"type": "string", "description": "A recipe to build on: a path relative to this file, or a shipped name."}
    schema["properties"] = {"base": base, **schema["properties"]}
    schema["anyOf"] = [{"required": ["base"]}, {"required": required}]
    definitions = schema["$defs"]
    trainable = [{"enum": ["all", "lora"]}, definitions["TrainableParts"]]
    definitions["TrainableParts"] = {"anyOf": trainable, "description": "Which parameters are trainable."}
    for definition in definitions.values():  # required settings may be in the base
        definition.pop("required", None)
    schema["properties"]["name"]["pattern"] = NAME_PATTERN
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _value(loaded: LoadedRecipe, key: str) -> Any:
    """The value of a key as plain data; None if the recipe lacks its section."""
    value: Any = loaded.recipe.model_dump()
    for step in key.split(".") if key else ():
        value = value.get(step) if isinstance(value, dict) else None
    return value


def _iter_settings(setting: ConfigField, value: Any, origins: dict[str, Origin]) -> Iterator[SettingValue]:
    if setting.section and isinstance(value, dict):
        for child in child_fields(setting):
            yield from _iter_settings(child, value.get(child.key.rpartition(".")[2]), origins)
    elif isinstance(value, dict) and value:
        for name, item in value.items():
            entry = get_field((*setting.key.split("."), name))
            assert entry is not None
            yield from _iter_settings(entry, item, origins)
    elif value is not None or setting.key in origins:
        yield SettingValue(setting.key, value, origins.get(setting.key, DEFAULT), setting.description)


def plain_default(setting: ConfigField) -> Any:
    """The default of a setting as plain data."""
    default = setting.default
    if isinstance(default, dict):
        return {key: value.model_dump(exclude_none=True) if isinstance(value, BaseModel) else value
                for key, value in default.items()}  # fmt: skip
    return default.model_dump() if isinstance(default, BaseModel) else getattr(default, "raw", default)
