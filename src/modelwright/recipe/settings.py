"""The schema as a list of settings: what each wants, in words, with its default and its sentence."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from modelwright.recipe.cluster import IS_AMOUNT, IS_LABEL, Volume
from modelwright.recipe.judging import Threshold
from modelwright.recipe.schema import NAME_PATTERN, Recipe
from modelwright.recipe.training import Trainable
from modelwright.recipe.values import COMPILES, Steps

NAME_WANTS = "lower-case letters, digits, dots and dashes"
LABEL_WANTS = "lower-case letters, digits and dashes"


@dataclass(frozen=True)
class Setting:
    """One key of a recipe."""

    key: str
    """Dotted name, such as ``sft.learning_rate``."""
    annotation: Any
    """Its type, without the ``None`` of an optional one."""
    constraints: tuple[Any, ...]
    """Bounds and patterns."""
    optional: bool
    """Whether null is a value of it."""
    required: bool
    """Whether a recipe must say it."""
    default: Any
    """What it is when nobody says it."""
    sentence: str
    """What it means."""

    @property
    def section(self) -> type[BaseModel] | None:
        """The settings below it, where it is a section."""
        return self.annotation if isinstance(self.annotation, type) and issubclass(self.annotation, BaseModel) else None

    @property
    def is_text(self) -> bool:
        """Whether it is text and nothing else."""
        return self.annotation is str

    @property
    def is_number(self) -> bool:
        """Whether it is a number and nothing else."""
        return self.annotation in (int, float)

    @property
    def choices(self) -> tuple[str, ...]:
        """The words it may be, where they are few."""
        return _choices(self.annotation)

    @property
    def meaning(self) -> str:
        """Its sentence as the end of a letter: ``a folder, a hub id, or the embedded smollm2-135m-instruct``."""
        first = self.sentence.partition(";")[0].rstrip(".")
        return f"{first[:1].lower()}{first[1:]}"

    @property
    def wants(self) -> str:
        """What would do, in words: ``a number above 0``."""
        return _wants(self.annotation, self.constraints)


def find(path: tuple[str, ...]) -> Setting | None:
    """The setting that a path names, through sections, mappings (``gates.sft.eval_loss``) and list items."""
    setting = _ROOT
    for step in path:
        child = _child(setting, step)
        if child is None:
            return None
        setting = child
    return setting


def children(setting: Setting) -> tuple[Setting, ...]:
    """The settings of a section, in the order of the schema."""
    return _fields(setting.section, setting.key) if setting.section else ()


@functools.cache
def sections() -> dict[str, Setting]:
    """Every section with fixed settings by its key, the recipe itself under the empty key."""
    found = {"": _ROOT}
    waiting = list(children(_ROOT))
    while waiting:
        setting = waiting.pop(0)
        if setting.section:
            found[setting.key] = setting
            waiting += children(setting)
    return found


def sample(setting: Setting) -> Any:
    """Some value that would do, to look past a problem at the next one."""
    if setting.section:
        return _sound(setting)
    annotation = setting.annotation
    if setting.choices:
        return setting.choices[0]
    if setting.is_number:
        bounds = {name: getattr(each, name) for each in setting.constraints for name in _BOUNDS if hasattr(each, name)}
        number = max(bounds.get("ge", 1), bounds.get("gt", 0) + 1)
        return number if number < bounds.get("lt", number + 1) else 0
    examples: dict[Any, Any] = {bool: False, list: [], dict: {}, Steps: 1}
    if _is_union(annotation) and bool in get_args(annotation):
        return False
    return examples.get(get_origin(annotation) or annotation, "x")


def _sound(section: Setting) -> dict[str, Any]:
    """The smallest mapping that the section accepts."""
    assert section.section is not None
    fields = children(section)
    name = len(section.key) + 1 if section.key else 0
    needed = {field.key[name:]: sample(field) for field in fields if field.required}
    for attempt in ({}, *({field.key[name:]: sample(field)} for field in fields if not field.required)):
        try:
            section.section.model_validate({**needed, **attempt})
        except ValueError:
            continue
        return {**needed, **attempt}
    return needed


@functools.cache
def _fields(section: type[BaseModel], prefix: str) -> tuple[Setting, ...]:
    return tuple(_from_field(prefix, name, field) for name, field in section.model_fields.items())


def _from_field(prefix: str, name: str, field: FieldInfo) -> Setting:
    annotation, constraints, optional = _bare(field.annotation, tuple(field.metadata))
    default = None if field.default is PydanticUndefined else field.default
    key = f"{prefix}.{name}" if prefix else name
    return Setting(key, annotation, constraints, optional, field.is_required(), default, field.description or "")


def _bare(annotation: Any, constraints: tuple[Any, ...] = ()) -> tuple[Any, tuple[Any, ...], bool]:
    """Take ``Annotated`` and ``| None`` off a type."""
    optional = False
    while True:
        if get_origin(annotation) is Annotated:
            constraints += tuple(annotation.__metadata__)
            annotation = annotation.__origin__
        elif _is_union(annotation) and NoneType in get_args(annotation):
            optional = True
            others = tuple(each for each in get_args(annotation) if each is not NoneType)
            annotation = Union[others]  # noqa: UP007 (built from a tuple)
        else:
            flat = (each for one in constraints for each in getattr(one, "metadata", None) or (one,))
            return annotation, tuple(flat), optional


def _child(setting: Setting, step: str) -> Setting | None:
    for field in children(setting):
        if field.key == (f"{setting.key}.{step}" if setting.key else step):
            return field
    if get_origin(setting.annotation) not in (dict, list):
        return None
    annotation, constraints, optional = _bare(get_args(setting.annotation)[-1])
    sentence = annotation.__doc__ if isinstance(annotation, type) and issubclass(annotation, BaseModel) else ""
    key = f"{setting.key}.{step}"
    return Setting(key, annotation, constraints, optional, False, None, sentence or setting.sentence)


def _is_union(annotation: Any) -> bool:
    return get_origin(annotation) in (Union, UnionType)


def _choices(annotation: Any) -> tuple[str, ...]:
    """The words of a type; beside words true and false are two more."""
    members = get_args(annotation) if _is_union(annotation) else (annotation,)
    words = tuple(str(word) for each in members if get_origin(each) is Literal for word in get_args(each))
    return ("true", "false", *words) if words and bool in members else words


_BOUNDS = {"gt": "above", "ge": "of at least", "lt": "below", "le": "at most"}


def _wants(annotation: Any, constraints: tuple[Any, ...]) -> str:
    """Say a type in words."""
    if COMPILES in constraints:
        return "a regular expression"
    if IS_AMOUNT in constraints or IS_LABEL in constraints:
        return "an amount such as 16Gi" if IS_AMOUNT in constraints else LABEL_WANTS
    if annotation in (int, float):
        return ("a whole number" if annotation is int else "a number") + _bounds(constraints)
    if _is_union(annotation) and bool in get_args(annotation) and (choices := _choices(annotation)):
        return f"one of {', '.join(choices)}"
    if _is_union(annotation):
        told = (_wants(*_bare(each)[:2]) for each in get_args(annotation))
        return " or ".join(each if "," in each else each.removeprefix("one of ") for each in told)
    if get_origin(annotation) is Literal:
        return f"one of {', '.join(map(str, get_args(annotation)))}"
    if get_origin(annotation) is list:
        item = _wants(*_bare(get_args(annotation)[0])[:2])
        if item.startswith("one of "):
            return f"a list of {item.removeprefix('one of ')}"
        return f"a list of {item}" if item == "text" else f"a list of {item.removeprefix('a ')}s"
    if get_origin(annotation) is dict:
        return "a mapping"
    if annotation is str:
        pattern = next((each.pattern for each in constraints if getattr(each, "pattern", None)), None)
        return NAME_WANTS if pattern == NAME_PATTERN else "text"
    words: dict[Any, str] = {
        bool: "true or false",
        Steps: Steps.WANTS,
        Threshold: "limits, such as {at_most: 2.2}",
        Trainable: Trainable.WANTS,
        Volume: "storage, such as {mount: /shared/models, size: 50Gi}",
    }
    return words.get(annotation, "a mapping of settings")


def _bounds(constraints: tuple[Any, ...]) -> str:
    limits = [(word, getattr(each, name, None)) for name, word in _BOUNDS.items() for each in constraints]
    found = [f"{word} {limit:g}" for word, limit in limits if limit is not None]
    return f" {' and '.join(found)}" if found else ""


_ROOT = Setting("", Recipe, (), False, True, None, "One file that becomes a trained model.")
