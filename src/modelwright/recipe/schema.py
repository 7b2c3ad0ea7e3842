"""What a recipe may say: every section, every setting, its default and its meaning.

Names are those of Hugging Face ``TrainingArguments`` and TRL; ``aliases`` maps what other tools call them.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator
from pydantic_core import PydanticCustomError

from modelwright.recipe.values import Frozen, Regex, Steps

TRAINING_STAGES = ("sft", "classify")
"""The stages that move weights, in the order they happen."""

NAME_PATTERN = r"^[a-z0-9][a-z0-9._-]*$"

_OF_EVERY_STAGE = ("eval_loss", "base_eval_loss", "steps", "tokens", "trained_tokens", "seconds")
MEASURED = {
    "sft": (*_OF_EVERY_STAGE, "style_score", "base_style_score", "answer_words", "base_answer_words"),
    "classify": (*_OF_EVERY_STAGE, "eval_accuracy", "base_eval_accuracy"),
}
"""What a gate may ask of each stage."""

Precision = Literal["auto", "fp32", "bf16", "fp16"]
Sharding = Literal["auto", "ddp", "fsdp"]
Scheduler = Literal["linear", "cosine", "constant", "constant_with_warmup", "warmup_stable_decay", "one_cycle"]


class Model(Frozen):
    """The model that is trained."""

    model_name_or_path: str
    """A folder, a hub id, or the embedded smollm2-135m-instruct; a folder is looked for first."""
    revision: str | None = None
    """Branch, tag or commit of a hub model; the commit it means is pinned in the run."""
    attn_implementation: Literal["auto", "sdpa", "eager", "flash_attention_2"] = "auto"
    """How attention is computed; auto is sdpa."""
    width: PositiveInt = 64
    """Channels of resnet18's first layers; 64 is the full model."""


class Data(Frozen):
    """What the model learns from, and what is held out to measure it."""

    dataset_name: str | None = None
    """An embedded set (field-guide), a file, a folder or a hub id."""
    dataset_config_name: str | None = None
    """Configuration of a hub data set."""
    train_file: str | None = None
    """A JSON, JSONL, CSV or Parquet file to train on, in place of dataset_name."""
    validation_file: str | None = None
    """A file of held-out rows; without it a share of the training rows is held out."""
    columns: dict[str, Literal["messages", "prompt", "completion", "system"]] = {}
    """Which column plays which part, such as {question: prompt, answer: completion}."""
    system_prompt: str | None = None
    """System message put before every conversation, in training and in asking."""
    split_by: str | None = None
    """Column whose equal values stay on one side of the split; without it, the prompt."""
    test_size: Steps = Steps("10%")
    """Rows held out, as a count or a share of the distinct split_by values."""
    max_rows: PositiveInt | None = None
    """Use only the first rows, for a quick try."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.dataset_name is None) == (self.train_file is None):
            found = "both dataset_name and train_file" if self.dataset_name else "neither dataset_name nor train_file"
            raise PydanticCustomError("one_source", "has {found}; it wants one of them", {"found": found})
        return self


class Batch(Frozen):
    """How rows become steps."""

    per_device_train_batch_size: PositiveInt = 8
    """Rows a device takes at once."""
    gradient_accumulation_steps: PositiveInt = 1
    """Times a device does so before the weights move."""
    global_batch_size: PositiveInt | None = None
    """Rows per step over all devices; accumulation is then solved for."""
    per_device_eval_batch_size: PositiveInt = 8
    """Rows a device takes at once when measuring."""


class Text(Frozen):
    """How conversations become tokens."""

    max_length: Annotated[int, Field(ge=8)] = 1024
    """Longest row in tokens; what is cut is counted and reported."""
    packing: bool = False
    """Put several short rows into one of max_length; they cannot see each other."""
    assistant_only_loss: bool = True
    """Learn the assistant's words only; false learns the prompts too."""


