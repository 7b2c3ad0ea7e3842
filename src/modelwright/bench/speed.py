"""Our engine beside the HF Trainer on one GPU: the same model, rows and batch; tokens/s, MFU, memory, and the loss.

On a machine without a GPU the same code runs a model of a few thousand weights, to show that it works.
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np

SEED = 42
LATE = 50
"""Steps at the end whose mean loss is compared."""
WORDS = 50_304


@dataclass(frozen=True)
class Work:
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
    """Rows a device takes at once."""
    length: int
    """Tokens in a row."""
    accumulation: int = 1
    """Micro-batches in a step."""
    words: int = WORDS
    """Vocabulary."""


@dataclass(frozen=True)
class Way:
    """One way to do the work."""

    name: str
    """What the table calls it."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Of the pretrain section."""
    peer: dict[str, Any] | None = None
    """TrainingArguments, where the HF Trainer does it."""


EXACT = "ours, fp32 weights and autocast"
"""What the other ways' losses are held against."""
COMPILED = {"precision": "bf16", "torch_compile": True}
WORKS = {
    "tiny": Work(2, 64, 128, 4, 2, rows=2, length=64, words=512),
    "135m": Work(30, 576, 1536, 9, 3, rows=16, length=512),
    "0.5b": Work(14, 1536, 4096, 12, 4, rows=8, length=512),
    "6b": Work(32, 4096, 11008, 32, 8, rows=8, length=2048, accumulation=4),
}
WAYS = {
    "tiny": (
        Way("ours, fp32", {"precision": "fp32"}),
        Way("HF Trainer, fp32", peer={"use_cpu": True}),
    ),
    "135m": (
        Way(EXACT, {**COMPILED, "weights": "fp32"}),
        Way("ours, bf16", COMPILED),
        Way("ours, bf16, mean in bf16", {**COMPILED, "exp_avg_dtype": "bf16"}),
        Way("ours, fp8", {**COMPILED, "precision": "fp8"}),
        Way("HF Trainer, bf16, eager", peer={"bf16": True}),
    ),
    "0.5b": (
        Way("ours, bf16", COMPILED),
        Way("ours, bf16, not recorded", {**COMPILED, "cuda_graphs": "never"}),
        Way("ours, fp8", {**COMPILED, "precision": "fp8"}),
        Way(EXACT, {**COMPILED, "weights": "fp32"}),
        Way("HF Trainer, bf16, eager", peer={"bf16": True}),
        Way("HF Trainer, bf16, torch_compile", peer={"bf16": True, "torch_compile": True}),
    ),
    "6b": (
        Way("ours, bf16", {**COMPILED, "exp_avg_dtype": "bf16"}),
        Way("ours, fp8", {**COMPILED, "precision": "fp8", "exp_avg_dtype": "bf16"}),
        Way("HF Trainer, bf16, checkpointing", peer={"bf16": True, "gradient_checkpointing": True}),
    ),
}


@dataclass(frozen=True)
class Pace:
    """How one way went."""

    seconds: list[float]
    """Of each step."""
    losses: list[float]
    """After each step."""
    memory: int
    """The most bytes held on the device."""
    start: float
    """Seconds before the second step began: loading, compiling, recording."""


def measure(work: str = "", ways: Sequence[str] = (), steps: int = 12, tokens: Path | None = None) -> dict[str, Any]:
    """Each way in turn over the same rows; a way that fails tells why and the others go on.

    tokens: an .npy of token numbers of real text, in place of made-up rows; then the curves can be held together.
    """
    import torch

    work = work or ("0.5b" if torch.cuda.is_available() else "tiny")
    told: dict[str, Any] = {"work": work, "device": _device(), "steps": steps, "ways": {}}
    for way in WAYS[work]:
        if ways and not any(word in way.name for word in ways):
            continue
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        torch._dynamo.reset()
        try:
            rows = rows_of(WORKS[work], steps, tokens)
            train = train_ours if way.peer is None else train_theirs
            told["ways"][way.name] = _figures(WORKS[work], train(WORKS[work], way, rows))
        except Exception as error:  # one way must not take the others with it
            told["ways"][way.name] = {"failed": str(error).strip().splitlines()[:1] or [type(error).__name__]}
        print(way.name, told["ways"][way.name], flush=True)
    return told


def lines(figures: dict[str, Any]) -> Iterator[str]:
    """The table."""
    yield f"{figures['work']} on {figures['device']}, {figures['steps']} steps"
    for name, way in figures["ways"].items():
        if "failed" in way:
            yield f"  {name}: {way['failed']}"
            continue
        share = f", {way['mfu']:.1%} MFU" if way["mfu"] else ""
        yield (
            f"  {name}: {way['tokens_per_second']:,.0f} tokens/s{share}, {way['memory_gb']:.1f} GB, "
            f"{way['start_seconds']:.0f} s to start, loss {way['loss_first']:.3f} → {way['loss_last']:.3f}"
            + gap_to_exact(figures, name)
        )


def gap_to_exact(figures: dict[str, Any], name: str) -> str:
    """How far a way's loss ends from that of exact fp32 weights, where those were measured for long enough."""
    curves = {way: figures["ways"].get(way, {}).get("losses", [])[-LATE:] for way in (EXACT, name)}
    if name == EXACT or figures["steps"] < 2 * LATE or not all(curves.values()):
        return ""
    exact, other = (mean(curve) for curve in curves.values())
    return f", {other / exact - 1:+.2%} of exact weights' over the last {LATE} steps"


