"""The schema of a recipe: every section and setting with its default and its description.

Names are those of Hugging Face ``TrainingArguments`` and TRL; ``fields`` maps the names of other tools."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from modelwright.recipe.sections import (
    ClusterConfig,
    CompareConfig,
    CountOrFraction,
    EvaluateConfig,
    Fraction,
    FrozenModel,
    LlamaArchitecture,
    PrepareConfig,
    Threshold,
)

PrecisionName = Literal["auto", "fp32", "bf16", "fp16", "fp8"]
StrategyName = Literal["auto", "ddp", "fsdp", "hsdp"]
CheckpointingMode = bool | Literal["selective"]
SchedulerName = Literal["linear", "cosine", "constant", "constant_with_warmup", "warmup_stable_decay", "one_cycle"]


class BatchConfig(FrozenModel):
    """How rows become steps."""

    per_device_train_batch_size: PositiveInt = 8
    """Micro-batch size per device."""
    gradient_accumulation_steps: PositiveInt = 1
    """Micro-batches per optimizer step."""
    global_batch_size: PositiveInt | None = None
    """Rows per step over all devices; accumulation is then solved for."""
    per_device_eval_batch_size: PositiveInt = 8
    """Micro-batch size per device in evaluation."""


class ChatConfig(FrozenModel):
    """How conversations become tokens."""

    max_length: Annotated[int, Field(ge=8)] = 1024
    """Longest row in tokens; what is cut is counted and reported."""
    packing: bool = False
    """Put several short rows into one of max_length; they cannot see each other."""
    packing_strategy: Literal["bfd", "bfd_split"] = "bfd"
    """What becomes of a row longer than max_length: bfd cuts it, bfd_split divides it; the best fit, longest first."""
    max_truncated_rows: CountOrFraction = CountOrFraction("100%")
    """Rows that may be cut, as a count or a share; more is an error before the first step."""
    assistant_only_loss: bool = True
    """Learn the assistant's words only; false learns the prompts too."""

    @model_validator(mode="after")
    def _split_needs_packing(self) -> Self:
        if self.packing_strategy == "bfd_split" and not self.packing:
            raise PydanticCustomError("packing", "has packing_strategy bfd_split; it wants packing: true beside it")
        return self


class PreferenceConfig(FrozenModel):
    """How pairs of answers become a loss."""

    beta: PositiveFloat = 0.1
    """DPO beta: higher stays closer to the reference."""
    loss_type: Literal["sigmoid", "ipo", "hinge"] = "sigmoid"
    """sigmoid is DPO's own loss; ipo aims at a margin rather than beyond it; hinge stops at one."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Share of pairs taken to be labelled the wrong way round, for sigmoid."""
    max_length: Annotated[int, Field(ge=8)] = 1024
    """Longest prompt with one answer in tokens; longer answers are cut at the end, then prompts at the start."""
    max_truncated_rows: CountOrFraction = CountOrFraction("10%")
    """Pairs that may be cut, as a count or a share; more is an error before the first step."""
    share_prompt: bool = True
    """Compute a prompt once for both of its answers, where the model's attention allows it."""

    @model_validator(mode="after")
    def _smoothing_is_for_sigmoid(self) -> Self:
        if self.label_smoothing and self.loss_type != "sigmoid":
            message = "has label_smoothing with loss_type {kind}; it applies to loss_type sigmoid only"
            raise PydanticCustomError("smoothing", message, {"kind": self.loss_type})
        return self


