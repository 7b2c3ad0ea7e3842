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
    field_names,
    get_field,
    section_aliases,
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
    """What it is, as plain data."""
    origin: Origin
    """Who set it."""
    description: str
    """What it means."""


@dataclass(frozen=True)
class Explanation:
    """Everything there is to say about one setting."""

    setting: SettingValue
    """Its value in the recipe, and who set it."""
    expected: str
    """What values would do, in words."""
    default: Any
    """What it is when nobody says it."""
    required: bool
    """Whether a recipe must say it."""
    choices: tuple[str, ...]
    """The words it may be, where they are few."""
    aliases: tuple[str, ...]
    """What other tools call it; accepted with a note."""


def list_settings(loaded: LoadedRecipe, section: str = "") -> tuple[SettingValue, ...]:
    """Every setting of a recipe, or of one section, in the order of the schema."""
    start = get_field(tuple(section.split(".")) if section else ())
    assert start is not None
    return tuple(_iter_settings(start, _value(loaded, section), loaded.origins))


def non_default_settings(loaded: LoadedRecipe) -> tuple[tuple[SettingValue, Any], ...]:
    """The settings that are not at their default, each with that default."""
    changed = []
    for row in list_settings(loaded):
        setting = get_field(tuple(row.key.split(".")))
        default = None if setting is None else plain_default(setting)
        if row.value != default:
            changed.append((row, default))
    return tuple(changed)


def explain_setting(loaded: LoadedRecipe, key: str) -> Explanation:
    """One setting at length."""
    setting = get_field(tuple(key.split(".")))
    assert setting is not None
    row = SettingValue(key, _value(loaded, key), loaded.origins.get(key, DEFAULT), setting.description)
    wants = setting.expected + (", or null" if setting.optional else "")
    default = plain_default(setting)
    return Explanation(row, wants, default, setting.required, setting.choices, tuple(aliases_for(key)))


def resolve_key(key: str) -> str:
    """The full key that a person means by a dotted key, a bare name or another tool's name."""
    if get_field(tuple(canonical_key(key).split("."))) is not None:
        return canonical_key(key)
    bare: dict[str, str] = {}
    for name, meant in _bare_names():
        bare.setdefault(name, meant)
    if key in bare:
        return bare[key]
    known = {setting.key: setting.key for section in all_sections().values() for setting in child_fields(section)}
    match = closest_match(key, {**bare, **known}, cutoff=0.6)
    close = {**bare, **known}[match] if match else None
    hint = f"did you mean {close}?" if close else f"sections are {', '.join(filter(None, all_sections()))}"
    raise UsageError(f"{key} is not a setting; {hint}")


def is_section(key: str) -> bool:
    """Whether a key has settings of its own below it."""
    setting = get_field(tuple(key.split(".")))
    return setting is not None and (bool(setting.section) or setting.expected == "a mapping")


def json_schema() -> dict[str, Any]:
    """JSON Schema of a recipe file, for editors and agents."""
    schema = Recipe.model_json_schema()
    required = schema.pop("required")
    base = {"type": "string", "description": "A recipe that this one builds on: a path beside it, or a shipped name."}
    schema["properties"] = {"base": base, **schema["properties"]}
    schema["anyOf"] = [{"required": ["base"]}, {"required": required}]
    definitions = schema["$defs"]
    shorthands = {"enum": ["all", "lora"]}
    definitions["TrainableParts"] = {
        "anyOf": [shorthands, definitions["TrainableParts"]],
        "description": "Which parameters are trainable.",
    }
    for definition in definitions.values():  # a child recipe may leave to its base what is required
        definition.pop("required", None)
    schema["properties"]["name"]["pattern"] = NAME_PATTERN
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _value(loaded: LoadedRecipe, key: str) -> Any:
    """What a key is in a recipe, as plain data; nothing where the recipe does not go so far."""
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


def _bare_names() -> Iterator[tuple[str, str]]:
    """Every name without its section, ours before others', and the key it means."""
    for section in all_sections():
        prefix = f"{section}." if section else ""
        yield from ((name, prefix + name) for name in field_names(section))
    for section in all_sections():
        prefix = f"{section}." if section else ""
        yield from ((name, prefix + alias.canonical) for name, alias in section_aliases(section).items())


def plain_default(setting: ConfigField) -> Any:
    """The default of a setting as plain data."""
    default = setting.default
    if isinstance(default, dict):
        return {key: value.model_dump(exclude_none=True) if isinstance(value, BaseModel) else value
                for key, value in default.items()}  # fmt: skip
    return default.model_dump() if isinstance(default, BaseModel) else getattr(default, "raw", default)
