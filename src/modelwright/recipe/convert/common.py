"""The state of a conversion, rendering of the recipe, and the rules that TRL and axolotl share."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, get_args

from modelwright.recipe.diagnostics import ConversionLoss
from modelwright.recipe.fields import aliases_for, field_names, section_aliases
from modelwright.recipe.schema import Recipe, SchedulerName
from modelwright.recipe.source import ConfigNode, Origin

UNQUOTED_RE = re.compile(r"[A-Za-z_./~][\w./~@+-]*( [\w./~@+-]+)*|\d+(\.\d+)?%")
YAML_KEYWORDS = frozenset({"true", "false", "null", "yes", "no", "on", "off", "~"})
MAX_LINE_WIDTH = 110


@dataclass(frozen=True)
class Unconverted:
    """One setting that is not in the recipe as it was."""

    key: str
    """Its name in the other tool."""
    display: str
    """Its value, short."""
    line: int | None
    """Its line; none where the file is silent and the tool has a default."""
    kind: ConversionLoss
    """How much is lost."""
    advice: str
    """Why, and what is nearest."""

    def __str__(self) -> str:
        what = f"{self.key}: {self.display}" if self.display else self.key
        return f"{what}: {self.advice}" if self.advice else what


@dataclass
class Conversion:
    """A configuration whose settings are taken one by one, so that none is forgotten."""

    tool: str
    """What it was written for, as people call it."""
    source: dict[str, ConfigNode]
    """What was not taken yet."""
    stage: str
    """The training stage that it becomes."""
    tree: ConfigNode
    """The recipe so far."""
    comments: dict[str, str] = field(default_factory=dict)
    """What stands beside a setting of the recipe, by its dotted key."""
    unconverted: list[Unconverted] = field(default_factory=list)
    """What did not come along."""
    converted: list[str] = field(default_factory=list)
    """The names that did."""

    def pop(self, name: str) -> ConfigNode | None:
        """A setting that asks for something; what is null or false asks for nothing, and is kept in mind as that."""
        node = self.source.pop(name, None)
        if node is None:
            return None
        if node.value is None or node.value is False or node.value in ("", [], {}):
            self.report(name, node, "not_needed", "")
            return None
        return node

    def pop_word(self, name: str) -> str:
        """A setting taken as a lower-case word; empty where it asks for nothing."""
        node = self.pop(name)
        return "" if node is None else str(node.value).lower()

    def set(self, key: str, value: Any, source_key: str = "", comment: str = "") -> None:
        """Write a setting of the recipe: a value as it was read, or a plain one of ours."""
        node = value if isinstance(value, ConfigNode) else to_node(value, self.tree.origin)
        self.tree = self.tree.with_value(key.split("."), node)
        if comment:
            self.comments[key] = comment
        if source_key:
            self.converted.append(source_key)

    def set_default(self, key: str, value: Any) -> None:
        """Write what the other tool does where its file is silent, and ours would do something else."""
        is_set = any(name in self.source for name in (key.rpartition(".")[2], *aliases_for(key)))
        if self.get(key) is None and not is_set:
            self.set(key, value, comment=f"{self.tool}'s default")

    def get(self, key: str) -> ConfigNode | None:
        """What the recipe says of a key so far."""
        return self.tree.get(key.split("."))

    def report(self, name: str, node: ConfigNode | None, kind: ConversionLoss, advice: str) -> None:
        """Keep in mind that a setting does not come along."""
        line = node.origin.line if node is not None else None
        self.unconverted.append(Unconverted(name, preview(node), line, kind, advice))

    def find_key(self, name: str) -> str | None:
        """The key of the recipe that has this name, or knows it as another tool's."""
        for section in ("", "model", "data", self.stage):
            if name in field_names(section) or name in section_aliases(section):
                return f"{section}.{name}".lstrip(".")
        return None


def to_node(value: Any, origin: Origin) -> ConfigNode:
    """A plain value of ours as the reader would have brought it."""
    if isinstance(value, dict):
        return ConfigNode({key: to_node(item, origin) for key, item in value.items()}, origin)
    if isinstance(value, list | tuple):
        return ConfigNode([to_node(item, origin) for item in value], origin)
    return ConfigNode(value, origin, str(value).lower() if isinstance(value, bool) else str(value))


def preview(node: ConfigNode | None) -> str:
    """A value in a few characters."""
    if node is None:
        return ""
    text = "" if node.value is None else to_flow_style(node)
    return text if len(text) <= 60 else f"{text[:59]}…"


