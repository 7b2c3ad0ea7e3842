"""The sections of a recipe that are not training stages, and the value types that settings are written in."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
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
    """Immutable pydantic model; the docstring of a field is its help text and its row in the reference."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True, protected_namespaces=()
    )


def invalid(message: str) -> PydanticCustomError:
    """The error of a validator: `it wants ...` for a value, `has ...` for a section."""
    return PydanticCustomError("invalid", "{message}", {"message": message})


class CountOrFraction:
    """A count, or a fraction of a total: ``500``, ``0.05`` or ``5%``."""

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
        """Convert to a count, given the total; a fraction gives at least 1."""
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
            with suppress(ValueError):
                return cls(value)
        raise invalid(f"it wants {cls.EXPECTED}")

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        serializer = core_schema.plain_serializer_function_ser_schema(lambda value: value.raw)
        return core_schema.no_info_plain_validator_function(cls._parse, serialization=serializer)

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"anyOf": [{"type": "number", "minimum": 0}, {"type": "string", "pattern": r"^[0-9.]+ *%$"}]}


def _check_regex(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise invalid(f"it wants a regular expression: {error}") from None
    return text


IS_REGEX = AfterValidator(_check_regex)
RegexStr = Annotated[str, IS_REGEX]
PAD_MULTIPLE = 64
"""Default sizes are multiples of this, which fits the tiles of a GPU."""


def round_up(size: float) -> int:
    """The next multiple of PAD_MULTIPLE."""
    return int(-(-size // PAD_MULTIPLE) * PAD_MULTIPLE)


EMBEDDED_MODEL = "smollm2-135m-instruct"
"""The model that comes as a Python package."""
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


MAX_LAYERS, MAX_WIDTH, MAX_VOCAB = 1_000, 1_000_000, 10_000_000
"""Limits of the sizes of a model, several times those of any published one."""
ModelWidth = Annotated[PositiveInt, Field(le=MAX_WIDTH)]


class LlamaArchitecture(FrozenModel):
    """Sizes of a Llama model trained from scratch, named as in Hugging Face's LlamaConfig."""

    num_hidden_layers: Annotated[PositiveInt, Field(le=MAX_LAYERS)]
    """Transformer layers."""
    hidden_size: ModelWidth
    """Size of the hidden states."""
    num_attention_heads: ModelWidth
    """Attention heads per layer."""
    num_key_value_heads: ModelWidth | None = None
    """Key/value heads (grouped-query attention); without it, as many as attention heads."""
    intermediate_size: ModelWidth | None = None
    """Size of the feed-forward layers; without it, 8/3 of hidden_size, rounded up to a multiple of 64."""
    vocab_size: Annotated[PositiveInt, Field(le=MAX_VOCAB)] | None = None
    """Vocabulary size with padding; without it, that of the tokenizer, rounded up to a multiple of 64."""
    max_position_embeddings: PositiveInt = 4096
    """Maximum context length."""
    rope_theta: PositiveFloat = 10000.0
    """RoPE base frequency."""
    tie_word_embeddings: bool = False
    """Whether the LM head shares its weights with the embeddings."""
    initializer_range: PositiveFloat = 0.02
    """Standard deviation of the initial weights; for output projections divided by sqrt(2 * layers)."""

    @model_validator(mode="after")
    def _heads_fit(self) -> Self:
        heads = f"num_attention_heads {self.num_attention_heads}"
        if self.hidden_size % self.num_attention_heads:
            raise invalid(f"has hidden_size {self.hidden_size}, which {heads} do not divide")
        if self.num_attention_heads % self.kv_heads:
            raise invalid(f"has {heads}, which num_key_value_heads {self.kv_heads} do not divide")
        return self

    @property
    def kv_heads(self) -> int:
        """Number of key/value heads."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def ffn_size(self) -> int:
        """Size of the feed-forward layers."""
        return self.intermediate_size or round_up(self.hidden_size * 8 / 3)


QUANTITY_RE = re.compile(r"([0-9]+(?:\.[0-9]+)?)([KMGTPE]i?)?")
QUANTITY_UNITS = {unit: 1000**power for power, unit in enumerate("KMGTPE", 1)} | {
    f"{unit}i": 1024**power for power, unit in enumerate("KMGTPE", 1)
}
DNS_LABEL_RE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
"""RFC 1123 label: a name that Kubernetes accepts."""


def quantity_to_bytes(quantity: str) -> int:
    """A quantity such as 16Gi in bytes."""
    match = QUANTITY_RE.fullmatch(quantity)
    assert match is not None, quantity
    return int(float(match[1]) * QUANTITY_UNITS.get(match[2] or "", 1))


def _check_quantity(text: str) -> str:
    if QUANTITY_RE.fullmatch(text) is None:
        raise invalid("it wants an amount such as 16Gi")
    return text


def _check_code_source(text: str) -> str:
    if text in ("image", "configmap") or re.fullmatch(r"git\+https://[^\s@]+(@[\w./-]+)?", text):
        return text
    raise invalid("it wants image, configmap, or git+https://HOST/PATH@REVISION")


def _check_dns_label(text: str) -> str:
    if DNS_LABEL_RE.fullmatch(text) is None:
        raise invalid("it wants lower-case letters, digits and dashes")
    return text


def _check_label_value(text: str) -> str:
    if re.fullmatch(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?", text) is None:
        raise invalid(f"it wants a label value, such as {re.sub(r'[^-A-Za-z0-9_.]+', '-', text).strip('-_.')[:63]}")
    return text


IS_QUANTITY, IS_DNS_LABEL = AfterValidator(_check_quantity), AfterValidator(_check_dns_label)
Quantity = Annotated[str, IS_QUANTITY]
"""Bytes as a Kubernetes quantity."""
DnsLabel = Annotated[str, IS_DNS_LABEL]


VolumePurpose = Literal["data", "models", "workspace"]


class VolumeConfig(FrozenModel):
    """A persistent volume claim."""

    mount: str
    """Mount path in the pods, such as /shared/models."""
    size: Quantity = "20Gi"
    """Requested size."""
    access_mode: Literal["auto", "ReadWriteMany", "ReadWriteOnce"] = "auto"
    """auto: ReadWriteMany for several nodes, ReadWriteOnce for one."""
    storage_class: str | None = None
    """Storage class; without it, the default of the cluster."""
    purpose: VolumePurpose | None = None
    """What it is for: models holds the run, workspace the downloads (HF_HOME); else its mount path or name tells."""


DEFAULT_VOLUMES = {
    "training-data": VolumeConfig(mount="/shared/data"),
    "trained-models": VolumeConfig(mount="/shared/models", size="50Gi"),
    "workspace": VolumeConfig(mount="/workspace", size="50Gi"),
}
POD_VOLUMES = ("recipe", "scratch", "dshm", "code", "code-zip")
"""Names of the volumes that every pod has besides the claims."""


class ClusterConfig(FrozenModel):
    """The OpenShift job of launch --on openshift: pods, resources, volumes."""

    namespace: DnsLabel = "modelwright"
    """Namespace (project) of the job; its volumes are kept, so that later jobs reuse them."""
    job_kind: Literal["trainjob", "pytorchjob"] = "trainjob"
    """Kind of job: trainjob for OpenShift AI from 3.2, pytorchjob up to 3.5."""
    nodes: PositiveInt = 1
    """Number of nodes, one pod each."""
    gpus_per_node: NonNegativeInt = 1
    """GPUs (and so processes) per pod; 0 trains on the CPU."""
    gpu_product: Annotated[str, AfterValidator(_check_label_value)] | None = None
    """GPU model as in the node label nvidia.com/gpu.product, such as NVIDIA-L40S (node selector)."""
    cpu: PositiveInt = 4
    """CPU cores per pod (limit)."""
    cpu_request: PositiveInt | None = None
    """CPU cores requested per pod; without it, cpu."""
    memory: Quantity = "16Gi"
    """Memory per pod (limit)."""
    memory_request: Quantity | None = None
    """Memory requested per pod; without it, memory."""
    shm_size: Quantity = "4Gi"
    """Size of /dev/shm, counted within memory."""
    image: str | None = None
    """Container image; without it, the one built in the namespace from the Containerfile."""
    code_source: Annotated[str, AfterValidator(_check_code_source)] = "image"
    """Where the program comes from: image, configmap, or git+https://HOST/PATH@REVISION."""
    volumes: dict[str, VolumeConfig] = DEFAULT_VOLUMES
    """Volume claims by name; NAME: null removes one of the base recipe."""
    local_queue: DnsLabel | None = None
    """Kueue LocalQueue; also shows the job in the workload metrics of the project."""
    hf_token_secret: DnsLabel | None = None
    """Secret whose key HF_TOKEN holds the Hugging Face token; the token itself is never written."""
    max_restarts: Annotated[int, Field(ge=0, le=20)] = 3
    """Maximum restarts after a lost pod; each resumes from the last checkpoint."""
    env: dict[str, str] = {}
    """Further environment variables of the pods, such as NCCL_DEBUG: INFO."""

    def mount_for(self, purpose: VolumePurpose) -> str | None:
        """Mount path of the volume for a purpose: the one that says so, is mounted there by default, or is named so."""
        default, word = {"data": ("/shared/data", "data"), "models": ("/shared/models", "model"),
                         "workspace": ("/workspace", "workspace")}[purpose]  # fmt: skip
        free = {name: volume for name, volume in self.volumes.items() if volume.purpose in (None, purpose)}
        ranked = sorted(
            free, key=lambda name: (free[name].purpose is None, free[name].mount != default, word not in name)
        )
        best = free[ranked[0]] if ranked else None
        matches = best and (best.purpose == purpose or best.mount == default or word in ranked[0])
        return best.mount.rstrip("/") if best and matches else None

    @model_validator(mode="after")
    def _fits(self) -> Self:
        mounts: dict[str, str] = {}
        for name, volume in self.volumes.items():
            if DNS_LABEL_RE.fullmatch(name) is None:
                raise invalid(f"has a volume {name!r}; it wants a name of lower-case letters, digits and dashes")
            if name in POD_VOLUMES:
                raise invalid(f"has a volume {name}, as every pod has already; it wants another name")
            if not volume.mount.startswith("/") or volume.mount == "/":
                raise invalid(f"has volume {name} at {volume.mount!r}; it wants a folder such as /shared/models")
            if (first := mounts.setdefault(volume.mount.rstrip("/"), name)) != name:
                raise invalid(f"has volumes {first} and {name} at {volume.mount}; {first}: null removes the first")
            if self.nodes > 1 and volume.access_mode == "ReadWriteOnce":
                raise invalid(f"has {self.nodes} nodes and volume {name} ReadWriteOnce; it wants ReadWriteMany")
        for name in self.env:
            if not name or "=" in name or not (name.isascii() and name.isprintable()):
                raise invalid(f"has a variable {name!r} in env; it wants a name without =, and its value after a colon")
        if (self.cpu_request or 0) > self.cpu:
            raise invalid(f"has cpu_request {self.cpu_request} above cpu {self.cpu}, the limit")
        if self.memory_request and quantity_to_bytes(self.memory_request) > quantity_to_bytes(self.memory):
            raise invalid(f"has memory_request {self.memory_request} above memory {self.memory}, the limit")
        if quantity_to_bytes(self.shm_size) >= quantity_to_bytes(self.memory):
            raise invalid(f"has shm_size {self.shm_size} within memory {self.memory}; it wants less than memory")
        if not self.volumes:
            raise invalid("has no volume; it wants one at least, where the run is kept")
        return self


PERPLEXITY_METRICS = ("text_loss", "text_perplexity", "text_bits_per_byte")
CHOICE_METRICS = ("choice_accuracy", "choice_accuracy_norm")
LM_EVAL_METRICS = ("acc", "acc_norm", "exact_match", "f1", "perplexity", "word_perplexity", "bits_per_byte")
TASK_FILE_SUFFIXES = (".yaml", ".yml")


def _check_template(text: str) -> str:
    if "{question}" not in text:
        raise invalid("it wants a text with {question} in it")
    return text


VERIFIER_SETTINGS: dict[str, tuple[str, ...]] = {
    "exact_match": ("ignore_case", "ignore_punctuation"), "number": ("abs_tol", "rel_tol"), "multiple_choice": (),
    "regex": ("pattern", "ignore_case"), "json_schema": ("json_schema",), "json_fields": ("fields",), "tool_call": (),
    "length": ("min_words", "max_words"), "tags": ("tags",), "python": ("file", "timeout"),
}  # fmt: skip
"""The settings that each verifier reads besides type and weight."""
REQUIRED_SETTINGS = {"regex": "pattern", "json_schema": "json_schema", "tags": "tags", "python": "file"}
if TYPE_CHECKING:
    VerifierType = str
else:
    VerifierType = Literal[tuple(VERIFIER_SETTINGS)]


class VerifierConfig(FrozenModel):
    """A verifier: code that judges an answer from 0 (wrong) to 1 (right). What a model writes is never executed."""

    type: VerifierType | None = None
    """The verifier; without it, the name of the entry is the type."""
    weight: NonNegativeFloat = 1.0
    """Weight in answers.score, the weighted mean of all verifiers."""
    ignore_case: bool = False
    """exact_match, regex: upper and lower case are equal."""
    ignore_punctuation: bool = False
    """exact_match: punctuation does not count."""
    abs_tol: NonNegativeFloat = 0.0
    """number: largest difference of the last number of the answer from that of the reference."""
    rel_tol: NonNegativeFloat = 1e-9
    """number: the same, as a fraction of the larger of the two."""
    pattern: RegexStr | None = None
    """regex: a regular expression that is searched in the answer."""
    json_schema: dict[str, Any] = {}
    """json_schema: the JSON schema that the answer must be valid against."""
    fields: list[str] = []
    """json_fields: the fields to compare, each as much as the others; without it, all, and a further one is wrong."""
    min_words: NonNegativeInt = 0
    """length: minimum number of words."""
    max_words: PositiveInt | None = None
    """length: maximum number of words."""
    tags: list[str] = []
    """tags: names of XML tags, such as think, that must each stand once in the answer, closed, in this order."""
    file: str | None = None
    """python: a file with a function verify(prompt, answer, reference); it runs only with --trust-file FILE."""
    timeout: PositiveFloat = 60.0
    """python: seconds for all answers of a model, in its own process."""


class AnswersConfig(FrozenModel):
    """Answers to held-out prompts, judged by verifiers; the metrics are answers.NAME of each, and answers.score."""

    verifiers: dict[Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")], VerifierConfig] = {
        "exact_match": VerifierConfig()
    }
    """Verifiers by name, such as {exact_match: {}} or {greets: {type: regex, pattern: ^Dear}}."""
    dataset_name: str | None = None
    """Prompts and reference answers: a file, a folder, an embedded set or a hub id; without it, the held-out rows."""
    max_prompts: PositiveInt = 100
    """Maximum number of prompts; the seed chooses them."""
    max_new_tokens: PositiveInt = 128
    """Maximum length of an answer in tokens."""
    temperature: NonNegativeFloat = 0.0
    """Sampling temperature; 0 is greedy decoding."""

    @model_validator(mode="after")
    def _verifiers_fit(self) -> Self:
        if not self.verifiers:
            raise invalid("has no verifiers; it wants one at least, such as {exact_match: {}}")
        for name, verifier in self.verifiers.items():
            kind, where = verifier.type or name, f"has verifiers.{name}"
            if kind not in VERIFIER_SETTINGS or name == "score":
                raise invalid(f"{where}; it wants a type: {', '.join(VERIFIER_SETTINGS)}")
            if (required := REQUIRED_SETTINGS.get(kind)) and not getattr(verifier, required):
                raise invalid(f"{where} of type {kind}, which wants {required}")
            for setting in verifier.model_fields_set - {"type", "weight", *VERIFIER_SETTINGS[kind]}:
                if getattr(verifier, setting) != VerifierConfig.model_fields[setting].default:
                    raise invalid(f"{where}.{setting}, which {kind} does not read")
        return self

    @property
    def metric_names(self) -> tuple[str, ...]:
        """The metrics a gate may use."""
        return tuple(f"answers.{name}" for name in (*self.verifiers, "score"))


class EvaluateConfig(FrozenModel):
    """Evaluation of the initial model and of the model of every stage, by the same measurements."""

    perplexity_text: str | None = None
    """Raw text (file, folder, embedded set, hub id) to measure perplexity on; else that held out by pretrain."""
    text_column: str = "text"
    """Column of perplexity_text that holds the documents."""
    multiple_choice: str | None = None
    """Multiple-choice questions (file, folder or hub id) with the usual columns for question, options and answer."""
    question_template: Annotated[str, AfterValidator(_check_template)] = "Question: {question}\nAnswer:"
    """Text around a question of multiple_choice; '{question}' is none, as for options that continue a text (COPA)."""
    max_rows: PositiveInt = 200
    """Maximum number of documents, and of questions, to evaluate."""
    max_length: Annotated[int, Field(ge=8)] = 512
    """Maximum sequence length; longer documents are split."""
    completion_prompts: list[str] = []
    """Prompts that every model completes, shown side by side."""
    max_new_tokens: PositiveInt = 48
    """Maximum length of a completion in tokens."""
    tasks: list[str] = []
    """Tasks of lm-eval, by name or as a task file NAME.yaml; needs the eval extra."""
    answers: AnswersConfig | None = None
    """Answers to held-out prompts, judged by verifiers."""

    @property
    def is_configured(self) -> bool:
        """Whether anything is to be evaluated."""
        sources = (self.perplexity_text, self.multiple_choice, self.completion_prompts, self.tasks, self.answers)
        return any(sources)

    @property
    def metric_names(self) -> tuple[str, ...]:
        """The metrics a gate may use."""
        names = (PurePath(task).stem if task.endswith(TASK_FILE_SUFFIXES) else task for task in self.tasks)
        task_metrics = (f"{name}_{metric}" for name in names for metric in LM_EVAL_METRICS)
        answer_metrics = self.answers.metric_names if self.answers else ()
        return (*PERPLEXITY_METRICS, *(CHOICE_METRICS if self.multiple_choice else ()), *answer_metrics, *task_metrics)


ColumnRole = Literal["messages", "prompt", "completion", "system", "context", "history", "tools", "chosen", "rejected",
                     "text", "ignore"]  # fmt: skip
"""What a column holds."""


def _parse_percent(value: Any) -> Any:
    """The fraction that a text such as 5% or 5 % means; anything else unchanged."""
    match = re.fullmatch(r"([0-9.]+) *%", value.strip()) if isinstance(value, str) else None
    return round(float(match[1]) / 100, 12) if match and match[1].count(".") < 2 else value


Fraction = Annotated[float, Field(ge=0, le=1), BeforeValidator(_parse_percent)]


class MixtureSource(FrozenModel):
    """One source of a mixture; columns, system_prompt and the split that it does not set are the section's."""

    dataset_name: str | None = None
    """The embedded data set, file, folder or hub id, where the name in mix is only a name."""
    weight: PositiveFloat | None = None
    """Sampling weight; without any weights, an epoch has each row of each source once."""
    max_rows: CountOrFraction | None = None
    """Use only the first rows, as a count or a fraction."""
    columns: dict[str, ColumnRole] = {}
    """Role of its columns by name."""
    system_prompt: str | None = None
    """System message of its conversations."""
    dataset_config_name: str | None = None
    """Configuration of a hub data set."""
    dataset_split: str | None = None
    """Split of a hub data set."""

    @model_validator(mode="before")
    @classmethod
    def _weight_alone(cls, value: Any) -> Any:
        if isinstance(value, bool) or (isinstance(value, int | float) and not value > 0):
            raise invalid("it wants a weight above 0")
        return {"weight": value} if isinstance(value, int | float) else value


class DataConfig(FrozenModel):
    """Training data, and the held-out split."""

    dataset_name: str | None = None
    """An embedded data set (field-guide, songbook, python-docs, shapes), a file, a folder or a hub id."""
    data_dir: str | None = None
    """Folder or file with the images of dataset_name; cifar10 is downloaded into a folder that has none."""
    dataset_config_name: str | None = None
    """Configuration of a hub data set."""
    dataset_split: str = "train"
    """Split of a hub data set or of a folder that load_from_disk reads."""
    train_file: str | None = None
    """A JSONL, JSON, CSV, TSV, Parquet, Arrow or TXT file, also .gz or .zst, or a pattern such as data/*.jsonl."""
    validation_file: str | None = None
    """A file or folder of held-out rows; without it, test_size of the training rows are held out."""
    validation_split: str | None = None
    """Split of the same data set that is held out, where it has one, such as validation."""
    columns: dict[str, ColumnRole] = {}
    """Role of columns by name, such as {question: prompt}; usual names need none. context follows the prompt, history
    precedes it, tools are JSON schemas, text is trained whole without the chat template, ignore leaves it out."""
    derived_columns: dict[str, str] = {}
    """Columns derived from others by a format string, such as {full-question: "For {topic}, {question}"}."""
    generate_qa: Literal["songs"] | None = None
    """Generate questions and answers for rows that have none: songs, from the columns lyrics and artist."""
    text_column: str = "text"
    """Column that holds the documents of raw text."""
    sample_by: Literal["document", "paragraph", "line"] = "document"
    """What is a document in a TXT file; paragraphs are separated by blank lines."""
    system_prompt: str | None = None
    """System message of every conversation, in training and inference."""
    split_by: str | None = None
    """Column whose equal values stay in one split; without it, the prompt."""
    test_size: CountOrFraction = CountOrFraction("10%")
    """Held-out rows, as a count or a fraction of the distinct split_by values."""
    max_rows: PositiveInt | None = None
    """Use only the first rows, for a quick test."""
    sample_evenly: bool = False
    """Take max_rows from the whole source at equal distances, where its rows are sorted by topic."""
    max_invalid_fraction: Fraction = 0.0
    """Maximum fraction of invalid rows; they are moved to quarantine.jsonl, 0 allows none."""
    mix: dict[str, MixtureSource] = {}
    """Several sources with sampling weights, such as {wiki.jsonl: 2, python-docs: 1}, or with settings of their own."""
    stopping_strategy: Literal["first_exhausted", "all_exhausted"] | None = None
    """Whether an epoch of a mixture with weights ends when the first source or all have come once; without it, after
    as many rows as all sources have."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if unweighted := [name for name in self.mix if self.weights and name not in self.weights]:
            raise invalid(f"has a mix in which {unweighted[0]} has no weight; all sources want one, or none does")
        if self.stopping_strategy and not self.weights:
            raise invalid("has a stopping_strategy, which wants a mix with weights")
        named = [key for key in ("dataset_name", "train_file", "mix") if getattr(self, key)]
        if len(named) != 1:
            conflict = "both " + " and ".join(named) if named else "neither dataset_name nor train_file"
            raise invalid(f"has {conflict}; set exactly one of them")
        return self

    @property
    def source(self) -> str:
        """Where the rows come from."""
        return self.dataset_name or self.train_file or " and ".join(self.mix)

    @property
    def weights(self) -> dict[str, float]:
        """The weights of the sources of a mixture, if they have any."""
        return {name: source.weight for name, source in self.mix.items() if source.weight}

    @property
    def parts(self) -> dict[str, DataConfig]:
        """The data of each source of a mixture, by name; without a mixture, these."""
        parts = {}
        for name, source in self.mix.items():
            own = {key: value for key, value in source if value and key not in ("weight", "max_rows")}
            parts[name] = self.model_copy(update={"mix": {}, "dataset_name": name, **own})
        return parts or {self.source: self}
