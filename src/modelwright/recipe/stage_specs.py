"""The training stages: the settings of each, and in `STAGES` what the rest of the program asks about it.

A new stage needs a settings class and an entry of `STAGES` here, a field of `Recipe`, a task and a builder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from modelwright.errors import ModelError
from modelwright.recipe.sections import CountOrFraction, DataConfig, FrozenModel, invalid

CheckpointingMode = bool | Literal["selective"]
Switch = bool | Literal["auto"]
PreferenceLoss = Literal["sigmoid", "ipo", "hinge"]
ANSWER_METRIC_PATTERN = r"^answers\.[a-z][a-z0-9_]*$"
AnswerMetric = Annotated[str, Field(pattern=ANSWER_METRIC_PATTERN)]
"""A metric of evaluate.answers."""
SchedulerName = Literal["linear", "cosine", "constant", "constant_with_warmup", "warmup_stable_decay", "one_cycle"]


@dataclass(frozen=True)
class RowStats:
    """What is known of a stage's rows."""

    count: int | None
    """Training rows in an epoch; None if they were not counted."""
    max_length: int
    """Tokens in the longest row, cut to max_length; 1 for images."""
    mean_length: float
    """Mean tokens per row."""
    trained_fraction: float = 1.0
    """Fraction of tokens that are trained on."""
    basis: str = ""
    """Where these numbers come from."""
    device_bytes: int = 0
    """Bytes of the data set that stay on the device."""
    lengths: tuple[int, ...] = ()
    """Tokens of each row, or of a sample of them; empty: all rows are of max_length."""
    prefix_length: int = 0
    """Tokens that all rows begin with and that a batch computes once."""


class BatchConfig(FrozenModel):
    """Batch sizes."""

    per_device_train_batch_size: PositiveInt = 8
    """Micro-batch size per device; larger where that keeps a GPU busy."""
    gradient_accumulation_steps: PositiveInt = 1
    """Micro-batches per optimizer step."""
    global_batch_size: PositiveInt | None = None
    """Rows per optimizer step over all devices; gradient_accumulation_steps is then computed."""
    per_device_eval_batch_size: PositiveInt | Literal["auto"] = "auto"
    """Micro-batch size per device in evaluation; auto: 8, or as many as keep a GPU busy."""


class ChatConfig(FrozenModel):
    """Tokenization of conversations."""

    max_length: Annotated[int, Field(ge=8)] = 1024
    """Maximum sequence length in tokens; truncated rows are counted and reported."""
    packing: bool = False
    """Pack several short rows into one of max_length, without attention between them."""
    packing_strategy: Literal["bfd", "bfd_split"] = "bfd"
    """Best-fit decreasing packing; a row longer than max_length is truncated by bfd and split by bfd_split."""
    max_truncated_rows: CountOrFraction = CountOrFraction("100%")
    """Rows that may be truncated; more is an error before the first step."""
    padding_free: Switch = "auto"
    """Lay the rows of a micro-batch end to end, without padding; auto: on a GPU."""
    assistant_only_loss: bool = True
    """Compute the loss on the answers only; false includes the prompts."""

    @model_validator(mode="after")
    def _split_needs_packing(self) -> Self:
        if self.packing_strategy == "bfd_split" and not self.packing:
            raise invalid("has packing_strategy bfd_split, which needs packing: true")
        return self


class PreferenceConfig(FrozenModel):
    """The loss of preference pairs."""

    beta: PositiveFloat = 0.1
    """DPO beta: higher stays closer to the reference."""
    loss_type: PreferenceLoss = "sigmoid"
    """sigmoid is the loss of the DPO paper, ipo that of IPO, hinge that of SLiC."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Assumed fraction of pairs with swapped labels (conservative DPO), for sigmoid."""

    @model_validator(mode="after")
    def _smoothing_is_for_sigmoid(self) -> Self:
        if self.label_smoothing and self.loss_type != "sigmoid":
            raise invalid(f"has label_smoothing with loss_type {self.loss_type}; it applies to loss_type sigmoid only")
        return self