def render_yaml(tree: ConfigNode, comments: Mapping[str, str], header: list[str]) -> str:
    """The recipe as a person would write it: what was said and nothing else, in the order of the schema."""
    lines = [f"# {line}".rstrip() for line in header]
    entries = {name: tree.mapping[name] for name in Recipe.model_fields if name in tree.mapping}
    sections = {name: node for name, node in entries.items() if node.mapping}
    lines += [_render_line(name, name, node, comments) for name, node in entries.items() if name not in sections]
    for name, node in sections.items():
        lines += ["", f"{name}:", *_render_section(name, node, comments)]
    return "\n".join(lines) + "\n"


def _render_section(section: str, node: ConfigNode, comments: Mapping[str, str]) -> list[str]:
    order = {name: index for index, name in enumerate(field_names(section))}
    entries = sorted(node.mapping.items(), key=lambda entry: order.get(entry[0], len(order)))
    return [f"  {_render_line(f'{section}.{name}', name, child, comments)}" for name, child in entries]


def _render_line(key: str, name: str, node: ConfigNode, comments: Mapping[str, str]) -> str:
    comment = comments.get(key, node.alias_used)
    text = f"{name}: {to_flow_style(node)}"
    return f"{text:<36}  # {comment}" if comment else text


def to_flow_style(node: ConfigNode) -> str:
    """A value on one line."""
    if isinstance(node.value, dict):
        return (
            "{"
            + ", ".join(f"{_quote_if_needed(key)}: {to_flow_style(child)}" for key, child in node.value.items())
            + "}"
        )
    if isinstance(node.value, list):
        return "[" + ", ".join(map(to_flow_style, node.value)) + "]"
    if isinstance(node.value, str):
        return _quote_if_needed(node.value)
    return "null" if node.value is None else node.text


def _quote_if_needed(value: str) -> str:
    plain = UNQUOTED_RE.fullmatch(value) and value.lower() not in YAML_KEYWORDS
    return value if plain else json.dumps(value, ensure_ascii=False)


SCHEDULERS = {**{name: name for name in get_args(SchedulerName)}, "wsd": "warmup_stable_decay"}
APPROXIMATE_SCHEDULERS = {
    **dict.fromkeys(("cosine_with_restarts", "cosine_with_min_lr", "cosine_warmup_with_min_lr", "rex"), "cosine"),
    **dict.fromkeys(("polynomial", "inverse_sqrt", "reduce_lr_on_plateau"), "linear"),
}
ADAMW = ("adamw", "adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused")
TRACKERS = ("tensorboard", "mlflow", "wandb", "trackio")
BUILDERS = ("json", "csv", "parquet", "text")
DATA_FILE_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet", ".txt")


def convert_optimizer(conversion: Conversion, name: str) -> None:
    """AdamW in any of its implementations, or SGD; others become AdamW."""
    node = conversion.pop(name)
    if node is None:
        return
    optimizer_name = str(node.value).lower()
    if optimizer_name in ADAMW:
        conversion.set(f"{conversion.stage}.optim", "adamw_torch", source_key=name, comment=f"{name}: {optimizer_name}")
    elif optimizer_name == "sgd":
        conversion.set(f"{conversion.stage}.optim", "sgd", source_key=name)
        conversion.set(f"{conversion.stage}.momentum", 0, comment="the other tool's sgd has none")
    else:
        low = "; exp_avg_dtype: bf16 saves memory" if "8bit" in optimizer_name or "4bit" in optimizer_name else ""
        conversion.set(f"{conversion.stage}.optim", "adamw_torch", comment=f"nearest to {optimizer_name}")
        conversion.report(name, node, "approximated", f"there are AdamW and SGD; adamw_torch is written{low}")


def convert_scheduler(conversion: Conversion, name: str) -> None:
    """The shape of the learning rate, or the nearest one."""
    node, scheduler_kwargs = conversion.pop(name), conversion.pop("lr_scheduler_kwargs")
    scheduler_name = "" if node is None else str(node.value).lower()
    if scheduler_name in SCHEDULERS:
        conversion.set(f"{conversion.stage}.lr_scheduler_type", SCHEDULERS[scheduler_name], source_key=name)
    elif node is not None:
        close = APPROXIMATE_SCHEDULERS.get(scheduler_name, "cosine")
        conversion.set(f"{conversion.stage}.lr_scheduler_type", close, comment=f"nearest to {scheduler_name}")
        conversion.report(name, node, "approximated", f"not offered; {close} is written")
    for key, value in (scheduler_kwargs.mapping if scheduler_kwargs is not None else {}).items():
        if key == "num_decay_steps" and SCHEDULERS.get(scheduler_name) == "warmup_stable_decay":
            conversion.set(f"{conversion.stage}.decay_steps", value, source_key=f"lr_scheduler_kwargs.{key}")
        else:
            conversion.report(f"lr_scheduler_kwargs.{key}", value, "unsupported", "a schedule has no such number here")


