"""What benchmarks.speed trains: model shapes and batches, their variants, the data, and models with random weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from modelwright.engine.task import Task

SEED = 42
VOCAB_SIZE = 50_304
SMALL_VOCAB_SIZE, SMALL_LENGTH = 8192, 256
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
EOS = "</s>"


@dataclass(frozen=True)
class Workload:
    """A Llama shape and a batch of token rows."""

    layers: int
    """Transformer layers."""
    width: int
    """Hidden size."""
    inner: int
    """Intermediate size of the MLP."""
    heads: int
    """Attention heads."""
    key_heads: int
    """Key and value heads."""
    rows: int
    """Micro-batch size per device."""
    length: int
    """Tokens per row."""
    accumulation: int = 1
    """Micro-batches per step."""
    vocab_size: int = VOCAB_SIZE
    """Vocabulary size."""
    lora: bool = False
    """Whether only LoRA matrices are trained."""
    learning_rate: float = 1e-4
    """Constant; with that of a small model the loss of a large one diverges, and losses cannot be compared."""

    @property
    def batch(self) -> int:
        """Rows per step."""
        return self.rows * self.accumulation


@dataclass(frozen=True)
class Variant:
    """One row of a speed table: who trains, with which settings."""

    name: str
    """Its name in the table."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of our stage."""
    peer: dict[str, Any] | None = None
    """Settings of the HF Trainer or TRL, where it trains."""
    titan: dict[str, Any] | None = None
    """Settings of torchtitan's JobConfig, where it trains."""
    optional: bool = False
    """Whether it runs only if --variant selects it."""
    bf16_weights: bool = False
    """Whether the peer's weights are plain bf16: faster, and without fp32 master weights."""


@dataclass(frozen=True)
class SftScenario:
    """A supervised fine-tune on prompts and completions under the system prompt of the survival recipe."""

    shape: str
    """smollm3 and tiny have random weights; smollm2 is the embedded SmolLM2-135M."""
    rows: int | None
    """Training rows; None: all."""
    batch: int
    """Rows per step."""
    epochs: int
    """Epochs of our run."""
    compared_steps: int
    """Steps of the run without caching, and of the peer."""


@dataclass(frozen=True)
class DpoWorkload:
    """A Llama shape and preference pairs of exact lengths."""

    layers: int
    """Transformer layers."""
    width: int
    """Hidden size; heads are 64 wide, four query heads per key head."""
    vocab_size: int
    """Vocabulary size."""
    prompt: int
    """Tokens per prompt."""
    answer: int
    """Tokens per answer, without its EOS."""
    pairs: int
    """Pairs per step."""

    @property
    def max_length(self) -> int:
        """Tokens of a prompt with one answer."""
        return self.prompt + self.answer + 1

    def __str__(self) -> str:
        return (
            f"{self.layers}-layer Llama of width {self.width}, {self.pairs} pairs a step of {self.prompt} prompt + "
            f"2 × {self.answer + 1} answer tokens"
        )


