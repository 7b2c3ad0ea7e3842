"""Our DPO beside TRL's DPOTrainer: the same random Llama, the same pairs in the same order, in one run.

The reference is cached on our side; TRL trains once with its own cache and once as it does by itself, with a second
model in memory. On a GPU the model has the shape of Llama 1B; on a CPU it is small, and time is CPU time.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

from modelwright.bench.results import installed

SEED, WARM_UP = 42, 3
LEARNING_RATE = 1e-6
EOS = "</s>"


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
    steps: int
    """Steps that are timed."""

    def __str__(self) -> str:
        return (
            f"{self.layers}-layer Llama of width {self.width}, {self.pairs} pairs a step of {self.prompt} prompt + "
            f"2 × {self.answer + 1} answer tokens"
        )


TINY = Work(layers=4, width=256, words=2048, prompt=192, answer=63, pairs=4, steps=6)
BILLION = Work(layers=16, width=2048, words=50304, prompt=512, answer=511, pairs=8, steps=12)


@dataclass(frozen=True)
class Pace:
    """How one training went."""

    seconds: list[float]
    """Time of each timed step."""
    loss: float
    """Mean loss over all steps: both sides must come to the same."""
    before: float
    """Seconds spent on the reference before the first step."""
    peak: int
    """Most memory held on the GPU, in bytes; 0 on a CPU."""


def measure(work: Work | None = None, ways: Collection[str] = ()) -> dict[str, Any]:
    """Train every way in turn; a way that fails is told with its reason, and the others go on."""
    import torch

    gpu = torch.cuda.is_available()
    work = work or (BILLION if gpu else TINY)
    sides: dict[str, Callable[[Path], Pace]] = {
        "modelwright": lambda place: train_ours(place, work, "auto", compiled=gpu),
    }
    if installed("trl") is not None:
        sides["trl"] = lambda place: train_theirs(place, work, cached=True)
        sides["trl, reference in memory"] = lambda place: train_theirs(place, work, cached=False)
    if gpu:
        sides["modelwright, not compiled"] = lambda place: train_ours(place, work, "auto", compiled=False)
        sides["modelwright, flex attention"] = lambda place: train_ours(place, work, "flex_attention", compiled=True)
    found: dict[str, Any] = {"setting": f"{work}, {'bf16 arithmetic' if gpu else 'fp32, pairs per CPU-second'}"}
    with tempfile.TemporaryDirectory() as place:
        make_model(Path(place), work)
        for name, train in sides.items():
            if ways and name not in ways:
                continue
            try:
                found[name] = _side(train(Path(place)), work)
            except Exception as error:  # a peer that fails must not cost the other figures
                found[name] = {"failed": f"{type(error).__name__}: {error}"[:400]}
            print(json.dumps({name: found[name]}), file=sys.stderr, flush=True)  # a kill loses only what is to come
            if gpu:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
    return _compared(found)


def train_ours(folder: Path, work: Work, attention: str, compiled: bool) -> Pace:
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

    pairs = [
        Pair(str(row), said("user", prompt), said("assistant", chosen), said("assistant", rejected), prompt)
        for row, (prompt, chosen, rejected) in enumerate(_texts(work))
    ]
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    model = text.load_model(folder, attention)
    text.move(model, device, attention)
    settings = Dpo(
        max_steps=WARM_UP + work.steps, per_device_train_batch_size=work.pairs, per_device_eval_batch_size=work.pairs,
        max_length=work.prompt + work.answer + 1, precision="auto" if torch.cuda.is_available() else "fp32",
        learning_rate=LEARNING_RATE, lr_scheduler_type="constant", torch_compile=compiled,
    )  # fmt: skip
    task = DpoTask(model, text.load_tokenizer(folder), Preferences(pairs, [], ""), settings, ())
    assert task.not_shared is None, task.not_shared
    engine = Engine(task, settings, plan_stage(settings, task.rows, 1, probe()), World(device=device), SEED)
    began = _clock()
    set_reference(task, engine, folder / f"reference-{attention}-{compiled}", "random")
    before = _clock() - began
    marks, losses = [_clock()], []
    for report in engine.steps():
        losses.append(report.loss)
        marks.append(_clock())
    return Pace([b - a for a, b in pairwise(marks)][WARM_UP:], mean(losses), before, _peak())


def train_theirs(folder: Path, work: Work, cached: bool) -> Pace:
    """TRL's trainer on the same pairs in the order our engine takes them; what it would do besides is turned off."""
    import torch
    from datasets import Dataset, disable_progress_bars
    from transformers import TrainerCallback
    from trl import DPOConfig, DPOTrainer

    from modelwright.data.stream import Order
    from modelwright.models import text

    disable_progress_bars()
    marks: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            marks.append(_clock())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            marks.append(_clock())

    gpu, steps, texts = torch.cuda.is_available(), WARM_UP + work.steps, _texts(work)
    order = Order(len(texts), work.pairs, steps * work.pairs, SEED)
    rows = [texts[row] for step in range(steps) for row in order.at(step)]
    settings = DPOConfig(
        output_dir=str(folder / "trl"), max_steps=steps, per_device_train_batch_size=work.pairs,
        precompute_ref_log_probs=cached, precompute_ref_batch_size=work.pairs,
        max_length=work.prompt + work.answer + 1, beta=0.1, learning_rate=LEARNING_RATE, lr_scheduler_type="constant",
        train_sampling_strategy="sequential", use_cpu=not gpu, bf16=gpu, gradient_checkpointing=False,
        optim="adamw_torch_fused", seed=SEED, logging_strategy="no", save_strategy="no", report_to="none",
        disable_tqdm=True,
    )  # fmt: skip
    began = _clock()
    trainer = DPOTrainer(
        text.load_model(folder), args=settings, processing_class=text.load_tokenizer(folder), callbacks=[Clock()],
        train_dataset=Dataset.from_list([{"prompt": p, "chosen": f" {c}", "rejected": f" {r}"} for p, c, r in rows]),
    )  # fmt: skip
    first = trainer.train_dataset[0]
    assert (len(first["prompt_ids"]), len(first["chosen_ids"])) == (work.prompt, work.answer + 1)
    loss = trainer.train().training_loss
    return Pace([b - a for a, b in pairwise(marks)][WARM_UP:], loss, marks[0] - began, _peak())


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


