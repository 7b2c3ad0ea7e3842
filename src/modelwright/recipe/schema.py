"""The schema of a recipe: its sections, and how they fit together.

Names are those of Hugging Face ``TrainingArguments`` and TRL; ``fields`` maps the names of other tools."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from datetime import date
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt, field_validator, model_validator

from modelwright.errors import ModelError
from modelwright.recipe.prepare_config import PrepareConfig
from modelwright.recipe.sections import (
    CHOICE_METRICS,
    MAX_LAYERS,
    MAX_VOCAB,
    MAX_WIDTH,
    PERPLEXITY_METRICS,
    ClusterConfig,
    DataConfig,
    EvaluateConfig,
    FrozenModel,
    LlamaArchitecture,
    RegexStr,
    invalid,
)
from modelwright.recipe.stage_specs import (
    ANSWER_METRICS,
    STAGES,
    ClassifyConfig,
    DpoConfig,
    LoraStageConfig,
    OrpoConfig,
    PretrainConfig,
    SftConfig,
    TrainableConfig,
    TrainingConfig,
)

AttentionName = Literal["auto", "sdpa", "eager", "flash_attention_2", "flex_attention"]
TrackerName = Literal["tensorboard", "mlflow", "wandb", "trackio"]
TemplateVariable = Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")]
NAME_PATTERN = r"^[a-z0-9][a-z0-9._-]*$"
if TYPE_CHECKING:
    StageName = str
else:
    StageName = Literal[tuple(STAGES)]


WIDTH_KEYS = ("hidden_size", "n_embd", "d_model", "num_attention_heads", "n_head", "n_heads", "num_key_value_heads")
LAYER_KEYS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers")
SIZE_LIMITS = {
    **dict.fromkeys(LAYER_KEYS, MAX_LAYERS),
    **dict.fromkeys((*WIDTH_KEYS, "intermediate_size", "head_dim"), MAX_WIDTH),
    "vocab_size": MAX_VOCAB,
    "max_position_embeddings": 10**9,
}
"""Largest sizes in a config.json, by key."""


def check_sizes(config: Mapping[str, Any], source: str) -> None:
    """Refuse sizes in a config.json, or in a part of it, that no model has, before anything is built with them."""
    parts: list[Any] = [config]
    for part in parts:
        if not isinstance(part, dict):
            continue
        parts += part.values()
        for name in SIZE_LIMITS.keys() & part.keys():
            sizes = part[name] if isinstance(part[name], list) else [part[name]]  # a list has a size for each layer
            for size in sizes:
                if size is not None and (type(size) is not int or not 1 <= size <= SIZE_LIMITS[name]):
                    wants = f"it wants a whole number from 1 to {SIZE_LIMITS[name]:,}"
                    raise ModelError(f"model: {source} has {name} {repr(size)[:40]}; {wants}")
        heads, kv_heads = part.get("num_attention_heads"), part.get("num_key_value_heads")
        if isinstance(heads, int) and isinstance(kv_heads, int) and heads % kv_heads:
            raise ModelError(
                f"model: {source} has num_attention_heads {heads}, which num_key_value_heads {kv_heads} does not divide"
            )


FRACTION_METRICS = {
    *("eval_accuracy", "eval_reward_accuracy", "style_score", "answer_f1", "degenerate_answers", "answers"),
    *CHOICE_METRICS,
}
NON_NEGATIVE_METRICS = {
    *("eval_loss", "eval_nll_loss", "eval_sft_loss", "eval_bits_per_byte", "answer_words", *PERPLEXITY_METRICS),
    *("steps", "tokens", "trained_tokens", "seconds"),
}


def metric_range(metric: str) -> tuple[float, float]:
    """The lowest and the highest value that a metric can have."""
    name = re.sub(r"^(parent_)?(base_)?", "", metric).partition(".")[0]
    if name in FRACTION_METRICS or name.endswith(("_acc", "_acc_norm")):
        return 0.0, 1.0
    return (0.0 if name in NON_NEGATIVE_METRICS else -math.inf), (0.0 if name.endswith("_logp") else math.inf)


class CompareConfig(FrozenModel):
    """Before/after comparison: the same prompts answered by the initial and the trained model."""

    prompts: list[str] = []
    """Prompts of every comparison."""
    num_held_out_prompts: NonNegativeInt = 0
    """Number of held-out prompts to add."""
    max_new_tokens: PositiveInt = 128
    """Maximum length of an answer in tokens."""
    temperature: NonNegativeFloat = 0.0
    """Sampling temperature; 0 is greedy decoding, which makes answers comparable."""
    style_patterns: list[RegexStr] = []
    """Regular expressions of the target style; style_score is the mean fraction of them found in an answer."""


class Threshold(FrozenModel):
    """Limits of one metric."""

    at_most: float | None = None
    """Maximum of the metric."""
    at_least: float | None = None
    """Minimum of the metric."""
    times: str | None = None
    """Another metric that the limits are multiplied by, such as base_eval_loss."""
    plus: str | None = None
    """Another metric that is added to the limits, such as parent_eval_loss: allows a difference."""

    @model_validator(mode="after")
    def _some_limit(self) -> Self:
        if self.at_most is None and self.at_least is None:
            raise invalid("has no limit; it wants at_most or at_least")
        if self.times is not None and self.plus is not None:
            raise invalid("has both times and plus; it wants one of them")
        if self.at_most is not None and self.at_least is not None and self.at_least > self.at_most:
            raise invalid(f"has at_least {self.at_least} above at_most {self.at_most}; nothing could pass")
        return self


class ModelConfig(FrozenModel):
    """The model to train: an existing one, or an architecture from scratch."""

    model_name_or_path: str | None = None
    """A folder, a hub id, or the embedded smollm2-135m-instruct; an existing folder takes precedence."""
    architecture: LlamaArchitecture | None = None
    """Sizes of a model trained from scratch, instead of model_name_or_path."""
    tokenizer_name_or_path: str | None = None
    """Folder of the tokenizer for an architecture; without it, the one trained by prepare."""
    revision: str | None = None
    """Branch, tag or commit of a hub model; the run pins the commit."""
    chat_template: str | None = None
    """Chat template in place of the tokenizer's: Jinja text, or a file of it; saved with the trained model."""
    chat_template_kwargs: dict[TemplateVariable, bool | int | float | str] = {}
    """Variables of the chat template, such as {enable_thinking: false}, in training and inference; saved with it."""
    chat_template_date: str = "2024-07-26"
    """Date that a chat template gets as today's, so that rows never change."""
    attn_implementation: AttentionName = "auto"
    """Attention implementation; auto is sdpa."""
    resnet_width: PositiveInt = 64
    """Channels of the first layers of resnet18; 64 is the full model."""

    @field_validator("model_name_or_path")
    @classmethod
    def _published_name(cls, value: str | None) -> str | None:
        return re.sub(r"^google/gemma-270m(?=$|-it$)", "google/gemma-3-270m", value) if value else value

    @field_validator("chat_template_date")
    @classmethod
    def _is_date(cls, value: str) -> str:
        try:
            return date.fromisoformat(value).isoformat()
        except ValueError:
            raise invalid("it wants a date such as 2024-07-26") from None

    @model_validator(mode="after")
    def _one_model(self) -> Self:
        if (self.model_name_or_path is None) == (self.architecture is None):
            both, joint = ("both", "and") if self.architecture else ("neither", "nor")
            raise invalid(f"has {both} model_name_or_path {joint} architecture; set exactly one of them")
        return self

    @property
    def display_name(self) -> str:
        """The name of the model in messages."""
        return self.model_name_or_path or "a model from scratch"