class AugmentationConfig(FrozenModel):
    """Image augmentation, label smoothing and test-time augmentation."""

    random_crop_padding: NonNegativeInt = 4
    """Zero padding in pixels before the random crop of a training image."""
    horizontal_flip: bool = True
    """Mirror training images with probability 0.5."""
    cutout_size: NonNegativeInt = 0
    """Side in pixels of the square that cutout blanks in a training image; 0: off."""
    label_smoothing_factor: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Label smoothing of the training loss."""
    test_time_flip: bool = False
    """Test-time augmentation: average the predictions for an image and its mirror image."""
    test_time_shift: NonNegativeInt = 0
    """Test-time augmentation: also average over shifts by so many pixels up-left and down-right; 0: off."""


Decay = Annotated[float, Field(ge=0, lt=1)]
OptimizerName = Literal["adamw_torch", "sgd", "lion"]


class OptimizerSpec(NamedTuple):
    """What recipe, planner and converters know of an optimizer; engine/optimizer.py builds it."""

    state: tuple[str, ...]
    """State of a trained parameter: tensors of its shape, in fp32."""
    step_traffic: int
    """Bytes that a step moves per fp32 parameter, with the gradient norm."""
    settings: tuple[str, ...]
    """Those of the settings that not every optimizer reads which this one reads."""
    aliases: tuple[str, ...] = ()
    """Its names in other tools."""
    foreign_defaults: dict[str, dict[str, float]] = {}
    """Settings with another default in other tools, by a part of its name there."""
    beta2: float = 0.999
    """Default of adam_beta2."""
    high_learning_rate: float = 0.02
    """Learning rate above which training nearly always diverges: several times what published trainings use."""
    bf16_params: bool = False
    """Whether it can train bf16 parameters with remainders (exact fp32 masters)."""


OPTIMIZERS: dict[OptimizerName, OptimizerSpec] = {
    "adamw_torch": OptimizerSpec(
        ("exp_avg", "exp_avg_sq"), 36, ("adam_beta1", "adam_beta2", "adam_epsilon", "exp_avg_dtype"),
        ("adamw", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused"), bf16_params=True),
    "sgd": OptimizerSpec(("momentum_buffer",), 28, ("momentum",), foreign_defaults={"sgd": {"momentum": 0}},
                         high_learning_rate=5.0),
    "lion": OptimizerSpec(("exp_avg",), 68, ("adam_beta1", "adam_beta2"), ("lion_32bit", "lion_pytorch"),
                          {"bit": {"adam_beta2": 0.999}}, beta2=0.99, high_learning_rate=0.005),
}  # fmt: skip


class OptimizerConfig(FrozenModel):
    """Optimizer and learning-rate schedule."""

    optim: OptimizerName = "adamw_torch"
    """AdamW, SGD with momentum, or Lion (half of AdamW's state, a lower learning rate)."""
    momentum: Decay = 0.9
    """Nesterov momentum of sgd."""
    learning_rate: PositiveFloat = 2e-5
    """Peak learning rate, reached after warm-up."""
    scale_lr_by_world_size: bool = False
    """Multiply learning_rate by the number of devices; the plan prints the product."""
    lr_scheduler_type: SchedulerName = "cosine"
    """Learning-rate schedule."""
    warmup_steps: CountOrFraction = CountOrFraction(0)
    """Length of the linear warm-up from zero."""
    decay_steps: CountOrFraction = CountOrFraction("20%")
    """Length of the final decay of warmup_stable_decay."""
    weight_decay: NonNegativeFloat = 0.0
    """Weight decay of matrices; norms and biases are excluded."""
    adam_beta1: Decay = 0.9
    """Beta1 of AdamW and Lion."""
    adam_beta2: Decay = Field(default_factory=lambda data: OPTIMIZERS[data.get("optim", "adamw_torch")].beta2)
    """Beta2 of AdamW and Lion; its default is 0.999 with adamw_torch and 0.99 with lion."""
    exp_avg_dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype of AdamW's first moment where parameters are stored in bf16; bf16 saves two bytes per parameter."""
    adam_epsilon: PositiveFloat = 1e-8
    """AdamW epsilon."""
    ema_decay: Decay = 0.0
    """Decay of the moving average of the weights that is evaluated and saved, at most n/(n + 9) in step n; 0: off."""
    max_grad_norm: NonNegativeFloat = 1.0
    """Maximum gradient norm (clipping); 0 disables it."""

    def ignored_settings(self) -> list[str]:
        """Settings that differ from their defaults although only other optimizers read them."""
        default, own = OptimizerConfig(optim=self.optim), OPTIMIZERS[self.optim].settings
        others = {name for spec in OPTIMIZERS.values() for name in spec.settings if name not in own}
        return sorted(name for name in others if getattr(self, name) != getattr(default, name))

    def optimizer_bytes(self, param_dtype: str) -> tuple[int, int]:
        """Bytes per trained parameter: of the optimizer state, with the remainder of bf16, and moved in a step."""
        spec, is_bf16 = OPTIMIZERS[self.optim], param_dtype == "bf16"
        saved = 2 * (is_bf16 and self.exp_avg_dtype == "bf16")
        return 4 * len(spec.state) + 2 * is_bf16 - saved, spec.step_traffic - 8 * is_bf16 - 2 * saved


class DurationConfig(FrozenModel):
    """Length of the training, evaluation and checkpoints."""

    num_train_epochs: PositiveFloat = 1.0
    """Number of training epochs."""
    max_steps: PositiveInt | None = None
    """Maximum number of optimizer steps; takes precedence over num_train_epochs."""
    logging_steps: PositiveInt = 1
    """Steps between two log entries in the journal."""
    eval_steps: CountOrFraction | None = None
    """Steps between two evaluations; without it, before the first and after the last step."""
    max_eval_samples: PositiveInt | None = None
    """Held-out rows per evaluation; without it, those of 5% of the tokens trained between two, and at least 256."""
    save_steps: CountOrFraction = CountOrFraction("25%")
    """Steps between two checkpoints; a share of the run is saved later where the one before is still being written."""
    resume_from_checkpoint: bool | str | None = None
    """A checkpoint folder to start a new run from; an existing run resumes from its own."""
    save_total_limit: Annotated[int, Field(ge=2)] = 2
    """Checkpoints kept besides the best; at least 2, in case the last one is damaged."""
    async_save: Literal["auto", "always", "never"] = "auto"
    """Write checkpoints in the background, from a copy in memory; auto: on a GPU, if memory allows."""
    load_best_model_at_end: bool = True
    """Keep the best weights instead of the last ones."""
    metric_for_best_model: Literal["eval_loss"] | AnswerMetric = "eval_loss"
    """Metric that selects the best weights: the lowest held-out loss, or the highest score of judged answers."""
    early_stopping_patience: PositiveInt | None = None
    """Stop after so many evaluations (eval_steps) in a row that do not improve metric_for_best_model."""
    early_stopping_threshold: NonNegativeFloat | None = None
    """Smallest change that counts as an improvement for early stopping; without it, any does."""


class PrecisionConfig(FrozenModel):
    """Precision, distribution, activation checkpointing, compilation and the spike guard."""

    precision: Literal["auto", "fp32", "bf16", "fp16", "fp8"] = "auto"
    """Compute precision; fp8 in the linear layers only; auto: bf16 where fast, fp16 on older GPUs, and fp8 for
    pretraining where the GPU has it and the run finds it faster and as accurate."""
    tf32: bool | Literal["auto"] = "auto"
    """With precision fp32 on a GPU: use TF32 tensor cores (10 of 23 mantissa bits); auto: where available."""
    deterministic: bool = True
    """Deterministic kernels: the same command gives the same bits; false: faster ones on a GPU."""
    fp8_validation: Literal["auto", "off"] = "auto"
    """Use fp8 only if a trial finds it 5 % faster than bf16 and as accurate; off: no trial."""
    fp8_scaling: Literal["auto", "tensorwise", "rowwise"] = "auto"
    """fp8 scales per tensor, or per row (more accurate, slower); auto: rowwise for DPO."""
    param_dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """Storage dtype of parameters: fp32, or bf16 with remainders in the optimizer (exact fp32 masters, faster)."""
    distributed_strategy: Literal["auto", "ddp", "fsdp", "hsdp"] = "auto"
    """Data parallelism: ddp replicates the model, fsdp shards it, hsdp shards it per node; auto: ddp if it fits."""
    ddp_bucket_cap_mb: PositiveInt = 25
    """Bucket size of the DDP gradient all-reduce in megabytes."""
    gradient_checkpointing: CheckpointingMode | Literal["auto"] = "auto"
    """Activation checkpointing: true recomputes all, selective all but matmuls and attention; auto: if memory asks."""
    torch_compile: Switch = "auto"
    """Compile the layers: slower start, faster steps; auto: on a GPU if steps save half of what it takes."""
    cuda_graphs: Literal["auto", "always", "never"] = "auto"
    """Replay steps of one shape as CUDA graphs, on one GPU; auto: below four billion trained parameters."""
    profile_memory: bool = False
    """Profile the memory of the third step by component, for the report."""
    max_skipped_steps: NonNegativeInt = 3
    """Consecutive bad steps that are skipped before the run returns to its last checkpoint."""
    spike_factor: Annotated[float, Field(gt=1)] = 10.0
    """A step is bad if its gradient norm is so many times the recent median and its loss 1.5 times as high."""


class TrainableParts(FrozenModel):
    """Which parameters are trainable. Written as `all`, `lora`, or a mapping of these."""

    EXPECTED: ClassVar[str] = "all, lora, or a mapping such as {last_layers: 2, lm_head: true}"

    last_layers: PositiveInt | None = None
    """Train only the last so many transformer layers."""
    lm_head: bool = False
    """Train the language-model head too."""
    norms: bool = False
    """Train every norm too."""
    untie_lm_head: bool = False
    """Give an LM head that is tied to the embeddings its own copy."""
    lora: bool = False
    """Train LoRA adapters, with all other parameters frozen (lora_r, lora_alpha, ...)."""

    @model_validator(mode="before")
    @classmethod
    def _expand_shorthand(cls, value: Any) -> Any:
        shorthands: dict[str, dict[str, bool]] = {"all": {}, "lora": {"lora": True}}
        if isinstance(value, str):
            if value not in shorthands:
                raise invalid(f"it wants {cls.EXPECTED}")
            return shorthands[value]
        return value

    @model_validator(mode="after")
    def _lora_excludes_parts(self) -> Self:
        if self.lora and (self.last_layers or self.lm_head or self.norms):
            raise invalid("has lora, which cannot be combined with last_layers, lm_head or norms")
        return self

    @property
    def is_partial(self) -> bool:
        """Whether only some parts are trained, without LoRA."""
        return bool(self.last_layers or self.lm_head or self.norms)


def matching_paths(named: Iterable[tuple[str, Any]], name: str) -> list[str]:
    """Paths of modules or weights that end with a name of lora_target_modules."""
    return [path for path, _ in named if f".{path}".endswith(f".{name}")]


class TrainableConfig(FrozenModel):
    """Which parameters are trainable, the settings of LoRA, and the router loss of a mixture of experts."""

    router_aux_loss_coef: NonNegativeFloat | None = None
    """Coefficient of a mixture of experts' load-balancing loss; without it, that of the model's config."""

    trainable: TrainableParts = TrainableParts()
    """Which parameters are trainable: all, lora, or a mapping such as {last_layers: 2, lm_head: true}."""
    lora_r: PositiveInt = 16
    """LoRA rank."""
    lora_alpha: PositiveFloat = 32.0
    """LoRA alpha: the scale is alpha divided by the rank."""
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout of the adapter inputs in training."""
    lora_target_modules: str | list[str] = "all-linear"
    """Layers that get adapters; all-linear is every linear layer but the LM head."""
    use_dora: bool = False
    """Also train the magnitude of each adapted weight (DoRA)."""
    use_rslora: bool = False
    """Divide alpha by the square root of the rank (rank-stabilized LoRA), which keeps high ranks stable."""
    quantization: Literal["none", "nf4", "int8"] = "none"
    """Quantize the frozen weights to 4 or 8 bits (QLoRA); needs bitsandbytes."""

    LORA_KEYS: ClassVar[tuple[str, ...]] = (
        *("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "use_dora", "use_rslora", "quantization"),
    )
    """The settings above, which need LoRA."""

    @model_validator(mode="after")
    def _lora_keys_need_lora(self) -> Self:
        off = (False, "none")
        lora_keys = [key for key in self.LORA_KEYS if key in self.model_fields_set and getattr(self, key) not in off]
        if lora_keys and not self.trainable.lora:
            raise invalid(f"has {lora_keys[0]}, which needs trainable: lora")
        return self

    def peft_settings(self, model: Any) -> dict[str, Any]:
        """The arguments of peft's LoraConfig for a model.

        The experts of a layer are one weight, not a linear layer: peft adapts them as a parameter.
        """
        targets: Any = self.lora_target_modules
        experts: list[str] = []
        if isinstance(targets, list):
            experts = [name for name in targets if matching_paths(model.named_parameters(), name)]
            targets = [name for name in targets if name not in experts or matching_paths(model.named_modules(), name)]
        return {
            "r": self.lora_r, "lora_alpha": self.lora_alpha, "lora_dropout": self.lora_dropout,
            "target_modules": targets, "target_parameters": experts or None,
            "use_dora": self.use_dora, "use_rslora": self.use_rslora, "task_type": "CAUSAL_LM",
        }  # fmt: skip

    def require_target_layers(self, adapted: Any) -> None:
        """Refuse names that no layer has; peft renames those of some experts, which is in the adapted model."""
        modules = list(adapted.get_base_model().named_modules())
        for name in self.lora_target_modules if isinstance(self.lora_target_modules, list) else ():
            if name in adapted.peft_config["default"].target_modules and not matching_paths(modules, name):
                raise ModelError(f"model: lora_target_modules names {name}, which no layer is called")


class ReuseConfig(FrozenModel):
    """Reuse of computed activations; the result of the training stays the same."""

    cache_frozen_layers: Literal["auto", "memory", "disk", "off"] = "auto"
    """Compute the frozen lower layers once per row and cache their activations, in memory or on disk."""
    share_prefix: bool = True
    """Compute a prefix shared by all rows, such as a system prompt, once per batch."""


class TrainingConfig(BatchConfig, OptimizerConfig, DurationConfig, PrecisionConfig):
    """Settings of every training stage."""

    data: DataConfig | None = None
    """Data of this stage only; without it, the data of the recipe."""

    @property
    def spec(self) -> StageSpec:
        """The entry of `STAGES` with these settings."""
        return next(spec for spec in STAGES.values() if spec.config is type(self))

    @property
    def may_use_fp8(self) -> bool:
        """Whether precision auto may become fp8."""
        return False


class PretrainConfig(TrainableConfig, TrainingConfig):
    """Pretraining: next-token prediction on raw text."""

    max_length: Annotated[int, Field(ge=8)] = 2048
    """Sequence length in tokens."""
    sequence_length_curriculum: dict[PositiveInt, CountOrFraction] = {}
    """Shorter sequences first, as {512: 10%, 1024: 20%}: steps at each length; tokens per step stay the same."""

    @model_validator(mode="after")
    def _lengths_grow(self) -> Self:
        lengths = [*self.sequence_length_curriculum, self.max_length]
        for shorter, longer in pairwise(lengths):
            if shorter >= longer:
                raise invalid(f"has a curriculum from {shorter} to {longer}; lengths must increase up to max_length")
            if self.max_length % shorter:
                raise invalid(f"has a curriculum of {shorter}, which does not divide max_length {self.max_length}")
        return self

    @property
    def may_use_fp8(self) -> bool:
        """Whether precision auto may become fp8: rows of every length are aligned, and the run checks it."""
        aligned = all(length % 16 == 0 for length in (*self.sequence_length_curriculum, self.max_length))
        return aligned and (self.precision, self.fp8_validation, self.quantization) == ("auto", "auto", "none")

    def sequence_length_at(self, step: int, steps: int) -> int:
        """Sequence length at a step (from 0) of a training of `steps` steps."""
        end = 0
        for length, part in self.sequence_length_curriculum.items():
            end += part.resolve(steps)
            if step < end:
                return length
        return self.max_length


class SftConfig(TrainableConfig, ReuseConfig, ChatConfig, TrainingConfig):
    """Supervised fine-tuning on prompts and answers."""


class PairConfig(TrainableConfig, TrainingConfig):
    """Settings of every stage that trains on preference pairs."""

    max_length: Annotated[int, Field(ge=8)] = 1024
    """Maximum length of prompt and answer in tokens; answers are truncated at the end, then prompts at the start."""
    max_truncated_rows: CountOrFraction = CountOrFraction("10%")
    """Pairs that may be truncated; more is an error before the first step."""
    share_prompt: bool = True
    """Compute a prompt once for both of its answers, where the attention of the model allows it."""
    disable_dropout: bool = True
    """Train without dropout, so that policy and reference agree before the first step."""
    learning_rate: PositiveFloat = 1e-6
    """Peak learning rate, reached after warm-up; much lower than for fine-tuning."""
    metric_for_best_model: Literal["eval_loss", "eval_reward_accuracy"] | AnswerMetric = "eval_loss"
    """Metric that selects the best weights: the lowest held-out loss, or the highest reward accuracy or answers."""


class DpoConfig(PreferenceConfig, PairConfig):
    """Direct preference optimization (DPO) on chosen and rejected answers."""

    padding_free: Switch = "auto"
    """Lay the pairs of a micro-batch end to end, without padding; auto: on a GPU."""


class OrpoConfig(PairConfig):
    """Odds ratio preference optimization (ORPO) on chosen and rejected answers, without a reference model."""

    beta: PositiveFloat = 0.1
    """Weight of the odds ratio loss (lambda in the paper) beside the loss on prompts and chosen answers."""


class LoraStageConfig(SftConfig):
    """LoRA fine-tuning: low-rank adapters on frozen weights."""

    trainable: TrainableParts = TrainableParts(lora=True)
    """Which parameters are trainable: all, lora, or a mapping such as {last_layers: 2, lm_head: true}."""


class ClassifyConfig(AugmentationConfig, TrainingConfig):
    """Image classification."""

    metric_for_best_model: Literal["eval_loss", "eval_accuracy"] = "eval_accuracy"
    """Metric that selects the best weights: the lowest held-out loss, or the highest accuracy."""
    param_dtype: Literal["fp32"] = "fp32"
    """Storage dtype of the parameters: fp32, which batch norm needs."""
    gradient_checkpointing: CheckpointingMode | Literal["auto"] = "auto"
    """No effect for images: all activations are kept; the plan notes it."""


RowFormatName = Literal["conversations", "pairs", "text", "images"]


@dataclass(frozen=True)
class StageSpec:
    """What the rest of the program asks about a training stage."""

    config: type[TrainingConfig]
    """Its settings."""
    row_format: RowFormatName
    """How its rows are read: a key of `data.row_formats.ROW_FORMATS`."""
    metrics: tuple[str, ...]
    """Metrics that a gate may use; with the prefix parent_, also those of the stage before it."""
    best_metrics: Mapping[str, Literal["min", "max"]] = field(default_factory=lambda: {"eval_loss": "min"})
    """Metrics that may select the best weights, and whether the lowest or the highest value does."""
    loss_on_prompt: bool = False
    """Whether the loss of pairs includes the prompt."""
    full_logits: bool = False
    """Whether the loss needs all logits of a micro-batch at once; otherwise it is computed in chunks."""
    fp8_scalings: tuple[str, ...] = ("tensorwise", "rowwise")
    """The fp8 scalings to try, fastest first."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Names of its own settings in other tools, separated by spaces, by our name."""
    section_aliases: str = ""
    """Names of its section in other tools, separated by spaces."""
    methods: Mapping[str, dict[str, str]] = field(default_factory=dict)
    """Values of axolotl's `rl` for it, with the settings they imply; convert writes no stage without a method."""
    method_keys: tuple[str, ...] = ()
    """Keys of TRL and axolotl by which convert knows it."""

    @property
    def modality(self) -> Literal["text", "image"]:
        """What its model reads."""
        return "image" if self.row_format == "images" else "text"


def _with_base(*names: str) -> tuple[str, ...]:
    """Metrics of the trained model and, with the prefix base_, of the model before the stage."""
    return (*names, *(f"base_{name}" for name in names))


COMMON_METRICS = (*_with_base("eval_loss"), "steps", "seconds", "tokens", "trained_tokens")
IMAGE_METRICS = (*_with_base("eval_loss"), "steps", "seconds", "images", *_with_base("eval_accuracy"))
ANSWER_METRICS = _with_base("style_score", "answer_words", "answer_f1", "degenerate_answers")
PAIR_METRICS = _with_base(
    *("eval_reward_accuracy", "eval_reward_margin", "eval_chosen_logp", "eval_rejected_logp", "eval_kl"),
    "eval_sft_loss",
)
STAGES: dict[str, StageSpec] = {
    "pretrain": StageSpec(
        PretrainConfig, "text", (*COMMON_METRICS, *_with_base("eval_bits_per_byte")),
        methods={"pretrain": {}}, method_keys=("pretraining_dataset", "dataset_text_field"),
    ),
    "sft": StageSpec(
        SftConfig, "conversations", (*COMMON_METRICS, *ANSWER_METRICS), methods={"sft": {}},
        section_aliases="training train trainer training_args training_arguments finetune finetuning fine_tuning",
    ),
    "dpo": StageSpec(
        DpoConfig, "pairs", (*COMMON_METRICS, *PAIR_METRICS, *ANSWER_METRICS), full_logits=True,
        best_metrics={"eval_loss": "min", "eval_reward_accuracy": "max"},
        # a pair's log-probs must not depend on the other rows: the reference's were computed in another batch
        fp8_scalings=("rowwise",),
        aliases={"beta": "rl_beta dpo_beta pref_beta", "loss_type": "dpo_loss_type pref_loss",
                 "label_smoothing": "dpo_label_smoothing"},
        methods={"dpo": {}, "ipo": {"loss_type": "ipo"}},
        method_keys=("beta", "precompute_ref_log_probs", "sync_ref_model", "f_divergence_type", "ld_alpha",
                     "loss_weights"),
    ),
    "orpo": StageSpec(
        OrpoConfig, "pairs",
        (*COMMON_METRICS, *_with_base("eval_reward_accuracy", "eval_reward_margin", "eval_log_odds", "eval_nll_loss"),
         *ANSWER_METRICS),
        best_metrics={"eval_loss": "min", "eval_reward_accuracy": "max"}, loss_on_prompt=True, full_logits=True,
        aliases={"beta": "orpo_alpha rl_beta pref_beta"}, methods={"orpo": {}}, method_keys=("orpo_alpha",),
    ),
    "lora": StageSpec(LoraStageConfig, "conversations", (*COMMON_METRICS, *ANSWER_METRICS)),
    "classify": StageSpec(
        ClassifyConfig, "images", IMAGE_METRICS,
        best_metrics={"eval_loss": "min", "eval_accuracy": "max"},
    ),
}  # fmt: skip
"""The training stages in order: each starts from the model of the one before it."""


def throughput_unit(stage: str) -> Literal["tokens", "images"]:
    """What a stage counts; other stages than the training stages count as text."""
    return "images" if stage in STAGES and STAGES[stage].modality == "image" else "tokens"


def name_images(fields: Mapping[str, Any], stage: str) -> dict[str, Any]:
    """Fields as a user reads them: what the engine counts as tokens is images where a stage trains on images."""
    if throughput_unit(stage) == "tokens":
        return dict(fields)
    return {
        name.replace("tokens", "images"): name_images(value, stage) if isinstance(value, dict) else value
        for name, value in fields.items()
        if not name.startswith("trained_tokens")
    }


def first_stage(row_format: RowFormatName) -> str:
    """The first stage with rows of a format."""
    return next(name for name, spec in STAGES.items() if spec.row_format == row_format)
