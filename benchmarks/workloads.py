"""What benchmarks.speed trains: shapes and batches, the ways to do each, the rows, and a model of random weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

SEED = 42
WORDS = 50_304
SMALL_WORDS, SMALL_LENGTH = 8192, 256
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Workload:
    """One model shape and one batch."""

    layers: int
    """Transformer layers."""
    width: int
    """Hidden size."""
    inner: int
    """Size inside the feed-forward part."""
    heads: int
    """Attention heads."""
    key_heads: int
    """Heads of keys and values."""
    rows: int
    """Micro-batch size per device."""
    length: int
    """Tokens in a row."""
    accumulation: int = 1
    """Micro-batches in a step."""
    words: int = WORDS
    """Vocabulary."""
    lora: bool = False
    """Whether only low-rank matrices move, beside frozen weights."""
    learning_rate: float = 1e-4
    """From the first step on; with that of a small model a large one's loss climbs, and says nothing about the ways."""


@dataclass(frozen=True)
class Variant:
    """One way to do the work."""

    name: str
    """What the table calls it."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Of the stage's section."""
    peer: dict[str, Any] | None = None
    """TrainingArguments, where the HF Trainer does it."""
    titan: dict[str, Any] | None = None
    """Settings of torchtitan's JobConfig, where its Trainer does it."""
    aside: bool = False
    """Whether it is measured only where it is asked for."""


EXACT = "ours, fp32 weights and autocast"
"""What the other ways' losses are held against."""
COMPILED = {"precision": "bf16", "torch_compile": True}
HALF_MEAN = {**COMPILED, "exp_avg_dtype": "bf16"}
SELECTIVE, FULL = ({"gradient_checkpointing": how} for how in ("selective", True))
CHECKPOINTED = {"bf16": True, "gradient_checkpointing": True}
TITAN_FP8 = {"model.converters": ["quantize.linear.float8"], "quantize.linear.float8.filter_fqns": ["output"]}
KEEP_ALL = {"activation_checkpoint.mode": "none"}
KEEP_SOME = {"activation_checkpoint.mode": "selective", "activation_checkpoint.selective_ac_option": "op"}
KEEP_FEW = {"activation_checkpoint.mode": "full"}
WORKS = {
    "tiny": Workload(2, 64, 128, 4, 2, rows=2, length=64, words=512),
    "tiny-lora": Workload(2, 64, 128, 4, 2, rows=2, length=64, words=512, lora=True),
    "135m": Workload(30, 576, 1536, 9, 3, rows=16, length=512),
    "0.5b": Workload(14, 1536, 4096, 12, 4, rows=8, length=512),
    "fp32": Workload(14, 1536, 4096, 12, 4, rows=8, length=512),
    "6b": Workload(32, 4096, 11008, 32, 8, rows=8, length=2048, accumulation=4, learning_rate=1e-5),
    "lora": Workload(32, 4096, 14336, 32, 8, rows=4, length=4096, words=128_256, lora=True),
}
WAYS = {
    "tiny": (
        Variant("ours, fp32", {"precision": "fp32"}),
        Variant("ours, fp32, selective checkpointing", {"precision": "fp32", **SELECTIVE}, aside=True),
        Variant("HF Trainer, fp32", peer={"use_cpu": True}),
    ),
    "tiny-lora": (
        Variant("ours, fp32", {"precision": "fp32"}),
        Variant("HF Trainer and PEFT, fp32", peer={"use_cpu": True}),
    ),
    "135m": (
        Variant(EXACT, {**COMPILED, "weights": "fp32"}),
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
        Variant("ours, bf16, mean in bf16", HALF_MEAN),
        Variant("ours, bf16, not recorded", {**COMPILED, "cuda_graphs": "never"}),
        Variant("ours, bf16, selective checkpointing", {**COMPILED, **SELECTIVE}, aside=True),
        Variant("ours, bf16, full checkpointing", {**COMPILED, **FULL}, aside=True),
        Variant("ours, fp8", {**COMPILED, "precision": "fp8"}),
        Variant(EXACT, {**COMPILED, "weights": "fp32"}),
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
        Variant("ours, bf16, selective checkpointing", {**HALF_MEAN, **SELECTIVE}, aside=True),
        Variant("ours, bf16, full checkpointing", {**HALF_MEAN, **FULL}, aside=True),
        Variant("ours, fp8", {**HALF_MEAN, "precision": "fp8"}),
        Variant("ours, fp8, a scale for each row", {**HALF_MEAN, "precision": "fp8", "fp8_scaling": "rowwise"},
                aside=True),
        Variant("ours, fp8, selective checkpointing", {**HALF_MEAN, "precision": "fp8", **SELECTIVE}, aside=True),
        Variant("HF Trainer, bf16, checkpointing", peer=CHECKPOINTED),
        Variant("HF Trainer, bf16, checkpointing, liger", peer={**CHECKPOINTED, "use_liger_kernel": True}),
        Variant("torchtitan, bf16, compiled, full checkpointing", titan=KEEP_FEW),
        Variant("torchtitan, bf16, compiled, selective checkpointing", titan=KEEP_SOME),
        Variant("torchtitan, fp8, compiled, full checkpointing", titan={**KEEP_FEW, **TITAN_FP8}),
    ),
    "lora": (
        Variant("ours, bf16", COMPILED),
        Variant("ours, bf16, selective checkpointing", {**COMPILED, **SELECTIVE}, aside=True),
        Variant("ours, bf16, full checkpointing", {**COMPILED, **FULL}, aside=True),
        Variant("ours, fp8", {**COMPILED, "precision": "fp8"}),
        Variant("ours, fp8, a scale for each row", {**COMPILED, "precision": "fp8", "fp8_scaling": "rowwise"},
                aside=True),
        Variant("HF Trainer and PEFT, bf16, checkpointing, liger", peer={**CHECKPOINTED, "use_liger_kernel": True}),
    ),
}  # fmt: skip


