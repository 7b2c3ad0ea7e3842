"""The sections of a recipe that are not training stages, and the value types that settings are written in."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePath
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema


class FrozenModel(BaseModel):
    """A value that cannot change; the sentence under each field is its help and its reference."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True, protected_namespaces=()
    )


class CountOrFraction:
    """A number of steps, or a share of all steps: ``500``, ``0.05`` or ``5%``."""

    EXPECTED = "a count such as 500, or a share such as 5%"

    def __init__(self, raw: int | float | str) -> None:
        self.raw = raw
        is_percent = isinstance(raw, str) and raw.strip().endswith("%")
        try:
            number = float(raw.strip().rstrip("%")) / (100 if is_percent else 1) if isinstance(raw, str) else float(raw)
        except ValueError:
            raise ValueError(f"it wants {self.EXPECTED}") from None
        is_fraction = is_percent or 0 < number < 1
        if isinstance(raw, bool) or number < 0 or (is_fraction and number > 1) or (not is_fraction and number % 1):
            raise ValueError(f"it wants {self.EXPECTED}")
        self.fraction: float | None = number if is_fraction else None
        self.count: int | None = None if is_fraction else int(number)

    def resolve(self, total: int) -> int:
        """Turn the value into a count, given how many there are in all; a share is at least one."""
        if self.fraction is not None:
            return max(1, round(self.fraction * total))
        assert self.count is not None
        return self.count

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CountOrFraction) and (self.fraction, self.count) == (other.fraction, other.count)

    def __hash__(self) -> int:
        return hash((self.fraction, self.count))

    def __repr__(self) -> str:
        return f"CountOrFraction({self.raw!r})"

    @classmethod
    def _parse(cls, value: object) -> Self:
        if isinstance(value, cls):
            return value
        if isinstance(value, int | float | str) and not isinstance(value, bool):
            try:
                return cls(value)
            except ValueError:
                pass
        raise PydanticCustomError("steps", "it wants {wants}", {"wants": cls.EXPECTED})

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            cls._parse,
            serialization=core_schema.plain_serializer_function_ser_schema(lambda value: value.raw),
        )

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"anyOf": [{"type": "number", "minimum": 0}, {"type": "string", "pattern": r"^[0-9.]+%$"}]}


