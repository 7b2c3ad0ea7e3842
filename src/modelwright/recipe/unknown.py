"""Answer a key that is not in the schema: what it was probably meant to be, or where it belongs."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass

from modelwright.recipe.aliases import aliases_of, names_in
from modelwright.recipe.schema import TRAINING_STAGES
from modelwright.recipe.settings import children, find, sections
from modelwright.recipe.tree import Path

LIST_AT_MOST = 10
"""A section with more settings is not listed in a letter."""

STAGES_TO_COME = ("init", "grpo", "orpo", "kto", "export")

SECTIONS = {
    "sft": (
        *("training", "train", "trainer", "training_args", "training_arguments"),
        *("finetune", "finetuning", "fine_tuning"),
    ),
    "data": ("dataset", "datasets"),
    "gates": ("promotion_gates", "thresholds"),
    "environment": ("env", "environment_variables"),
    "base": ("extends", "inherit", "defaults"),
    "compare": ("before_after", "demo", "samples"),
}
SECTION_NAMES = {other: ours for ours, others in SECTIONS.items() for other in others}
"""What other files call our sections."""

ADVICE = {
    "the run keeps its own journal; leave it out": ("logging_dir", "wandb_project"),
    "a run resumes by itself; leave it out": ("resume", "auto_resume"),
    "eval_steps decides alone; leave it out": ("eval_strategy", "evaluation_strategy", "do_eval"),
    "save_steps decides alone; leave it out": ("save_strategy",),
    "logging_steps decides alone; leave it out": ("logging_strategy",),
    "the metric knows which way is better; leave it out": ("greater_is_better",),
    "a section sft is trained; leave it out": ("do_train",),
    "a run is resumed or refused, never overwritten; leave it out": ("overwrite_output_dir",),
    "the device is found by itself; leave it out": ("use_cpu", "no_cuda", "device", "device_map"),
    "several devices share the work by sharding: ddp or fsdp": ("fsdp", "fsdp_config", "deepspeed", "distributed"),
    "a stage says it beside trainable: lora, as quantization: nf4 (4 bits) or int8": (
        "load_in_4bit",
        "load_in_8bit",
        "quantization_bit",
    ),
    "it is not offered; leave it out": ("push_to_hub", "hub_model_id", "trust_remote_code"),
    "data.columns maps columns, as {question: prompt}": ("dataset_text_field", "formatting"),
    "the tokenizer brings its chat template; leave it out": ("chat_template", "template"),
    "it was removed in 0.2; leave it out": ("tune_products",),
    "it is not needed here; leave it out": (
        *("dataloader_num_workers", "remove_unused_columns", "ddp_find_unused_parameters", "group_by_length"),
    ),
    "the run is called by name, at the top level": ("run_name",),
    "it wants per_device_train_batch_size (rows a device takes at once) or global_batch_size (rows per step)": (
        *("batch_size", "train_batch_size"),
    ),
}
SYNONYMS = {**dict.fromkeys(("max", "maximum"), "at_most"), **dict.fromkeys(("min", "minimum"), "at_least")}
HINTS = {name: hint for hint, names in ADVICE.items() for name in names}
"""Settings of other tools that have no counterpart of one name here, and what to do instead."""


@dataclass(frozen=True)
class Answer:
    """What to say about an unknown key."""

    message: str
    """The letter, without its place."""
    target: Path | None = None
    """Where the value belongs, to look at it there for further problems."""


def nearest(name: str, candidates: Iterable[str], cutoff: float = 0.75) -> str | None:
    """The candidate most like a name, if any is alike; in a short name one slip weighs more, and is forgiven."""
    cutoff = min(cutoff, 0.6) if len(name) <= 4 else cutoff
    lowered = {candidate.lower(): candidate for candidate in candidates}
    found = difflib.get_close_matches(name.lower(), lowered, n=1, cutoff=cutoff)
    return lowered[found[0]] if found else None


def answer(path: Path, is_mapping: bool = False) -> Answer:
    """Answer an unknown key: nearest in its section first, then a peer's habit, then the other sections."""
    *parents, name = path
    section, key = ".".join(parents), ".".join(path)
    if not parents and is_mapping and name in SECTION_NAMES:
        return Answer(f"{key} is unknown; the section is called {SECTION_NAMES[name]}", (SECTION_NAMES[name],))
    known = _names(section) if section in sections() else _fields_below(tuple(parents))
    if not parents and name in STAGES_TO_COME:
        return Answer(f"{key} is unknown; the stages are {', '.join(TRAINING_STAGES)} so far")
    if name in HINTS:
        return Answer(f"{key} is unknown; {HINTS[name]}")
    if not parents and (exact := _elsewhere(name, section, alike=False)):
        return exact
    synonym = SYNONYMS.get(name)
    close = synonym if synonym in known else nearest(name, [*known, *(["base"] if not parents else [])])
    if close is not None:
        return Answer(f"{key} is unknown; did you mean {known.get(close, close)}?", (*parents, close))
    elsewhere = _elsewhere(name, section)
    if elsewhere is not None:
        return elsewhere
    ours = list(dict.fromkeys(known.values()))
    if len(ours) <= LIST_AT_MOST:
        return Answer(f"{key} is unknown; it wants one of {', '.join(ours)}")
    return Answer(f"{key} is unknown; modelwright explain quickstart {section} lists what is known")


def _elsewhere(name: str, section: str, alike: bool = True) -> Answer | None:
    """The same name, or one like it, in another section."""
    others = [other for other in sections() if other != section and not other.endswith(".data")]
    key = _join(section, name)
    places = [(other, _names(other)[name]) for other in others if name in _names(other)]
    if places:
        first, ours = next((place for place in places if place[0].startswith(f"{section}.")), places[0])
        stages = {other for other, _ in places} & set(TRAINING_STAGES)
        under = f"under {first}:" if first else "at the top level:"
        under = "to a stage, such as" if first in stages and len(stages) > 1 else under
        return Answer(f"{key} belongs {under} {_join(first, ours)}", tuple(_join(first, name).split(".")))
    for other in others if alike else ():
        close = nearest(name, _names(other), cutoff=0.85) if len(name) > 4 else None
        if close is not None:
            ours = _join(other, _names(other)[close])
            return Answer(f"{key} is unknown; did you mean {ours}?", tuple(_join(other, close).split(".")))
    return None


def _join(section: str, name: str) -> str:
    return f"{section}.{name}" if section else name


def _names(section: str) -> dict[str, str]:
    """Every name known in a section, ours and others', and ours for each."""
    others = {name: alias.canonical for name, alias in aliases_of(section).items()}
    return {**{name: name for name in names_in(section)}, **others}


def _fields_below(parents: Path) -> dict[str, str]:
    """The settings of a section inside a mapping, such as a gate's threshold."""
    setting = find(parents)
    fields = children(setting) if setting else ()
    return {name: name for name in (field.key.rpartition(".")[2] for field in fields)}