class AugmentationConfig(FrozenModel):
    """How images are shown to the model, and what is asked of it."""

    random_crop_padding: NonNegativeInt = 4
    """Pixels of black around a training image out of which a crop of its own size is taken."""
    horizontal_flip: bool = True
    """Mirror half of the training images."""
    cutout_size: NonNegativeInt = 0
    """Side of the square that is blanked in a training image, in pixels, at a place drawn anew each time; 0: none."""
    label_smoothing_factor: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the target that is spread over all classes, in training only."""
    test_time_flip: bool = False
    """Judge held-out images by the mean over them and their mirror images."""
    test_time_shift: NonNegativeInt = 0
    """Judge them also moved so many pixels up and left, and down and right; 0 leaves them where they are."""


class OptimizerConfig(FrozenModel):
    """How the weights move."""

    optim: Literal["adamw_torch", "sgd"] = "adamw_torch"
    """AdamW, or stochastic gradient descent with momentum."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Memory of sgd, in Nesterov's form."""
    learning_rate: PositiveFloat = 2e-5
    """Peak learning rate, reached after warm-up."""
    scale_lr_by_world_size: bool = False
    """Multiply learning_rate by the number of devices that the batch was made for; the plan prints the product."""
    lr_scheduler_type: SchedulerName = "cosine"
    """Shape of the learning rate over the run."""
    warmup_steps: CountOrFraction = CountOrFraction(0)
    """Length of the linear rise from zero."""
    decay_steps: CountOrFraction = CountOrFraction("20%")
    """Length of the final fall of warmup_stable_decay."""
    weight_decay: NonNegativeFloat = 0.0
    """Weight decay of matrices; norms and biases are excluded."""
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """AdamW beta1."""
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """AdamW beta2."""
    exp_avg_dtype: Literal["fp32", "bf16"] = "fp32"
    """What AdamW keeps the mean of the gradients in beside bf16 weights; bf16 saves two bytes a weight."""
    adam_epsilon: PositiveFloat = 1e-8
    """AdamW epsilon."""
    ema_decay: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Decay of the exponential moving average of the weights, which is evaluated and saved; 0: off."""
    max_grad_norm: NonNegativeFloat = 1.0
    """Maximum gradient norm (clipping); 0 disables it."""


class DurationConfig(FrozenModel):
    """How long a stage trains, and what it keeps."""

    num_train_epochs: PositiveFloat = 1.0
    """Times the training rows are seen."""
    max_steps: PositiveInt | None = None
    """Stop after so many steps, whatever num_train_epochs says."""
    logging_steps: PositiveInt = 1
    """Steps between two records in the journal."""
    eval_steps: CountOrFraction | None = None
    """Steps between two measurements of held-out loss; without it, before the first and after the last step."""
    save_steps: CountOrFraction = CountOrFraction("25%")
    """Steps between two checkpoints."""
    resume_from_checkpoint: bool | str | None = None
    """A checkpoint folder to begin from in a new run; a run resumes from its own by itself, whatever this says."""
    save_total_limit: Annotated[int, Field(ge=2)] = 2
    """Checkpoints kept besides the best; at least 2, so that a damaged one has a good one behind it."""
    async_save: Literal["auto", "always", "never"] = "auto"
    """Train on while a checkpoint is written from a copy, where memory holds one; auto: on a GPU."""
    load_best_model_at_end: bool = True
    """Keep the best weights rather than the last ones."""
    metric_for_best_model: Literal["eval_loss"] = "eval_loss"
    """What makes weights the best: the lowest held-out loss."""


class PrecisionConfig(FrozenModel):
    """What the arithmetic is done in, and when it is not trusted."""

    precision: PrecisionName = "auto"
    """What is computed in: fp32, bf16, fp16, or fp8 in the linear layers; auto: bf16 where fast, fp16 on older GPUs."""
    tf32: bool | Literal["auto"] = "auto"
    """With precision fp32 on a GPU: multiply on the tensor cores, with 10 of 23 bits; auto: where there are any."""
    fp8_validation: Literal["auto", "off"] = "auto"
    """Try fp8 against bf16 before the first step, and keep it where it is 5 % faster and as exact; off: take it."""
    fp8_scaling: Literal["auto", "tensorwise", "rowwise"] = "auto"
    """What shares a scale in fp8: a matrix, or a row of it, which is closer and slower; auto: rows for DPO."""
    param_dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """What weights are kept in: fp32, or bf16 with the lost bits beside the optimizer (exact fp32 masters, faster)."""
    distributed_strategy: StrategyName = "auto"
    """How devices share it: ddp copies the model, fsdp splits it, hsdp splits it in each node; auto: ddp if it fits."""
    ddp_bucket_cap_mb: PositiveInt = 25
    """Megabytes of gradients that ddp exchanges at once."""
    gradient_checkpointing: CheckpointingMode = False
    """Recompute activations: true all of them, a quarter more time; selective all but products and attention."""
    torch_compile: bool = False
    """Compile the layers: slower to start, faster to run on a GPU."""
    cuda_graphs: Literal["auto", "always", "never"] = "auto"
    """Record steps of one shape and replay them, on one GPU; auto: below two billion weights, where the host lags."""
    profile_memory: bool = False
    """Watch the third step's memory by component: into memory_profile.json of the stage, and as a picture into the report."""
    max_skipped_steps: NonNegativeInt = 3
    """Bad steps in a row that are skipped before the run goes back to its last checkpoint."""
    spike_factor: Annotated[float, Field(gt=1)] = 10.0
    """A gradient so many times its recent median, with a loss half as high again, is a bad step (of hard rows once)."""