def rows_of(work: Workload, steps: int, tokens: Path | None = None) -> np.ndarray[Any, Any]:
    """Rows that can be learnt: [rows, length]. Without text, a walk whose next word often follows a rule."""
    draw = np.random.default_rng(SEED)
    count = work.rows * work.accumulation * steps
    if tokens is not None:
        return np.resize(np.lib.format.open_memmap(tokens, mode="r").astype(np.int64), (count, work.length))
    words = draw.zipf(1.2, (count, work.length)).astype(np.int64) % (work.words - 1) + 1
    follows = draw.random(words.shape) < 0.5
    for place in range(1, work.length):
        words[:, place] = np.where(follows[:, place], words[:, place - 1] * 7 % (work.words - 1) + 1, words[:, place])
    return words


def build(work: Workload) -> Any:
    """The model with random weights, on the device where there is one."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=work.words, hidden_size=work.width, intermediate_size=work.inner, num_hidden_layers=work.layers,
        num_attention_heads=work.heads, num_key_value_heads=work.key_heads, max_position_embeddings=work.length,
        attn_implementation="sdpa", tie_word_embeddings=False,
    )  # fmt: skip
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        return LlamaForCausalLM(config)


class Rows:
    """Rows of one length as a task."""

    metric_names: tuple[str, ...] = ("loss", "bits_per_byte")

    def __init__(self, model: Any, rows: np.ndarray[Any, Any]) -> None:
        from modelwright.tasks.pretrain import PretrainLoss

        self.module: Any = PretrainLoss(model, 1.0)
        self._rows = rows

    @property
    def rows(self) -> int:
        return len(self._rows)

    held_out_rows = 0

    def row_length(self, row: int) -> int:
        return int(self._rows.shape[1])

    def batch(self, rows: Sequence[int], step: int) -> Any:
        from modelwright.tasks.pretrain import collate_packed

        tokens = self._rows[list(rows)] if len(rows) else np.zeros((1, self._rows.shape[1]), dtype=np.int64)
        return collate_packed(tokens, np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape).copy(), tokens.size)

    def held_out_batch(self, rows: Sequence[int]) -> Any:
        return self.batch(rows, 0)


def flops_per_token(work: Workload) -> float:
    """Forward and backward: six for each weight that multiplies and moves, four for a frozen one (what the low-rank
    matrices beside it add is not counted), and attention's products over half the row."""
    depth = work.width // work.heads
    layer = 2 * work.width * depth * (work.heads + work.key_heads) + 3 * work.width * work.inner
    attention = 12 * work.heads * depth * work.length / 2
    return (4.0 if work.lora else 6.0) * (work.layers * layer + work.words * work.width) + work.layers * attention


def make_tokenizer(folder: Path, texts: list[str], words: int = SMALL_WORDS) -> Any:
    """A tokenizer learnt from the texts, with ChatML."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<|pad|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=words, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=special[2], pad_token=special[0])
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(folder)
    return tokenizer


def save_small_model(folder: Path, texts: list[str], layers: int = 8, width: int = 256, vocab_size: int = SMALL_WORDS) -> None:
    """A Llama with random weights, and a tokenizer learnt from the texts."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = make_tokenizer(folder, texts, vocab_size)
    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=width, intermediate_size=width * 43 // 16, num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=SMALL_LENGTH, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
