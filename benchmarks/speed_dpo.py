"""DPO beside TRL's DPOTrainer: the same random Llama, the same pairs in the same order and steps; pairs a second.

Ours keeps what the reference says; TRL trains once with its own cache of that and once as it does by itself, with a
second model in memory. On a GPU the model has the shape of Llama 1B; on a CPU it is small, and time is CPU time.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.common import Kernels, installed, ratio, require_finite, run_variants, select_variants, variant_lines
from modelwright.errors import UsageError

SEED = 42
LEARNING_RATE = 1e-6
EOS = "</s>"
ALIKE = 0.01
"""How far the mean losses of ways may be apart that learn the same."""


@dataclass(frozen=True)
class Work:
    """What is trained."""

    layers: int
    """Layers of the Llama."""
    width: int
    """Its width; the heads are 64 wide, four to a key."""
    words: int
    """Words it knows."""
    prompt: int
    """Tokens in a prompt."""
    answer: int
    """Tokens in each answer, its end not counted."""
    pairs: int
    """Pairs in a step."""

    def __str__(self) -> str:
        return (
            f"{self.layers}-layer Llama of width {self.width}, {self.pairs} pairs a step of {self.prompt} prompt + "
            f"2 × {self.answer + 1} answer tokens"
        )


@dataclass(frozen=True)
class Way:
    """One way to learn from pairs."""

    name: str
    """What the table calls it."""
    compiled: bool = False
    """Whether our layers are compiled."""
    attention: str = "auto"
    """What computes our attention."""
    peer: bool = False
    """Whether TRL does it."""
    cached: bool = True
    """Whether the peer keeps what the reference says, rather than a second model."""


TINY = Work(layers=4, width=256, words=2048, prompt=192, answer=63, pairs=4)
BILLION = Work(layers=16, width=2048, words=50304, prompt=512, answer=511, pairs=8)
WAYS = {
    "cpu": (
        Way("ours, fp32"),
        Way("TRL, fp32", peer=True),
        Way("TRL with a second model, fp32", peer=True, cached=False),
    ),
    "cuda": (
        Way("ours, bf16", compiled=True),
        Way("TRL, bf16", peer=True),
        Way("TRL with a second model, bf16", peer=True, cached=False),
        Way("ours not compiled, bf16"),
        Way("ours with flex attention, bf16", compiled=True, attention="flex_attention"),
    ),
}


@dataclass(frozen=True)
class Stand:
    """What every way is given."""

    work: Work
    """What is trained."""
    folder: Path
    """The model, and room for files."""
    steps: int
    """Steps of each way."""

    @property
    def longest(self) -> int:
        """Tokens of a prompt with one answer."""
        return self.work.prompt + self.work.answer + 1


@dataclass(frozen=True)
class Trial:
    """How one way went."""

    seconds: list[float]
    """Of each step."""
    loss: float
    """Mean loss over all steps: every way must come to the same."""
    reference: float
    """Seconds spent on the reference before the first step; with a second model, on loading it."""
    start: float
    """Seconds before the second step began."""


def measure(ways: Sequence[str], steps: int, data: Path | None, kernels: bool = False) -> dict[str, Any]:
    """Each way in turn; one that fails tells why and the others go on."""
    import torch

    from modelwright.engine.meter import memory_in_use

    if data is not None:
        raise UsageError("--rows is not for dpo: its pairs are drawn, so that their lengths are exact")
    gpu = torch.cuda.is_available()
    wanted = [way for way in select_variants(WAYS["cuda" if gpu else "cpu"], ways) if not way.peer or installed("trl")]
    work = BILLION if gpu else TINY
    with tempfile.TemporaryDirectory() as place:
        make_model(Path(place), work)
        stand = Stand(work, Path(place), steps)

        def figures(way: Way, watch: Kernels) -> dict[str, Any]:
            trial = train_theirs(stand, way) if way.peer else train_ours(stand, way, watch)
            require_finite([trial.loss])
            return {
                "pairs_per_second": round(work.pairs / median(trial.seconds[len(trial.seconds) // 2 :]), 3),
                "memory_gb": round(memory_in_use() / 1e9, 2), "start_seconds": round(trial.start, 1),
                "reference_seconds": round(trial.reference, 2), "mean_loss": round(trial.loss, 5),
            }  # fmt: skip

        told = run_variants(wanted, kernels, figures)
    setting = f"{work}, {'bf16 arithmetic' if gpu else 'fp32, pairs per CPU-second'}"
    return {"setting": setting, "ways": told, **ratio(told, "pairs_per_second")}


def lines(figures: dict[str, Any]) -> Iterator[str]:
    """The table."""
    yield f"  {figures['setting']}"

    def line(_: str, way: dict[str, Any]) -> str:
        return (
            f"{way['pairs_per_second']:,.2f} pairs/s, {way['memory_gb']:.1f} GB, "
            f"{way['start_seconds']:.0f} s to start, {way['reference_seconds']:.1f} s of them the reference, "
            f"mean loss {way['mean_loss']:.4f}"
        )

    yield from variant_lines(figures["ways"], line)
    losses = [way["mean_loss"] for way in figures["ways"].values() if "failed" not in way]
    if losses and max(losses) - min(losses) > ALIKE:
        yield f"  the ways did not learn the same: their losses are {max(losses) - min(losses):.3f} apart"
    if "ratio" in figures:
        yield f"  ratio {figures['ratio']:.2f} (above 1: ours is faster)"


def train_ours(stand: Stand, way: Way, watch: Kernels) -> Trial:
    """Our engine on one device, the prompt computed once for both answers."""
    import torch

    from modelwright.data.preferences import Pair, Preferences
    from modelwright.engine.loop import Engine
    from modelwright.engine.world import World
    from modelwright.models import text
    from modelwright.plan.facts import probe
    from modelwright.plan.stage import plan_stage
    from modelwright.recipe.schema import Dpo
    from modelwright.tasks.dpo import DpoTask
    from modelwright.tasks.reference import set_reference

    def said(role: str, words: str) -> tuple[dict[str, str], ...]:
        return ({"role": role, "content": words},)

    began, work = now(), stand.work
    pairs = [
        Pair(str(row), said("user", prompt), said("assistant", chosen), said("assistant", rejected), prompt)
        for row, (prompt, chosen, rejected) in enumerate(texts(stand))
    ]
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    model = text.load_model(stand.folder, way.attention)
    text.move(model, device, way.attention)
    settings = Dpo(
        max_steps=stand.steps, per_device_train_batch_size=work.pairs, per_device_eval_batch_size=work.pairs,
        max_length=stand.longest, precision="auto" if torch.cuda.is_available() else "fp32",
        learning_rate=LEARNING_RATE, lr_scheduler_type="constant", torch_compile=way.compiled,
    )  # fmt: skip
    task = DpoTask(model, text.load_tokenizer(stand.folder), Preferences(pairs, [], ""), settings, ())
    assert task.not_shared is None, task.not_shared
    engine = Engine(task, settings, plan_stage(settings, task.rows, 1, probe()), World(device=device), SEED)
    loaded = now()
    set_reference(task, engine, stand.folder / f"reference of {way.name}", "random")
    marks, losses = [now()], []
    for report in watch.during(engine.steps(), stand.steps):
        losses.append(report.loss)
        marks.append(now())
    return _trial(marks, mean(losses), loaded, began)


def train_theirs(stand: Stand, way: Way) -> Trial:
    """TRL's trainer on the same pairs in the order our engine takes them; what it would do besides is turned off."""
    import torch
    from datasets import Dataset, disable_progress_bars
    from transformers import TrainerCallback
    from trl import DPOConfig, DPOTrainer

    from modelwright.data.stream import Order
    from modelwright.models import text

    disable_progress_bars()
    began, work, marks, drawn = now(), stand.work, list[float](), texts(stand)

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            marks.append(now())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            marks.append(now())

    gpu, order = torch.cuda.is_available(), Order(len(drawn), work.pairs, len(drawn), SEED)
    rows = [drawn[row] for step in range(stand.steps) for row in order.at(step)]
    settings = DPOConfig(
        output_dir=str(stand.folder / "trl"), max_steps=stand.steps, per_device_train_batch_size=work.pairs,
        precompute_ref_log_probs=way.cached, precompute_ref_batch_size=work.pairs,
        max_length=stand.longest, beta=0.1, learning_rate=LEARNING_RATE, lr_scheduler_type="constant",
        train_sampling_strategy="sequential", use_cpu=not gpu, bf16=gpu, gradient_checkpointing=False,
        optim="adamw_torch_fused", seed=SEED, logging_strategy="no", save_strategy="no", report_to="none",
        disable_tqdm=True,
    )  # fmt: skip
    data = Dataset.from_list([{"prompt": p, "chosen": f" {c}", "rejected": f" {r}"} for p, c, r in rows])
    model, tokenizer = text.load_model(stand.folder), text.load_tokenizer(stand.folder)
    loaded = now()
    trainer = DPOTrainer(
        model, args=settings, processing_class=tokenizer, callbacks=[Clock()], train_dataset=data
    )  # fmt: skip
    first = trainer.train_dataset[0]
    assert (len(first["prompt_ids"]), len(first["chosen_ids"])) == (work.prompt, work.answer + 1)
    return _trial(marks, trainer.train().training_loss, loaded, began)