class TrainableParts(FrozenModel):
    """Which parameters are trainable. Written as `all`, `lora`, or a mapping of these."""

    EXPECTED: ClassVar[str] = "all, lora, or a mapping such as {last_layers: 2, lm_head: true}"

    last_layers: PositiveInt | None = None
    """Train only so many of the last transformer layers."""
    lm_head: bool = False
    """Train the language-model head too."""
    norms: bool = False
    """Train every norm too."""
    untie_lm_head: bool = False
    """Give a head that shares its weights with the embeddings its own copy."""
    lora: bool = False
    """Train small low-rank matrices beside the frozen weights (lora_r and friends)."""

    @model_validator(mode="before")
    @classmethod
    def _expand_shorthand(cls, value: Any) -> Any:
        shorthands: dict[str, dict[str, bool]] = {"all": {}, "lora": {"lora": True}}
        if isinstance(value, str):
            if value not in shorthands:
                raise PydanticCustomError("trainable", "it wants {wants}", {"wants": cls.EXPECTED})
            return shorthands[value]
        return value

    @model_validator(mode="after")
    def _lora_excludes_parts(self) -> Self:
        if self.lora and (self.last_layers or self.lm_head or self.norms):
            message = "has lora, which cannot be combined with last_layers, lm_head or norms"
            raise PydanticCustomError("one_way", message)
        return self

    @property
    def is_partial(self) -> bool:
        """Whether named parts alone are trained."""
        return bool(self.last_layers or self.lm_head or self.norms)