class Images(Frozen):
    """How images are shown to the model, and what is asked of it."""

    crop_padding: NonNegativeInt = 4
    """Pixels of black around a training image out of which a crop of its own size is taken."""
    horizontal_flip: bool = True
    """Mirror half of the training images."""
    label_smoothing_factor: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the target that is spread over all classes, in training only."""
    test_time_flip: bool = False
    """Judge held-out images by the mean over them and their mirror images."""


class Optimizer(Frozen):
    """How the weights move."""

    optim: Literal["adamw_torch", "sgd"] = "adamw_torch"
    """AdamW, or stochastic gradient descent with momentum."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Memory of sgd, in Nesterov's form."""
    learning_rate: PositiveFloat = 2e-5
    """Peak learning rate, reached after warm-up."""
    lr_scheduler_type: Scheduler = "cosine"
    """Shape of the learning rate over the run."""
    warmup_steps: Steps = Steps(0)
    """Length of the linear rise from zero."""
    decay_steps: Steps = Steps("20%")
    """Length of the final fall of warmup_stable_decay."""
    weight_decay: NonNegativeFloat = 0.0
    """Pull of matrices towards zero; vectors such as norms and biases are left alone."""
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Memory of the gradient."""
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """Memory of the squared gradient."""
    adam_epsilon: PositiveFloat = 1e-8
    """Keeps the division finite."""
    max_grad_norm: NonNegativeFloat = 1.0
    """Longer gradients are shortened to this; 0 leaves them."""


class Length(Frozen):
    """How long a stage trains, and what it keeps."""

    num_train_epochs: PositiveFloat = 1.0
    """Times the training rows are seen."""
    max_steps: PositiveInt | None = None
    """Stop after so many steps, whatever num_train_epochs says."""
    logging_steps: PositiveInt = 1
    """Steps between two records in the journal."""
    eval_steps: Steps | None = None
    """Steps between two measurements of held-out loss; without it, before the first and after the last step."""
    save_steps: Steps = Steps("25%")
    """Steps between two checkpoints."""
    save_total_limit: Annotated[int, Field(ge=2)] = 2
    """Checkpoints kept besides the best; at least 2, so that a damaged one has a good one behind it."""
    load_best_model_at_end: bool = True
    """Keep the best weights rather than the last ones."""
    metric_for_best_model: Literal["eval_loss"] = "eval_loss"
    """What makes weights the best: the lowest held-out loss."""


class Numerics(Frozen):
    """What the arithmetic is done in, and when it is not trusted."""

    precision: Precision = "auto"
    """fp32, bf16 or fp16 arithmetic over fp32 weights; auto: bf16 where it is fast, fp16 on older GPUs, else fp32."""
    sharding: Sharding = "auto"
    """How several devices share the work; auto is ddp."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, a quarter more time."""
    torch_compile: bool = False
    """Compile the layers: slower to start, faster to run on a GPU."""
    max_skipped_steps: NonNegativeInt = 3
    """Bad steps in a row that are skipped before the run goes back to its last checkpoint."""
    spike_factor: Annotated[float, Field(gt=1)] = 10.0
    """A gradient so many times its recent median, with a loss half as high again, is a bad step."""


class Trainable(Frozen):
    """Which weights move. Written as `all`, `lora`, or a mapping of these."""

    WANTS: ClassVar[str] = "all, lora, or a mapping such as {last_layers: 2, head: true}"

    last_layers: PositiveInt | None = None
    """Train only so many of the last transformer layers."""
    head: bool = False
    """Train the language-model head too."""
    norms: bool = False
    """Train every norm too."""
    untie_head: bool = False
    """Give a head that shares its weights with the embeddings its own copy."""
    lora: bool = False
    """Train small low-rank matrices beside the frozen weights (lora_r and friends)."""

    @model_validator(mode="before")
    @classmethod
    def _from_word(cls, value: Any) -> Any:
        words: dict[str, dict[str, bool]] = {"all": {}, "lora": {"lora": True}}
        if isinstance(value, str):
            if value not in words:
                raise PydanticCustomError("trainable", "it wants {wants}", {"wants": cls.WANTS})
            return words[value]
        return value

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if self.lora and (self.last_layers or self.head or self.norms):
            found = "has lora beside last_layers, head or norms; it wants one way or the other"
            raise PydanticCustomError("one_way", found)
        return self

    @property
    def partial(self) -> bool:
        """Whether named parts alone are trained."""
        return bool(self.last_layers or self.head or self.norms)


