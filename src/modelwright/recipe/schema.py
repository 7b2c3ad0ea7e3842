"""What a recipe may say: every section, every setting, its default and its meaning.

Names are those of Hugging Face ``TrainingArguments`` and TRL; ``aliases`` maps what other tools call them.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Literal, Self

from pydantic import (
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from modelwright.recipe.architecture import Architecture
from modelwright.recipe.cluster import Cluster
from modelwright.recipe.evaluation import Evaluate
from modelwright.recipe.judging import Compare, Threshold
from modelwright.recipe.preparing import Prepare, Share
from modelwright.recipe.training import Checkpointing, Images, Parts, Preference, Savings, Text, Trainable, Training
from modelwright.recipe.values import Frozen, Steps

TRAINING_STAGES = ("pretrain", "sft", "dpo", "lora", "classify")
"""The stages that move weights, in the order they happen: each starts from the model of the one before it."""
StageName = Literal["sft", "pretrain", "dpo", "lora", "classify"]

NAME_PATTERN = r"^[a-z0-9][a-z0-9._-]*$"

Part = Literal["messages", "prompt", "completion", "system", "context", "chosen", "rejected"]
"""What a column may be: context stands below the prompt, chosen and rejected are the answers of a pair."""

_OF_EVERY_STAGE = ("eval_loss", "base_eval_loss", "steps", "tokens", "trained_tokens", "seconds")
_OF_ANSWERS = (
    *("style_score", "base_style_score", "answer_words", "base_answer_words"),
    *("exactness", "base_exactness"),
)
_OF_PAIRS = (
    *("eval_reward_accuracy", "eval_reward_margin", "eval_chosen_logp", "eval_rejected_logp", "eval_kl"),
    "eval_sft_loss",
)
MEASURED = {
    "pretrain": (*_OF_EVERY_STAGE, "eval_bits_per_byte", "base_eval_bits_per_byte"),
    "sft": (*_OF_EVERY_STAGE, *_OF_ANSWERS),
    "dpo": (*_OF_EVERY_STAGE, *_OF_PAIRS, *(f"base_{name}" for name in _OF_PAIRS), *_OF_ANSWERS),
    "lora": (*_OF_EVERY_STAGE, *_OF_ANSWERS),
    "classify": (*_OF_EVERY_STAGE, "eval_accuracy", "base_eval_accuracy"),
}
"""What a gate may ask of each stage; with parent_ before it, what the stage before it measured in the end."""


class Model(Frozen):
    """The model that is trained: one that exists, or an architecture made from scratch."""

    model_name_or_path: str | None = None
    """A folder, a hub id, or the embedded smollm2-135m-instruct; a folder is looked for first."""
    architecture: Architecture | None = None
    """Sizes of a model that is made from scratch, in place of model_name_or_path."""
    tokenizer_name_or_path: str | None = None
    """Folder of the tokenizer for an architecture; without it, the one that prepare trains."""
    revision: str | None = None
    """Branch, tag or commit of a hub model; the commit it means is pinned in the run."""
    attn_implementation: Literal["auto", "sdpa", "eager", "flash_attention_2", "flex_attention"] = "auto"
    """How attention is computed; auto is sdpa."""
    width: PositiveInt = 64
    """Channels of resnet18's first layers; 64 is the full model."""

    @model_validator(mode="after")
    def _one_model(self) -> Self:
        if (self.model_name_or_path is None) == (self.architecture is None):
            word = "both {0} and {1}" if self.architecture else "neither {0} nor {1}"
            found = word.format("model_name_or_path", "architecture")
            raise PydanticCustomError("one_model", "has {found}; it wants one of them", {"found": found})
        return self

    @property
    def name(self) -> str:
        """What letters call it."""
        return self.model_name_or_path or "a model from scratch"


