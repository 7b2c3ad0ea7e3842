"""What other tools call our settings: accepted with a note, never written out."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from modelwright.recipe.schema import TRAINING_STAGES
from modelwright.recipe.settings import children, sections
from modelwright.recipe.tree import Located, RecipeProblem, problem

Word = str | bool | None


@dataclass(frozen=True)
class Alias:
    """Another name for a setting, and what its values mean here where they differ."""

    canonical: str
    """The setting of the same section."""
    words: Mapping[str, Word] | None = None
    """The values it may have and ours for each; without it the value is taken as it is."""
    off: Word = None
    """Ours for ``false``, which gives way where the same layer says something else."""
    share: bool = False
    """Whether the value is a share below one, as ``warmup_ratio`` is."""
    commas: bool = False
    """Whether one text may hold several names between commas."""


NAMES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "": {"output_dir": ("out_dir", "ckpt_output_dir")},
    "model": {
        "model_name_or_path": (
            *("base_model", "model_path", "checkpoint_dir", "model_name", "model_id"),
            "pretrained_model_name_or_path",
        ),
        "revision": ("model_revision",),
    },
    "data": {
        "dataset_name": ("data_path", "dataset", "dataset_path", "dataset_id", "path"),
        "dataset_config_name": ("dataset_config",),
        "dataset_split": ("dataset_train_split",),
        "train_file": ("data_files", "train_path"),
        "validation_file": ("val_file", "eval_file", "validation_path"),
        "test_size": ("val_set_size", "val_size"),
        "max_rows": ("max_samples", "max_train_samples"),
    },
    "training": {
        "learning_rate": ("lr",),
        "num_train_epochs": ("epochs", "num_epochs"),
        "max_steps": ("max_iters",),
        "per_device_train_batch_size": (
            *("micro_batch_size", "per_gpu_train_batch_size"),
            "train_micro_batch_size_per_gpu",
        ),
        "per_device_eval_batch_size": ("eval_batch_size", "per_gpu_eval_batch_size"),
        "gradient_accumulation_steps": ("grad_accum_steps", "accumulate_grad_batches"),
        "global_batch_size": ("effective_batch_size",),
        "max_length": (
            *("max_seq_length", "max_seq_len", "sequence_len", "cutoff_len"),
            *("model_max_length", "block_size"),
        ),
        "packing": ("sample_packing",),
        "assistant_only_loss": ("completion_only_loss",),
        "lr_scheduler_type": ("lr_scheduler", "scheduler"),
        "optim": ("optimizer", "optimizer_type"),
        "warmup_steps": ("lr_warmup_steps", "num_warmup_steps", "warmup_iters"),
        "adam_beta1": ("beta1",),
        "adam_beta2": ("beta2",),
        "adam_epsilon": ("adam_eps",),
        "max_grad_norm": ("grad_clip", "clip_grad_norm", "gradient_clipping"),
        "logging_steps": ("log_interval",),
        "eval_steps": ("eval_interval",),
        "save_steps": ("save_interval",),
        "precision": ("mixed_precision",),
        "gradient_checkpointing": ("activation_checkpointing", "enable_activation_checkpointing"),
        "lora_r": ("lora_rank",),
        "use_dora": ("peft_use_dora",),
        "use_rslora": ("peft_use_rslora",),
        "beta": ("dpo_beta", "pref_beta"),
        "loss_type": ("dpo_loss_type", "pref_loss"),
        "label_smoothing": ("dpo_label_smoothing",),
    },
    "compare": {"max_new_tokens": ("max_tokens", "max_gen_length")},
}
"""For each section our name and what others call it: old TRL, axolotl, LLaMA-Factory, litgpt, training_hub, nanoGPT."""

FLASH = {"true": "flash_attention_2", "fa2": "flash_attention_2", "sdpa": "sdpa", "auto": "auto", "disabled": "eager"}
INVERTED = {"true": False, "false": True}
TRANSLATED: Mapping[str, Mapping[str, Alias]] = {
    "model": dict.fromkeys(
        ("use_flash_attention", "use_flash_attention_2", "flash_attention", "flash_attn"),
        Alias("attn_implementation", FLASH, off="auto"),
    ),
    "training": {
        "bf16": Alias("precision", {"true": "bf16", "full": "bf16", "auto": "auto"}, off="auto"),
        "fp16": Alias("precision", {"true": "fp16"}, off="auto"),
        "warmup_ratio": Alias("warmup_steps", share=True),
        "train_on_inputs": Alias("assistant_only_loss", INVERTED),
        "train_on_prompt": Alias("assistant_only_loss", INVERTED),
        "use_peft": Alias("trainable", {"true": "lora"}, off="all"),
        "adapter": Alias("trainable", {"lora": "lora"}),
        "finetuning_type": Alias("trainable", {"lora": "lora", "full": "all"}),
        "load_in_4bit": Alias("quantization", {"true": "nf4"}, off="none"),
        "load_in_8bit": Alias("quantization", {"true": "int8"}, off="none"),
        "lora_target": Alias("lora_target_modules", commas=True),
        "lora_target_linear": Alias("lora_target_modules", {"true": "all-linear"}, off="all-linear"),
    },
}
"""Names whose values, too, mean something else than ours."""

VALUES: Mapping[str, Mapping[str, Word]] = {
    "precision": {
        **dict.fromkeys(("bfloat16", "bf16-mixed"), "bf16"),
        **dict.fromkeys(("float16", "half", "16-mixed", "fp16-mixed"), "fp16"),
        **dict.fromkeys(("float32", "32-true", "no"), "fp32"),
    },
    "lr_scheduler_type": {"wsd": "warmup_stable_decay"},
    "optim": dict.fromkeys(("adamw", "adamw_torch_fused", "adamw_hf"), "adamw_torch"),
    "lora_target_modules": {"all": "all-linear"},
    "attn_implementation": {"flash": "flash_attention_2", "fa2": "flash_attention_2"},
    "max_steps": {"-1": None},
    "gradient_checkpointing": {"full": True, "none": False},
}
"""Other words for values of our own settings; ``None`` is the default."""

REMOVED: Mapping[str, str] = {"tune_products": "0.2"}
"""Settings of a stage that are ignored with a note, and the version that removed each."""


@functools.cache
def aliases_of(section: str) -> dict[str, Alias]:
    """The other names known in a section, by its key; the top level is the empty key."""
    table = "training" if section in TRAINING_STAGES else section.rpartition(".")[2]
    plain = {name: Alias(ours) for ours, names in NAMES.get(table, {}).items() for name in names}
    known = names_in(section)
    both = {**plain, **TRANSLATED.get(table, {})}
    return {name: alias for name, alias in both.items() if alias.canonical in known and name not in known}


@functools.cache
def names_in(section: str) -> tuple[str, ...]:
    """Our own names in a section, in the order of the schema."""
    return tuple(setting.key.rpartition(".")[2] for setting in children(sections()[section]))


def other_names(key: str) -> list[str]:
    """What other tools call a setting."""
    section, _, name = key.rpartition(".")
    table = aliases_of(section) if section in sections() else {}
    return [other for other, alias in table.items() if alias.canonical == name]


def our_key(key: str) -> str:
    """A dotted key under our own name for its last part."""
    section, _, name = key.rpartition(".")
    alias = aliases_of(section).get(name) if section in sections() else None
    return key if alias is None else f"{section}.{alias.canonical}".lstrip(".")


def whole_key(key: str, present: Collection[str]) -> str:
    """A bare name with its section, where just one section that the recipe may have or has knows it."""
    if "." in key or key in names_in("") or key in aliases_of(""):
        return key
    homes = [
        section
        for section in ("model", "data", *(stage for stage in TRAINING_STAGES if stage in present))
        if key in names_in(section) or key in aliases_of(section)
    ]
    return f"{homes[0]}.{key}" if len(homes) == 1 else key


def canonicalise(tree: Located) -> tuple[Located, list[str], list[RecipeProblem]]:
    """Give every setting of one layer its own name, with a note for each other name used."""
    notes: list[str] = []
    problems: list[RecipeProblem] = []
    for section in sections():
        path = tuple(section.split(".")) if section else ()
        node = tree.at(path)
        if node is not None and isinstance(node.value, dict):
            renamed = _Section(section, node.value, notes, problems).rename()
            tree = tree.put(path, Located(renamed, node.origin))
    return tree, notes, problems


@dataclass
class _Section:
    """One section of one layer on its way to our names."""

    key: str
    entries: dict[str, Located]
    notes: list[str]
    problems: list[RecipeProblem]

    def rename(self) -> dict[str, Located]:
        """The section under our names."""
        self._ignore_removed()
        table = aliases_of(self.key)
        off = {name for name, node in self.entries.items() if name in table and _is_off(table[name], node)}
        first: dict[str, str] = {}
        for name in self.entries:
            if name not in off:
                first.setdefault(table[name].canonical if name in table else name, name)
        renamed: dict[str, Located] = {}
        for name, node in self.entries.items():
            if name not in table:
                renamed[name] = self._in_our_words(name, node)
                continue
            ours = table[name].canonical
            other = ours if ours in self.entries else first.get(ours, name)
            if name in off and (other != name or ours in renamed):
                self._note(node, f"{self._full(name)}: {node.text} is left out")
            elif other != name:
                self._conflict(name, other, ours)
            elif (translated := self._translate(name, table[name], node)) is not None:
                renamed[ours] = replace(self._in_our_words(ours, translated), called=name)
        return renamed

    def _ignore_removed(self) -> None:
        removed = REMOVED.keys() & self.entries.keys() if self.key in TRAINING_STAGES else ()
        for name in removed:
            self._note(self.entries[name], f"{self._full(name)} is ignored: it was removed in {REMOVED[name]}")
        self.entries = {name: node for name, node in self.entries.items() if name not in removed}

    def _translate(self, name: str, alias: Alias, node: Located) -> Located | None:
        """The value under our name, or nothing where it makes no sense there."""
        if node.value is None:
            return node
        if alias.words is not None:
            words = {**alias.words, **({"false": alias.off} if alias.off is not None else {})}
            word = _switch(node)
            if word not in words:
                choice = f"one of {', '.join(words)}" if len(words) > 1 else ", ".join(words)
                wants = f"it wants {choice} here, or {alias.canonical} in its place"
                self._problem(name, node, f"{self._full(name)} is {node.shown}; {wants}")
                return None
            return self._read_as(f"{self._full(name)}: {node.text}", alias.canonical, node, words[word])
        if alias.share and not _is_share(node):
            wants = f"it wants a share below 1; a count is {alias.canonical}"
            self._problem(name, node, f"{self._full(name)} is {node.shown}; {wants}")
            return None
        self._note(node, f"{self._full(name)} is read as {alias.canonical}")
        if alias.commas and isinstance(node.value, str) and "," in node.value:
            names = [each.strip() for each in node.value.split(",") if each.strip()]
            return Located([Located(each, node.origin, each) for each in names], node.origin)
        return node

    def _in_our_words(self, name: str, node: Located) -> Located:
        """A value of one of our settings, where another tool has another word for it."""
        words, word = VALUES.get(name, {}), _word(node)
        if word in words and name in names_in(self.key):
            return self._read_as(f"{self._full(name)}: {node.text}", name, node, words[word])
        return node

    def _read_as(self, found: str, canonical: str, node: Located, value: Word) -> Located:
        text = "null" if value is None else str(value).lower() if isinstance(value, bool) else value
        self._note(node, f"{found} is read as {canonical}: {text}")
        return Located(value, node.origin, text)

    def _conflict(self, name: str, other: str, ours: str) -> None:
        node, line = self.entries[name], self.entries[other].origin.line
        place = f" (line {line})" if line else ""
        if other == ours:
            message = f"{self._full(name)} is another name for {other}{place}; keep one of them"
        else:
            message = f"{self._full(name)} and {other}{place} both set {ours}; keep one of them"
        self._problem(name, node, message)

    def _problem(self, name: str, node: Located, message: str) -> None:
        self.problems.append(problem(node.origin, self._full(name), message))

    def _note(self, node: Located, message: str) -> None:
        self.notes.append(f"{node.origin.where}: {message}")

    def _full(self, name: str) -> str:
        return f"{self.key}.{name}" if self.key else name


def _word(node: Located) -> str:
    """A scalar as a table of words knows it."""
    return "" if node.value is None or isinstance(node.value, dict | list) else str(node.value).lower()


def _switch(node: Located) -> str:
    """The same where the word may be a yes or a no."""
    return {"yes": "true", "on": "true", "no": "false", "off": "false"}.get(_word(node), _word(node))


def _is_off(alias: Alias, node: Located) -> bool:
    return alias.off is not None and _switch(node) == "false"


def _is_share(node: Located) -> bool:
    percent = node.text.strip().endswith("%")
    try:
        return 0 <= float(node.text.strip().rstrip("%")) < (100 if percent else 1)
    except ValueError:
        return False