class TrainableConfig(FrozenModel):
    """Which parameters are trainable, and the low-rank matrices where those are asked for."""

    trainable: TrainableParts = TrainableParts()
    """Which parameters are trainable: all, lora, or a mapping such as {last_layers: 2, lm_head: true}."""
    lora_r: PositiveInt = 16
    """Rank of the low-rank matrices."""
    lora_alpha: PositiveFloat = 32.0
    """Their scale, divided by the rank."""
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of their inputs dropped in training."""
    lora_target_modules: str | list[str] = "all-linear"
    """The layers they sit beside; all-linear is every linear layer but the head."""
    use_dora: bool = False
    """Let each of them also learn the size of the weights it sits beside (DoRA)."""
    use_rslora: bool = False
    """Divide their scale by the square root of the rank, which keeps high ranks stable."""
    quantization: Literal["none", "nf4", "int8"] = "none"
    """Hold the frozen weights beside them in 4 or 8 bits (QLoRA); wants bitsandbytes."""

    LORA_KEYS: ClassVar[tuple[str, ...]] = (
        *("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "use_dora", "use_rslora", "quantization"),
    )

    @model_validator(mode="after")
    def _lora_keys_need_lora(self) -> Self:
        off = (False, "none")
        lora_keys = [
            name for name in self.LORA_KEYS if name in self.model_fields_set and getattr(self, name) not in off
        ]
        if lora_keys and not self.trainable.lora:
            message = "has {name}, but trains no low-rank matrices; it wants trainable: lora beside it"
            raise PydanticCustomError("no_lora", message, {"name": lora_keys[0]})
        return self


class ReuseConfig(FrozenModel):
    """Work that need not be done twice; what is learnt stays the same."""

    cache_frozen_layers: Literal["auto", "memory", "disk", "off"] = "auto"
    """Compute frozen layers at the bottom once and keep what they say: in memory, or on disk where that is short."""
    share_prefix: bool = True
    """Compute the tokens that all rows begin with, such as a system prompt, once for many rows."""


class TrainingConfig(BatchConfig, OptimizerConfig, DurationConfig, PrecisionConfig):
    """What every stage that moves weights may say."""


TRAINING_STAGES = ("pretrain", "sft", "dpo", "lora", "classify")
"""The stages that move weights, in the order they happen: each starts from the model of the one before it."""
StageName = Literal["sft", "pretrain", "dpo", "lora", "classify"]
NAME_PATTERN = r"^[a-z0-9][a-z0-9._-]*$"
ColumnRole = Literal["messages", "prompt", "completion", "system", "context", "chosen", "rejected"]
"""What a column may be: context stands below the prompt, chosen and rejected are the answers of a pair."""
COMMON_METRICS = ("eval_loss", "base_eval_loss", "steps", "tokens", "trained_tokens", "seconds")
ANSWER_METRICS = (
    *("style_score", "base_style_score", "answer_words", "base_answer_words"),
    *("answer_f1", "base_answer_f1"),
)
PAIR_METRICS = (
    *("eval_reward_accuracy", "eval_reward_margin", "eval_chosen_logp", "eval_rejected_logp", "eval_kl"),
    "eval_sft_loss",
)
STAGE_METRICS = {
    "pretrain": (*COMMON_METRICS, "eval_bits_per_byte", "base_eval_bits_per_byte"),
    "sft": (*COMMON_METRICS, *ANSWER_METRICS),
    "dpo": (*COMMON_METRICS, *PAIR_METRICS, *(f"base_{name}" for name in PAIR_METRICS), *ANSWER_METRICS),
    "lora": (*COMMON_METRICS, *ANSWER_METRICS),
    "classify": (*COMMON_METRICS, "eval_accuracy", "base_eval_accuracy"),
}
"""What a gate may ask of each stage; with parent_ before it, what the stage before it measured in the end."""


class ModelConfig(FrozenModel):
    """The model that is trained: one that exists, or an architecture made from scratch."""

    model_name_or_path: str | None = None
    """A folder, a hub id, or the embedded smollm2-135m-instruct; a folder is looked for first."""
    architecture: LlamaArchitecture | None = None
    """Sizes of a model that is made from scratch, in place of model_name_or_path."""
    tokenizer_name_or_path: str | None = None
    """Folder of the tokenizer for an architecture; without it, the one that prepare trains."""
    revision: str | None = None
    """Branch, tag or commit of a hub model; the commit it means is pinned in the run."""
    attn_implementation: Literal["auto", "sdpa", "eager", "flash_attention_2", "flex_attention"] = "auto"
    """How attention is computed; auto is sdpa."""
    resnet_width: PositiveInt = 64
    """Channels of resnet18's first layers; 64 is the full model."""

    @model_validator(mode="after")
    def _one_model(self) -> Self:
        if (self.model_name_or_path is None) == (self.architecture is None):
            template = "both {0} and {1}" if self.architecture else "neither {0} nor {1}"
            conflict = template.format("model_name_or_path", "architecture")
            raise PydanticCustomError("one_model", "has {found}; set exactly one of them", {"found": conflict})
        return self

    @property
    def display_name(self) -> str:
        """Its name in messages."""
        return self.model_name_or_path or "a model from scratch"


class DataConfig(FrozenModel):
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
    columns: dict[str, ColumnRole] = {}
    """Which column plays which part, such as {question: prompt, answer: completion}."""
    derived_columns: dict[str, str] = {}
    """Columns made of others where they are not there yet, such as {full-question: "For {topic}, {question}"}."""
    generate_qa: Literal["songs"] | None = None
    """Make questions and answers for rows that have none: songs, from the columns lyrics and artist."""
    text_column: str = "text"
    """Column that holds the documents of raw text."""
    system_prompt: str | None = None
    """System message put before every conversation, in training and in asking."""
    split_by: str | None = None
    """Column whose equal values stay on one side of the split; without it, the prompt."""
    test_size: CountOrFraction = CountOrFraction("10%")
    """Rows held out, as a count or a share of the distinct split_by values."""
    max_rows: PositiveInt | None = None
    """Use only the first rows, for a quick try."""
    max_invalid_fraction: Fraction = 0.0
    """Largest share of rows that may be unusable; they are set aside in quarantine.jsonl, 0 refuses any."""
    mix: dict[str, PositiveFloat] = {}
    """Several sources of raw text with their weights, such as {wiki.jsonl: 2, python-docs: 1}, for prepare."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        named = [key for key in ("dataset_name", "train_file", "mix") if getattr(self, key)]
        if len(named) != 1:
            conflict = "both " + " and ".join(named) if named else "neither dataset_name nor train_file"
            raise PydanticCustomError("one_source", "has {found}; set exactly one of them", {"found": conflict})
        return self

    @property
    def source(self) -> str:
        """Where the rows come from."""
        return self.dataset_name or self.train_file or " and ".join(self.mix)


class StageConfig(TrainingConfig):
    """What every training stage of a recipe may say."""

    data: DataConfig | None = None
    """Data of this stage alone; without it, the recipe's data."""