def convert_eval_and_save(conversion: Conversion, epochs: float) -> None:
    """When held-out loss is measured and checkpoints are written: by steps, by epochs, so many an epoch, or never."""
    for what, key in (("eval", "eval_steps"), ("save", "save_steps")):
        strategy, per_epoch = conversion.pop(f"{what}_strategy"), conversion.pop(f"{what}s_per_epoch")
        strategy = strategy or (conversion.pop("evaluation_strategy") if what == "eval" else None)
        strategy_name = "" if strategy is None else str(strategy.value).lower()
        times = float(str(per_epoch.value)) if per_epoch is not None else 1.0 if strategy_name == "epoch" else 0.0
        if times:
            source_key = f"{what}s_per_epoch" if per_epoch is not None else f"{what}_strategy"
            reason = f"{times:g} an epoch × {epochs:g} epochs"
            conversion.set(
                f"{conversion.stage}.{key}", f"{100 / (times * epochs):.4g}%", source_key=source_key, comment=reason
            )
            if "max_steps" in conversion.source:
                conversion.report(source_key, per_epoch or strategy, "approximated", "a share of max_steps is written")
        if strategy is not None and not (times and per_epoch is None):
            if strategy_name == "no":
                advice = "checkpoints are always written; save_steps says how often" if what == "save" else ""
                conversion.report(f"{what}_strategy", strategy, "unsupported" if advice else "not_needed", advice)
            elif strategy_name == "best":
                conversion.report("save_strategy", strategy, "approximated", "the best checkpoint is always kept")
            else:
                conversion.converted.append(f"{what}_strategy")
    limit = conversion.pop("save_total_limit")
    if limit is not None and str(limit.value).isdigit() and int(str(limit.value)) < 2:
        conversion.set(
            f"{conversion.stage}.save_total_limit", 2, comment="at least 2, so that a damaged one has one behind it"
        )
        conversion.report(
            "save_total_limit", limit, "approximated", "2 is the least: a damaged checkpoint wants one behind it"
        )
    elif limit is not None:
        conversion.set(f"{conversion.stage}.save_total_limit", limit, source_key="save_total_limit")
    metric = conversion.pop("metric_for_best_model")
    if metric is not None and str(metric.value) in ("loss", "eval_loss"):
        conversion.set(f"{conversion.stage}.metric_for_best_model", "eval_loss", source_key="metric_for_best_model")
    elif metric is not None:
        conversion.report("metric_for_best_model", metric, "approximated", "eval_loss decides")
    logging_steps = conversion.pop("logging_steps")
    if logging_steps is not None and isinstance(logging_steps.value, float) and logging_steps.value < 1:
        conversion.report(
            "logging_steps", logging_steps, "approximated", "a count of steps here; every step is written down"
        )
    elif logging_steps is not None:
        conversion.set(f"{conversion.stage}.logging_steps", logging_steps, source_key="logging_steps")


