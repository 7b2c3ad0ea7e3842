"""The same tiny Llama on the same pairs: our DPO, with the prompt computed once, is TRL's, step by step.

Each side does its own work: chat template, tokens, reference, loss, accumulation, clipping, AdamW, schedule. Only the
order of pairs is ours; TRL is given them in that order.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from torch import Tensor

from modelwright.data.preferences import PreferenceDataset, PreferencePair, tokenize_pair
from modelwright.engine.distributed import World
from modelwright.engine.trainer import Engine
from modelwright.models.pretrained import eos_token_ids, load_model, load_tokenizer
from modelwright.plan.hardware import DeviceInfo
from modelwright.plan.stage import plan_stage
from modelwright.recipe.stage_specs import DpoConfig
from modelwright.tasks.dpo import DpoTask, precompute_ref_log_probs
from tiny import tiny_pairs

pytestmark = pytest.mark.slow
STEPS, PER_DEVICE, ACCUMULATION = 20, 2, 2
TOLERANCE = 1e-4
SETTINGS: dict[str, Any] = {
    "learning_rate": 2e-4, "lr_scheduler_type": "linear", "warmup_steps": 3, "weight_decay": 0.1, "max_grad_norm": 1.0,
    "max_steps": STEPS, "per_device_train_batch_size": PER_DEVICE, "gradient_accumulation_steps": ACCUMULATION,
    "max_length": 128,
}  # fmt: skip
LAPTOP = DeviceInfo("cpu", "a laptop", 8 << 30, fast_bf16=False)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def pairs() -> list[PreferencePair]:
    return [
        PreferencePair(
            str(number),
            ({"role": "user", "content": row["prompt"]},),
            ({"role": "assistant", "content": row["chosen"]},),
            ({"role": "assistant", "content": row["rejected"]},),
            row["prompt"],
        )
        for number, row in enumerate(tiny_pairs(40))
    ]


def train_ours(
    folder: Path, cache: Path, **changes: Any
) -> tuple[list[float], list[float], dict[str, Tensor], list[int]]:
    settings = DpoConfig(**SETTINGS, **changes, precision="fp32")
    model = load_model(folder)
    task = DpoTask(model, load_tokenizer(folder), PreferenceDataset(pairs(), [], ""), settings, eos_token_ids(model))
    assert task.sharing_blocker is None
    engine = Engine(task, settings, plan_stage(settings, task.rows, 1, LAPTOP), World(), seed=7)
    precompute_ref_log_probs(task, engine, cache, "m")
    reports = list(engine.steps())
    assert all(report.health == "ok" for report in reports)
    order = [row for step in range(STEPS) for row in engine.sampler.batch_indices(step)]
    weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    return [report.loss for report in reports], [report.grad_norm for report in reports], weights, order


def their_trainer(folder: Path, output_dir: Path, order: list[int], **changes: Any) -> Any:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    all_pairs = pairs()
    rows = [
        {"prompt": list(pair.prompt), "chosen": list(pair.chosen), "rejected": list(pair.rejected)}
        for pair in (all_pairs[row] for row in order)
    ]
    settings = DPOConfig(
        **SETTINGS, **changes, output_dir=str(output_dir), train_sampling_strategy="sequential", use_cpu=True,
        bf16=False, gradient_checkpointing=False, logging_steps=1, save_strategy="no", report_to="none",
        disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    return DPOTrainer(
        load_model(folder), args=settings, train_dataset=Dataset.from_list(rows),
        processing_class=load_tokenizer(folder),
    )  # fmt: skip


# a small beta keeps the hinge away from its end, where loss and gradient are nothing
@pytest.mark.parametrize(("loss_type", "beta"), [("sigmoid", 0.1), ("ipo", 0.1), ("hinge", 0.02)])
def test_our_dpo_is_trl_s(model_folder: Path, tmp_path: Path, loss_type: str, beta: float) -> None:
    losses, norms, weights, order = train_ours(model_folder, tmp_path / "kept", loss_type=loss_type, beta=beta)
    trainer = their_trainer(model_folder, tmp_path / "trl", order, loss_type=[loss_type], beta=beta)
    inner, parts = trainer.compute_loss, []

    def compute_loss(*args: Any, **kwargs: Any) -> Tensor:
        loss: Tensor = inner(*args, **kwargs)
        parts.append(float(loss.detach()))
        return loss

    trainer.compute_loss = compute_loss
    trainer.train()
    theirs = [mean(parts[at : at + ACCUMULATION]) for at in range(0, len(parts), ACCUMULATION)]
    their_norms = [float(entry["grad_norm"]) for entry in trainer.state.log_history if "grad_norm" in entry]
    assert len(theirs) == len(losses) == STEPS
    apart = max(abs(a - b) / abs(b) for a, b in zip(losses, theirs, strict=True))
    norms_apart = max(abs(a - b) / abs(b) for a, b in zip(norms, their_norms, strict=True))
    moved = {name: weight.detach() for name, weight in trainer.model.named_parameters()}
    weights_apart = max(float((weight - moved[name]).abs().max()) for name, weight in weights.items())
    print(f"{loss_type}: loss {losses[0]:.4f} → {losses[-1]:.4f}, at most {apart:.1e} from TRL's; "
          f"gradients {norms_apart:.1e}, weights {weights_apart:.1e}")  # fmt: skip
    assert losses[-1] < 0.97 * losses[0], "and it is a curve, not a line"
    assert apart < TOLERANCE
    assert norms_apart < TOLERANCE
    assert weights_apart < 1e-5


def test_trl_reads_the_tokens_that_we_read(model_folder: Path, tmp_path: Path) -> None:
    rows = their_trainer(model_folder, tmp_path, list(range(40))).train_dataset
    tokenizer = load_tokenizer(model_folder)
    for row, pair in zip(rows, pairs(), strict=True):
        ours = tokenize_pair(pair, tokenizer)
        assert row["prompt_ids"] == ours.prompt.tolist()
        assert row["chosen_ids"] == ours.chosen.input_ids.tolist()
        assert row["rejected_ids"] == ours.rejected.input_ids.tolist()
