"""What every stage that moves weights may say: batches, the optimizer, lengths, numerics, and which weights move."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator
from pydantic_core import PydanticCustomError

from modelwright.recipe.values import Frozen, Steps

Precision = Literal["auto", "fp32", "bf16", "fp16", "fp8"]
Sharding = Literal["auto", "ddp", "fsdp", "hsdp"]
Checkpointing = bool | Literal["selective"]
Scheduler = Literal["linear", "cosine", "constant", "constant_with_warmup", "warmup_stable_decay", "one_cycle"]


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
    packing_strategy: Literal["bfd", "bfd_split"] = "bfd"
    """What becomes of a row longer than max_length: bfd cuts it, bfd_split divides it; the best fit, longest first."""
    max_truncated: Steps = Steps("100%")
    """Rows that may be cut, as a count or a share; more is an error before the first step."""
    assistant_only_loss: bool = True
    """Learn the assistant's words only; false learns the prompts too."""

    @model_validator(mode="after")
    def _dividing_is_for_packing(self) -> Self:
        if self.packing_strategy == "bfd_split" and not self.packing:
            raise PydanticCustomError("packing", "has packing_strategy bfd_split; it wants packing: true beside it")
        return self


class Preference(Frozen):
    """How pairs of answers become a loss."""

    beta: PositiveFloat = 0.1
    """How closely the model is held to what it was before: higher is closer."""
    loss_type: Literal["sigmoid", "ipo", "hinge"] = "sigmoid"
    """sigmoid is DPO's own loss; ipo aims at a margin rather than beyond it; hinge stops at one."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Share of pairs taken to be labelled the wrong way round, for sigmoid."""
    max_length: Annotated[int, Field(ge=8)] = 1024
    """Longest prompt with one answer in tokens; longer answers are cut at the end, then prompts at the start."""
    max_truncated: Steps = Steps("10%")
    """Pairs that may be cut, as a count or a share; more is an error before the first step."""
    share_prompt: bool = True
    """Compute a prompt once for both of its answers, where the model's attention allows it."""

    @model_validator(mode="after")
    def _smoothing_is_for_sigmoid(self) -> Self:
        if self.label_smoothing and self.loss_type != "sigmoid":
            found = "has label_smoothing beside loss_type {kind}; only sigmoid knows it"
            raise PydanticCustomError("smoothing", found, {"kind": self.loss_type})
        return self