def lines(figures: dict[str, Any]) -> list[str]:
    """The figures as sentences."""
    told = [figures["setting"]]
    for name, side in figures.items():
        if isinstance(side, dict):
            memory = f", {side['peak_bytes'] / 1e9:.1f} GB" if side.get("peak_bytes") else ""
            told.append(
                f"{name}: {side['failed']}" if "failed" in side
                else f"{name}: {side['pairs_per_second']:,.2f} pairs/s, mean loss {side['mean_loss']:.4f}{memory}"
            )  # fmt: skip
    if "ratio" not in figures:
        return [*told, "there is no figure of trl to hold it against"]
    return [*told, f"ratio {figures['ratio']:.2f} with both references cached (above 1: ours is faster)"]


def _texts(work: Work) -> list[tuple[str, str, str]]:
    """Prompts with two answers each, of exact lengths; the end-of-text token comes on top."""
    import numpy as np

    dice = np.random.default_rng(SEED)
    count = work.pairs * (WARM_UP + work.steps)
    shape = (count, work.prompt + 2 * work.answer)
    drawn = [" ".join(map(str, row)) for row in dice.integers(1, work.words - 1, shape)]
    cut = [each.split(" ") for each in drawn]
    ends = (work.prompt, work.prompt + work.answer)
    return [(" ".join(r[: ends[0]]), " ".join(r[ends[0] : ends[1]]), " ".join(r[ends[1] :])) for r in cut]


def _side(pace: Pace, work: Work) -> dict[str, Any]:
    return {
        "pairs_per_second": round(work.pairs / median(pace.seconds), 3),
        "step_seconds": round(median(pace.seconds), 4),
        "mean_loss": round(pace.loss, 5),
        "reference_seconds": round(pace.before, 2),
        "peak_bytes": pace.peak,
    }


def _compared(found: dict[str, Any]) -> dict[str, Any]:
    sides = {name: side for name, side in found.items() if isinstance(side, dict) and "failed" not in side}
    losses = [side["mean_loss"] for side in sides.values()]
    assert not losses or max(losses) - min(losses) < 0.01, f"the sides did not learn the same: {losses}"
    ours = max((side["pairs_per_second"] for name, side in sides.items() if "modelwright" in name), default=None)
    ratios = {name: ours / side["pairs_per_second"] for name, side in sides.items() if name.startswith("trl") and ours}
    extra = {"ratio": round(ratios["trl"], 3)} if "trl" in ratios else {}
    memory = "trl, reference in memory"
    return {**found, **extra, **({"ratio_in_memory": round(ratios[memory], 3)} if memory in ratios else {})}


def _clock() -> float:
    """Seconds: of the CPU where that is what computes, of the wall where a GPU does."""
    import torch

    if not torch.cuda.is_available():
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def _peak() -> int:
    import torch

    return int(torch.cuda.max_memory_allocated()) if torch.cuda.is_available() else 0