class PretrainConfig(TrainableConfig, StageConfig):
    """Pretraining: the model learns to go on with any text."""

    max_length: Annotated[int, Field(ge=8)] = 2048
    """Tokens in a row."""
    sequence_length_curriculum: dict[PositiveInt, CountOrFraction] = {}
    """Shorter rows first, as {512: 10%, 1024: 20%}: steps at each length, or their share; a step keeps its tokens."""

    @model_validator(mode="after")
    def _lengths_grow(self) -> Self:
        lengths = [*self.sequence_length_curriculum, self.max_length]
        for shorter, longer in pairwise(lengths):
            if shorter >= longer:
                message = "has a curriculum from {shorter} to {longer}; its lengths want to grow up to max_length"
                raise PydanticCustomError("curriculum", message, {"shorter": shorter, "longer": longer})
            if self.max_length % shorter:
                message = "has a curriculum of {shorter}, which does not divide max_length {longest}"
                raise PydanticCustomError("curriculum", message, {"shorter": shorter, "longest": self.max_length})
        return self

    def sequence_length_at(self, step: int, steps: int) -> int:
        """Tokens in a row at a step, counted from 0, of so many."""
        end = 0
        for length, part in self.sequence_length_curriculum.items():
            end += part.resolve(steps)
            if step < end:
                return length
        return self.max_length


class SftConfig(TrainableConfig, ReuseConfig, ChatConfig, StageConfig):
    """Supervised fine-tuning: the model learns to answer as the data answers."""


class DpoConfig(TrainableConfig, PreferenceConfig, StageConfig):
    """Direct preference optimisation: the model learns which of two answers is the better one."""

    learning_rate: PositiveFloat = 1e-6
    """Peak learning rate, reached after warm-up; far lower than for fine-tuning."""
    metric_for_best_model: Literal["eval_loss", "eval_reward_accuracy"] = "eval_loss"  # type: ignore[assignment]
    """What makes weights the best: the lowest held-out loss, or the highest share of pairs told apart."""


class LoraStageConfig(SftConfig):
    """Adaptation: fine-tuning of small low-rank matrices beside the frozen weights."""

    trainable: TrainableParts = TrainableParts(lora=True)
    """Which parameters are trainable: all, lora, or a mapping such as {last_layers: 2, lm_head: true}."""


class ClassifyConfig(AugmentationConfig, StageConfig):
    """Image classification: the model learns which class an image shows."""

    metric_for_best_model: Literal["eval_loss", "eval_accuracy"] = "eval_accuracy"  # type: ignore[assignment]
    """What makes weights the best: the lowest held-out loss, or the highest accuracy."""
    param_dtype: Literal["fp32"] = "fp32"
    """What weights are kept in: fp32, which batch norms want."""
    gradient_checkpointing: CheckpointingMode = False
    """Changes nothing for images, which are trained with all activations kept; the plan says so."""