EXACT = "ours, fp32 weights and autocast"
"""The variant that the losses of the others are compared with."""
COMPILED = {"precision": "bf16", "torch_compile": True}
HALF_MEAN = {**COMPILED, "exp_avg_dtype": "bf16"}
FASTEST = {"deterministic": False}
SELECTIVE, FULL = ({"gradient_checkpointing": how} for how in ("selective", True))
CHECKPOINTED = {"bf16": True, "gradient_checkpointing": True}
TITAN_FP8 = {"model.converters": ["quantize.linear.float8"], "quantize.linear.float8.filter_fqns": ["output"]}
KEEP_ALL = {"activation_checkpoint.mode": "none"}
KEEP_SOME = {"activation_checkpoint.mode": "selective", "activation_checkpoint.selective_ac_option": "op"}
KEEP_FEW = {"activation_checkpoint.mode": "full"}
LIGER = {"bf16": True, "use_liger_kernel": True, "gradient_checkpointing": False}
ON_CPU = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False}
PACKED = {"packing": True, "max_length": 4096}
DPO = {
    "dpo": DpoWorkload(layers=16, width=2048, vocab_size=50304, prompt=512, answer=511, pairs=8),
    "dpo-tiny": DpoWorkload(layers=4, width=256, vocab_size=2048, prompt=192, answer=63, pairs=4),
}
SURVIVAL = {
    "survival": SftScenario("smollm2", 32, 8, 4, 3),
    "survival-3b": SftScenario("smollm3", None, 16, 4, 24),
    "survival-tiny": SftScenario("tiny", 32, 8, 2, 3),
}
SMOLLM3_3B: dict[str, Any] = {
    "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
    "num_attention_heads": 16, "num_key_value_heads": 4, "max_position_embeddings": 65536, "rope_theta": 5e6,
    "tie_word_embeddings": True,
}  # fmt: skip
TINY_SMOLLM3: dict[str, Any] = {
    **SMOLLM3_3B, "vocab_size": 8192, "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 12,
}  # fmt: skip
WORKLOADS = {
    "tiny": Workload(2, 64, 128, 4, 2, rows=2, length=64, vocab_size=512),
    "tiny-lora": Workload(2, 64, 128, 4, 2, rows=2, length=64, vocab_size=512, lora=True),
    "135m": Workload(30, 576, 1536, 9, 3, rows=16, length=512),
    "0.5b": Workload(14, 1536, 4096, 12, 4, rows=8, length=512),
    "fp32": Workload(14, 1536, 4096, 12, 4, rows=8, length=512),
    "6b": Workload(32, 4096, 11008, 32, 8, rows=8, length=2048, accumulation=4, learning_rate=1e-5),
    "lora": Workload(32, 4096, 14336, 32, 8, rows=4, length=4096, vocab_size=128_256, lora=True),
}
VARIANTS = {
    "tiny": (
        Variant("ours, fp32", {"precision": "fp32"}),
        Variant("ours, fp32, selective checkpointing", {"precision": "fp32", **SELECTIVE}, optional=True),
        Variant("HF Trainer, fp32", peer={"use_cpu": True}),
    ),
    "tiny-lora": (
        Variant("ours, fp32", {"precision": "fp32"}),
        Variant("HF Trainer and PEFT, fp32", peer={"use_cpu": True}),
    ),
    "135m": (
        Variant(EXACT, {**COMPILED, "param_dtype": "fp32"}),
        Variant("ours, bf16", COMPILED),
        Variant("ours, bf16, mean in bf16", HALF_MEAN),
        Variant("ours, fp8", {**COMPILED, "precision": "fp8"}),
        Variant("ours, fp8, a scale for each row", {**COMPILED, "precision": "fp8", "fp8_scaling": "rowwise"}),
        Variant("ours, fp16", {**COMPILED, "precision": "fp16"}),
        Variant("ours, fp32 on tensor cores", {**COMPILED, "precision": "fp32"}),
        Variant("HF Trainer, bf16, eager", peer={"bf16": True}),
    ),
    "0.5b": (
        Variant("ours, bf16", COMPILED),
        Variant("ours, bf16, deterministic: false", {**COMPILED, **FASTEST}, optional=True),
        Variant("ours, bf16, mean in bf16", HALF_MEAN),
        Variant("ours, bf16, not recorded", {**COMPILED, "cuda_graphs": "never"}),
        Variant("ours, bf16, selective checkpointing", {**COMPILED, **SELECTIVE}, optional=True),
        Variant("ours, bf16, full checkpointing", {**COMPILED, **FULL}, optional=True),
        Variant("ours, fp8", {**COMPILED, "precision": "fp8"}),
        Variant(EXACT, {**COMPILED, "param_dtype": "fp32"}),
        Variant("HF Trainer, bf16, eager", peer={"bf16": True}),
        Variant("HF Trainer, bf16, torch_compile", peer={"bf16": True, "torch_compile": True}),
        Variant("torchtitan, bf16, compiled", titan=KEEP_ALL),
        Variant("torchtitan, fp8, compiled", titan={**KEEP_ALL, **TITAN_FP8}),
    ),
    "fp32": (
        Variant("ours, fp32", {"precision": "fp32", "tf32": False, "torch_compile": True}),
        Variant("ours, tf32", {"precision": "fp32", "tf32": True, "torch_compile": True}),
        Variant("HF Trainer, fp32", peer={"tf32": False}),
        Variant("HF Trainer, tf32", peer={"tf32": True}),
    ),
    "6b": (
        Variant("ours, bf16", HALF_MEAN),
        Variant("ours, bf16, deterministic: false", {**HALF_MEAN, **FASTEST}, optional=True),
        Variant("ours, fp8, deterministic: false", {**HALF_MEAN, **FASTEST, "precision": "fp8"}, optional=True),
        Variant("ours, bf16, selective checkpointing", {**HALF_MEAN, **SELECTIVE}, optional=True),
        Variant("ours, bf16, full checkpointing", {**HALF_MEAN, **FULL}, optional=True),
        Variant("ours, fp8", {**HALF_MEAN, "precision": "fp8"}),
        Variant("ours, fp8, a scale for each row", {**HALF_MEAN, "precision": "fp8", "fp8_scaling": "rowwise"},
                optional=True),
        Variant("ours, fp8, selective checkpointing", {**HALF_MEAN, "precision": "fp8", **SELECTIVE}, optional=True),
        Variant("HF Trainer, bf16, checkpointing", peer=CHECKPOINTED),
        Variant("HF Trainer, bf16, checkpointing, liger", peer={**CHECKPOINTED, "use_liger_kernel": True}),
        Variant("torchtitan, bf16, compiled, full checkpointing", titan=KEEP_FEW),
        Variant("torchtitan, bf16, compiled, selective checkpointing", titan=KEEP_SOME),
        Variant("torchtitan, fp8, compiled, full checkpointing", titan={**KEEP_FEW, **TITAN_FP8}),
    ),
    "lora": (
        Variant("ours, bf16", COMPILED),
        Variant("ours, bf16, deterministic: false", {**COMPILED, **FASTEST}, optional=True),
        Variant("ours, bf16, selective checkpointing", {**COMPILED, **SELECTIVE}, optional=True),
        Variant("ours, bf16, full checkpointing", {**COMPILED, **FULL}, optional=True),
        Variant("ours, fp8", {**COMPILED, "precision": "fp8"}),
        Variant("ours, fp8, a scale for each row", {**COMPILED, "precision": "fp8", "fp8_scaling": "rowwise"},
                optional=True),
        Variant("HF Trainer and PEFT, bf16, checkpointing, liger", peer={**CHECKPOINTED, "use_liger_kernel": True}),
    ),
    "sft": (
        Variant("ours, bf16", COMPILED),
        Variant("ours, bf16, deterministic: false", {**COMPILED, **FASTEST}),
        Variant("ours, bf16, not compiled", {"precision": "bf16"}),
        Variant("ours, bf16, packed, nothing shared", {**COMPILED, **PACKED, "share_prefix": False}),
        Variant("TRL, bf16, liger", peer=LIGER),
        Variant("TRL, bf16, liger, packed", peer={**LIGER, **PACKED}),
        Variant("TRL, bf16 weights, liger", peer=LIGER, bf16_weights=True),
    ),
    "sft-tiny": (
        Variant("ours, fp32", {"precision": "fp32"}),
        Variant("ours, fp32, packed, nothing shared", {"precision": "fp32", "packing": True, "share_prefix": False}),
        Variant("TRL, fp32", peer=ON_CPU),
        Variant("TRL, fp32, packed", peer={**ON_CPU, "packing": True}),
    ),
    "dpo": (
        Variant("ours, bf16", {"torch_compile": True}),
        Variant("ours, bf16, deterministic: false", {"torch_compile": True, **FASTEST}),
        Variant("TRL, bf16", peer={"precompute_ref_log_probs": True}),
        Variant("TRL with a second model, bf16", peer={"precompute_ref_log_probs": False}),
        Variant("ours not compiled, bf16"),
    ),
    "dpo-tiny": (
        Variant("ours, fp32", {"precision": "fp32"}),
        Variant("TRL, fp32", peer={"precompute_ref_log_probs": True}),
        Variant("TRL with a second model, fp32", peer={"precompute_ref_log_probs": False}),
    ),
}  # fmt: skip