def _check_regex(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise PydanticCustomError("regex", "it wants a regular expression: {reason}", {"reason": str(error)}) from None
    return text


IS_REGEX = AfterValidator(_check_regex)
RegexStr = Annotated[str, IS_REGEX]
"""Text that is a regular expression."""
PAD_MULTIPLE = 64
"""Sizes that are chosen for a person are multiples of this, which fit a GPU's tiles."""


def round_up(size: float) -> int:
    """The next multiple of 64."""
    return int(-(-size // PAD_MULTIPLE) * PAD_MULTIPLE)


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


MLP_LINEARS = ("gate_proj", "up_proj", "down_proj")
FUSED_LORA_RANKS = (16, 32, 64, 128)
"""LoRA ranks that the fused LoRA MLP supports: those a tensor core multiplies."""


@dataclass(frozen=True)
class ParameterCount:
    """How many parameters of a model are trained."""

    trained: int
    """Trainable parameters."""
    total: int
    """All parameters, with LoRA."""

    def __str__(self) -> str:
        millions = f"{self.trained / 1e6:,.1f} M of {self.total / 1e6:,.1f} M"
        return f"{millions} parameters trainable ({self.trained / self.total:.2%})"


class LlamaArchitecture(FrozenModel):
    """The sizes of a Llama that is made from scratch; names are those of Hugging Face's LlamaConfig."""

    num_hidden_layers: PositiveInt
    """Transformer layers."""
    hidden_size: PositiveInt
    """Width of the stream between the layers."""
    num_attention_heads: PositiveInt
    """Heads of attention in a layer."""
    num_key_value_heads: PositiveInt | None = None
    """Heads of keys and values, shared by groups of the others; without it, one for each."""
    intermediate_size: PositiveInt | None = None
    """Width inside a layer's feed-forward part; without it, 8/3 of hidden_size, rounded up to a multiple of 64."""
    vocab_size: PositiveInt | None = None
    """Tokens in the vocabulary, padding included; without it, the tokenizer's, rounded up to a multiple of 64."""
    max_position_embeddings: PositiveInt = 4096
    """Longest context."""
    rope_theta: PositiveFloat = 10000.0
    """RoPE base frequency."""
    tie_word_embeddings: bool = False
    """Whether the head shares its weights with the embeddings."""
    initializer_range: PositiveFloat = 0.02
    """Spread of the first weights; where they write into the stream, divided by the root of twice the layers."""

    @model_validator(mode="after")
    def _heads_fit(self) -> Self:
        if self.hidden_size % self.num_attention_heads:
            sizes = {"hidden": self.hidden_size, "heads": self.num_attention_heads}
            message = "has hidden_size {hidden}, which num_attention_heads {heads} do not divide"
            raise PydanticCustomError("heads", message, sizes)
        if self.num_attention_heads % self.kv_heads:
            sizes = {"heads": self.num_attention_heads, "kv": self.kv_heads}
            message = "has num_attention_heads {heads}, which num_key_value_heads {kv} do not divide"
            raise PydanticCustomError("kv_heads", message, sizes)
        return self

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def ffn_size(self) -> int:
        """Width inside a layer's feed-forward part."""
        return self.intermediate_size or round_up(self.hidden_size * 8 / 3)

    def num_parameters(self, vocab_size: int) -> int:
        """Weights in all, by arithmetic alone."""
        kv_size = self.hidden_size * self.kv_heads // self.num_attention_heads
        attention = 2 * self.hidden_size * self.hidden_size + 2 * self.hidden_size * kv_size
        layer = attention + 3 * self.hidden_size * self.ffn_size + 2 * self.hidden_size
        embeddings = vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return self.num_hidden_layers * layer + self.hidden_size + embeddings


QUANTITY_RE = re.compile(r"([0-9]+(?:\.[0-9]+)?)([KMGTPE]i?)?")
QUANTITY_UNITS = {unit: 1000**power for power, unit in enumerate("KMGTPE", 1)} | {
    f"{unit}i": 1024**power for power, unit in enumerate("KMGTPE", 1)
}
DNS_LABEL_RE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
"""A name that Kubernetes takes."""


def quantity_to_bytes(quantity: str) -> int:
    """An amount such as 16Gi in bytes."""
    match = QUANTITY_RE.fullmatch(quantity)
    assert match is not None, quantity
    return int(float(match[1]) * QUANTITY_UNITS.get(match[2] or "", 1))


def _check_quantity(text: str) -> str:
    if QUANTITY_RE.fullmatch(text) is None:
        raise PydanticCustomError("amount", "it wants an amount such as 16Gi")
    return text


def _check_code_source(text: str) -> str:
    if text in ("image", "configmap") or re.fullmatch(r"git\+https://[^\s@]+(@[\w./-]+)?", text):
        return text
    raise PydanticCustomError("code", "it wants image, configmap, or git+https://HOST/PATH@REVISION")


def _check_dns_label(text: str) -> str:
    if DNS_LABEL_RE.fullmatch(text) is None:
        raise PydanticCustomError("label", "it wants lower-case letters, digits and dashes")
    return text


IS_QUANTITY, IS_DNS_LABEL = AfterValidator(_check_quantity), AfterValidator(_check_dns_label)
Quantity = Annotated[str, IS_QUANTITY]
"""Bytes as Kubernetes writes them."""
DnsLabel = Annotated[str, IS_DNS_LABEL]


class VolumeConfig(FrozenModel):
    """Storage that outlives the pods."""

    mount: str
    """Folder where the pods see it, such as /shared/models."""
    size: Quantity = "20Gi"
    """Room that is asked for."""
    access_mode: Literal["auto", "ReadWriteMany", "ReadWriteOnce"] = "auto"
    """auto: ReadWriteMany for several nodes, ReadWriteOnce for one."""
    storage_class: str | None = None
    """Kind of storage; without it, the cluster's default."""


DEFAULT_VOLUMES = {
    "training-data": VolumeConfig(mount="/shared/data"),
    "trained-models": VolumeConfig(mount="/shared/models", size="50Gi"),
    "workspace": VolumeConfig(mount="/workspace", size="50Gi"),
}


class ClusterConfig(FrozenModel):
    """What launch --on openshift asks of the cluster."""

    namespace: DnsLabel = "modelwright"
    """Project the job runs in; its volumes are kept, so that each job builds on the last."""
    job_kind: Literal["trainjob", "pytorchjob"] = "trainjob"
    """Kind of job: trainjob for OpenShift AI from 3.2, pytorchjob up to 3.5."""
    nodes: PositiveInt = 1
    """Pods that train together, one a node."""
    gpus_per_node: NonNegativeInt = 1
    """GPUs of each pod, and so its processes; 0 trains on the CPU."""
    gpu_product: str | None = None
    """GPU model by its node label, such as NVIDIA-L40S; pods wait for a node that has it."""
    cpu: PositiveInt = 4
    """Processor cores of each pod."""
    memory: Quantity = "16Gi"
    """Memory of each pod."""
    shm_size: Quantity = "4Gi"
    """Size of /dev/shm, counted within memory."""
    image: str | None = None
    """Container image; without it, the one built in the namespace from the Containerfile."""
    code_source: Annotated[str, AfterValidator(_check_code_source)] = "image"
    """Where the program comes from: image, configmap, or git+https://HOST/PATH@REVISION."""
    volumes: dict[str, VolumeConfig] = DEFAULT_VOLUMES
    """Claims by name; the run lies on trained-models, downloads on workspace, where there are such."""
    local_queue: DnsLabel | None = None
    """LocalQueue of Kueue; what makes the job appear under the project's workload metrics."""
    hf_token_secret: DnsLabel | None = None
    """Secret whose key HF_TOKEN holds the hub's token; the token itself is written nowhere."""
    max_restarts: Annotated[int, Field(ge=0, le=20)] = 3
    """Times the job begins again after a lost pod; each goes on from the last checkpoint."""
    env: dict[str, str] = {}
    """Further environment variables of the pods, such as NCCL_DEBUG: INFO."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        for name, volume in self.volumes.items():
            if DNS_LABEL_RE.fullmatch(name) is None:
                message = "has a volume {name}; it wants a name of lower-case letters, digits and dashes"
                raise PydanticCustomError("volume_name", message, {"name": repr(name)})
            if not volume.mount.startswith("/") or volume.mount == "/":
                message = "has volume {name} at {mount}; it wants a folder such as /shared/models"
                raise PydanticCustomError("volume_mount", message, {"name": name, "mount": repr(volume.mount)})
            if self.nodes > 1 and volume.access_mode == "ReadWriteOnce":
                message = "has {nodes} nodes and volume {name} ReadWriteOnce; it wants ReadWriteMany"
                raise PydanticCustomError("one_writer", message, {"nodes": self.nodes, "name": name})
        if quantity_to_bytes(self.shm_size) >= quantity_to_bytes(self.memory):
            message = "has shm_size {shm} within memory {memory}; it wants less than memory"
            raise PydanticCustomError("shm", message, {"shm": self.shm_size, "memory": self.memory})
        if not self.volumes:
            raise PydanticCustomError("no_volume", "has no volume; it wants one at least, where the run is kept")
        return self


PERPLEXITY_METRICS = ("text_loss", "text_perplexity", "text_bits_per_byte")
CHOICE_METRICS = ("choice_accuracy", "choice_accuracy_norm")
LM_EVAL_METRICS = ("acc", "acc_norm", "exact_match", "f1", "perplexity", "word_perplexity", "bits_per_byte")
TASK_FILE_SUFFIXES = (".yaml", ".yml")
"""How the name of a task that is a file ends."""


class EvaluateConfig(FrozenModel):
    """The model a run begins with and the model of every stage, measured in the same way."""

    perplexity_text: str | None = None
    """Raw text (file, folder, embedded set or hub id) for loss and bits per byte; else what pretrain held out."""
    text_column: str = "text"
    """Column that holds the documents of the text."""
    multiple_choice: str | None = None
    """Questions with options and an answer, in any of the usual columns: a file, a folder or a hub id."""
    max_rows: PositiveInt = 200
    """Most documents and most questions that are measured."""
    max_length: Annotated[int, Field(ge=8)] = 512
    """Longest row of tokens; longer documents are measured in pieces."""
    completion_prompts: list[str] = []
    """Beginnings that every model goes on with, shown side by side."""
    max_new_tokens: PositiveInt = 48
    """Longest continuation in tokens."""
    tasks: list[str] = []
    """Tasks of lm-eval, by name or as a file NAME.yaml of its form, where the eval extra is installed."""

    @property
    def is_configured(self) -> bool:
        """Whether anything is named to measure by."""
        return bool(self.perplexity_text or self.multiple_choice or self.completion_prompts or self.tasks)

    @property
    def metric_names(self) -> tuple[str, ...]:
        """What a gate may ask."""
        names = (PurePath(task).stem if task.endswith(TASK_FILE_SUFFIXES) else task for task in self.tasks)
        task_metrics = (f"{name}_{metric}" for name in names for metric in LM_EVAL_METRICS)
        return (*PERPLEXITY_METRICS, *(CHOICE_METRICS if self.multiple_choice else ()), *task_metrics)


class CompareConfig(FrozenModel):
    """The same questions answered before and after."""

    prompts: list[str] = []
    """Questions asked every time."""
    num_held_out_prompts: NonNegativeInt = 0
    """So many held-out questions asked as well."""
    max_new_tokens: PositiveInt = 128
    """Longest answer in tokens."""
    temperature: NonNegativeFloat = 0.0
    """0 takes the likeliest token each time, so that answers can be compared."""
    style_patterns: list[RegexStr] = []
    """Regular expressions of the target style; style_score is the mean share of them found in an answer."""


class Threshold(FrozenModel):
    """What a metric must be."""

    at_most: float | None = None
    """The metric may not be higher."""
    at_least: float | None = None
    """The metric may not be lower."""
    times: str | None = None
    """Name of another metric that the limits are multiples of, such as base_eval_loss."""
    plus: str | None = None
    """Name of another metric that the limits are added to, such as parent_eval_loss: no worse than it by so much."""

    @model_validator(mode="after")
    def _some_limit(self) -> Self:
        if self.at_most is None and self.at_least is None:
            raise PydanticCustomError("some_limit", "has no limit; it wants at_most or at_least")
        if self.times is not None and self.plus is not None:
            raise PydanticCustomError("one_yardstick", "has both times and plus; it wants one of them")
        if self.at_most is not None and self.at_least is not None and self.at_least > self.at_most:
            limits = {"least": self.at_least, "most": self.at_most}
            message = "has at_least {least} above at_most {most}; nothing could pass"
            raise PydanticCustomError("empty_range", message, limits)
        return self


Fraction = Annotated[float, Field(ge=0, le=1)]
BOILERPLATE = [
    r"(?i)[^\w\n]*(please )?(enable|activate|turn on) (javascript|cookies)\b.*",
    r"(?i)[^\w\n]*(this|our) (web ?)?site uses cookies\b.*",
    r"(?i)[^\w\n]*(accept|manage|reject) (all )?cookies[^\w\n]*",
    r"(?i)[^\w\n]*(terms (of|and) (use|service|conditions)|privacy policy|cookie policy|all rights reserved)[^\w\n]*",
    r"(?i)[^\w\n]*(share|tweet|print|email|follow us)( this)?( on \w+)?[^\w\n]*",
    r"(?i).*\blorem ipsum dolor\b.*",
]


class CleaningConfig(FrozenModel):
    """Which documents and lines are left out before anything is learnt."""

    normalize: Literal["NFC", "NFKC", "none"] = "NFC"
    """Form of Unicode that text is brought to; control characters and stray whitespace go as well."""
    min_words: NonNegativeInt = 5
    """Fewest words of a document."""
    max_words: PositiveInt | None = None
    """Most words of a document."""
    max_mean_word_length: NonNegativeFloat = 30.0
    """Longest mean word, in characters, of a text that is mostly ASCII; encoded data has longer ones."""
    max_symbol_ratio: Fraction = 0.5
    """Largest share of ASCII marks among the characters that are not spaces; 1 allows all."""
    max_digit_ratio: Fraction = 0.5
    """Largest share of digits among the characters that are not spaces; 1 allows all."""
    max_bullet_lines: Fraction = 0.9
    """Largest share of lines that begin with a bullet or a dash."""
    max_ellipsis_lines: Fraction = 0.3
    """Largest share of lines that end in an ellipsis."""
    max_repeated_lines: Fraction = 0.3
    """Largest share of characters in lines that stood before in the same document."""
    max_repeated_ngrams: Fraction = 0.5
    """Largest share of five-word runs that stood before in the same document."""
    drop_lines: list[RegexStr] = BOILERPLATE
    """Lines that match one of these are taken out; the default finds the boilerplate of web pages."""
    drop_documents: dict[str, RegexStr] = {}
    """Rules of your own: a name, and what a document is dropped for when it is found in it."""


class DedupConfig(FrozenModel):
    """Which documents are left out because others say the same, or because an examination asks it."""

    exact_dedup: bool = True
    """Drop documents whose words are those of an earlier one."""
    minhash_dedup: bool = True
    """Drop documents that are nearly an earlier one (MinHash with verified candidates)."""
    jaccard_threshold: Annotated[float, Field(ge=0.5, le=1)] = 0.7
    """Share of five-word runs in common from which two documents are nearly the same."""
    decontaminate_against: list[str] = []
    """Evaluation sets (files, folders, hub ids); documents that share a run of words with them are dropped."""
    decontaminate_ngram: Annotated[int, Field(ge=4)] = 13
    """Words in such a run; a shorter evaluation text counts as a whole, from four words on."""


class ShardConfig(FrozenModel):
    """How documents become rows of tokens."""

    sequence_length: Annotated[int, Field(ge=8)] = 2048
    """Tokens in a stored row; training may read any length that divides it."""
    tokenizer: Literal["auto", "model", "train"] = "auto"
    """Use the model's tokenizer, or train a byte-level BPE on the text; auto trains for a model without one."""
    vocab_size: PositiveInt = 50_304
    """Tokens of a trained tokenizer; the model's vocabulary is the next multiple of 64."""
    tokenizer_sample_mb: PositiveInt = 64
    """Megabytes of text, taken evenly from all that was kept, that a tokenizer is trained on."""
    use_gigatoken: bool = True
    """Encode with gigatoken where it is installed and gives the same tokens for a sample of this very text."""
    rows_per_shard: PositiveInt = 8192
    """Rows in a shard."""


class PrepareConfig(CleaningConfig, DedupConfig, ShardConfig):
    """From raw text to packed shards: clean, deduplicate, decontaminate, tokenize, pack."""

    max_invalid_fraction: Fraction = 0.01
    """Largest share of rows that may be unreadable; they are set aside in quarantine.jsonl."""
    max_dropped_token_fraction: Fraction = 0.05
    """Largest share of tokens that may be lost with the last, unfilled row of a source."""
    num_proc: PositiveInt | None = None
    """Processes at work; without it, one for each core. The result does not depend on it."""
    minhash_device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where near-duplicate signatures are computed: auto takes a GPU whose numbers are the CPU's."""
    keep_intermediate_files: bool = False
    """Keep the intermediate files once all is done."""
