"""Convert a configuration of TRL or axolotl into a recipe, and list every setting that could not be converted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from modelwright.errors import RecipeError, UsageError
from modelwright.recipe.convert.axolotl import convert_axolotl
from modelwright.recipe.convert.common import Conversion, Unconverted, render_yaml
from modelwright.recipe.convert.trl import convert_trl
from modelwright.recipe.diagnostics import FOREIGN_KEYS, MEANINGFUL_WHEN_FALSE, closest_match, slugify, validate_tree
from modelwright.recipe.fields import apply_aliases
from modelwright.recipe.load import display_path
from modelwright.recipe.schema import Recipe
from modelwright.recipe.source import ConfigNode, Origin, read_file
from modelwright.recipe.stage_specs import STAGES, PreferenceLoss, first_stage

CONVERTERS: dict[str, tuple[str, Callable[[Conversion], None]]] = {
    "trl": ("TRL", convert_trl),
    "axolotl": ("axolotl", convert_axolotl),
}
"""The display name of each tool, and its converter."""
AXOLOTL_KEYS = ("base_model", "micro_batch_size", "sequence_len", "sample_packing", "num_epochs", "pretraining_dataset")
TRL_KEYS = ("model_name_or_path", "per_device_train_batch_size", "dataset_name", "num_train_epochs")
OTHER_METHOD_KEYS = {
    "grpo": ("num_generations", "reward_funcs", "max_completion_length", "vllm_mode"),
    "kto": ("desirable_weight", "undesirable_weight"),
    "reward": ("center_rewards_coefficient",),
    "gkd": ("teacher_model_name_or_path",),
}
CONVERTED_STAGES = [stage for stage, spec in STAGES.items() if spec.methods]


@dataclass(frozen=True)
class ConvertedRecipe:
    """A recipe made from the configuration of another tool."""

    recipe: Recipe
    """The recipe, checked."""
    text: str
    """The recipe as a file, with what was not converted as comments."""
    tool: str
    """The tool of the configuration."""
    stage: str
    """The training stage of the recipe."""
    converted: tuple[str, ...]
    """Names of the converted settings."""
    unconverted: tuple[Unconverted, ...]
    """Settings that were not converted exactly."""


def convert_config(
    path: Path, tool: str | None = None, stage: str | None = None, name: str | None = None
) -> ConvertedRecipe:
    """Convert a configuration into a recipe, named after its file by default; problems name the file's own lines."""
    origin = Origin("recipe", display_path(path))
    source, problems = read_file(path, origin)
    if problems:
        raise RecipeError(problems)
    tool = tool or detect_tool(source.mapping, path)
    if tool not in CONVERTERS:
        raise UsageError(f"--from is {tool!r}; it wants one of {', '.join(CONVERTERS)}")
    if stage is not None and stage not in CONVERTED_STAGES:
        raise UsageError(f"--stage is {stage!r}; it wants one of {', '.join(CONVERTED_STAGES)}")
    title, convert = CONVERTERS[tool]
    stage = stage or detect_stage(source.mapping, path)
    conversion = Conversion(title, dict(source.mapping), stage, ConfigNode({}, origin))
    conversion.set("name", slugify(name or path.stem) or "converted")
    convert(conversion)
    _convert_remaining(conversion)
    tree, _, alias_problems = apply_aliases(conversion.tree)
    recipe, recipe_problems = validate_tree(tree)
    if recipe is None or alias_problems:
        raise RecipeError([*alias_problems, *recipe_problems])
    unconverted = sorted(conversion.unconverted, key=lambda each: each.line or 0)
    text = render_yaml(tree, conversion.comments, _header_comments(path.name, conversion, unconverted))
    return ConvertedRecipe(recipe, text, tool, conversion.stage, tuple(conversion.converted), tuple(unconverted))