def token_rows(workload: Workload, steps: int, tokens: Path | None = None) -> np.ndarray[Any, Any]:
    """Learnable token rows [rows, length]; without a file of tokens, half of the tokens follow from the one before."""
    rng = np.random.default_rng(SEED)
    count = workload.batch * steps
    if tokens is not None:
        return np.resize(np.lib.format.open_memmap(tokens, mode="r").astype(np.int64), (count, workload.length))
    limit = workload.vocab_size - 1
    rows = rng.zipf(1.2, (count, workload.length)).astype(np.int64) % limit + 1
    follows = rng.random(rows.shape) < 0.5
    for column in range(1, workload.length):
        rows[:, column] = np.where(follows[:, column], rows[:, column - 1] * 7 % limit + 1, rows[:, column])
    return rows


def random_model(
    model_type: str, shape: dict[str, Any], device: Any = "cpu", tokenizer: Any = None, dtype: Any = None
) -> Any:
    """A model with random weights on a device, fp32 by default; `tokenizer` gives its special tokens."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    special: dict[str, Any] = {}
    if tokenizer is not None:
        ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
        special = {"bos_token_id": None, **ids}
    torch.manual_seed(SEED)
    with torch.device(device):
        config = AutoConfig.for_model(model_type, **shape, **special)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype or torch.float32, attn_implementation="sdpa")
    if tokenizer is not None:
        model.generation_config.eos_token_id = tokenizer.eos_token_id
    return model


def random_llama(workload: Workload) -> Any:
    """The model of a workload with random weights, on the GPU where there is one."""
    import torch

    shape = {
        "vocab_size": workload.vocab_size, "hidden_size": workload.width, "intermediate_size": workload.inner,
        "num_hidden_layers": workload.layers, "num_attention_heads": workload.heads, "tie_word_embeddings": False,
        "num_key_value_heads": workload.key_heads, "max_position_embeddings": workload.length,
    }  # fmt: skip
    return random_model("llama", shape, "cuda" if torch.cuda.is_available() else "cpu")


class TokenRowsTask(Task):
    """Pretraining on token rows of one length."""

    metric_names: tuple[str, ...] = ("loss", "bits_per_byte")
    held_out_rows = 0

    def __init__(self, model: Any, rows: np.ndarray[Any, Any]) -> None:
        from modelwright.tasks.pretrain import PretrainLoss

        self.module: Any = PretrainLoss(model, 1.0)
        self._rows = rows

    @property
    def rows(self) -> int:
        return len(self._rows)

    def row_length(self, row: int) -> int:
        return int(self._rows.shape[1])

    def batch(self, rows: Sequence[int], step: int) -> Any:
        from modelwright.tasks.pretrain import collate_packed

        tokens = self._rows[list(rows)] if len(rows) else np.zeros((1, self._rows.shape[1]), dtype=np.int64)
        return collate_packed(tokens, np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape).copy(), tokens.size)

    def held_out_batch(self, rows: Sequence[int]) -> Any:
        return self.batch(rows, 0)


def flops_per_token(workload: Workload) -> float:
    """Forward and backward: six per trained weight of a matmul, four per frozen one, and causal attention.

    The LoRA matrices themselves are not counted.
    """
    depth = workload.width // workload.heads
    layer = 2 * workload.width * depth * (workload.heads + workload.key_heads) + 3 * workload.width * workload.inner
    attention = 12 * workload.heads * depth * workload.length / 2
    weights = workload.layers * layer + workload.vocab_size * workload.width
    return (4.0 if workload.lora else 6.0) * weights + workload.layers * attention


def train_tokenizer(folder: Path, texts: list[str], vocab_size: int = SMALL_VOCAB_SIZE) -> Any:
    """A BPE tokenizer trained on the texts, with ChatML."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<|pad|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=special[2], pad_token=special[0])
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(folder)
    return tokenizer


