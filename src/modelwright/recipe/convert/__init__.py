"""Convert a configuration of another tool into a recipe, and name every setting that could not be converted."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelwright.errors import RecipeError, UsageError
from modelwright.recipe.convert.axolotl import convert_axolotl
from modelwright.recipe.convert.common import Conversion, Unconverted, as_str_list, render_yaml
from modelwright.recipe.convert.llamafactory import convert_llamafactory
from modelwright.recipe.convert.trl import LOSSES, convert_handbook, convert_trl
from modelwright.recipe.diagnostics import FOREIGN_KEYS, MEANINGFUL_WHEN_FALSE, closest_match, slugify, validate_tree
from modelwright.recipe.fields import apply_aliases
from modelwright.recipe.load import display_path
from modelwright.recipe.schema import Recipe
from modelwright.recipe.source import ConfigNode, Origin, RecipeProblem, read_file
from modelwright.recipe.stage_specs import STAGES, first_stage

CONVERTERS: dict[str, tuple[str, Callable[[Conversion], None], tuple[str, ...]]] = {
    "axolotl": ("axolotl", convert_axolotl, ("base_model", "micro_batch_size", "sequence_len", "sample_packing",
                "num_epochs", "pretraining_dataset", "val_set_size", "rl", "adapter")),
    "llamafactory": ("LLaMA-Factory", convert_llamafactory, ("stage", "finetuning_type", "cutoff_len", "template",
                     "dataset_dir", "lora_rank", "lora_target", "dataset", "pref_loss", "quantization_bit")),
    "handbook": ("alignment-handbook", convert_handbook, ("dataset_mixer", "dataset_mixture", "dataset_splits")),
    "trl": ("TRL", convert_trl, ("model_name_or_path", "dataset_name", "datasets", "num_train_epochs",
            "per_device_train_batch_size")),
}  # fmt: skip
"""Each tool: its display name, its converter, and keys that tell it from the tools after it."""
OTHER_METHODS = {
    "gkd": r"teacher_.*|lmbda|seq_kd|use_teacher_server|distillation_.*|generate_from_teacher",
    "kto": r"(un)?desirable_weight|kto_.*",
    "rloo": r"normalize_advantages|reward_clip_range|rloo_.*",
    "online_dpo": r"missing_eos_penalty|reward_model_path|judge",
    "ppo": r"ppo_.*|num_ppo_epochs|kl_coef|cliprange.*|vf_coef|whiten_rewards|value_model.*",
    "cpo": r"cpo_alpha|simpo_gamma",
    "tpo": r"tpo_.*",
    "bco": r"prompt_sample_size|(min|max)_density_ratio",
    "reward": r"center_rewards_coefficient|reward_model|process_reward_model|reward_num_labels|num_labels",
    "dft": r"use_(dft|asft|eaft)_loss|use_dynamic_finetuning",
    "grpo": r"reward_(funcs|weights)|num_generations.*|scale_rewards|steps_per_generation|generation_batch_size|"
    r"(use_)?vllm.*|num_iterations|epsilon(_high)?|importance_sampling_level|num_value_samples|max_staleness",
}
"""Methods that are not offered, by patterns of keys that only they have."""
METHOD_WORDS = {"pt": "pretrain", "cpt": "pretrain", "rm": "reward", "prm": "reward"}
"""Other words for methods."""
PAIR_KEYS = ("beta", "max_prompt_length", "max_completion_length")
"""Keys that several methods of TRL have and its SFT has not."""
SFT_KEYS = ("packing", "assistant_only_loss", "completion_only_loss", "dataset_text_field", "max_seq_length",
            "eos_token", "chat_template_path", "dataset_kwargs", "eval_packing")  # fmt: skip
"""Keys of TRL's SFT."""
METHODS = {method: stage for stage, spec in STAGES.items() for method in spec.methods}
"""The stage of each method that is offered."""
PAIR_STAGES = [stage for stage, spec in STAGES.items() if spec.row_format == "pairs"]
CONVERTED_STAGES = [stage for stage, spec in STAGES.items() if spec.methods]
_WORDS = "|".join(sorted({*METHODS, *METHOD_WORDS, *OTHER_METHODS, "simpo", "xpo"}))
NAME_HINT = re.compile(rf"(?<![a-z])({_WORDS})(?![a-z])")
COMMENT_HINT = re.compile(rf"#.*?(?:\btrl ({_WORDS})\b|\brun_({_WORDS})\b|\b({_WORDS}) ?(?:trainer|config)\b)")