def detect_tool(entries: dict[str, ConfigNode], path: Path) -> str:
    """The tool of a configuration, by its keys."""
    if any(name in entries for name in AXOLOTL_KEYS):
        return "axolotl"
    if any(name in entries for name in TRL_KEYS):
        return "trl"
    if "model" in entries and any(key in entries for key in ("name", *STAGES)):
        raise UsageError(f"{path}: this looks like a recipe already; modelwright check {path} reads it")
    raise UsageError(f"{path}: neither TRL's names are in it nor axolotl's; say whose it is with --from")


def detect_stage(entries: dict[str, ConfigNode], path: Path) -> str:
    """The training stage of a configuration, by its keys; unsupported methods are refused."""
    rl = entries.get("rl")
    method = str(rl.value).lower() if rl is not None and rl.value else ""
    others = (name for name, keys in OTHER_METHOD_KEYS.items() if any(key in entries for key in keys))
    method = method or next(others, "")
    stages = [stage for stage, spec in STAGES.items() if method in spec.methods]
    if method and not stages:
        offered = ", ".join(CONVERTED_STAGES)
        raise UsageError(f"{path}: this trains by {method}, which is not offered; what is: {offered}")
    kind = entries.get("loss_type")
    if kind is not None and (isinstance(kind.value, list) or kind.value in get_args(PreferenceLoss)):
        stages.append(first_stage("pairs"))
    stages += [stage for stage, spec in reversed(STAGES.items()) if any(key in entries for key in spec.method_keys)]
    datasets = entries.get("datasets")
    items = datasets.value if datasets is not None and isinstance(datasets.value, list) else []
    types = [item.get(("type",)) for item in items]
    raw = [kind for kind in types if kind is not None and str(kind.value).startswith("completion")]
    return next(iter(stages), first_stage("text" if raw else "conversations"))


def _convert_remaining(conversion: Conversion) -> None:
    """Settings without a rule: shared names, names with an explanation, and unknown names."""
    for name in list(conversion.source):
        node = conversion.source.pop(name)
        key = conversion.find_key(name)
        is_set = node.value is not None and (node.value is not False or name in MEANINGFUL_WHEN_FALSE or key)
        if not is_set:
            conversion.report(name, node, "not_needed", "")
        elif name in FOREIGN_KEYS:
            kind, advice = FOREIGN_KEYS[name]
            conversion.report(name, node, kind, advice)
        elif key is not None:
            conversion.set(key, node, source_key=name)
        else:
            close = closest_match(name, [*FOREIGN_KEYS, *conversion.converted], cutoff=0.85)
            hint = f"; did you mean {close}?" if close else ""
            conversion.report(name, node, "unsupported", f"not a known setting of {conversion.tool}{hint}")


def _header_comments(file: str, conversion: Conversion, unconverted: list[Unconverted]) -> list[str]:
    """The comments at the top of the recipe."""
    head = [f"Converted from {file}, a configuration of {conversion.tool}, by modelwright convert."]
    titles = {"unsupported": "Not converted:", "approximated": "Approximated:"}
    for kind, title in titles.items():
        entries = [each for each in unconverted if each.kind == kind]
        head += ["", title] if entries else []
        head += [f"  {each}" for each in entries]
    explained = [each for each in unconverted if each.kind == "not_needed" and each.advice]
    disabled = [each.key for each in unconverted if each.kind == "not_needed" and not each.advice]
    head += ["", "Needs no setting here:"] if explained else []
    head += [f"  {each}" for each in explained]
    head += ["", f"Disabled in the source: {', '.join(disabled)}"] if disabled else []
    return head


def conversion_json(converted: ConvertedRecipe) -> dict[str, Any]:
    """The conversion as JSON."""
    return {
        "from": converted.tool,
        "stage": converted.stage,
        "name": converted.recipe.name,
        "converted": list(converted.converted),
        "unconverted": [
            {"key": each.key, "value": each.display, "line": each.line, "kind": each.kind, "advice": each.advice}
            for each in converted.unconverted
        ],
        "recipe": converted.text,
    }