class Data(Frozen):
    """What the model learns from, and what is held out to measure it."""

    dataset_name: str | None = None
    """An embedded set (field-guide, songbook, python-docs, shapes), a file, a folder or a hub id."""
    dataset_config_name: str | None = None
    """Configuration of a hub data set."""
    dataset_split: str = "train"
    """Split of a hub data set or of a folder that load_from_disk reads."""
    train_file: str | None = None
    """A JSON, JSONL, CSV, Parquet or TXT file to train on, in place of dataset_name."""
    validation_file: str | None = None
    """A file or folder of held-out rows; without it a share of the training rows is held out."""
    columns: dict[str, Part] = {}
    """Which column plays which part, such as {question: prompt, answer: completion}."""
    derive: dict[str, str] = {}
    """Columns made of others where they are not there yet, such as {full-question: "For {topic}, {question}"}."""
    make_pairs: Literal["songs"] | None = None
    """Make questions and answers for rows that have none: songs, from the columns lyrics and artist."""
    text_column: str = "text"
    """Column that holds the documents of raw text."""
    system_prompt: str | None = None
    """System message put before every conversation, in training and in asking."""
    split_by: str | None = None
    """Column whose equal values stay on one side of the split; without it, the prompt."""
    test_size: Steps = Steps("10%")
    """Rows held out, as a count or a share of the distinct split_by values."""
    max_rows: PositiveInt | None = None
    """Use only the first rows, for a quick try."""
    max_bad_share: Share = 0.0
    """Largest share of rows that may be unusable; they are set aside in quarantine.jsonl, 0 refuses any."""
    mix: dict[str, PositiveFloat] = {}
    """Several sources of raw text with their weights, such as {wiki.jsonl: 2, python-docs: 1}, for prepare."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        named = [key for key in ("dataset_name", "train_file", "mix") if getattr(self, key)]
        if len(named) != 1:
            found = "both " + " and ".join(named) if named else "neither dataset_name nor train_file"
            raise PydanticCustomError("one_source", "has {found}; it wants one of them", {"found": found})
        return self

    @property
    def source(self) -> str:
        """Where the rows come from."""
        return self.dataset_name or self.train_file or " and ".join(self.mix)


class Stage(Training):
    """What every training stage of a recipe may say."""

    data: Data | None = None
    """Data of this stage alone; without it, the recipe's data."""


class Pretrain(Parts, Stage):
    """Pretraining: the model learns to go on with any text."""

    max_length: Annotated[int, Field(ge=8)] = 2048
    """Tokens in a row."""
    curriculum: dict[PositiveInt, Steps] = {}
    """Shorter rows first, as {512: 10%, 1024: 20%}: steps at each length, or their share; a step keeps its tokens."""

    @model_validator(mode="after")
    def _lengths_grow(self) -> Self:
        lengths = [*self.curriculum, self.max_length]
        for shorter, longer in pairwise(lengths):
            if shorter >= longer:
                found = "has a curriculum from {shorter} to {longer}; its lengths want to grow up to max_length"
                raise PydanticCustomError("curriculum", found, {"shorter": shorter, "longer": longer})
            if self.max_length % shorter:
                found = "has a curriculum of {shorter}, which does not divide max_length {longest}"
                raise PydanticCustomError("curriculum", found, {"shorter": shorter, "longest": self.max_length})
        return self

    def length_at(self, step: int, steps: int) -> int:
        """Tokens in a row at a step, counted from 0, of so many."""
        end = 0
        for length, part in self.curriculum.items():
            end += part.of(steps)
            if step < end:
                return length
        return self.max_length


class Sft(Parts, Savings, Text, Stage):
    """Supervised fine-tuning: the model learns to answer as the data answers."""


class Dpo(Parts, Preference, Stage):
    """Direct preference optimisation: the model learns which of two answers is the better one."""

    learning_rate: PositiveFloat = 1e-6
    """Peak learning rate, reached after warm-up; far lower than for fine-tuning."""
    metric_for_best_model: Literal["eval_loss", "eval_reward_accuracy"] = "eval_loss"  # type: ignore[assignment]
    """What makes weights the best: the lowest held-out loss, or the highest share of pairs told apart."""


class Lora(Sft):
    """Adaptation: fine-tuning of small low-rank matrices beside the frozen weights."""

    trainable: Trainable = Trainable(lora=True)
    """Which weights move: all, lora, or a mapping such as {last_layers: 2, head: true}."""


class Classify(Images, Stage):
    """Image classification: the model learns which class an image shows."""

    metric_for_best_model: Literal["eval_loss", "eval_accuracy"] = "eval_accuracy"  # type: ignore[assignment]
    """What makes weights the best: the lowest held-out loss, or the highest accuracy."""
    weights: Literal["fp32"] = "fp32"
    """What weights are kept in: fp32, which batch norms want."""
    gradient_checkpointing: Checkpointing = False
    """Changes nothing for images, which are trained with all activations kept; the plan says so."""