def convert_lora(conversion: Conversion, uses_lora: bool) -> None:
    """The settings of low-rank matrices; where none are trained they would be refused, and are left."""
    names = {"lora_r": "lora_r", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout"}
    names |= {"use_dora": "use_dora", "use_rslora": "use_rslora"}
    names |= {"peft_use_dora": "use_dora", "peft_use_rslora": "use_rslora"}
    for name, ours in names.items():
        node = conversion.source.pop(name, None) if name == "lora_dropout" else conversion.pop(name)
        if node is not None and uses_lora and node.value is not None:
            conversion.set(f"{conversion.stage}.{ours}", node, source_key=name)
        elif node is not None:
            conversion.report(name, node, "not_needed", "no low-rank matrices are trained")
    bits = {"load_in_4bit": "nf4", "load_in_8bit": "int8"}
    for name, quantization in bits.items():
        node = conversion.pop(name)
        if node is not None and uses_lora:
            conversion.set(f"{conversion.stage}.quantization", quantization, source_key=name, comment=name)
        elif node is not None:
            conversion.report(name, node, "unsupported", "quantised weights are only kept beside low-rank matrices")
    kind = conversion.pop("bnb_4bit_quant_type")
    if kind is not None and str(kind.value) != "nf4":
        conversion.report("bnb_4bit_quant_type", kind, "approximated", "nf4 is the only form in 4 bits")
    elif kind is not None:
        conversion.converted.append("bnb_4bit_quant_type")
    if uses_lora:
        conversion.set(f"{conversion.stage}.trainable", "lora")


def convert_sharding(conversion: Conversion) -> None:
    """DeepSpeed and FSDP become distributed_strategy: fsdp; what they say in detail is left."""
    for name in ("deepspeed", "fsdp", "fsdp_config"):
        node = conversion.pop(name)
        if node is None:
            continue
        copies = name == "deepspeed" and any(zero_stage in str(node.value).lower() for zero_stage in ("zero1", "zero2"))
        conversion.set(
            f"{conversion.stage}.distributed_strategy", "ddp" if copies else "fsdp", comment=f"nearest to {name}"
        )
        reason = (
            "ddp is written: each device holds the optimizer whole"
            if copies
            else "distributed_strategy: fsdp is written"
        )
        more = "; wrapping, prefetching and offloading have no settings here" if name != "fsdp" else ""
        conversion.report(name, node, "approximated", reason + more)


def convert_report_to(conversion: Conversion, names: list[str], node: ConfigNode | None, name: str) -> None:
    """The trackers that metrics are logged to."""
    known = [tracker for tracker in names if tracker in TRACKERS]
    unsupported = [tracker for tracker in names if tracker not in TRACKERS and tracker not in ("none", "all")]
    if known or names == ["none"]:
        conversion.set("report_to", known, source_key=name)
    if unsupported or names == ["all"]:
        conversion.report(name, node, "unsupported", f"the trackers are {', '.join(TRACKERS)}")


def convert_dataset(conversion: Conversion, entry: dict[str, ConfigNode], label: str) -> None:
    """Where the rows of one entry of datasets come from; what was taken is taken out of the entry."""
    path, files = entry.pop("path", None), entry.pop("data_files", None)
    kind = entry.pop("ds_type", None)
    dataset = "" if path is None else str(path.value)
    if files is not None and (dataset in BUILDERS or not dataset):
        _convert_data_files(conversion, files, f"{label}.data_files")
        conversion.converted += [f"{label}.path"] if path is not None else []
    elif path is not None:
        is_file = PurePath(dataset).suffix in DATA_FILE_SUFFIXES
        conversion.set("data.train_file" if is_file else "data.dataset_name", path, source_key=f"{label}.path")
        if files is not None:
            advice = "which files of a set are read cannot be said; put them into data.train_file"
            conversion.report(f"{label}.data_files", files, "unsupported", advice)
    if kind is not None:
        conversion.report(f"{label}.ds_type", kind, "not_needed", "a file says by its suffix what it is")
    for name, ours in (("name", "dataset_config_name"), ("split", "dataset_split")):
        node = entry.pop(name, None)
        if node is not None and node.value is not None and conversion.get("data.dataset_name") is not None:
            conversion.set(f"data.{ours}", node, source_key=f"{label}.{name}")
        elif node is not None:
            conversion.report(f"{label}.{name}", node, "not_needed", "a file has one part, and all of it is read")


def report_extra_datasets(conversion: Conversion, items: list[ConfigNode], label: str) -> None:
    """Sets beyond the first: a stage learns from one."""
    advice = (
        "data.mix with a section prepare takes several" if conversion.stage == "pretrain" else "join them into one file"
    )
    for number, item in enumerate(items, 1):
        name = item.get(("path",)) or item
        conversion.report(f"{label}[{number}]", name, "unsupported", f"a stage learns from one source; {advice}")


def _convert_data_files(conversion: Conversion, files: ConfigNode, label: str) -> None:
    if isinstance(files.value, dict):
        for part, node in files.value.items():
            key = "data.train_file" if part == "train" else "data.validation_file"
            conversion.set(key, node, source_key=f"{label}.{part}")
        return
    items = files.value if isinstance(files.value, list) else [files]
    conversion.set("data.train_file", items[0], source_key=label)
    for item in items[1:]:
        conversion.report(
            label, item, "unsupported", "a stage reads one file, or all files of a folder: data.dataset_name: FOLDER"
        )


def as_str_list(node: ConfigNode | None) -> list[str]:
    """One word or several, as a list."""
    if node is None:
        return []
    return [str(item.value) for item in (node.value if isinstance(node.value, list) else [node])]


def as_float(node: ConfigNode | None, default: float) -> float:
    """A number that was read, or another where there is none."""
    return float(node.value) if node is not None and isinstance(node.value, int | float) else default


def convert_test_split(conversion: Conversion, test_size: ConfigNode | None, name: str) -> None:
    """How much is held out: as the file says, else nothing, as the other tool does."""
    if test_size is not None:
        conversion.set("data.test_size", test_size, source_key=name)
    elif conversion.get("data.validation_file") is None:
        comment = f"{conversion.tool} holds nothing out unless asked; 10% would be measured"
        conversion.set("data.test_size", to_node(0, conversion.tree.origin), comment=comment)