class Recipe(FrozenModel):
    """One file that becomes a trained model."""

    name: Annotated[str, Field(pattern=NAME_PATTERN, max_length=63)]
    """A short name in lower case, digits, dots and dashes; also the default run folder."""
    description: str = ""
    """One line for the list of recipes."""
    output_dir: str | None = None
    """The run folder; without it, runs/NAME."""
    seed: NonNegativeInt = 42
    """Decides the order of data, the split, and every random number."""
    model: ModelConfig
    """The model that is trained."""
    data: DataConfig | None = None
    """What it learns from, in every stage that has no data of its own."""
    sft: SftConfig | None = None
    """Supervised fine-tuning."""
    pretrain: PretrainConfig | None = None
    """Pretraining on text, before sft."""
    dpo: DpoConfig | None = None
    """Preference tuning, after sft."""
    lora: LoraStageConfig | None = None
    """Adaptation by low-rank matrices, last."""
    classify: ClassifyConfig | None = None
    """Image classification."""
    prepare: PrepareConfig | None = None
    """From raw text to packed shards, before pretrain."""
    compare: CompareConfig = CompareConfig()
    """Questions answered before and after."""
    evaluate: EvaluateConfig | None = None
    """Measurements of every stage's model in the same way."""
    gates: dict[StageName, dict[str, Threshold]] = {}
    """For each stage, what its metrics must be for the result to be promoted."""
    gates_file: str | None = None
    """A file of gates beside the recipe, such as configs/promotion_gates.yaml; the recipe's own gates come on top."""
    cluster: ClusterConfig | None = None
    """What launch --on openshift asks of the cluster."""
    report_to: list[Literal["tensorboard", "mlflow", "wandb", "trackio"]] = ["tensorboard"]
    """Trackers that are told the numbers, as a word or a list; none for none. One that fails never stops a run."""
    env_overrides: dict[str, str] = {}
    """Environment variables that may set something, such as EPOCHS: sft.num_train_epochs."""

    @field_validator("report_to", mode="before")
    @classmethod
    def _expand_shorthand(cls, value: object) -> object:
        return ([] if value == "none" else [value]) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _stages_fit(self) -> Self:
        if not self.stages and self.prepare is None:
            raise PydanticCustomError(
                "no_stage", "has no stage; it wants a section sft, pretrain, dpo, lora or classify"
            )
        if self.classify and len(self.stages) > 1:
            other = next(stage for stage in self.stages if stage != "classify")
            message = "has both {other} and classify; it wants text or images"
            raise PydanticCustomError("two_kinds", message, {"other": other})
        if self.prepare and self.data is None and (self.pretrain is None or self.pretrain.data is None):
            raise PydanticCustomError("no_data", "has no data for prepare; it wants a section data")
        for stage, section in self.stages.items():
            if self.data is None and section.data is None:
                message = "has no data for {stage}; it wants a section data"
                raise PydanticCustomError("no_data", message, {"stage": stage})
        for stage in self.gates:
            if stage not in self.stages:
                message = "has gates.{stage} but no section {stage}"
                raise PydanticCustomError("gate_without_stage", message, {"stage": stage})
        return self

    @property
    def stages(self) -> dict[str, StageConfig]:
        """The training stages this recipe asks for, in order."""
        return {name: section for name in TRAINING_STAGES if (section := getattr(self, name)) is not None}

    def data_for(self, stage: str) -> DataConfig:
        """What a stage learns from: its own data, or the recipe's."""
        data = self.stages[stage].data or self.data
        assert data is not None
        return data

    @property
    def pipeline(self) -> tuple[str, ...]:
        """Every stage that happens, in order: the training stages, and what stands around them."""
        before = (("prepare", self.prepare), ("init", self.model.architecture))
        after = ("evaluate",) if self.evaluate else ()
        return (*(name for name, section in before if section), *self.stages, *after)

    @property
    def prepare_data(self) -> DataConfig:
        """What prepare works on: the data of pretrain, or the recipe's."""
        data = (self.pretrain.data if self.pretrain else None) or self.data
        assert data is not None
        return data

    def parent_stage(self, stage: str) -> str | None:
        """The stage whose model a stage starts from; None where it starts from the recipe's model."""
        names = [*(("init",) if self.model.architecture else ()), *self.stages]
        index = names.index(stage)
        return names[index - 1] if index else None

    def gate_metrics(self, stage: str) -> tuple[str, ...]:
        """What a gate may ask of a stage."""
        parent = self.parent_stage(stage)
        evaluate_metrics = self.evaluate.metric_names if self.evaluate else ()
        parent_metrics = (*STAGE_METRICS[parent], *evaluate_metrics) if parent in STAGE_METRICS else ()
        own = (*STAGE_METRICS[stage], *evaluate_metrics, *(f"base_{metric}" for metric in evaluate_metrics))
        return (*own, *(f"parent_{metric}" for metric in parent_metrics))

    def gate_for(self, stage: str) -> dict[str, Threshold]:
        """What is asked of a stage, by metric; nothing where it has no gate."""
        return next((thresholds for name, thresholds in self.gates.items() if name == stage), {})

    @property
    def run_dir(self) -> str:
        """Where the run lives."""
        return self.output_dir or f"runs/{self.name}"
