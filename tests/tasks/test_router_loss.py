"""The load-balancing loss of a mixture of experts is part of the loss, as the model itself and TRL add it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from families import SIZES, family
from modelwright.data.chat import Conversation, ConversationDataset
from modelwright.data.preferences import PreferenceDataset, PreferencePair
from modelwright.engine.distributed import World
from modelwright.engine.trainer import Engine
from modelwright.errors import ModelError
from modelwright.models.pretrained import load_tokenizer
from modelwright.plan.hardware import DeviceInfo
from modelwright.plan.stage import plan_stage
from modelwright.recipe.stage_specs import DpoConfig, SftConfig
from modelwright.tasks.dpo import DpoTask, precompute_ref_log_probs
from modelwright.tasks.losses import RouterLoss
from modelwright.tasks.sft import SftTask, find_compute_reuse
from tiny import VOCAB_SIZE, tiny_pairs, tiny_rows

SETTINGS: dict[str, Any] = {"max_length": 96, "max_steps": 2, "per_device_train_batch_size": 4, "precision": "fp32",
                            "learning_rate": 1e-3, "lr_scheduler_type": "constant"}  # fmt: skip
SYSTEM = {"role": "system", "content": "You count ropes and tents and knots for a scout troop. Say the sum first."}
LAPTOP = DeviceInfo("cpu", "a laptop", 8 << 30, fast_bf16=False)


def mixtral(**changes: Any) -> Any:
    """A mixture of four experts whose load-balancing loss weighs a tenth."""
    from transformers import AutoModelForCausalLM, MixtralConfig

    torch.manual_seed(1)
    sizes = {**SIZES, "num_hidden_layers": 2, "num_key_value_heads": 2, "num_local_experts": 4, **changes}
    sizes = {"router_aux_loss_coef": 0.1, **sizes, "vocab_size": VOCAB_SIZE, "initializer_range": 0.2}
    return AutoModelForCausalLM.from_config(MixtralConfig(**sizes)).eval()


def sft_task(folder: Path, model: Any, **changes: Any) -> SftTask:
    rows = [
        Conversation(str(number), (SYSTEM, {"role": "user", "content": row["question"]},
                                   {"role": "assistant", "content": row["answer"]}), row["question"])
        for number, row in enumerate(tiny_rows(12))
    ]  # fmt: skip
    data = ConversationDataset(rows, [], "")
    return SftTask(model, load_tokenizer(folder), data, SftConfig(**{**SETTINGS, **changes}), [])


def dpo_task(folder: Path, model: Any, **changes: Any) -> tuple[DpoTask, Engine]:
    pairs = [
        PreferencePair(str(number), ({"role": "user", "content": row["prompt"]},),
                       ({"role": "assistant", "content": row["chosen"]},),
                       ({"role": "assistant", "content": row["rejected"]},), row["prompt"])
        for number, row in enumerate(tiny_pairs(8))
    ]  # fmt: skip
    settings = DpoConfig(**{**SETTINGS, **changes})
    task = DpoTask(model, load_tokenizer(folder), PreferenceDataset(pairs, [], ""), settings, [])
    return task, Engine(task, settings, plan_stage(settings, task.rows, 1, LAPTOP), World(), seed=7)


@pytest.mark.parametrize("packing", [False, True])
def test_the_loss_is_the_model_s_own_with_its_router_loss(model_folder: Path, packing: bool) -> None:
    model = mixtral()
    task = sft_task(model_folder, model, packing=packing, max_length=192)
    assert task.prefix_length == 0, "a shared prefix would be counted once instead of once a row"
    rows = range(task.rows if packing else 5)
    loss, aux_loss = (task.module(**task.batch(rows).inputs) / task.batch(rows).trained_tokens).tolist()
    examples = [task.examples[number] for row in rows for number in task._packs[row]]
    length = max(map(len, examples))
    tokens, labels = torch.zeros(len(examples), length, dtype=torch.int64), torch.full((len(examples), length), -100)
    attention_mask = torch.zeros_like(tokens)
    for number, example in enumerate(examples):
        tokens[number, : len(example)] = torch.from_numpy(example.input_ids)
        trained = torch.from_numpy(example.loss_mask)
        labels[number, : len(example)][trained] = tokens[number, : len(example)][trained]
        attention_mask[number, : len(example)] = 1
    theirs = model(tokens, attention_mask=attention_mask, labels=labels, output_router_logits=True, use_cache=False)
    assert loss == pytest.approx(float(theirs.loss.detach()), rel=1e-5)
    assert aux_loss == pytest.approx(float(theirs.aux_loss.detach()), rel=1e-5)
    assert 0.1 * aux_loss > 0.01 * loss
    assert task.metric_names == ("loss", "router_aux_loss")


def test_preferences_have_it_too_and_both_parts_are_reported(model_folder: Path, tmp_path: Path) -> None:
    losses = {}
    for coef in (0.0, 0.1):
        task, engine = dpo_task(model_folder, mixtral(router_aux_loss_coef=coef))
        precompute_ref_log_probs(task, engine, tmp_path / str(coef), "m")
        batch = task.batch(range(4))
        sums = dict(zip(task.metric_names, task.module(**batch.inputs).tolist(), strict=True))
        losses[coef] = sums["loss"] / batch.trained_tokens
    aux_loss = sums["router_aux_loss"] / batch.trained_tokens
    assert losses[0.0] == pytest.approx(0.6931, abs=1e-4)
    assert losses[0.1] == pytest.approx(losses[0.0] + 0.1 * aux_loss, rel=1e-5)
    assert task.sharing_blocker is not None


def test_the_setting_takes_precedence_and_a_dense_model_refuses_it(model_folder: Path) -> None:
    assert RouterLoss(mixtral(), None).coef == 0.1
    assert RouterLoss(mixtral(), 0.0).coef == 0.0
    assert RouterLoss(mixtral(), 0.5).coef == 0.5
    assert sft_task(model_folder, mixtral(), router_aux_loss_coef=0).prefix_length > 16
    assert RouterLoss(family("llama"), None).coef == 0.0
    with pytest.raises(ModelError, match="router_aux_loss_coef: 0"):
        RouterLoss(family("llama"), 0.1)


def test_frozen_layers_with_a_router_are_not_cached(model_folder: Path) -> None:
    model = mixtral().requires_grad_(False)
    model.lm_head.requires_grad_(True)
    settings = {"trainable": {"lm_head": True}}
    task = sft_task(model_folder, model, **settings)
    reuse = find_compute_reuse(task, model, SftConfig(**SETTINGS, **settings))
    assert reuse.frozen_layers is None
    assert "router" in str(reuse.cache_blocker)


@pytest.mark.slow
def test_our_losses_are_trl_s(model_folder: Path, tmp_path: Path) -> None:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    tokenizer = load_tokenizer(model_folder)
    common = {"output_dir": str(tmp_path), "train_sampling_strategy": "sequential", "use_cpu": True, "bf16": False,
              "gradient_checkpointing": False, "logging_steps": 1, "save_strategy": "no", "report_to": "none",
              "disable_tqdm": True, "dataloader_pin_memory": False, "max_grad_norm": 1.0}  # fmt: skip
    settings = {key: value for key, value in SETTINGS.items() if key != "precision"}
    task = sft_task(model_folder, mixtral())
    engine = Engine(task, SftConfig(**SETTINGS), plan_stage(SftConfig(**SETTINGS), 12, 1, LAPTOP), World(), seed=7)
    order = [row for step in range(2) for row in engine.sampler.batch_indices(step)]
    ours = [report.loss for report in engine.steps()]
    rows = [
        {"input_ids": each.input_ids.tolist(),
         "labels": [int(t) if m else -100 for t, m in zip(each.input_ids, each.loss_mask, strict=True)]}
        for each in (task.examples[row] for row in order)
    ]  # fmt: skip
    config = SFTConfig(**common, **settings, dataset_kwargs={"skip_prepare_dataset": True}, shuffle_dataset=False)
    trainer = SFTTrainer(mixtral(), config, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
    trainer.train()
    theirs = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert ours == pytest.approx(theirs, rel=1e-4)
    preferences, engine = dpo_task(model_folder, mixtral())
    precompute_ref_log_probs(preferences, engine, tmp_path / "kept", "m")
    order = [row for step in range(2) for row in engine.sampler.batch_indices(step)]
    ours = [report.loss for report in engine.steps()]
    pairs = [
        {"prompt": [{"role": "user", "content": row["prompt"]}],
         "chosen": [{"role": "assistant", "content": row["chosen"]}],
         "rejected": [{"role": "assistant", "content": row["rejected"]}]}
        for row in (tiny_pairs(8)[number] for number in order)
    ]  # fmt: skip
    trainer = DPOTrainer(mixtral(), mixtral(), args=DPOConfig(**common, **settings),
                         train_dataset=Dataset.from_list(pairs), processing_class=tokenizer)  # fmt: skip
    trainer.train()
    theirs = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert ours == pytest.approx(theirs, rel=1e-4)