def make_model(folder: Path, work: Work) -> None:
    """A Llama with random weights, and a tokenizer whose words are numbers, so that lengths are exact."""
    import torch
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({str(number): number for number in range(work.words - 1)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.add_special_tokens([AddedToken(EOS, special=True)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token=EOS, pad_token=EOS)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(SEED)
    heads = work.width // 64
    config = LlamaConfig(
        vocab_size=work.words, hidden_size=work.width, intermediate_size=4 * work.width, num_hidden_layers=work.layers,
        num_attention_heads=heads, num_key_value_heads=max(1, heads // 4), tie_word_embeddings=True,
        max_position_embeddings=work.prompt + work.answer + 1, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


def texts(stand: Stand) -> list[tuple[str, str, str]]:
    """Prompts with two answers each, of exact lengths; the end-of-text token comes on top."""
    import numpy as np

    work, dice = stand.work, np.random.default_rng(SEED)
    shape = (work.pairs * stand.steps, work.prompt + 2 * work.answer)
    cut = [list(map(str, row)) for row in dice.integers(1, work.words - 1, shape)]
    ends = (work.prompt, work.prompt + work.answer)
    return [(" ".join(r[: ends[0]]), " ".join(r[ends[0] : ends[1]]), " ".join(r[ends[1] :])) for r in cut]


def now() -> float:
    """Seconds: of the CPU where that is what computes, of the wall where a GPU does."""
    import torch

    if not torch.cuda.is_available():
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def _trial(marks: list[float], loss: float, loaded: float, began: float) -> Trial:
    return Trial([after - before for before, after in pairwise(marks)], loss, marks[0] - loaded, marks[1] - began)
