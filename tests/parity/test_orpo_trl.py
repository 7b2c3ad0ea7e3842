"""The same tiny Llama on the same pairs of mixed length: our ORPO is TRL's, step by step.

Each side does its own work: chat template, tokens, loss, clipping, AdamW, schedule. Only the order of pairs is ours.
TRL averages the means of its micro-batches, so it is given the unsplit batch at once; ours is also cut in three. TRL
appends an end token where the template ends with something else, so this template ends with one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from modelwright.data.preferences import PreferenceDataset, PreferencePair
from modelwright.engine.distributed import World
from modelwright.engine.trainer import Engine
from modelwright.models.pretrained import eos_token_ids, load_model, load_tokenizer
from modelwright.plan.hardware import DeviceInfo
from modelwright.plan.stage import EVAL_ROWS, plan_stage
from modelwright.recipe.stage_specs import OrpoConfig
from modelwright.tasks.orpo import OrpoTask
from tiny import tiny_pairs

pytestmark = pytest.mark.slow
STEPS, BATCH, HELD_OUT = 20, 8, 8
TOLERANCE = 1e-4
METRICS = {
    "eval_loss": "eval_loss", "eval_nll_loss": "eval_nll_loss", "eval_log_odds": "eval_log_odds_chosen",
    "eval_reward_accuracy": "eval_rewards/accuracies", "eval_reward_margin": "eval_rewards/margins",
}  # fmt: skip
"""Our metrics of held-out pairs and TRL's."""
SETTINGS: dict[str, Any] = {"learning_rate": 2e-4, "lr_scheduler_type": "linear", "warmup_steps": 3,
                            "weight_decay": 0.1, "max_steps": STEPS}  # fmt: skip
LAPTOP = DeviceInfo("cpu", "a laptop", 8 << 30, fast_bf16=False)


def tokenizer_of(folder: Path) -> Any:
    tokenizer = load_tokenizer(folder)
    tokenizer.chat_template = tokenizer.chat_template.replace("<|im_end|>\n", "<|im_end|>")
    return tokenizer


def pairs() -> list[PreferencePair]:
    """Pairs whose prompts and answers have many lengths."""
    return [
        PreferencePair(
            str(index),
            ({"role": "user", "content": row["prompt"] * (1 + index % 3)},),
            ({"role": "assistant", "content": row["chosen"] * (1 + index % 4)},),
            ({"role": "assistant", "content": row["rejected"] * (1 + index % 5)},),
            row["prompt"],
        )
        for index, row in enumerate(tiny_pairs(40))
    ]


class Training(NamedTuple):
    losses: list[float]
    norms: list[float]
    metrics: dict[str, float]
    weights: dict[str, Tensor]


def train_ours(folder: Path, **config: Any) -> tuple[Training, list[int]]:
    settings, model = OrpoConfig(**SETTINGS, **config, precision="fp32"), load_model(folder)
    data = PreferenceDataset(pairs()[HELD_OUT:], pairs()[:HELD_OUT], "")
    task = OrpoTask(model, tokenizer_of(folder), data, settings, eos_token_ids(model))
    assert len({task.row_length(row) for row in range(task.rows)}) > 10
    engine = Engine(task, settings, plan_stage(settings, task.rows, 1, LAPTOP), World(), seed=7)
    reports = list(engine.steps())
    order = [row for step in range(STEPS) for row in engine.sampler.batch_indices(step)]
    losses, norms = ([getattr(report, name) for report in reports] for name in ("loss", "grad_norm"))
    return Training(losses, norms, engine.evaluate(), dict(model.named_parameters())), order


def train_theirs(folder: Path, output: Path, order: list[int]) -> Training:
    from datasets import Dataset
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    rows = [{name: list(getattr(pair, name)) for name in ("prompt", "chosen", "rejected")} for pair in pairs()]
    settings = ORPOConfig(
        **SETTINGS, output_dir=str(output), train_sampling_strategy="sequential", use_cpu=True, bf16=False,
        gradient_checkpointing=False, logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True,
        dataloader_pin_memory=False,
    )  # fmt: skip
    assert settings.per_device_train_batch_size == BATCH == HELD_OUT == EVAL_ROWS
    trainer = ORPOTrainer(
        load_model(folder),
        args=settings,
        train_dataset=Dataset.from_list([rows[HELD_OUT + index] for index in order]),
        eval_dataset=Dataset.from_list(rows[:HELD_OUT]),
        processing_class=tokenizer_of(folder),
    )
    inner, losses = trainer.compute_loss, []

    def compute_loss(*args: Any, **kwargs: Any) -> Tensor:
        loss: Tensor = inner(*args, **kwargs)
        losses.append(float(loss.detach()))
        return loss

    trainer.compute_loss = compute_loss
    trainer.train()
    norms = [float(entry["grad_norm"]) for entry in trainer.state.log_history if "grad_norm" in entry]
    return Training(losses, norms, trainer.evaluate(), dict(trainer.model.named_parameters()))


def test_our_orpo_is_trl_s(model_folder: Path, tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    unsplit, order = train_ours(model_folder)
    split, _ = train_ours(model_folder, per_device_train_batch_size=3, global_batch_size=BATCH)
    theirs = train_theirs(model_folder, tmp_path, order)
    torch.set_num_threads(threads)
    assert len(unsplit.losses) == len(theirs.losses) == STEPS and unsplit.losses[-1] < 0.97 * unsplit.losses[0]
    for ours in (unsplit, split):
        for curve, expected in ((ours.losses, theirs.losses), (ours.norms, theirs.norms)):
            difference = max(abs(a - b) / abs(b) for a, b in zip(curve, expected, strict=True))
            print(f"{curve[0]:.4f} → {curve[-1]:.4f}, at most {difference:.1e} from TRL's")
            assert difference < TOLERANCE
        for name, their_name in METRICS.items():
            assert ours.metrics[name] == pytest.approx(theirs.metrics[their_name], rel=TOLERANCE, abs=1e-6), name
    differences = [(weight - theirs.weights[name]).detach().abs().max() for name, weight in unsplit.weights.items()]
    assert max(map(float, differences)) < 1e-5