def save_small_model(
    folder: Path, texts: list[str], layers: int = 8, width: int = 256, vocab_size: int = SMALL_VOCAB_SIZE
) -> None:
    """A Llama with random weights, and a tokenizer trained on the texts."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    shape = {
        "vocab_size": vocab_size, "hidden_size": width, "intermediate_size": width * 43 // 16,
        "num_hidden_layers": layers, "num_attention_heads": 8, "num_key_value_heads": 4,
        "max_position_embeddings": SMALL_LENGTH, "tie_word_embeddings": True,
    }  # fmt: skip
    random_model("llama", shape, tokenizer=train_tokenizer(folder, texts, vocab_size)).save_pretrained(folder)


def scenario_conversations(scenario: SftScenario, data: Path | None) -> Any:
    """The rows of a file, or of the embedded field guide, under the recipe's system prompt."""
    from modelwright.data import chat
    from modelwright.data.sources import read_train_rows
    from modelwright.recipe.load import load
    from modelwright.recipe.sections import DataConfig

    recipe = load("survival-smollm3", environ={}).recipe
    assert recipe.data is not None
    source = str(data) if data else "field-guide"
    config = DataConfig(dataset_name=source, system_prompt=recipe.data.system_prompt, max_rows=scenario.rows)
    roles: dict[str, Any] = {"full-question": "prompt", "question": "prompt", "answer": "completion"}
    present = read_train_rows(config, Path())[0].values
    config = config.model_copy(update={"columns": {name: role for name, role in roles.items() if name in present}})
    items = chat.rows_to_conversations(read_train_rows(config, Path()), config)
    return chat.ConversationDataset(items, [], "")


