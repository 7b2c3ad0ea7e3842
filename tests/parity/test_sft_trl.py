"""The same tiny Llama on the same rows: our loss curve is TRL's, and Hugging Face's, step by step.

Each side does its own work: chat template, tokens, masks, padding, loss, accumulation, clipping, AdamW, schedule.
Only the order of rows is ours (TRL is given them in that order), and the grouping of packed rows, since two best-fit
packers may break ties differently; that theirs fill rows just as full is a test of its own.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from modelwright.data.chat import Conversation, ConversationDataset
from modelwright.data.packing import pack_bfd
from modelwright.engine.distributed import World
from modelwright.engine.task import MicroBatch
from modelwright.engine.trainer import Engine
from modelwright.models.pretrained import eos_token_ids, load_model, load_tokenizer
from modelwright.plan.hardware import DeviceInfo
from modelwright.plan.stage import plan_stage
from modelwright.recipe.stage_specs import SftConfig
from modelwright.tasks.sft import SftTask
from tiny import tiny_rows

pytestmark = pytest.mark.slow
STEPS, PER_DEVICE, ACCUMULATION = 20, 2, 2
TOLERANCE = 1e-4
"""Largest relative difference of any step's loss; measured is 1.6e-7 (torch 2.13, TRL 1.16, one thread)."""
SETTINGS: dict[str, Any] = {
    "learning_rate": 1e-3, "lr_scheduler_type": "linear", "warmup_steps": 3, "weight_decay": 0.1, "max_grad_norm": 1.0,
    "max_steps": STEPS, "per_device_train_batch_size": PER_DEVICE, "gradient_accumulation_steps": ACCUMULATION,
}  # fmt: skip
LAPTOP = DeviceInfo("cpu", "a laptop", 8 << 30, fast_bf16=False)


@dataclass
class Curve:
    """What one training did, step by step."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class Ours:
    """Our training, and the rows in the order it took them."""

    curve: Curve
    groups: list[list[int]]
    """Rows that were packed together, for each row of the data in the order of training."""


def conversations() -> list[Conversation]:
    """Rows of many lengths: questions with answers of one word to four sentences."""
    return [
        Conversation(
            str(index),
            ({"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]}),
            row["question"],
        )
        for index, row in enumerate(tiny_rows(60))
    ]


class LeakingTask(SftTask):
    """Packed documents whose positions run on, so that they see each other: what must not be."""

    def batch(self, rows: Sequence[int], step: int = 0) -> MicroBatch:
        batch = super().batch(rows, step)
        batch.inputs["positions"] = torch.arange(batch.inputs["tokens"].shape[1]).expand(len(rows), -1)
        return batch


def train_ours(folder: Path, packing: bool, kind: type[SftTask] = SftTask) -> Ours:
    settings = SftConfig(**SETTINGS, max_length=128, packing=packing, precision="fp32")
    model, data = load_model(folder), ConversationDataset(conversations(), [], "")
    task = kind(model, load_tokenizer(folder), data, settings, eos_token_ids(model))
    plan = plan_stage(settings, task.rows, 1, LAPTOP)
    engine = Engine(task, settings, plan, World(), seed=7)
    curve = Curve()
    for report in engine.steps():
        curve.losses.append(report.loss)
        curve.norms.append(report.grad_norm)
        curve.rates.append(report.learning_rate)
        assert report.health == "ok"
    curve.weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    lengths = [len(row) for row in task.train_set.rows]
    groups = pack_bfd(lengths, settings.max_length) if packing else [[row] for row in range(len(lengths))]
    return Ours(curve, [groups[row] for step in range(STEPS) for row in engine.sampler.batch_indices(step)])


def record(trainer: Any, curve: Curve) -> None:
    """Train with a Hugging Face trainer, adding up the loss of each step's micro-batches."""
    inner: Callable[..., Tensor] = trainer.compute_loss
    parts: list[float] = []

    def compute_loss(*args: Any, **kwargs: Any) -> Tensor:
        loss = inner(*args, **kwargs)
        parts.append(float(loss.detach()))
        return loss

    trainer.compute_loss = compute_loss
    trainer.train()
    curve.losses = [sum(parts[at : at + ACCUMULATION]) for at in range(0, len(parts), ACCUMULATION)]
    curve.norms = [float(entry["grad_norm"]) for entry in trainer.state.log_history if "grad_norm" in entry]
    curve.rates = [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]
    curve.weights = {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}