class Recipe(Frozen):
    """One file that becomes a trained model."""

    name: Annotated[str, Field(pattern=NAME_PATTERN, max_length=63)]
    """A short name in lower case, digits, dots and dashes; also the default run folder."""
    description: str = ""
    """One line for the list of recipes."""
    output_dir: str | None = None
    """The run folder; without it, runs/NAME."""
    seed: NonNegativeInt = 42
    """Decides the order of data, the split, and every random number."""
    model: Model
    """The model that is trained."""
    data: Data | None = None
    """What it learns from, in every stage that has no data of its own."""
    sft: Sft | None = None
    """Supervised fine-tuning."""
    pretrain: Pretrain | None = None
    """Pretraining on text, before sft."""
    dpo: Dpo | None = None
    """Preference tuning, after sft."""
    lora: Lora | None = None
    """Adaptation by low-rank matrices, last."""
    classify: Classify | None = None
    """Image classification."""
    prepare: Prepare | None = None
    """From raw text to packed shards, before pretrain."""
    compare: Compare = Compare()
    """Questions answered before and after."""
    evaluate: Evaluate | None = None
    """Measurements of every stage's model in the same way."""
    gates: dict[StageName, dict[str, Threshold]] = {}
    """For each stage, what its metrics must be for the result to be promoted."""
    gates_file: str | None = None
    """A file of gates beside the recipe, such as configs/promotion_gates.yaml; the recipe's own gates come on top."""
    cluster: Cluster | None = None
    """What launch --on openshift asks of the cluster."""
    report_to: list[Literal["tensorboard", "mlflow", "wandb", "trackio"]] = ["tensorboard"]
    """Trackers that are told the numbers, as a word or a list; none for none. One that fails never stops a run."""
    environment: dict[str, str] = {}
    """Environment variables that may set something, such as EPOCHS: sft.num_train_epochs."""

    @field_validator("report_to", mode="before")
    @classmethod
    def _from_word(cls, value: object) -> object:
        return ([] if value == "none" else [value]) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _stages_fit(self) -> Self:
        if not self.stages and self.prepare is None:
            raise PydanticCustomError(
                "no_stage", "has no stage; it wants a section sft, pretrain, dpo, lora or classify"
            )
        if self.classify and len(self.stages) > 1:
            other = next(stage for stage in self.stages if stage != "classify")
            found = "has both {other} and classify; it wants text or images"
            raise PydanticCustomError("two_kinds", found, {"other": other})
        if self.prepare and self.data is None and (self.pretrain is None or self.pretrain.data is None):
            raise PydanticCustomError("no_data", "has no data for prepare; it wants a section data")
        for stage, section in self.stages.items():
            if self.data is None and section.data is None:
                found = "has no data for {stage}; it wants a section data"
                raise PydanticCustomError("no_data", found, {"stage": stage})
        for stage in self.gates:
            if stage not in self.stages:
                found = "has gates.{stage} but no section {stage}"
                raise PydanticCustomError("gate_without_stage", found, {"stage": stage})
        return self

    @property
    def stages(self) -> dict[str, Stage]:
        """The training stages this recipe asks for, in order."""
        return {name: section for name in TRAINING_STAGES if (section := getattr(self, name)) is not None}

    def data_of(self, stage: str) -> Data:
        """What a stage learns from: its own data, or the recipe's."""
        data = self.stages[stage].data or self.data
        assert data is not None
        return data

    @property
    def flow(self) -> tuple[str, ...]:
        """Every stage that happens, in order: the training stages, and what stands around them."""
        before = (("prepare", self.prepare), ("init", self.model.architecture))
        after = ("evaluate",) if self.evaluate else ()
        return (*(name for name, section in before if section), *self.stages, *after)

    @property
    def prepared_data(self) -> Data:
        """What prepare works on: the data of pretrain, or the recipe's."""
        data = (self.pretrain.data if self.pretrain else None) or self.data
        assert data is not None
        return data

    def parent_of(self, stage: str) -> str | None:
        """The stage whose model a stage starts from; None where it starts from the recipe's model."""
        names = [*(("init",) if self.model.architecture else ()), *self.stages]
        place = names.index(stage)
        return names[place - 1] if place else None

    def measured_in(self, stage: str) -> tuple[str, ...]:
        """What a gate may ask of a stage."""
        parent = self.parent_of(stage)
        same = self.evaluate.measured if self.evaluate else ()
        of_parent = (*MEASURED[parent], *same) if parent in MEASURED else ()
        own = (*MEASURED[stage], *same, *(f"base_{metric}" for metric in same))
        return (*own, *(f"parent_{metric}" for metric in of_parent))

    def gate_of(self, stage: str) -> dict[str, Threshold]:
        """What is asked of a stage, by metric; nothing where it has no gate."""
        return next((asked for name, asked in self.gates.items() if name == stage), {})

    @property
    def run_dir(self) -> str:
        """Where the run lives."""
        return self.output_dir or f"runs/{self.name}"