def save_scenario_tokenizer(scenario: SftScenario, rows: Any, folder: Path) -> None:
    """Write the embedded model's tokenizer, or one trained on the rows."""
    from modelwright.models import pretrained

    if scenario.shape == "smollm2":
        pretrained.load_tokenizer(pretrained.embedded_model()).save_pretrained(folder)
    else:
        train_tokenizer(folder, [message["content"] for item in rows.train for message in item.messages])


def load_scenario_model(scenario: SftScenario, folder: Path, device: Any, settings: Any) -> Any:
    """The model on its device with its trainable parameters set: the embedded one, or random weights of a shape."""
    from modelwright.models import pretrained, trainable

    if scenario.shape == "smollm2":
        model = pretrained.load_model(pretrained.embedded_model())
    else:
        shape = SMOLLM3_3B if scenario.shape == "smollm3" else TINY_SMOLLM3
        model = random_model("smollm3", shape, device, pretrained.load_tokenizer(folder))
    return trainable.set_trainable(model, settings).to(device)


def save_dpo_model(folder: Path, workload: DpoWorkload) -> None:
    """A Llama with random weights, and a tokenizer whose words are numbers, so that lengths are exact."""
    import torch
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {str(number): number for number in range(workload.vocab_size - 1)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.add_special_tokens([AddedToken(EOS, special=True)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token=EOS, pad_token=EOS)
    tokenizer.save_pretrained(folder)
    heads = workload.width // 64
    shape = {
        "vocab_size": workload.vocab_size, "hidden_size": workload.width, "intermediate_size": 4 * workload.width,
        "num_hidden_layers": workload.layers, "num_attention_heads": heads, "num_key_value_heads": max(1, heads // 4),
        "tie_word_embeddings": True, "max_position_embeddings": workload.max_length,
    }  # fmt: skip
    device = "cuda" if torch.cuda.is_available() else "cpu"
    random_model("llama", shape, device, tokenizer).save_pretrained(folder)


def preference_texts(workload: DpoWorkload, steps: int) -> list[tuple[str, str, str]]:
    """Prompts with two answers each, of exact lengths; the EOS token comes on top."""
    rng = np.random.default_rng(SEED)
    shape = (workload.pairs * steps, workload.prompt + 2 * workload.answer)
    rows = [list(map(str, row)) for row in rng.integers(1, workload.vocab_size - 1, shape)]
    first, second = workload.prompt, workload.prompt + workload.answer
    return [(" ".join(row[:first]), " ".join(row[first:second]), " ".join(row[second:])) for row in rows]