def common(folder: Path) -> dict[str, Any]:
    """Settings of both trainers of Hugging Face."""
    return {
        **SETTINGS, "output_dir": str(folder), "train_sampling_strategy": "sequential", "use_cpu": True, "bf16": False,
        "gradient_checkpointing": False, "logging_steps": 1, "save_strategy": "no", "report_to": "none",
        "disable_tqdm": True, "dataloader_pin_memory": False,
    }  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def loud_model(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with weights four times as large: what it attends to, a leak too, then shows in its loss."""
    folder, model = tmp_path_factory.mktemp("loud"), load_model(model_folder)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight *= 4
    model.save_pretrained(folder)
    load_tokenizer(model_folder).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def prepared(loud_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The rows as TRL itself encodes and masks them, in their first order."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    rows = [{"prompt": list(item.messages[:1]), "completion": list(item.messages[1:])} for item in conversations()]
    settings = SFTConfig(**common(tmp_path_factory.mktemp("prepared")), max_length=128, completion_only_loss=True,
                         shuffle_dataset=False)  # fmt: skip
    trainer = SFTTrainer(
        load_model(loud_model), settings, train_dataset=Dataset.from_list(rows),
        processing_class=load_tokenizer(loud_model),
    )  # fmt: skip
    return trainer.train_dataset


@pytest.fixture(scope="module", params=[False, True], ids=["padded", "packed"])
def both(
    request: pytest.FixtureRequest, loud_model: Path, prepared: Any, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Curve, Curve]:
    """Our training and TRL's, of the same rows in the same order."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    packing: bool = request.param
    ours = train_ours(loud_model, packing)
    arranged = [
        {
            "input_ids": [token for row in group for token in prepared[row]["input_ids"]],
            "labels": [label for row in group for label in prepared[row]["labels"]],
            **({"seq_lengths": [len(prepared[row]["input_ids"]) for row in group]} if packing else {}),
        }
        for group in ours.groups
    ]
    settings = SFTConfig(
        **common(tmp_path_factory.mktemp("trl")), max_length=128, packing=packing, packing_strategy="bfd",
        shuffle_dataset=False, dataset_kwargs={"skip_prepare_dataset": True},
    )  # fmt: skip
    trainer = SFTTrainer(
        load_model(loud_model), settings, train_dataset=Dataset.from_list(arranged),
        processing_class=load_tokenizer(loud_model),
    )  # fmt: skip
    theirs = Curve()
    record(trainer, theirs)
    return ours.curve, theirs


def max_relative_difference(ours: list[float], theirs: list[float]) -> float:
    """The largest relative difference of any step."""
    assert len(ours) == len(theirs) == STEPS
    return max(relative(a, b) for a, b in zip(ours, theirs, strict=True))


def relative(a: float, b: float) -> float:
    return abs(a - b) / abs(b)


def weights_apart(ours: Curve, theirs: Curve) -> float:
    assert set(ours.weights) == set(theirs.weights)
    return max(float((weight - theirs.weights[name]).abs().max()) for name, weight in ours.weights.items())


def test_trl_trains_the_tokens_that_we_train(loud_model: Path, prepared: Any) -> None:
    from modelwright.data.chat_tokens import tokenize_conversation

    tokenizer = load_tokenizer(loud_model)
    for index, item in enumerate(conversations()):
        [row] = tokenize_conversation(item, tokenizer)
        assert prepared[index]["input_ids"] == row.input_ids.tolist()
        labels = [int(token) if trained else -100 for token, trained in zip(row.input_ids, row.loss_mask, strict=True)]
        assert prepared[index]["labels"] == labels


def test_our_loss_curve_is_trl_s(both: tuple[Curve, Curve], record_property: Callable[[str, object], None]) -> None:
    ours, theirs = both
    apart = max_relative_difference(ours.losses, theirs.losses)
    record_property("largest relative difference of a loss", apart)
    print(f"loss {ours.losses[0]:.4f} → {ours.losses[-1]:.4f}, at most {apart:.1e} from TRL's")
    assert apart < TOLERANCE
    assert ours.losses[-1] < ours.losses[0] - 0.5, "and it is a curve, not a line"


def test_a_leak_between_packed_rows_would_show_in_the_curve(loud_model: Path) -> None:
    apart, leaking = train_ours(loud_model, packing=True), train_ours(loud_model, packing=True, kind=LeakingTask)
    moved = max_relative_difference(leaking.curve.losses, apart.curve.losses)
    print(f"a leak would move the loss by {moved:.1e}")
    assert moved > 10 * TOLERANCE


def test_our_gradients_rates_and_weights_are_trl_s(both: tuple[Curve, Curve]) -> None:
    ours, theirs = both
    apart = max_relative_difference(ours.norms, theirs.norms), weights_apart(ours, theirs)
    print(f"gradient norm at most {apart[0]:.1e} from TRL's, weights {apart[1]:.1e}")
    assert ours.rates == pytest.approx(theirs.rates, rel=1e-9)
    assert apart[0] < TOLERANCE
    assert apart[1] < 1e-5


def test_our_loss_curve_is_the_hugging_face_trainer_s(
    loud_model: Path, prepared: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    from datasets import Dataset
    from transformers import DataCollatorForSeq2Seq, Trainer, TrainingArguments

    ours = train_ours(loud_model, packing=False)
    rows = [{name: prepared[group[0]][name] for name in ("input_ids", "labels")} for group in ours.groups]
    trainer = Trainer(
        load_model(loud_model), TrainingArguments(**common(tmp_path_factory.mktemp("hf"))),
        train_dataset=Dataset.from_list(rows), data_collator=DataCollatorForSeq2Seq(load_tokenizer(loud_model)),
    )  # fmt: skip
    theirs = Curve()
    record(trainer, theirs)
    apart = max_relative_difference(ours.curve.losses, theirs.losses)
    print(f"loss at most {apart:.1e} from Hugging Face's, weights {weights_apart(ours.curve, theirs):.1e}")
    assert apart < TOLERANCE
    assert weights_apart(ours.curve, theirs) < 1e-5


def test_our_packer_fills_rows_as_trl_s_does() -> None:
    from datasets import Dataset
    from trl import pack_dataset

    for seed in range(5):
        rng = random.Random(seed)
        lengths = [rng.randint(1, 64) for _ in range(150)]
        theirs = pack_dataset(Dataset.from_dict({"input_ids": [[0] * length for length in lengths]}), 64, "bfd")
        ours = [sum(lengths[row] for row in group) for group in pack_bfd(lengths, 64)]
        assert sorted(ours) == sorted(len(row) for row in theirs["input_ids"])
