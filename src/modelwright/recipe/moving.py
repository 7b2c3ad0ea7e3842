"""Move a configuration of TRL or axolotl into a recipe, and name everything that could not come along."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelwright.errors import RecipeError, UsageError
from modelwright.recipe.aliases import canonicalise
from modelwright.recipe.letters import validate
from modelwright.recipe.load import shown_name
from modelwright.recipe.moved import Left, Move, written
from modelwright.recipe.moving_axolotl import axolotl
from modelwright.recipe.moving_trl import trl
from modelwright.recipe.moving_words import ADVICE, NEEDED_WHEN_OFF
from modelwright.recipe.schema import Recipe
from modelwright.recipe.source import read_file
from modelwright.recipe.tree import Located, Origin
from modelwright.recipe.unknown import nearest

TOOLS: dict[str, tuple[str, Callable[[Move], None]]] = {"trl": ("TRL", trl), "axolotl": ("axolotl", axolotl)}
"""What can be moved: its name among people, and what reads it."""
OF_AXOLOTL = ("base_model", "micro_batch_size", "sequence_len", "sample_packing", "num_epochs", "pretraining_dataset")
OF_TRL = ("model_name_or_path", "per_device_train_batch_size", "dataset_name", "num_train_epochs")
OF_DPO = ("beta", "precompute_ref_log_probs", "sync_ref_model", "f_divergence_type", "ld_alpha", "loss_weights")
OF_OTHERS = {
    "grpo": ("num_generations", "reward_funcs", "max_completion_length", "vllm_mode"),
    "kto": ("desirable_weight", "undesirable_weight"),
    "reward": ("center_rewards_coefficient",),
    "gkd": ("teacher_model_name_or_path",),
}
STAGES = ("sft", "dpo", "pretrain")


@dataclass(frozen=True)
class Moved:
    """A recipe that was another tool's configuration."""

    recipe: Recipe
    """The recipe, checked."""
    text: str
    """The same as a file, with what is not in it as comments."""
    tool: str
    """Whose configuration it was."""
    stage: str
    """The training stage it became."""
    carried: tuple[str, ...]
    """Settings that came along, by their old names."""
    left: tuple[Left, ...]
    """Settings that did not, or not as they were."""


def move(path: Path, tool: str | None = None, stage: str | None = None, name: str | None = None) -> Moved:
    """Make a recipe of a configuration, called by its file unless told; what is wrong is told by its own lines."""
    origin = Origin("recipe", shown_name(path))
    source, problems = read_file(path, origin)
    if problems:
        raise RecipeError(problems)
    tool = tool or told_by(source.entries, path)
    if tool not in TOOLS:
        raise UsageError(f"--from is {tool!r}; it wants one of {', '.join(TOOLS)}")
    if stage is not None and stage not in STAGES:
        raise UsageError(f"--stage is {stage!r}; it wants one of {', '.join(STAGES)}")
    title, read = TOOLS[tool]
    found = Move(title, dict(source.entries), stage or stage_of(source.entries, path), Located({}, origin))
    found.put("name", slug(name or path.stem))
    read(found)
    _the_rest(found)
    tree, _, aliased = canonicalise(found.tree)
    recipe, wrong = validate(tree)
    if recipe is None or aliased:
        raise RecipeError([*aliased, *wrong])
    left = sorted(found.left, key=lambda each: each.line or 0)
    text = written(tree, found.remarks, _head(path.name, found, left))
    return Moved(recipe, text, tool, found.stage, tuple(found.carried), tuple(left))


def told_by(entries: dict[str, Located], path: Path) -> str:
    """Whose configuration a file is, by the names in it."""
    if any(name in entries for name in OF_AXOLOTL):
        return "axolotl"
    if any(name in entries for name in OF_TRL):
        return "trl"
    if "model" in entries and ("sft" in entries or "name" in entries):
        raise UsageError(f"{path}: this looks like a recipe already; modelwright check {path} reads it")
    raise UsageError(f"{path}: neither TRL's names are in it nor axolotl's; say whose it is with --from")


def stage_of(entries: dict[str, Located], path: Path) -> str:
    """What a configuration trains, by the names in it; methods that are not trained here are refused."""
    wish = entries.get("rl")
    method = str(wish.value).lower() if wish is not None and wish.value else ""
    method = method or next((name for name, keys in OF_OTHERS.items() if any(key in entries for key in keys)), "")
    if method not in ("", "dpo", "ipo"):
        raise UsageError(f"{path}: this trains by {method}, which is not offered; what is: {', '.join(STAGES)}")
    kind = entries.get("loss_type")
    preference = kind is not None and (isinstance(kind.value, list) or kind.value in ("sigmoid", "ipo", "hinge"))
    if method or preference or any(name in entries for name in OF_DPO):
        return "dpo"
    sets = entries.get("datasets")
    types = [item.at(("type",)) for item in sets.value] if sets is not None and isinstance(sets.value, list) else []
    raw = [kind for kind in types if kind is not None and str(kind.value).startswith("completion")]
    return "pretrain" if "pretraining_dataset" in entries or "dataset_text_field" in entries or raw else "sft"


def slug(text: str) -> str:
    """A name as recipes have them."""
    return re.sub(r"[^a-z0-9._-]+", "-", text.lower()).strip("-._") or "moved"


def _the_rest(found: Move) -> None:
    """What needs no rule of its own: names we share, names we have an answer to, names nobody knows."""
    for name in list(found.source):
        node = found.source.pop(name)
        home = found.home(name)
        asks = node.value is not None and (node.value is not False or name in NEEDED_WHEN_OFF or home)
        if not asks:
            found.leave(name, node, "unneeded", "")
        elif name in ADVICE:
            kind, advice = ADVICE[name]
            found.leave(name, node, kind, advice)
        elif home is not None:
            found.put(home, node, came_from=name)
        else:
            close = nearest(name, [*ADVICE, *found.carried], cutoff=0.85)
            hint = f"; did you mean {close}?" if close else ""
            found.leave(name, node, "lost", f"no setting of {found.tool} that is known here{hint}")


def _head(file: str, found: Move, left: list[Left]) -> list[str]:
    """The comments on top of the recipe."""
    head = [f"Moved from {file}, a configuration of {found.tool}, by modelwright convert."]
    titles = {"lost": "Not carried over:", "nearest": "Carried over as the nearest there is:"}
    for kind, title in titles.items():
        some = [each for each in left if each.kind == kind]
        head += ["", title] if some else []
        head += [f"  {each}" for each in some]
    explained = [each for each in left if each.kind == "unneeded" and each.advice]
    silent = [each.key for each in left if each.kind == "unneeded" and not each.advice]
    head += ["", "Needs no setting here:"] if explained else []
    head += [f"  {each}" for each in explained]
    head += ["", f"Asked for nothing: {', '.join(silent)}"] if silent else []
    return head


def as_json(moved: Moved) -> dict[str, Any]:
    """The same for machines."""
    return {
        "from": moved.tool,
        "stage": moved.stage,
        "name": moved.recipe.name,
        "carried": list(moved.carried),
        "left": [
            {"key": each.key, "value": each.shown, "line": each.line, "kind": each.kind, "advice": each.advice}
            for each in moved.left
        ],
        "recipe": moved.text,
    }