class Parts(Frozen):
    """Which weights move, and the low-rank matrices where those are asked for."""

    trainable: Trainable = Trainable()
    """Which weights move: all, lora, or a mapping such as {last_layers: 2, head: true}."""
    lora_r: PositiveInt = 16
    """Rank of the low-rank matrices."""
    lora_alpha: PositiveFloat = 32.0
    """Their scale, divided by the rank."""
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of their inputs dropped in training."""
    lora_target_modules: str | list[str] = "all-linear"
    """The layers they sit beside; all-linear is every linear layer but the head."""


class Training(Batch, Optimizer, Length, Numerics):
    """What every stage that moves weights may say."""


class Sft(Parts, Text, Training):
    """Supervised fine-tuning: the model learns to answer as the data answers."""


class Classify(Images, Training):
    """Image classification: the model learns which class an image shows."""

    metric_for_best_model: Literal["eval_loss", "eval_accuracy"] = "eval_accuracy"  # type: ignore[assignment]
    """What makes weights the best: the lowest held-out loss, or the highest accuracy."""


class Compare(Frozen):
    """The same questions answered before and after."""

    prompts: list[str] = []
    """Questions asked every time."""
    held_out_prompts: NonNegativeInt = 0
    """So many held-out questions asked as well."""
    max_new_tokens: PositiveInt = 128
    """Longest answer in tokens."""
    temperature: NonNegativeFloat = 0.0
    """0 takes the likeliest token each time, so that answers can be compared."""
    style: list[Regex] = []
    """Regular expressions of the voice; style_score is the mean share of them found in an answer."""


class Threshold(Frozen):
    """What a metric must be."""

    at_most: float | None = None
    """The metric may not be higher."""
    at_least: float | None = None
    """The metric may not be lower."""
    times: str | None = None
    """Name of another metric that the limits are multiples of, such as base_eval_loss."""

    @model_validator(mode="after")
    def _some_limit(self) -> Self:
        if self.at_most is None and self.at_least is None:
            raise PydanticCustomError("some_limit", "has no limit; it wants at_most or at_least")
        if self.at_most is not None and self.at_least is not None and self.at_least > self.at_most:
            limits = {"least": self.at_least, "most": self.at_most}
            found = "has at_least {least} above at_most {most}; nothing could pass"
            raise PydanticCustomError("empty_range", found, limits)
        return self


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
    data: Data
    """What it learns from."""
    sft: Sft | None = None
    """Supervised fine-tuning."""
    classify: Classify | None = None
    """Image classification."""
    compare: Compare = Compare()
    """Questions answered before and after."""
    gates: dict[Literal["sft", "classify"], dict[str, Threshold]] = {}
    """For each stage, what its metrics must be for the result to be promoted."""
    environment: dict[str, str] = {}
    """Environment variables that may set something, such as EPOCHS: sft.num_train_epochs."""

    @model_validator(mode="after")
    def _gates_have_stages(self) -> Self:
        if not self.stages:
            raise PydanticCustomError("no_stage", "has no stage; it wants a section sft or classify")
        if self.sft and self.classify:
            raise PydanticCustomError("two_kinds", "has both sft and classify; it wants text or images")
        for stage in self.gates:
            if stage not in self.stages:
                found = "has gates.{stage} but no section {stage}"
                raise PydanticCustomError("gate_without_stage", found, {"stage": stage})
        return self

    @property
    def stages(self) -> dict[str, Training]:
        """The training stages this recipe asks for, in order."""
        return {name: section for name in TRAINING_STAGES if (section := getattr(self, name)) is not None}

    def gate_of(self, stage: str) -> dict[str, Threshold]:
        """What is asked of a stage, by metric; nothing where it has no gate."""
        return next((asked for name, asked in self.gates.items() if name == stage), {})

    @property
    def run_dir(self) -> str:
        """Where the run lives."""
        return self.output_dir or f"runs/{self.name}"