@dataclass(frozen=True)
class ConvertedRecipe:
    """A recipe made from the configuration of another tool."""

    recipe: Recipe | None
    """The recipe, checked; None if something it needs is missing."""
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
    problems: tuple[RecipeProblem, ...] = ()
    """What the recipe lacks, and values that it cannot have; they are comments in it."""


def convert_config(
    path: Path, tool: str | None = None, stage: str | None = None, name: str | None = None, accelerate: str = ""
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
    title, convert, _ = CONVERTERS[tool]
    stage, assumption = detect_stage(source.mapping, path, tool, stage)
    conversion = Conversion(title, dict(source.mapping), stage, ConfigNode({}, origin), path.parent)
    conversion.set("name", slugify(name or path.stem) or "converted")
    if accelerate:
        conversion.source["accelerate_config"] = ConfigNode(accelerate, Origin("set"), accelerate)
    if assumption:
        conversion.report("method", None, "approximated", assumption)
    convert(conversion)
    _convert_remaining(conversion)
    recipe, missing = _validate(conversion)
    unconverted = conversion.unconverted = sorted(conversion.unconverted, key=lambda each: each.line or 0)
    text = render_yaml(conversion.tree, conversion.comments, _header_comments(path.name, conversion), unconverted)
    return ConvertedRecipe(recipe, text, tool, stage, tuple(conversion.converted), tuple(unconverted), tuple(missing))


def detect_tool(entries: dict[str, ConfigNode], path: Path) -> str:
    """The tool of a configuration: the one with most of its own keys in it."""
    if "distributed_type" in entries:
        raise UsageError(f"{path}: this is a configuration of accelerate; give it with --accelerate, after that of TRL")
    if "model" in entries and any(key in entries for key in ("name", *STAGES)):
        raise UsageError(f"{path}: this looks like a recipe already; modelwright check {path} reads it")
    counts = {tool: sum(key in entries for key in keys) for tool, (*_, keys) in CONVERTERS.items()}
    counts["trl"] = min(counts["trl"], 1)  # the others use its names too
    if not any(counts.values()):
        titles = ", ".join(title for title, *_ in CONVERTERS.values())
        raise UsageError(f"{path}: no keys of {titles} are in it; say whose it is with --from")
    return max(counts, key=counts.__getitem__)


def detect_stage(entries: dict[str, ConfigNode], path: Path, tool: str, stage: str | None) -> tuple[str, str]:
    """The training stage, and what was assumed; a method that is not offered, or that nothing tells, is refused."""
    method, key = _stated_method(entries)
    stated, is_trl = METHODS.get(method), tool in ("trl", "handbook")
    if method and stated is None:
        offered = f"what is: {', '.join(CONVERTED_STAGES)} (dpo by {', '.join(LOSSES)})"
        raise UsageError(f"{path}: this trains by {method} ({key}), which is not offered; {offered}")
    if stage and stated and stage != stated and "pairs" in (STAGES[stage].row_format, STAGES[stated].row_format):
        raise UsageError(f"{path}: this trains by {method} ({key}); --stage {stage} is another method")
    if stage or stated:
        return stage or stated or "", ""
    pair_keys = [key for key in PAIR_KEYS if key in entries]
    hints = _hinted_methods(entries, path) if is_trl else []
    if pair_keys or any("pref" in split for split in as_str_list(entries.get("dataset_splits"))):
        hints = [hint for hint in hints if hint not in METHODS or STAGES[METHODS[hint]].row_format == "pairs"]
    if other := next((hint for hint in hints if hint not in METHODS), ""):
        wants = f"if it trains by another method, name it: --stage {'|'.join(CONVERTED_STAGES)}"
        raise UsageError(f"{path}: its names or comments say {other}, which is not offered; {wants}")
    if pair_keys and not hints:
        owners = f"{pair_keys[0]} belongs to DPO, ORPO, KTO, CPO and others, and nothing in the file says which"
        raise UsageError(f"{path}: {owners}; name it: --stage {'|'.join(PAIR_STAGES)}")
    datasets = entries.get("datasets")
    items = datasets.value if datasets is not None and isinstance(datasets.value, list) else []
    types = [str(kind.value) for item in items if (kind := item.get(("type",))) is not None]
    is_text = any(kind.startswith("completion") for kind in types)
    is_text |= any(key in entries for key in STAGES[first_stage("text")].method_keys)
    stage = METHODS[hints[0]] if hints else first_stage("conversations")
    stage = first_stage("text") if is_text and STAGES[stage].row_format == "conversations" else stage
    if hints or not is_trl or any(key in entries for key in SFT_KEYS):
        return stage, ""
    return stage, f"nothing in the file names it; {stage} is written, and --stage sets another"


def _stated_method(entries: dict[str, ConfigNode]) -> tuple[str, str]:
    """The method that a setting names, or that only one method's settings belong to; and that setting."""
    keys = {key: node for key, node in entries.items() if node.value not in (None, False)}
    others = {method: key for method, each in OTHER_METHODS.items() for key in keys if re.fullmatch(each, key)}
    name = next((key for key in ("rl", "stage") if key in keys), "")
    method = str(keys[name].value).lower() if name else ""
    losses = as_str_list(keys.get("pref_loss" if name else "loss_type"))
    if "dft" in others or (others and not name):
        method, key = next(iter(others.items()))
        return ("dft", others["dft"]) if "dft" in others else (method, key)
    if losses and not {*losses} & {*LOSSES, "nll", "chunked_nll"} and METHODS.get(method, "dpo") in PAIR_STAGES:
        return losses[0], f"{'pref_loss' if name else 'loss_type'}: {', '.join(losses)}"
    if name:
        return METHOD_WORDS.get(method, method), f"{name}: {method}"
    if losses:
        return PAIR_STAGES[0] if {*losses} & {*LOSSES} else first_stage("conversations"), "loss_type"
    owners = ((stage, key) for stage in PAIR_STAGES for key in STAGES[stage].method_keys if key in keys)
    return next((owner for owner in owners if owner[1] not in PAIR_KEYS), ("", ""))


def _hinted_methods(entries: dict[str, ConfigNode], path: Path) -> list[str]:
    """The methods that comments speak of, or else the names of the file, its output and its model on the hub."""
    comments = COMMENT_HINT.findall(path.read_text(encoding="utf-8-sig").lower())
    keys = [key for key in ("output_dir", "run_name", "hub_model_id") if key in entries]
    names = " ".join([path.stem, *(str(entries[key].value) for key in keys)])
    words = ["".join(match) for match in comments] or NAME_HINT.findall(names.lower())
    return list(dict.fromkeys(METHOD_WORDS.get(word, word) for word in words))


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


def _validate(conversion: Conversion) -> tuple[Recipe | None, list[RecipeProblem]]:
    """The recipe without values that it cannot have, which become comments; None if it lacks something."""
    problems: list[RecipeProblem] = []
    recipe = None
    for _ in range(3):
        written = conversion.tree
        conversion.tree, _, alias_problems = apply_aliases(written)
        recipe, new = validate_tree(conversion.tree)
        new = [*alias_problems, *(problem for problem in new if problem not in problems)]
        for problem in new:
            *section, name = problem.key.split(".")
            node = written.get([*section, name]) or conversion.tree.get([*section, name])
            if node is not None and section:
                conversion.tree = conversion.tree.without([*section, name])
                conversion.report(name, node, "unsupported", problem.message, section[0])
            else:
                wanted = re.search(r"wants a section (\w+)$", problem.message)
                conversion.report("", None, "unsupported", problem.message, wanted[1] if wanted else name)
        problems += new
        if not new:
            break
    return recipe, problems


def _header_comments(file: str, conversion: Conversion) -> list[str]:
    """The comments at the top of the recipe; what was not converted stands at its place."""
    head = [f"Converted from {file}, a configuration of {conversion.tool}, by modelwright convert."]
    unconverted = conversion.unconverted
    missing = [each.key or each.section for each in unconverted if each.kind == "unsupported"]
    head += ["", f"Not converted, with the reason at its place below: {', '.join(missing)}"] if missing else []
    approximated = [each for each in unconverted if each.kind == "approximated"]
    head += ["", "Approximated:", *(f"  {each}" for each in approximated)] if approximated else []
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
        "name": converted.recipe.name if converted.recipe else None,
        "converted": list(converted.converted),
        "unconverted": [
            {"key": each.key, "value": each.display, "line": each.line, "kind": each.kind, "advice": each.advice}
            for each in converted.unconverted
        ],
        "problems": [str(problem) for problem in converted.problems],
        "recipe": converted.text,
    }