class Images(Frozen):
    """How images are shown to the model, and what is asked of it."""

    crop_padding: NonNegativeInt = 4
    """Pixels of black around a training image out of which a crop of its own size is taken."""
    horizontal_flip: bool = True
    """Mirror half of the training images."""
    cutout: NonNegativeInt = 0
    """Side of the square that is blanked in a training image, in pixels, at a place drawn anew each time; 0: none."""
    label_smoothing_factor: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the target that is spread over all classes, in training only."""
    test_time_flip: bool = False
    """Judge held-out images by the mean over them and their mirror images."""
    test_time_shift: NonNegativeInt = 0
    """Judge them also moved so many pixels up and left, and down and right; 0 leaves them where they are."""


class Optimizer(Frozen):
    """How the weights move."""

    optim: Literal["adamw_torch", "sgd"] = "adamw_torch"
    """AdamW, or stochastic gradient descent with momentum."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Memory of sgd, in Nesterov's form."""
    learning_rate: PositiveFloat = 2e-5
    """Peak learning rate, reached after warm-up."""
    scale_learning_rate_by_world: bool = False
    """Multiply learning_rate by the number of devices that the batch was made for; the plan prints the product."""
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
    exp_avg_dtype: Literal["fp32", "bf16"] = "fp32"
    """What AdamW keeps the mean of the gradients in beside bf16 weights; bf16 saves two bytes a weight."""
    adam_epsilon: PositiveFloat = 1e-8
    """Keeps the division finite."""
    ema_decay: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Measure and keep a running mean of the weights, of which each step keeps so much; 0 keeps the weights."""
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
    resume_from_checkpoint: bool | str | None = None
    """A checkpoint folder to begin from in a new run; a run resumes from its own by itself, whatever this says."""
    save_total_limit: Annotated[int, Field(ge=2)] = 2
    """Checkpoints kept besides the best; at least 2, so that a damaged one has a good one behind it."""
    save_in_background: Literal["auto", "always", "never"] = "auto"
    """Train on while a checkpoint is written from a copy, where memory holds one; auto: on a GPU."""
    load_best_model_at_end: bool = True
    """Keep the best weights rather than the last ones."""
    metric_for_best_model: Literal["eval_loss"] = "eval_loss"
    """What makes weights the best: the lowest held-out loss."""


class Numerics(Frozen):
    """What the arithmetic is done in, and when it is not trusted."""

    precision: Precision = "auto"
    """What is computed in: fp32, bf16, fp16, or fp8 in the linear layers; auto: bf16 where fast, fp16 on older GPUs."""
    tf32: bool | Literal["auto"] = "auto"
    """With precision fp32 on a GPU: multiply on the tensor cores, with 10 of 23 bits; auto: where there are any."""
    fp8_check: Literal["auto", "off"] = "auto"
    """Try fp8 against bf16 before the first step, and keep it where it is 5 % faster and as exact; off: take it."""
    fp8_scaling: Literal["auto", "tensorwise", "rowwise"] = "auto"
    """What shares a scale in fp8: a matrix, or a row of it, which is closer and slower; auto: rows for DPO."""
    weights: Literal["auto", "fp32", "bf16"] = "auto"
    """What weights are kept in: fp32, or bf16 with the lost bits beside the optimizer (exact fp32 masters, faster)."""
    sharding: Sharding = "auto"
    """How devices share it: ddp copies the model, fsdp splits it, hsdp splits it in each node; auto: ddp if it fits."""
    ddp_bucket_cap_mb: PositiveInt = 25
    """Megabytes of gradients that ddp exchanges at once."""
    gradient_checkpointing: Checkpointing = False
    """Recompute activations: true all of them, a quarter more time; selective all but products and attention."""
    torch_compile: bool = False
    """Compile the layers: slower to start, faster to run on a GPU."""
    cuda_graphs: Literal["auto", "always", "never"] = "auto"
    """Record steps of one shape and replay them, on one GPU; auto: below two billion weights, where the host lags."""
    profile_memory: bool = False
    """Watch the third step's memory by component: into memory.json of the stage, and as a picture into the report."""
    max_skipped_steps: NonNegativeInt = 3
    """Bad steps in a row that are skipped before the run goes back to its last checkpoint."""
    spike_factor: Annotated[float, Field(gt=1)] = 10.0
    """A gradient so many times its recent median, with a loss half as high again, is a bad step (of hard rows once)."""


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
    use_dora: bool = False
    """Let each of them also learn the size of the weights it sits beside (DoRA)."""
    use_rslora: bool = False
    """Divide their scale by the square root of the rank, which keeps high ranks stable."""
    quantization: Literal["none", "nf4", "int8"] = "none"
    """Hold the frozen weights beside them in 4 or 8 bits (QLoRA); wants bitsandbytes."""

    OF_LORA: ClassVar[tuple[str, ...]] = (
        *("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "use_dora", "use_rslora", "quantization"),
    )

    @model_validator(mode="after")
    def _matrices_are_asked_for(self) -> Self:
        off = (False, "none")
        said = [name for name in self.OF_LORA if name in self.model_fields_set and getattr(self, name) not in off]
        if said and not self.trainable.lora:
            found = "has {name}, but trains no low-rank matrices; it wants trainable: lora beside it"
            raise PydanticCustomError("no_lora", found, {"name": said[0]})
        return self


class Savings(Frozen):
    """Work that need not be done twice; what is learnt stays the same."""

    keep_trunk: Literal["auto", "memory", "disk", "off"] = "auto"
    """Compute frozen layers at the bottom once and keep what they say: in memory, or on disk where that is short."""
    share_prefix: bool = True
    """Compute the tokens that all rows begin with, such as a system prompt, once for many rows."""


class Training(Batch, Optimizer, Length, Numerics):
    """What every stage that moves weights may say."""