class Recipe(FrozenModel):
    """A recipe: model, data, training stages and gates in one file."""

    name: Annotated[str, Field(pattern=NAME_PATTERN, max_length=63)]
    """Lower-case letters, digits, dots and dashes; also names the default run folder."""
    description: str = ""
    """One line for the list of recipes."""
    output_dir: str | None = None
    """The run folder; without it, runs/NAME."""
    seed: Annotated[NonNegativeInt, Field(le=2**63 - 1)] = 42
    """Random seed of the data order, the split and all random numbers."""
    model: ModelConfig
    """The model to train."""
    data: DataConfig | None = None
    """Data of every stage that has none of its own."""
    sft: SftConfig | None = None
    """Supervised fine-tuning."""
    pretrain: PretrainConfig | None = None
    """Pretraining on text, before sft."""
    dpo: DpoConfig | None = None
    """Preference optimization, after sft."""
    orpo: OrpoConfig | None = None
    """Preference optimization without a reference model, after dpo."""
    lora: LoraStageConfig | None = None
    """LoRA fine-tuning, last."""
    classify: ClassifyConfig | None = None
    """Image classification."""
    prepare: PrepareConfig | None = None
    """Data preparation: raw text to packed shards, before pretrain."""
    compare: CompareConfig = CompareConfig()
    """Before/after comparison of answers."""
    evaluate: EvaluateConfig | None = None
    """Evaluation of the model of every stage."""
    gates: dict[StageName, dict[str, Threshold]] = {}
    """Limits of the metrics of each stage, which a model must meet to be promoted."""
    gates_file: str | None = None
    """A file of gates, relative to the recipe, such as configs/promotion_gates.yaml; the recipe overrides it."""
    save_pth: bool = False
    """At the end write best_model.pth, final_model.pth and checkpoint_latest.pth, state dicts for torch.load."""
    closed_gate_exit_code: Literal[0, 3] = 3
    """Exit code of a run whose gate is closed; with 0 a job counts as succeeded."""
    cluster: ClusterConfig | None = None
    """The OpenShift job of launch --on openshift."""
    report_to: list[TrackerName] = ["tensorboard"]
    """Experiment trackers to log metrics to, as a word or a list, or none; a failing tracker never stops a run."""
    env_overrides: dict[str, str] = {}
    """Environment variables that override a setting, such as EPOCHS: sft.num_train_epochs."""

    @field_validator("report_to", mode="before")
    @classmethod
    def _expand_shorthand(cls, value: object) -> object:
        return ([] if value == "none" else [value]) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _stages_fit(self) -> Self:
        if not self.stages and self.prepare is None:
            *names, last = STAGES
            raise invalid(f"has no stage; it wants a section {', '.join(names)} or {last}")
        first_of = {section.spec.modality: stage for stage, section in reversed(self.stages.items())}
        if len(first_of) > 1:
            raise invalid(f"has both {first_of['text']} and {first_of['image']}; it wants text or images")
        if self.evaluate and "image" in first_of:
            raise invalid(f"has both evaluate and {first_of['image']}; evaluate measures language models")
        if self.evaluate and self.evaluate.answers and self.answers_stage is None:
            raise invalid("has evaluate.answers and no stage that trains answers; it wants sft, dpo, orpo or lora")
        if self.prepare and self.data is None and (self.pretrain is None or self.pretrain.data is None):
            raise invalid("has no data for prepare; it wants a section data")
        for stage, section in self.stages.items():
            if self.data is None and section.data is None:
                raise invalid(f"has no data for {stage}; it wants a section data")
        if "text" in first_of and any(self.data_for(stage).data_dir for stage in self.stages):
            raise invalid("has data_dir, which is for images; name the folder itself as dataset_name")
        if any("" in self.data_for(stage).mix for stage in self.stages):  # it would be read as the current folder
            raise invalid("has a source without a name in data.mix; it wants a file, a folder or another name of data")
        text_data = self.prepare_data if self.prepare else self.data_for(self.text_stage) if self.text_stage else None
        if text_data and text_data.mix:
            own = {key for source in text_data.mix.values() for key, value in source if value}
            if not self.prepare or own - {"weight", "dataset_name"} or text_data.stopping_strategy:
                raise invalid("has a mix of raw text, which wants a section prepare, and takes only names and weights")
        for stage in self.gates:
            if stage not in self.stages:
                raise invalid(f"has gates.{stage} but no section {stage}")
        return self

    @property
    def stages(self) -> dict[str, TrainingConfig]:
        """The training stages of this recipe, in order."""
        return {name: section for name in STAGES if (section := getattr(self, name)) is not None}

    def data_for(self, stage: str) -> DataConfig:
        """The data of a stage: its own, or those of the recipe."""
        data = self.stages[stage].data or self.data
        assert data is not None
        return data

    @property
    def pipeline(self) -> tuple[str, ...]:
        """Every stage in order: the training stages, and prepare, init and evaluate around them."""
        before = (("prepare", self.prepare), ("init", self.model.architecture))
        after = ("evaluate",) if self.evaluate else ()
        return (*(name for name, section in before if section), *self.stages, *after)

    @property
    def text_stage(self) -> str | None:
        """The stage that trains on raw text, if there is one."""
        return next((name for name, section in self.stages.items() if section.spec.row_format == "text"), None)

    @property
    def answers_stage(self) -> str | None:
        """The stage whose held-out prompts evaluate.answers takes: the last with conversations, or else with pairs."""
        stages = {section.spec.row_format: name for name, section in self.stages.items()}
        return stages.get("conversations") or stages.get("pairs")

    @property
    def answers_precision(self) -> str:
        """The precision of the last stage, which answers are generated in on a GPU: bf16 unless it is fp32."""
        return next((section.precision for section in reversed(self.stages.values())), "auto")

    @property
    def prepare_data(self) -> DataConfig:
        """The data of prepare: those of the stage that trains on it, or of the recipe."""
        data = self.data_for(self.text_stage) if self.text_stage else self.data
        assert data is not None
        return data

    @property
    def lora_stages(self) -> dict[str, TrainableConfig]:
        """The stages that train an adapter."""
        stages = self.stages.items()
        return {name: each for name, each in stages if isinstance(each, TrainableConfig) and each.trainable.lora}

    def parent_stage(self, stage: str) -> str | None:
        """The stage whose model a stage starts from; None if it starts from the model of the recipe."""
        names = [*(("init",) if self.model.architecture else ()), *self.stages]
        index = names.index(stage)
        return names[index - 1] if index else None

    def gate_metrics(self, stage: str) -> tuple[str, ...]:
        """The metrics a gate of a stage may use."""
        parent = self.parent_stage(stage)
        evaluate_metrics = self.evaluate.metric_names if self.evaluate else ()
        parent_metrics = (*STAGES[parent].metrics, *evaluate_metrics) if parent in STAGES else ()
        data, metrics = self.data_for(stage), STAGES[stage].metrics
        sources = data.mix if STAGES[stage].row_format != "text" and not data.validation_file else ()
        by_source = (f"{metric}.{name}" for name in sources for metric in metrics if "eval_" in metric)
        own = (*metrics, *by_source, *evaluate_metrics, *(f"base_{metric}" for metric in evaluate_metrics))
        return (*own, *(f"parent_{metric}" for metric in parent_metrics))

    def unmeasured_reason(self, stage: str, metric: str) -> str | None:
        """Why this recipe never measures a metric that its kind of stage has; None where it does."""
        if metric.startswith("parent_"):
            return self.unmeasured_reason(str(self.parent_stage(stage)), metric.removeprefix("parent_"))
        name, data, compare = metric.removeprefix("base_"), self.data_for(stage), self.compare
        is_packed = STAGES[stage].row_format == "text" and not self.prepare  # a folder of shards has its own split
        holds_out = data.validation_file or data.validation_split or data.test_size.count != 0
        nothing_held_out = not (holds_out or is_packed or STAGES[stage].modality == "image")
        if nothing_held_out and name.startswith(("eval_", "answer_f1")):
            return "no rows are held out; set data.test_size: 10%"
        if name in ANSWER_METRICS and not (compare.prompts or (compare.num_held_out_prompts and not nothing_held_out)):
            return "no prompt is answered; set compare.prompts or compare.num_held_out_prompts"
        if name == "style_score" and not compare.style_patterns:
            return "there is no pattern; set compare.style_patterns"
        has_text = self.prepare or self.text_stage or (self.evaluate and self.evaluate.perplexity_text)
        if name in PERPLEXITY_METRICS and not has_text:
            return "there is no text; set evaluate.perplexity_text"
        return None

    def gate_names(self, stage: str) -> set[str]:
        """The metrics of a stage that its own gate and that of the next stage use."""
        names = set()
        for judged, prefix in ((stage, ""), *((each, "parent_") for each in self.gates)):
            for metric, threshold in self.gate_for(judged).items():
                if judged == stage or self.parent_stage(judged) == stage:
                    used = (name for name in (metric, threshold.times, threshold.plus) if name)
                    names |= {name.removeprefix(prefix) for name in used if name.startswith(prefix)}
        return names

    def gate_for(self, stage: str) -> dict[str, Threshold]:
        """The thresholds of a stage by metric; empty without a gate."""
        return self.gates.get(stage, {})

    @property
    def run_dir(self) -> str:
        """The run folder."""
        return self.output_dir or f"runs/{self.name}"
