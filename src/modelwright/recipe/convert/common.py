"""The state of a conversion, rendering of the recipe, and the rules that TRL and axolotl share."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any, NoReturn, get_args

from modelwright.errors import UsageError
from modelwright.recipe.diagnostics import ConversionLoss
from modelwright.recipe.fields import aliases_for, field_names, join_key, known_names
from modelwright.recipe.schema import Recipe, TrackerName
from modelwright.recipe.source import ConfigNode, Origin, make_node, read_file
from modelwright.recipe.stage_specs import OPTIMIZERS, STAGES, OptimizerConfig, SchedulerName, StageSpec

UNQUOTED_RE = re.compile(r"([A-Za-z_/~]|\.{1,2}/)[\w./~@+-]*( [\w./~@+-]+)*|\d+(\.\d+)?%")
YAML_KEYWORDS = frozenset({"true", "false", "null", "yes", "no", "on", "off", "~"})
SECTION_PATTERNS = {
    "data": r"(dataset|pretraining_dataset|test_datasets|eval_dataset|data_|template|chat_template|mix_|interleave_)",
    "model": r"(model_|tokenizer|trust_remote_code|rope_|attn_|special_tokens|add_|added_tokens|eos_token|pad_token)",
    "": r"(push_to_hub|hub_|report_to|wandb|mlflow|swanlab|use_swanlab|use_comet|comet_|env$|run_name)",
}
"""Names of settings of other tools by the section that they would stand in; others belong to the stage."""
NO_LORA = "no LoRA adapter is trained"
OWN_ATTENTION = "PyTorch's own attention is used; set attn_implementation: flash_attention_2 for another"
OWN_TEMPLATE = "the chat template of the model is used"
NO_TEST_SPLIT = "a test split is not read; 10% of the prompts are held out, or set data.validation_file"


@dataclass(frozen=True)
class Unconverted:
    """A setting that is not in the recipe, or only approximately."""

    key: str
    """Its name in the other tool."""
    display: str
    """Its value, shortened."""
    line: int | None
    """Its line; None for a default of the tool."""
    kind: ConversionLoss
    """How much is lost."""
    advice: str
    """Why, and what to do."""
    section: str = ""
    """The section of the recipe that it would stand in."""

    def __str__(self) -> str:
        return ": ".join(part for part in (self.key, self.display, self.advice) if part)


@dataclass
class Conversion:
    """A configuration whose settings are popped one by one, so that none is forgotten."""

    tool: str
    """The display name of the tool."""
    source: dict[str, ConfigNode]
    """The settings that are not yet converted."""
    stage: str
    """The training stage of the recipe."""
    tree: ConfigNode
    """The recipe so far."""
    folder: Path = Path()
    """The folder of the configuration, where files that it names may be."""
    comments: dict[str, str] = field(default_factory=dict)
    """End-of-line comments of the recipe by dotted key."""
    unconverted: list[Unconverted] = field(default_factory=list)
    """Settings that were not converted exactly."""
    converted: list[str] = field(default_factory=list)
    """Names of the converted settings."""

    @property
    def spec(self) -> StageSpec:
        """What the stage is."""
        return STAGES[self.stage]

    def has(self, name: str) -> bool:
        """Whether the stage has a setting of this name."""
        return name in self.spec.config.model_fields

    def pop(self, name: str) -> ConfigNode | None:
        """Take a setting; one that is null, false or empty is reported as disabled and gives None."""
        node = self.source.pop(name, None)
        if node is not None and (node.value is None or node.value is False or node.value in ("", [], {})):
            self.report(name, node, "not_needed", "")
            return None
        return node

    def set(self, key: str, value: Any, source_key: str = "", comment: str = "") -> None:
        """Set a key of the recipe to a node of the source or to a plain value; a leading dot stands for the stage."""
        key = f"{self.stage}{key}" if key.startswith(".") else key
        node = value if isinstance(value, ConfigNode) else make_node(value, self.tree.origin)
        self.tree = self.tree.with_value(key.split("."), node)
        if comment:
            self.comments[key] = comment
        if source_key:
            self.converted.append(source_key)

    def rename(self, name: str, key: str) -> None:
        """Convert a setting that only has another name in the recipe."""
        if (node := self.pop(name)) is not None:
            self.set(key, node, source_key=name)

    def set_defaults(self, defaults: Mapping[str, Any]) -> None:
        """Set stage settings whose default in the other tool differs from ours, unless the source sets them."""
        for name, value in defaults.items():
            key = f"{self.stage}.{name}"
            if self.get(key) is None and not any(each in self.source for each in (name, *aliases_for(key))):
                self.set(key, value, comment=f"{self.tool}'s default")

    def get(self, key: str) -> ConfigNode | None:
        """The value of a key of the recipe so far."""
        return self.tree.get(key.split("."))

    def report(
        self, name: str, node: ConfigNode | None, kind: ConversionLoss, advice: str, section: str | None = None
    ) -> None:
        """Record that a setting is not converted exactly; it belongs to a section, by its name if none is given."""
        line = node.origin.line if node is not None else None
        by_name = (known for known, pattern in SECTION_PATTERNS.items() if re.match(pattern, name))
        section = next(by_name, self.stage) if section is None else section
        self.unconverted.append(Unconverted(name, preview(node), line, kind, advice, section))

    def refuse(self, message: str) -> NoReturn:
        """Stop: the configuration trains by something that is not offered."""
        raise UsageError(f"{self.tree.origin.name}: {message}")

    def report_if_set(self, names: Iterable[str], kind: ConversionLoss, advice: str) -> None:
        """The same for those of the settings that are present."""
        for name in names:
            if (node := self.pop(name)) is not None:
                self.report(name, node, kind, advice)

    def read_named_file(self, node: ConfigNode | None) -> dict[str, ConfigNode]:
        """The settings of a file that a setting names, relative to the configuration or the working directory."""
        name = "" if node is None or not isinstance(node.value, str) else node.value
        paths = [path for folder in (self.folder, *self.folder.parents, Path()) if (path := folder / name).is_file()]
        return read_file(paths[0], Origin("base", name))[0].mapping if name and paths else {}

    def find_key(self, name: str) -> str | None:
        """The key of the recipe with this name or alias."""
        sections = ("", "model", "data", self.stage)
        return next((join_key(section, name) for section in sections if name in known_names(section)), None)


def preview(node: ConfigNode | None) -> str:
    """A value in at most 60 characters."""
    text = "" if node is None or node.value is None else to_flow_style(node)
    return text if len(text) <= 60 else f"{text[:59]}…"


def render_yaml(
    tree: ConfigNode, comments: Mapping[str, str], header: list[str], unconverted: Iterable[Unconverted] = ()
) -> str:
    """The recipe as a file with the settings that are set, in the order of the schema, and those that are not."""
    lines = [f"# {line}".rstrip() for line in header]
    missing: dict[str, list[str]] = {}
    for each in unconverted:
        if each.kind == "unsupported":
            missing.setdefault(each.section, []).append(f"# {each}")
    entries = {name: tree.mapping[name] for name in Recipe.model_fields if name in tree.mapping}
    lines += [_render_line("", name, node, comments) for name, node in entries.items() if not node.mapping]
    lines += missing.pop("", [])
    for section in Recipe.model_fields:
        settings = entries[section].mapping if section in entries else {}
        if settings or section in missing:
            order = [*field_names(section), *settings]
            names = sorted(settings, key=order.index)
            lines += ["", f"{section}:"]
            lines += [f"  {_render_line(section, name, settings[name], comments)}" for name in names]
            lines += [f"  {line}" for line in missing.get(section, [])]
    return "\n".join(lines) + "\n"


def _render_line(section: str, name: str, node: ConfigNode, comments: Mapping[str, str]) -> str:
    comment = comments.get(join_key(section, name), node.alias_used)
    text = f"{name}: {to_flow_style(node)}"
    return f"{text:<36}  # {comment}" if comment else text


def to_flow_style(node: ConfigNode) -> str:
    """A value on one line of YAML; numbers stay as written."""
    if isinstance(node.value, dict):
        items = (f"{_quote_if_needed(key)}: {to_flow_style(child)}" for key, child in node.value.items())
        return f"{{{', '.join(items)}}}"
    if isinstance(node.value, list):
        return f"[{', '.join(map(to_flow_style, node.value))}]"
    if isinstance(node.value, str):
        return _quote_if_needed(node.value)
    return "null" if node.value is None else node.text


def _quote_if_needed(value: str) -> str:
    plain = UNQUOTED_RE.fullmatch(value) and value.lower() not in YAML_KEYWORDS
    # YAML reads U+0085 and U+2028 between quotes as line breaks: text with such characters is escaped
    return value if plain else json.dumps(value, ensure_ascii=not value.replace("\n", "").isprintable())


SCHEDULERS = {**{name: name for name in get_args(SchedulerName)}, "wsd": "warmup_stable_decay"}
APPROXIMATE_SCHEDULERS = {
    **dict.fromkeys(("cosine_with_restarts", "cosine_with_min_lr", "cosine_warmup_with_min_lr", "rex"), "cosine"),
    **dict.fromkeys(("polynomial", "inverse_sqrt", "reduce_lr_on_plateau"), "linear"),
}
STRATEGIES = {
    r"no_shard|zero_?stage: 0|stage: 0": "ddp", "hybrid_shard": "hsdp",
    r"zero_?[12]|_z[12]_|stage: [12]|shard_grad_op|reshard_after_forward: false": "auto",
}  # fmt: skip
"""Words of DeepSpeed and FSDP for less than sharding everything; auto shards only where memory needs it."""
DATASET_BUILDERS = ("json", "csv", "parquet", "text")
DATA_FILE_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet", ".txt")


def convert_optimizer(conversion: Conversion, name: str) -> None:
    """An optimizer in any implementation; an unknown one becomes one with a name in it (adamw_bnb_8bit), or AdamW."""
    node = conversion.pop(name)
    if node is None:
        return
    their_name = str(node.value).lower()
    names = {each: ours for ours, spec in OPTIMIZERS.items() for each in (ours, *spec.aliases)}
    nearest = next((ours for each, ours in names.items() if each in their_name), OptimizerConfig().optim)
    optim = names.get(their_name, nearest)
    if their_name in names:
        conversion.set(".optim", optim, source_key=name, comment=f"{name}: {their_name}")
    else:
        is_low = OPTIMIZERS[optim].bf16_params and ("8bit" in their_name or "4bit" in their_name)
        hint = "; exp_avg_dtype: bf16 saves memory" if is_low else ""
        conversion.set(".optim", optim, comment=f"nearest to {their_name}")
        conversion.report(name, node, "approximated", f"there are {', '.join(OPTIMIZERS)}; {optim} is written{hint}")
    for part, defaults in OPTIMIZERS[optim].foreign_defaults.items():
        conversion.set_defaults(defaults if part in their_name else {})


def convert_scheduler(conversion: Conversion, name: str) -> None:
    """The learning-rate schedule, or the most similar one."""
    node, scheduler_kwargs = conversion.pop(name), conversion.pop("lr_scheduler_kwargs")
    scheduler_name = "" if node is None else str(node.value).lower()
    if scheduler_name in SCHEDULERS:
        conversion.set(".lr_scheduler_type", SCHEDULERS[scheduler_name], source_key=name)
    elif node is not None:
        close = APPROXIMATE_SCHEDULERS.get(scheduler_name, "cosine")
        conversion.set(".lr_scheduler_type", close, comment=f"nearest to {scheduler_name}")
        conversion.report(name, node, "approximated", f"not supported; {close} is written")
    for key, value in (scheduler_kwargs.mapping if scheduler_kwargs is not None else {}).items():
        if key == "num_decay_steps" and SCHEDULERS.get(scheduler_name) == "warmup_stable_decay":
            conversion.set(".decay_steps", value, source_key=f"lr_scheduler_kwargs.{key}")
        else:
            conversion.report(f"lr_scheduler_kwargs.{key}", value, "unsupported", "the schedules have no such argument")


def convert_eval_and_save(conversion: Conversion, epochs: float) -> None:
    """Evaluation, checkpoint and logging intervals, and what selects the best checkpoint."""
    _convert_interval(conversion, "eval", epochs)
    _convert_interval(conversion, "save", epochs)
    limit = conversion.pop("save_total_limit")
    if limit is not None and str(limit.value).isdigit() and int(str(limit.value)) < 2:
        conversion.set(".save_total_limit", 2, comment="at least 2, in case the last one is damaged")
        conversion.report("save_total_limit", limit, "approximated", "at least 2, in case the last one is damaged")
    elif limit is not None:
        conversion.set(".save_total_limit", limit, source_key="save_total_limit")
    metric = conversion.pop("metric_for_best_model")
    if metric is not None and str(metric.value) in ("loss", "eval_loss"):
        conversion.set(".metric_for_best_model", "eval_loss", source_key="metric_for_best_model")
    elif metric is not None:
        conversion.report("metric_for_best_model", metric, "approximated", "eval_loss selects the best weights")
    for name in ("early_stopping_patience", "early_stopping_steps"):
        patience = conversion.pop(name)
        if patience is not None and ("eval_steps" in conversion.source or conversion.get(".eval_steps") is not None):
            conversion.set(".early_stopping_patience", patience, source_key=name)
        elif patience is not None:
            conversion.report(name, patience, "not_needed", "nothing is evaluated during training")
    logging_steps = conversion.pop("logging_steps")
    if logging_steps is not None and isinstance(logging_steps.value, float) and logging_steps.value < 1:
        conversion.report("logging_steps", logging_steps, "approximated", "must be a count; every step is logged")
    elif logging_steps is not None:
        conversion.set(".logging_steps", logging_steps, source_key="logging_steps")


def _convert_interval(conversion: Conversion, what: str, epochs: float) -> None:
    """When to evaluate or to save: by steps, per epoch, several times per epoch, or never."""
    per_epoch, old_name = conversion.pop(f"{what}s_per_epoch"), "evaluation_strategy"
    if what == "eval" and old_name in conversion.source:
        conversion.converted.append(old_name)
        conversion.source.setdefault("eval_strategy", conversion.source.pop(old_name))
    strategy = conversion.pop(f"{what}_strategy")
    strategy_name = "" if strategy is None else str(strategy.value).lower()
    times = as_float(per_epoch, 1.0 if strategy_name == "epoch" else 0.0)
    if times > 0 and epochs > 0:
        source_key = f"{what}s_per_epoch" if per_epoch is not None else f"{what}_strategy"
        comment = f"{times:g} per epoch × {epochs:g} epochs"
        conversion.set(f".{what}_steps", f"{100 / (times * epochs):.4g}%", source_key=source_key, comment=comment)
        if "max_steps" in conversion.source:
            conversion.report(source_key, per_epoch or strategy, "approximated", "a fraction of max_steps is written")
    elif per_epoch is not None:
        conversion.report(f"{what}s_per_epoch", per_epoch, "unsupported", "it wants a number above 0")
    if strategy is None or (times and per_epoch is None):
        return
    if strategy_name == "no":
        advice = "checkpoints are always written, every save_steps" if what == "save" else ""
        conversion.report(f"{what}_strategy", strategy, "unsupported" if advice else "not_needed", advice)
    elif strategy_name == "best":
        conversion.report("save_strategy", strategy, "approximated", "the best checkpoint is always kept")
    else:
        conversion.converted.append(f"{what}_strategy")


def convert_lora(conversion: Conversion, uses_lora: bool) -> None:
    """The settings of LoRA and quantization; without LoRA they would be refused, and are reported."""
    names = {name: name for name in ("lora_r", "lora_alpha", "lora_dropout", "use_dora", "use_rslora")}
    for name, ours in {**names, "peft_use_dora": "use_dora", "peft_use_rslora": "use_rslora"}.items():
        node = conversion.source.pop(name, None) if name == "lora_dropout" else conversion.pop(name)
        if node is not None and uses_lora and node.value is not None:
            conversion.set(f".{ours}", node, source_key=name)
        elif node is not None:
            conversion.report(name, node, "not_needed", NO_LORA)
    for name, quantization in (("load_in_4bit", "nf4"), ("load_in_8bit", "int8")):
        node = conversion.pop(name)
        if node is not None and uses_lora:
            conversion.set(".quantization", quantization, source_key=name, comment=name)
        elif node is not None:
            conversion.report(name, node, "unsupported", "quantized weights need LoRA")
    kind = conversion.pop("bnb_4bit_quant_type")
    if kind is not None and str(kind.value) != "nf4":
        conversion.report("bnb_4bit_quant_type", kind, "approximated", "nf4 is the only 4-bit type")
    elif kind is not None:
        conversion.converted.append("bnb_4bit_quant_type")
    if uses_lora:
        conversion.set(".trainable", "lora")


def convert_sharding(conversion: Conversion) -> None:
    """DeepSpeed, FSDP and a configuration of accelerate become distributed_strategy; the rest is reported."""
    file = conversion.pop("accelerate_config")
    entries = conversion.read_named_file(file)
    if file is not None and not entries:
        key = {"zero": "deepspeed", "fsdp": "fsdp"}.get(str(file.value).rpartition("/")[2][:4])
        advice = "no such file; of its name only DeepSpeed or FSDP is read"
        conversion.report("accelerate_config", file, "approximated", advice)
        conversion.source |= {key: file} if key else {}
    kinds = {"DEEPSPEED": "deepspeed_config", "FSDP": "fsdp_config", "MULTI_GPU": "", "NO": ""}
    kind = str(entries["distributed_type"].value) if "distributed_type" in entries else ""
    for name, value in entries.items():
        if name == "mixed_precision" and not {"bf16", "fp16"} & {*conversion.source}:
            conversion.set(".precision", value, source_key=f"accelerate_config.{name}")
        elif name == kinds.get(kind):
            conversion.source["deepspeed" if kind == "DEEPSPEED" else "fsdp_config"] = value
        elif name not in ("distributed_type", "mixed_precision") or kind not in kinds:
            advice = "modelwright launch sets processes, machines and devices; nothing else of accelerate is read"
            conversion.report(f"accelerate_config.{name}", value, "not_needed", advice)
    for name in ("deepspeed", "fsdp", "fsdp_config"):
        node = conversion.pop(name)
        if node is None:
            continue
        words = to_flow_style(
            ConfigNode(conversion.read_named_file(node) or node.value, node.origin, node.text)
        ).lower()
        strategy = next((ours for pattern, ours in STRATEGIES.items() if re.search(pattern, words)), "fsdp")
        if name != "fsdp_config" or conversion.get(f"{conversion.stage}.distributed_strategy") is None:
            conversion.set(".distributed_strategy", strategy, comment=f"nearest to {name}")
        advice = f"distributed_strategy: {strategy} is written"
        advice += ", ddp where the optimizer fits on each device" if strategy == "auto" else ""
        more = "; wrapping, prefetching and offloading have no settings here" if name != "fsdp" else ""
        conversion.report(name, node, "approximated", advice + more)


def convert_report_to(conversion: Conversion, names: list[str], node: ConfigNode | None, name: str) -> None:
    """The experiment trackers."""
    trackers = get_args(TrackerName)
    known = [tracker for tracker in names if tracker in trackers]
    unsupported = [tracker for tracker in names if tracker not in trackers and tracker not in ("none", "all")]
    if known or names == ["none"]:
        conversion.set("report_to", known, source_key=name)
    if unsupported or names == ["all"]:
        conversion.report(name, node, "unsupported", f"the trackers are {', '.join(trackers)}")


def convert_dataset(conversion: Conversion, entry: dict[str, ConfigNode], label: str) -> None:
    """The source of one entry of datasets; converted keys are removed from the entry."""
    path, files = entry.pop("path", None), entry.pop("data_files", None)
    kind = entry.pop("ds_type", None)
    dataset = "" if path is None else str(path.value)
    if files is not None and (dataset in DATASET_BUILDERS or not dataset):
        _convert_data_files(conversion, files, f"{label}.data_files")
        conversion.converted += [f"{label}.path"] if path is not None else []
    elif path is not None:
        is_file = PurePath(dataset).suffix in DATA_FILE_SUFFIXES
        conversion.set("data.train_file" if is_file else "data.dataset_name", path, source_key=f"{label}.path")
        if files is not None:
            advice = "files of a data set cannot be selected; set data.train_file"
            conversion.report(f"{label}.data_files", files, "unsupported", advice)
    if kind is not None:
        conversion.report(f"{label}.ds_type", kind, "not_needed", "the format follows from the suffix of the file")
    for name, ours in (("name", "dataset_config_name"), ("split", "dataset_split")):
        node = entry.pop(name, None)
        if node is not None and node.value is not None and conversion.get("data.dataset_name") is not None:
            conversion.set(f"data.{ours}", node, source_key=f"{label}.{name}")
        elif node is not None:
            conversion.report(f"{label}.{name}", node, "not_needed", "a file has no splits, and is read whole")


MIX_KEYS = {"dataset_name": "dataset_name", "train_file": "dataset_name", "columns": "columns",
            "system_prompt": "system_prompt", "dataset_config_name": "dataset_config_name",
            "dataset_split": "dataset_split", "max_rows": "max_rows"}  # fmt: skip
"""Settings of data that a source of a mixture has too, by our name."""


def convert_datasets(
    conversion: Conversion, items: list[ConfigNode], label: str, convert_one: Callable[[ConfigNode, str], None]
) -> None:
    """Each data set by its own rule; several become data.mix, with every row of each once."""
    sources: dict[str, ConfigNode] = {}
    for number, item in enumerate(items):
        if number and conversion.spec.row_format == "text":
            advice = "a stage has one source; data.mix with a section prepare takes several"
            conversion.report(f"{label}[{number}]", item.get(("path",)) or item, "unsupported", advice)
            continue
        convert_one(item, f"{label}[{number}]")
        if len(items) > 1 and conversion.spec.row_format != "text":
            own = {ours: node for key, ours in MIX_KEYS.items() if (node := conversion.get(f"data.{key}")) is not None}
            for key in MIX_KEYS:
                conversion.tree = conversion.tree.without(("data", key))
            if "dataset_name" in own:
                name = PurePath(str(own["dataset_name"].value)).stem
                sources[f"{name}-{number}" if name in sources else name] = ConfigNode(own, item.origin)
    if sources:
        conversion.set("data.mix", ConfigNode(sources, items[0].origin), source_key=label)


def _convert_data_files(conversion: Conversion, files: ConfigNode, label: str) -> None:
    if isinstance(files.value, dict):
        for part, node in files.value.items():
            key = "data.train_file" if part == "train" else "data.validation_file"
            conversion.set(key, node, source_key=f"{label}.{part}")
        return
    items = files.value if isinstance(files.value, list) else [files]
    conversion.set("data.train_file", items[0], source_key=label)
    for item in items[1:]:
        advice = "a stage reads one file, or all files of a folder: data.dataset_name: FOLDER"
        conversion.report(label, item, "unsupported", advice)


def as_str_list(node: ConfigNode | None) -> list[str]:
    """One word or a list of words as a list."""
    if node is None:
        return []
    return [str(item.value) for item in (node.value if isinstance(node.value, list) else [node])]


def as_float(node: ConfigNode | None, default: float) -> float:
    """The number of a node, or the default if there is none."""
    return float(node.value) if node is not None and isinstance(node.value, int | float) else default


def convert_test_split(conversion: Conversion, test_size: ConfigNode | None, name: str) -> None:
    """The held-out fraction; without one nothing is held out, as in the other tool."""
    if test_size is not None:
        conversion.set("data.test_size", test_size, source_key=name)
    elif conversion.get("data.validation_file") is None:
        conversion.set("data.test_size", 0, comment=f"{conversion.tool} holds nothing out by default; ours is 10%")
