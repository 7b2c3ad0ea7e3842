"""The schema as a flat list of fields: type in words, default, description, and the names other tools use."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from modelwright.recipe import sections
from modelwright.recipe.schema import NAME_PATTERN, Recipe, Threshold
from modelwright.recipe.sections import IS_DNS_LABEL, IS_QUANTITY, IS_REGEX, CountOrFraction, VolumeConfig
from modelwright.recipe.source import ConfigNode, KeyPath, RecipeProblem, make_problem
from modelwright.recipe.stage_specs import ANSWER_METRIC_PATTERN, OPTIMIZERS, STAGES, TrainableParts

NAME_EXPECTED = "lower-case letters, digits, dots and dashes"
LABEL_EXPECTED = "lower-case letters, digits and dashes"


@dataclass(frozen=True)
class ConfigField:
    """One setting of the schema."""

    key: str
    """Dotted name, such as ``sft.learning_rate``."""
    annotation: Any
    """Its type without ``| None``."""
    constraints: tuple[Any, ...]
    """Bounds and patterns."""
    optional: bool
    """Whether null is allowed."""
    required: bool
    """Whether it has no default."""
    default: Any
    """The default."""
    description: str
    """The docstring of the field."""

    @property
    def section(self) -> type[BaseModel] | None:
        """The model class, if it is a section."""
        return self.annotation if isinstance(self.annotation, type) and issubclass(self.annotation, BaseModel) else None

    @property
    def is_str(self) -> bool:
        """Whether it is text only."""
        return self.annotation is str

    @property
    def is_number(self) -> bool:
        """Whether it is a number only."""
        return self.annotation in (int, float)

    @property
    def choices(self) -> tuple[str, ...]:
        """The allowed words of a Literal."""
        return _choices(self.annotation)

    @property
    def short_description(self) -> str:
        """Its description as the end of a message: ``a folder, a hub id, or the embedded smollm2-135m-instruct``."""
        first = self.description.partition(";")[0].rstrip(".")
        return f"{first[:1].lower()}{first[1:]}"

    @property
    def expected(self) -> str:
        """The type in words: ``a number above 0``."""
        return _describe_type(self.annotation, self.constraints)


def get_field(path: tuple[str, ...]) -> ConfigField | None:
    """The setting at a path, through sections, mappings (``gates.sft.eval_loss``) and list items."""
    setting = _ROOT
    for step in path:
        child = _child(setting, step)
        if child is None:
            return None
        setting = child
    return setting


def child_fields(setting: ConfigField) -> tuple[ConfigField, ...]:
    """The settings of a section, in the order of the schema."""
    return _fields(setting.section, setting.key) if setting.section else ()


@functools.cache
def all_sections() -> dict[str, ConfigField]:
    """Every section by its key; the recipe itself has the empty key."""
    by_key = {"": _ROOT}
    pending = list(child_fields(_ROOT))
    while pending:
        setting = pending.pop(0)
        if setting.section:
            by_key[setting.key] = setting
            pending += child_fields(setting)
    return by_key


def example_value(setting: ConfigField) -> Any:
    """A valid value, to patch a problem with."""
    if setting.section:
        return _minimal_valid(setting)
    annotation = setting.annotation
    if setting.choices:
        return setting.choices[0]
    if setting.is_number:
        bounds = {name: getattr(each, name) for each in setting.constraints for name in _BOUNDS if hasattr(each, name)}
        number = max(bounds.get("ge", 1), bounds.get("gt", 0) + 1)
        return number if number < bounds.get("lt", number + 1) else 0
    examples: dict[Any, Any] = {bool: False, list: [], dict: {}, CountOrFraction: 1}
    if _is_union(annotation) and bool in get_args(annotation):
        return False
    return examples.get(
        get_origin(annotation) or annotation, setting.default if setting.default and setting.is_str else "x"
    )


def _minimal_valid(section: ConfigField) -> dict[str, Any]:
    """A minimal mapping that the section accepts."""
    assert section.section is not None
    fields = child_fields(section)
    prefix_length = len(section.key) + 1 if section.key else 0
    required = {field.key[prefix_length:]: example_value(field) for field in fields if field.required}
    for attempt in ({}, *({field.key[prefix_length:]: example_value(field)} for field in fields if not field.required)):
        try:
            section.section.model_validate({**required, **attempt})
        except ValueError:
            continue
        return {**required, **attempt}
    return required


@functools.cache
def _fields(section: type[BaseModel], prefix: str) -> tuple[ConfigField, ...]:
    return tuple(_from_field(prefix, name, field) for name, field in section.model_fields.items())


def _from_field(prefix: str, name: str, field: FieldInfo) -> ConfigField:
    annotation, constraints, optional = _unwrap_annotated(field.annotation, tuple(field.metadata))
    default = None if field.is_required() else field.get_default(call_default_factory=True, validated_data={})
    key = join_key(prefix, name)
    return ConfigField(
        key,
        annotation,
        constraints,
        optional,
        field.is_required(),
        default,
        " ".join((field.description or "").split()),
    )


def _unwrap_annotated(annotation: Any, constraints: tuple[Any, ...] = ()) -> tuple[Any, tuple[Any, ...], bool]:
    """A type without ``Annotated`` and ``| None``, its constraints, and whether it is optional."""
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


def _child(setting: ConfigField, step: str) -> ConfigField | None:
    for field in child_fields(setting):
        if field.key == join_key(setting.key, step):
            return field
    if get_origin(setting.annotation) not in (dict, list):
        return None
    annotation, constraints, optional = _unwrap_annotated(get_args(setting.annotation)[-1])
    sentence = annotation.__doc__ if isinstance(annotation, type) and issubclass(annotation, BaseModel) else ""
    key = f"{setting.key}.{step}"
    return ConfigField(key, annotation, constraints, optional, False, None, sentence or setting.description)


def _is_union(annotation: Any) -> bool:
    return get_origin(annotation) in (Union, UnionType)


def _choices(annotation: Any) -> tuple[str, ...]:
    """The words of a type; a union of bool and words has true and false too."""
    members = get_args(annotation) if _is_union(annotation) else (annotation,)
    literals = tuple(str(literal) for each in members if get_origin(each) is Literal for literal in get_args(each))
    return ("true", "false", *literals) if literals and bool in members else literals


_BOUNDS = {"gt": "above", "ge": "of at least", "lt": "below", "le": "at most"}


def _describe_type(annotation: Any, constraints: tuple[Any, ...]) -> str:
    """A type in words."""
    if IS_REGEX in constraints:
        return "a regular expression"
    if IS_QUANTITY in constraints or IS_DNS_LABEL in constraints:
        return "an amount such as 16Gi" if IS_QUANTITY in constraints else LABEL_EXPECTED
    if annotation in (int, float):
        return ("a whole number" if annotation is int else "a number") + _describe_bounds(constraints)
    if _is_union(annotation) and bool in get_args(annotation) and (choices := _choices(annotation)):
        return f"one of {', '.join(choices)}"
    if _is_union(annotation):
        alternatives = (_describe_type(*_unwrap_annotated(each)[:2]) for each in get_args(annotation))
        return " or ".join(each if "," in each else each.removeprefix("one of ") for each in alternatives)
    if get_origin(annotation) is Literal:
        return f"one of {', '.join(map(str, get_args(annotation)))}"
    if get_origin(annotation) is list:
        item = _describe_type(*_unwrap_annotated(get_args(annotation)[0])[:2])
        if item.startswith("one of "):
            return f"a list of {item.removeprefix('one of ')}"
        return f"a list of {item}" if item == "text" else f"a list of {item.removeprefix('a ')}s"
    if get_origin(annotation) is dict:
        values = get_args(annotation)[1]
        return f"a mapping to {', '.join(get_args(values))}" if get_origin(values) is Literal else "a mapping"
    if annotation is str:
        pattern = next((each.pattern for each in constraints if getattr(each, "pattern", None)), None)
        return {NAME_PATTERN: NAME_EXPECTED, ANSWER_METRIC_PATTERN: "answers.NAME"}.get(pattern or "", "text")
    descriptions: dict[Any, str] = {
        bool: "true or false",
        CountOrFraction: CountOrFraction.EXPECTED,
        Threshold: "limits, such as {at_most: 2.2}",
        sections.MixtureSource: "weights, or sections such as {weight: 2}",
        TrainableParts: TrainableParts.EXPECTED,
        VolumeConfig: "storage, such as {mount: /shared/models, size: 50Gi}",
    }
    return descriptions.get(annotation, "a mapping of settings")


def _describe_bounds(constraints: tuple[Any, ...]) -> str:
    limits = [(comparison, getattr(each, name, None)) for name, comparison in _BOUNDS.items() for each in constraints]
    phrases = [f"{word} {limit:{',' if limit > 10**5 else 'g'}}" for word, limit in limits if limit is not None]
    return f" {' and '.join(phrases)}" if phrases else ""


_ROOT = ConfigField("", Recipe, (), False, True, None, Recipe.__doc__ or "")
AliasValue = str | bool | None


@dataclass(frozen=True)
class Alias:
    """Another name for a setting, and the conversion of its values."""

    canonical: str
    """Our name in the same section."""
    value_map: Mapping[str, AliasValue] | None = None
    """Its allowed values and ours for each; without it, values are the same."""
    false_value: AliasValue = None
    """Our value for ``false``; ignored if the same layer sets the setting by another name."""
    is_fraction: bool = False
    """Whether the value is a fraction below 1, as ``warmup_ratio``."""
    comma_separated: bool = False
    """Whether the value may be a comma-separated list."""
    renamed: bool = False
    """Whether it is our own name of an earlier version."""


KEY_ALIASES: Mapping[str, Mapping[str, str]] = {
    "": {"output_dir": "out_dir ckpt_output_dir"},
    "model": {
        "model_name_or_path": "base_model model_path checkpoint_dir model_name model_id pretrained_model_name_or_path",
        "revision": "model_revision",
    },
    "data": {
        "dataset_name": "data_path dataset dataset_path dataset_id path",
        "dataset_config_name": "dataset_config",
        "dataset_split": "dataset_train_split",
        "train_file": "data_files train_path",
        "validation_file": "val_file eval_file validation_path",
        "test_size": "val_set_size val_size",
        "max_rows": "max_samples max_train_samples",
    },
    "training": {
        "learning_rate": "lr",
        "num_train_epochs": "epochs num_epochs",
        "max_steps": "max_iters",
        "per_device_train_batch_size": "micro_batch_size per_gpu_train_batch_size train_micro_batch_size_per_gpu",
        "per_device_eval_batch_size": "eval_batch_size per_gpu_eval_batch_size",
        "gradient_accumulation_steps": "grad_accum_steps accumulate_grad_batches",
        "global_batch_size": "effective_batch_size",
        "max_length": "max_seq_length max_seq_len sequence_len cutoff_len model_max_length block_size",
        "packing": "sample_packing",
        "assistant_only_loss": "completion_only_loss",
        "lr_scheduler_type": "lr_scheduler scheduler",
        "optim": "optimizer optimizer_type",
        "warmup_steps": "lr_warmup_steps num_warmup_steps warmup_iters",
        "adam_beta1": "beta1",
        "adam_beta2": "beta2",
        "adam_epsilon": "adam_eps",
        "max_grad_norm": "grad_clip clip_grad_norm gradient_clipping",
        "logging_steps": "log_interval",
        "eval_steps": "eval_interval",
        "early_stopping_patience": "early_stopping_steps",
        "save_steps": "save_interval",
        "precision": "mixed_precision",
        "deterministic": "full_determinism",
        "gradient_checkpointing": "activation_checkpointing enable_activation_checkpointing",
        "lora_r": "lora_rank",
        "router_aux_loss_coef": "moe_aux_loss_coef",
        "use_dora": "peft_use_dora",
        "use_rslora": "peft_use_rslora",
    },
    "compare": {"max_new_tokens": "max_tokens max_gen_length"},
}
"""Our name in each section and the names of other tools: old TRL, axolotl, LLaMA-Factory, litgpt, nanoGPT."""
_FLASH = "flash_attention_2"
ATTENTION_VALUES = {"true": _FLASH, "fa2": _FLASH, "sdpa": "sdpa", "auto": "auto", "disabled": "eager"}
NEGATED = {"true": False, "false": True}
CONVERTED_ALIASES: Mapping[str, Mapping[str, Alias]] = {
    "model": dict.fromkeys(
        ("use_flash_attention", "use_flash_attention_2", "flash_attention", "flash_attn"),
        Alias("attn_implementation", ATTENTION_VALUES, false_value="auto"),
    ),
    "training": {
        "bf16": Alias("precision", {"true": "bf16", "full": "bf16", "auto": "auto"}, false_value="auto"),
        "fp16": Alias("precision", {"true": "fp16"}, false_value="auto"),
        "warmup_ratio": Alias("warmup_steps", is_fraction=True),
        "train_on_inputs": Alias("assistant_only_loss", NEGATED),
        "train_on_prompt": Alias("assistant_only_loss", NEGATED),
        "use_peft": Alias("trainable", {"true": "lora"}, false_value="all"),
        "adapter": Alias("trainable", {"lora": "lora"}),
        "finetuning_type": Alias("trainable", {"lora": "lora", "full": "all"}),
        "load_in_4bit": Alias("quantization", {"true": "nf4"}, false_value="none"),
        "load_in_8bit": Alias("quantization", {"true": "int8"}, false_value="none"),
        "lora_target": Alias("lora_target_modules", comma_separated=True),
        "lora_target_linear": Alias("lora_target_modules", {"true": "all-linear"}, false_value="all-linear"),
    },
}
"""Names of other tools whose values differ too."""
RENAMED_METRICS = {f"{prefix}exactness": f"{prefix}answer_f1" for prefix in ("", "base_", "parent_", "parent_base_")}
"""Metrics of version 0.1 and their new names: keys of a gate, and values of times and plus."""
VALUE_ALIASES: Mapping[str, Mapping[str, AliasValue]] = {
    "precision": {
        **dict.fromkeys(("bfloat16", "bf16-mixed"), "bf16"),
        **dict.fromkeys(("float16", "half", "16-mixed", "fp16-mixed"), "fp16"),
        **dict.fromkeys(("float32", "32-true", "no"), "fp32"),
    },
    "lr_scheduler_type": {"wsd": "warmup_stable_decay"},
    "optim": {alias: name for name, spec in OPTIMIZERS.items() for alias in spec.aliases},
    "lora_target_modules": {"all": "all-linear"},
    "attn_implementation": {"flash": _FLASH, "fa2": _FLASH},
    "max_steps": {"-1": None},
    "gradient_checkpointing": {"full": True, "none": False},
    "times": RENAMED_METRICS,
    "plus": RENAMED_METRICS,
}
"""Other words for values of our settings; ``None`` is the default."""
RENAMED_KEYS: Mapping[str, Mapping[str, str]] = {
    "": {"environment": "env_overrides"},
    "model": {"width": "resnet_width"},
    "data": {"derive": "derived_columns", "make_pairs": "generate_qa", "max_bad_share": "max_invalid_fraction"},
    "training": {
        "weights": "param_dtype", "sharding": "distributed_strategy",
        "scale_learning_rate_by_world": "scale_lr_by_world_size", "save_in_background": "async_save",
        "keep_trunk": "cache_frozen_layers", "fp8_check": "fp8_validation", "max_truncated": "max_truncated_rows",
        "curriculum": "sequence_length_curriculum", "crop_padding": "random_crop_padding", "cutout": "cutout_size",
    },
    "trainable": {"head": "lm_head", "untie_head": "untie_lm_head"},
    "prepare": {
        "max_bad_share": "max_invalid_fraction", "max_lost_share": "max_dropped_token_fraction",
        "max_symbol_share": "max_symbol_ratio", "max_digit_share": "max_digit_ratio", "near_dedup": "minhash_dedup",
        "near_dedup_threshold": "jaccard_threshold", "signature_device": "minhash_device",
        "decontaminate": "decontaminate_against", "row_length": "sequence_length", "shard_rows": "rows_per_shard",
        "fast_tokenizer": "use_gigatoken", "workers": "num_proc", "keep_work": "keep_intermediate_files",
    },
    "evaluate": {"text": "perplexity_text", "prompts": "completion_prompts"},
    "compare": {"style": "style_patterns", "held_out_prompts": "num_held_out_prompts"},
    "cluster": {
        "variables": "env", "code": "code_source", "queue": "local_queue", "token_secret": "hf_token_secret",
        "restarts": "max_restarts", "shared_memory": "shm_size", "target": "job_kind",
    },
}  # fmt: skip
"""Names of version 0.1 and their new names."""
REMOVED_KEYS: Mapping[str, str] = {"tune_products": "0.2"}
"""Removed settings of a stage, which are ignored with a note, and the version that removed them."""


@functools.cache
def section_aliases(section: str) -> dict[str, Alias]:
    """The aliases of a section by name; the top level is the empty key."""
    if section.startswith("gates."):
        metrics = {old: Alias(new, renamed=True) for old, new in RENAMED_METRICS.items()}
        return metrics if section.count(".") == 1 else {}
    table = "training" if section in STAGES else section.rpartition(".")[2]
    own = STAGES[section].aliases if section in STAGES else {}
    pairs = (*KEY_ALIASES.get(table, {}).items(), *own.items())
    aliases = {name: Alias(ours) for ours, names in pairs for name in names.split()}
    aliases |= {old: Alias(new, renamed=True) for old, new in RENAMED_KEYS.get(table, {}).items()}
    aliases |= CONVERTED_ALIASES.get(table, {})
    known = field_names(section)
    return {name: alias for name, alias in aliases.items() if alias.canonical in known and name not in known}


@functools.cache
def field_names(section: str) -> tuple[str, ...]:
    """Our names in a section, in the order of the schema; none if the key is not a section."""
    setting = get_field(tuple(section.split(".")) if section else ())
    return tuple(field.key.rpartition(".")[2] for field in child_fields(setting)) if setting else ()


@functools.cache
def known_names(section: str) -> dict[str, str]:
    """Every name known in a section, ours first, then its aliases, and our name for each."""
    aliases = {name: alias.canonical for name, alias in section_aliases(section).items()}
    return {**{name: name for name in field_names(section)}, **aliases}


def join_key(section: str, name: str) -> str:
    """The dotted key of a setting; the top level is the empty section."""
    return f"{section}.{name}" if section else name


def aliases_for(key: str) -> list[str]:
    """The names of a setting in other tools and earlier versions."""
    section, _, name = key.rpartition(".")
    return [other for other, alias in section_aliases(section).items() if alias.canonical == name]


def canonical_key(key: str) -> str:
    """A dotted key with aliases replaced by our names."""
    canonical = ""
    for step in key.split("."):
        alias = section_aliases(canonical).get(step)
        canonical = join_key(canonical, step if alias is None else alias.canonical)
    return canonical


def qualify_key(key: str, present: Collection[str]) -> str:
    """A bare name with its section, if exactly one of model, data and the present stages knows it."""
    if "." in key or key in field_names("") or key in section_aliases(""):
        return key
    candidates = [
        section
        for section in ("model", "data", *(stage for stage in STAGES if stage in present))
        if key in field_names(section) or key in section_aliases(section)
    ]
    return f"{candidates[0]}.{key}" if len(candidates) == 1 else key


def apply_aliases(tree: ConfigNode) -> tuple[ConfigNode, list[str], list[RecipeProblem]]:
    """Replace the aliases of one layer by our names, with a note for each."""
    notes: list[str] = []
    problems: list[RecipeProblem] = []
    paths: list[KeyPath] = [tuple(section.split(".")) if section else () for section in all_sections()]
    gates = tree.get(("gates",))
    for stage, gate in gates.mapping.items() if gates else ():
        paths += [*(("gates", stage, metric) for metric in gate.mapping), ("gates", stage)]
    for path in paths:
        node = tree.get(path)
        if node is not None and node.mapping:
            renamed = _SectionAliases(".".join(path), node.mapping, notes, problems).rename()
            tree = tree.with_value(path, ConfigNode(renamed, node.origin))
    return tree, notes, problems


@dataclass
class _SectionAliases:
    """Replaces the aliases of one section of one layer."""

    key: str
    entries: dict[str, ConfigNode]
    notes: list[str]
    problems: list[RecipeProblem]

    def rename(self) -> dict[str, ConfigNode]:
        """The section with our names."""
        self._ignore_removed()
        table = section_aliases(self.key)
        false_names = {name for name, node in self.entries.items() if name in table and _is_false(table[name], node)}
        first: dict[str, str] = {}
        for name in self.entries:
            if name not in false_names:
                first.setdefault(table[name].canonical if name in table else name, name)
        renamed: dict[str, ConfigNode] = {}
        for name, node in self.entries.items():
            if name not in table:
                renamed[name] = self._canonical_value(name, node)
                continue
            ours = table[name].canonical
            other = ours if ours in self.entries else first.get(ours, name)
            if name in false_names and (other != name or ours in renamed):
                self._note(node, f"{join_key(self.key, name)}: {node.text} is ignored")
            elif other != name:
                self._conflict(name, other, ours)
            elif (translated := self._translate(name, table[name], node)) is not None:
                renamed[ours] = replace(self._canonical_value(ours, translated), alias_used=name)
        return renamed

    def _ignore_removed(self) -> None:
        removed = REMOVED_KEYS.keys() & self.entries.keys() if self.key in STAGES else ()
        for name in removed:
            key, version = join_key(self.key, name), REMOVED_KEYS[name]
            self._note(self.entries[name], f"{key} is ignored: it was removed in {version}")
        self.entries = {name: node for name, node in self.entries.items() if name not in removed}

    def _translate(self, name: str, alias: Alias, node: ConfigNode) -> ConfigNode | None:
        """The value for our name; None if it cannot be converted, which is reported."""
        if node.value is None:
            return node
        if alias.value_map is not None:
            value_map = {**alias.value_map, **({"false": alias.false_value} if alias.false_value is not None else {})}
            source_value = _normalize_bool(node)
            if source_value not in value_map:
                choice = f"one of {', '.join(value_map)}" if len(value_map) > 1 else ", ".join(value_map)
                wants = f"it wants {choice} here, or {alias.canonical} in its place"
                self._problem(name, node, f"{join_key(self.key, name)} is {node.display}; {wants}")
                return None
            return self._replace_value(name, alias.canonical, node, value_map[source_value])
        if alias.is_fraction and not _is_fraction(node):
            wants = f"it wants a share below 1; a count is {alias.canonical}"
            self._problem(name, node, f"{join_key(self.key, name)} is {node.display}; {wants}")
            return None
        verb = "now called" if alias.renamed else "read as"
        self._note(node, f"{join_key(self.key, name)} is {verb} {alias.canonical}")
        if alias.comma_separated and isinstance(node.value, str) and "," in node.value:
            names = [each.strip() for each in node.value.split(",") if each.strip()]
            return ConfigNode([ConfigNode(each, node.origin, each) for each in names], node.origin)
        return node

    def _canonical_value(self, name: str, node: ConfigNode) -> ConfigNode:
        """The value of one of our settings, with other words for it replaced."""
        value_map, source_value = VALUE_ALIASES.get(name, {}), _scalar_text(node)
        if source_value in value_map and name in field_names(self.key):
            return self._replace_value(name, name, node, value_map[source_value])
        return node

    def _replace_value(self, name: str, canonical: str, node: ConfigNode, value: AliasValue) -> ConfigNode:
        text = "null" if value is None else str(value).lower() if isinstance(value, bool) else value
        self._note(node, f"{join_key(self.key, name)}: {node.text} is read as {canonical}: {text}")
        return ConfigNode(value, node.origin, text)

    def _conflict(self, name: str, other: str, ours: str) -> None:
        node, line = self.entries[name], self.entries[other].origin.line
        line_note = f" (line {line})" if line else ""
        if other == ours:
            message = f"{join_key(self.key, name)} is another name for {other}{line_note}; keep one of them"
        else:
            message = f"{join_key(self.key, name)} and {other}{line_note} both set {ours}; keep one of them"
        self._problem(name, node, message)

    def _problem(self, name: str, node: ConfigNode, message: str) -> None:
        self.problems.append(make_problem(node.origin, join_key(self.key, name), message))

    def _note(self, node: ConfigNode, message: str) -> None:
        self.notes.append(f"{node.origin.location}: {message}")


def _scalar_text(node: ConfigNode) -> str:
    """A scalar in lower case; empty for anything else."""
    return "" if node.value is None or isinstance(node.value, dict | list) else str(node.value).lower()


def _normalize_bool(node: ConfigNode) -> str:
    """The same, with yes and no as true and false."""
    return {"yes": "true", "on": "true", "no": "false", "off": "false"}.get(_scalar_text(node), _scalar_text(node))


def _is_false(alias: Alias, node: ConfigNode) -> bool:
    return alias.false_value is not None and _normalize_bool(node) == "false"


def _is_fraction(node: ConfigNode) -> bool:
    percent = node.text.strip().endswith("%")
    try:
        return 0 <= float(node.text.strip().rstrip("%")) < (100 if percent else 1)
    except ValueError:
        return False
