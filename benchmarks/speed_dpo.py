"""DPO beside TRL's DPOTrainer: the same random Llama, the same pairs in the same order and steps; pairs a second.

Ours keeps what the reference says; TRL trains once with its own cache of that and once as it does by itself, with a
second model in memory. On a GPU the model has the shape of Llama 1B; on a CPU it is small, and time is CPU time.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import Kernels, installed, ratio, require_finite, run_variants, select_variants, variant_lines
from benchmarks.peer_trainers import StepTimes, in_our_order, train_ours, train_peer
from benchmarks.workloads import SEED
from modelwright.errors import UsageError

LEARNING_RATE = 1e-6
EOS = "</s>"
ALIKE = 0.01
"""How far the mean losses of ways may be apart that learn the same."""


@dataclass(frozen=True)
class DpoWorkload:
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
class DpoVariant:
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


TINY = DpoWorkload(layers=4, width=256, words=2048, prompt=192, answer=63, pairs=4)
BILLION = DpoWorkload(layers=16, width=2048, words=50304, prompt=512, answer=511, pairs=8)
WAYS = {
    "cpu": (
        DpoVariant("ours, fp32"),
        DpoVariant("TRL, fp32", peer=True),
        DpoVariant("TRL with a second model, fp32", peer=True, cached=False),
    ),
    "cuda": (
        DpoVariant("ours, bf16", compiled=True),
        DpoVariant("TRL, bf16", peer=True),
        DpoVariant("TRL with a second model, bf16", peer=True, cached=False),
        DpoVariant("ours not compiled, bf16"),
        DpoVariant("ours with flex attention, bf16", compiled=True, attention="flex_attention"),
    ),
}


@dataclass(frozen=True)
class BenchSetup:
    """What every way is given."""

    work: DpoWorkload
    """What is trained."""
    folder: Path
    """The model, and room for files."""
    steps: int
    """Steps of each way."""

    @property
    def longest(self) -> int:
        """Tokens of a prompt with one answer."""
        return self.work.prompt + self.work.answer + 1


def measure(ways: Sequence[str], steps: int, data: Path | None, kernels: bool = False) -> dict[str, Any]:
    """Each way in turn; one that fails tells why and the others go on."""
    import torch

    if data is not None:
        raise UsageError("--rows is not for dpo: its pairs are drawn, so that their lengths are exact")
    gpu = torch.cuda.is_available()
    wanted = [way for way in select_variants(WAYS["cuda" if gpu else "cpu"], ways) if not way.peer or installed("trl")]
    work = BILLION if gpu else TINY
    with tempfile.TemporaryDirectory() as place:
        make_model(Path(place), work)
        setup = BenchSetup(work, Path(place), steps)

        def figures(way: DpoVariant, watch: Kernels) -> dict[str, Any]:
            reference, times = train_trl(setup, way) if way.peer else train_modelwright(setup, way, watch)
            require_finite(times.losses)
            return {
                "pairs_per_second": round(work.pairs / times.step_seconds, 3),
                "memory_gb": round(times.memory / 1e9, 2), "start_seconds": round(times.start, 1),
                "reference_seconds": round(reference, 2), "mean_loss": round(times.mean_loss, 5),
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


def train_modelwright(setup: BenchSetup, way: DpoVariant, watch: Kernels) -> tuple[float, StepTimes]:
    """Our engine on one device, the prompt computed once for both answers; first the reference's seconds."""
    import torch

    from modelwright.data.preferences import PreferenceDataset, PreferencePair
    from modelwright.engine.distributed import World
    from modelwright.engine.trainer import Engine
    from modelwright.models import pretrained
    from modelwright.plan.hardware import probe_device
    from modelwright.plan.stage import plan_stage
    from modelwright.recipe.schema import DpoConfig
    from modelwright.tasks.dpo import DpoTask, precompute_ref_log_probs

    def said(role: str, words: str) -> tuple[dict[str, str], ...]:
        return ({"role": role, "content": words},)

    began, work = now(), setup.work
    pairs = [
        PreferencePair(str(row), said("user", prompt), said("assistant", chosen), said("assistant", rejected), prompt)
        for row, (prompt, chosen, rejected) in enumerate(texts(setup))
    ]
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    model = pretrained.load_model(setup.folder, way.attention)
    pretrained.prepare_model(model, device, way.attention)
    settings = DpoConfig(
        max_steps=setup.steps, per_device_train_batch_size=work.pairs, per_device_eval_batch_size=work.pairs,
        max_length=setup.longest, precision="auto" if torch.cuda.is_available() else "fp32",
        learning_rate=LEARNING_RATE, lr_scheduler_type="constant", torch_compile=way.compiled,
    )  # fmt: skip
    task = DpoTask(model, pretrained.load_tokenizer(setup.folder), PreferenceDataset(pairs, [], ""), settings, ())
    assert task.sharing_blocker is None, task.sharing_blocker
    engine = Engine(task, settings, plan_stage(settings, task.rows, 1, probe_device()), World(device=device), SEED)
    loaded = now()
    precompute_ref_log_probs(task, engine, setup.folder / f"reference of {way.name}", "random")
    return now() - loaded, train_ours(engine, setup.steps, began, watch, now)


def train_trl(setup: BenchSetup, way: DpoVariant) -> tuple[float, StepTimes]:
    """TRL's trainer on the same pairs in the order our engine takes them; with a second model, the time to load it."""
    import torch
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    from modelwright.models import pretrained

    began, work, gpu = now(), setup.work, torch.cuda.is_available()
    rows = in_our_order(texts(setup), work.pairs, setup.steps)
    settings = {
        "max_steps": setup.steps, "per_device_train_batch_size": work.pairs, "precompute_ref_log_probs": way.cached,
        "precompute_ref_batch_size": work.pairs, "max_length": setup.longest, "beta": 0.1,
        "learning_rate": LEARNING_RATE, "use_cpu": not gpu, "bf16": gpu, "gradient_checkpointing": False,
    }  # fmt: skip
    data = Dataset.from_list([{"prompt": p, "chosen": f" {c}", "rejected": f" {r}"} for p, c, r in rows])
    model, tokenizer = pretrained.load_model(setup.folder), pretrained.load_tokenizer(setup.folder)
    loaded = now()
    times, trainer = train_peer(
        DPOTrainer, DPOConfig, settings, began, now, model=model, processing_class=tokenizer, train_dataset=data
    )
    first = trainer.train_dataset[0]
    assert (len(first["prompt_ids"]), len(first["chosen_ids"])) == (work.prompt, work.answer + 1)
    return began + times.before - loaded, times


def make_model(folder: Path, work: DpoWorkload) -> None:
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


def texts(setup: BenchSetup) -> list[tuple[str, str, str]]:
    """Prompts with two answers each, of exact lengths; the end-of-text token comes on top."""
    import numpy as np

    work, dice = setup.work, np.random.default_rng(SEED)
    shape = (work.pairs * setup.steps, work.prompt + 2 * work.answer)
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