def rows_of(work: Work, steps: int, tokens: Path | None = None) -> np.ndarray[Any, Any]:
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


def build(work: Work) -> Any:
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

    measures: tuple[str, ...] = ("loss", "bits_per_byte")

    def __init__(self, model: Any, rows: np.ndarray[Any, Any]) -> None:
        from modelwright.tasks.pretrain import TextLoss

        self.module: Any = TextLoss(model, 1.0)
        self._rows = rows

    @property
    def rows(self) -> int:
        return len(self._rows)

    held_out_rows = 0

    def length(self, row: int) -> int:
        return int(self._rows.shape[1])

    def batch(self, rows: Sequence[int], step: int) -> Any:
        from modelwright.tasks.pretrain import lay_out

        tokens = self._rows[list(rows)] if len(rows) else np.zeros((1, self._rows.shape[1]), dtype=np.int64)
        return lay_out(tokens, np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape).copy(), tokens.size)

    def held_out_batch(self, rows: Sequence[int]) -> Any:
        return self.batch(rows, 0)


def train_ours(work: Work, way: Way, rows: np.ndarray[Any, Any]) -> Pace:
    """Our engine on one device."""
    from modelwright.engine.loop import Engine
    from modelwright.engine.world import World
    from modelwright.models import text
    from modelwright.plan.facts import probe
    from modelwright.plan.stage import plan_stage
    from modelwright.recipe.schema import Pretrain

    began, steps = time.perf_counter(), len(rows) // (work.rows * work.accumulation)
    settings = Pretrain.model_validate({
        "max_steps": steps, "per_device_train_batch_size": work.rows, "learning_rate": 1e-4,
        "gradient_accumulation_steps": work.accumulation, "lr_scheduler_type": "constant", **way.settings,
    })  # fmt: skip
    world = replace(World(), device=_torch_device())
    model = build(work)
    text.move(model, world.device, "auto")
    task = Rows(model, rows)
    engine = Engine(task, settings, plan_stage(settings, task.rows, 1, probe()), world, SEED)
    marks, losses = [time.perf_counter()], []
    for report in engine.steps():
        marks.append(time.perf_counter())
        losses.append(report.loss)
    return _pace(marks, losses, began)


def train_theirs(work: Work, way: Way, rows: np.ndarray[Any, Any]) -> Pace:
    """The HF Trainer on the same rows in our order."""
    from datasets import Dataset
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from modelwright.data.stream import Order

    began = time.perf_counter()
    marks: list[float] = []
    losses: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            marks.append(_now())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            marks.append(_now())

        def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
            if "loss" in logs:
                losses.append(float(logs["loss"]))

    batch = work.rows * work.accumulation
    steps = len(rows) // batch
    order = Order(len(rows), batch, len(rows), SEED)
    turns = [rows[row].tolist() for step in range(steps) for row in order.at(step)]
    with tempfile.TemporaryDirectory() as place:
        settings = TrainingArguments(
            output_dir=place, max_steps=steps, per_device_train_batch_size=work.rows,
            gradient_accumulation_steps=work.accumulation, learning_rate=1e-4, lr_scheduler_type="constant",
            train_sampling_strategy="sequential", optim="adamw_torch_fused", seed=SEED, logging_steps=1,
            save_strategy="no", report_to="none", disable_tqdm=True, **(way.peer or {}),
        )  # fmt: skip
        data = Dataset.from_dict({"input_ids": turns, "labels": turns}).with_format("torch")
        Trainer(model=build(work), args=settings, train_dataset=data, callbacks=[Clock()]).train()
    return _pace(marks, losses, began)


def _pace(marks: list[float], losses: list[float], began: float) -> Pace:
    from modelwright.engine.meter import memory_in_use

    seconds = [after - before for before, after in pairwise(marks)]
    return Pace(seconds, losses, memory_in_use(), marks[1] - began)


def _figures(work: Work, pace: Pace) -> dict[str, Any]:
    tokens = work.rows * work.length * work.accumulation
    rate = tokens / median(pace.seconds[len(pace.seconds) // 2 :])
    peak = _peak()
    return {
        "tokens_per_second": round(rate, 1),
        "mfu": round(rate * flops_per_token(work) / peak, 4) if peak else None,
        "memory_gb": round(pace.memory / 1e9, 2),
        "start_seconds": round(pace.start, 1),
        "loss_first": pace.losses[0],
        "loss_last": pace.losses[-1],
        "losses": [round(loss, 4) for loss in pace.losses],
    }


def flops_per_token(work: Work) -> float:
    """Forward and backward: six for each weight that multiplies, and attention's products over half the row."""
    depth = work.width // work.heads
    layer = 2 * work.width * depth * (work.heads + work.key_heads) + 3 * work.width * work.inner
    attention = 12 * work.heads * depth * work.length / 2
    return 6.0 * (work.layers * layer + work.words * work.width) + work.layers * attention


def _torch_device() -> Any:
    import torch

    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def _now() -> float:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def _device() -> str:
    from modelwright.plan.facts import probe

    return probe().name


def _peak() -> float | None:
    from modelwright.plan.facts import probe

    return probe().peak_flops
