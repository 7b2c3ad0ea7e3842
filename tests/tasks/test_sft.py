"""Packed documents cannot see each other, and the loss is the model's own: over families, backends and batches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from families import BACKENDS, FAMILIES, SIZES, family
from modelwright.data.chat import load_conversations
from modelwright.data.chat_tokens import TokenizedRow
from modelwright.engine.task import MicroBatch
from modelwright.errors import ModelError
from modelwright.models.attention import check_forward, compute_logits, hidden_states
from modelwright.models.prefix_sharing import prefix_sharing_blocker
from modelwright.models.pretrained import eos_token_ids, load_model, prepare_model
from modelwright.models.trainable import set_trainable
from modelwright.recipe.load import load as load_recipe
from modelwright.recipe.stage_specs import SftConfig, TrainableConfig
from modelwright.tasks.batching import collate_examples
from modelwright.tasks.sft import SftLoss, SftTask
from tiny import tiny_recipe

PACKED = (11, 7, 9)
"""Lengths of the documents in the packed row."""


def documents(*lengths: int, seed: int = 0) -> list[TokenizedRow]:
    """Random documents whose second half is trained."""
    rng = np.random.default_rng(seed)
    return [
        TokenizedRow(rng.integers(3, 300, length, dtype=np.int32), np.arange(length) >= length // 2)
        for length in lengths
    ]


@torch.no_grad()
def logits(model: Any, batch: MicroBatch) -> Tensor:
    return compute_logits(model, hidden_states(model, batch.inputs["tokens"], batch.inputs["positions"]))


def gradients(module: torch.nn.Module) -> dict[str, Tensor]:
    grads = {name: weight.grad.clone() for name, weight in module.named_parameters() if weight.grad is not None}
    module.zero_grad(set_to_none=True)
    return grads


def assert_close(ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float) -> None:
    assert set(ours) == set(theirs)
    for name, gradient in ours.items():
        scale = theirs[name].abs().max().clamp(min=1e-6)
        assert (gradient - theirs[name]).abs().max() / scale < tolerance, name


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("changed", range(len(PACKED)))
def test_changing_one_packed_document_moves_no_logit_of_another(name: str, backend: str, changed: int) -> None:
    model, group = family(name, backend), documents(*PACKED)
    other = [*group[:changed], documents(PACKED[changed], seed=9)[0], *group[changed + 1 :]]
    before, after = logits(model, collate_examples([group])), logits(model, collate_examples([other]))
    start = sum(PACKED[:changed])
    inside = torch.zeros(sum(PACKED), dtype=torch.bool)
    inside[start : start + PACKED[changed]] = True
    assert torch.equal(before[0, ~inside], after[0, ~inside])
    assert (before[0, inside] - after[0, inside]).abs().max() > 0.1


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_packed_document_says_what_it_says_alone(name: str, backend: str) -> None:
    model, group = family(name, backend), documents(*PACKED)
    packed, start = logits(model, collate_examples([group]))[0], 0
    for document in group:
        alone = model(input_ids=torch.from_numpy(document.input_ids[None].astype(np.int64)), use_cache=False).logits[0]
        torch.testing.assert_close(packed[start : start + len(document)], alone, atol=2e-5, rtol=1e-5)
        start += len(document)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_padded_batch_equals_its_rows_one_by_one(name: str, backend: str) -> None:
    module, rows = SftLoss(family(name, backend)), documents(5, 23, 12, 2)
    together = collate_examples([[row] for row in rows])
    module(**together.inputs).backward()
    at_once = gradients(module)
    alone = [collate_examples([[row]]) for row in rows]
    losses = [module(**batch.inputs) for batch in alone]
    torch.stack(losses).sum().backward()
    assert together.trained_tokens == sum(batch.trained_tokens for batch in alone)
    assert_close(at_once, gradients(module), 1e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_head_on_loss_positions_gives_the_model_s_own_loss(name: str) -> None:
    model, rows = family(name), documents(17, 9, 21)
    batch = collate_examples([[row] for row in rows])
    labels = torch.full_like(batch.inputs["tokens"], -100)
    attention_mask = torch.zeros_like(labels)
    for number, row in enumerate(rows):
        labels[number, : len(row)] = torch.from_numpy(np.where(row.loss_mask, row.input_ids, -100).astype(np.int64))
        attention_mask[number, : len(row)] = 1
    theirs = model(input_ids=batch.inputs["tokens"], attention_mask=attention_mask, labels=labels, use_cache=False).loss
    theirs.backward()
    their_gradients = gradients(model)
    ours = SftLoss(model)(**batch.inputs) / batch.trained_tokens
    ours.backward()
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)
    assert_close(gradients(model), their_gradients, 1e-5)


@pytest.mark.parametrize("packed", [False, True])
def test_trl_2175_accumulation_equals_one_large_batch(packed: bool) -> None:
    module, rows = SftLoss(family("llama")), documents(5, 23, 12, 9, 30, 2)
    groups = [rows[:2], rows[2:4], rows[4:]] if packed else [[row] for row in rows]
    full_batch = collate_examples(groups)
    (module(**full_batch.inputs) / full_batch.trained_tokens).backward()
    at_once = gradients(module)
    for group in groups:
        batch = collate_examples([group])
        (module(**batch.inputs) / full_batch.trained_tokens).backward()
    assert_close(gradients(module), at_once, 1e-6)


def test_a_blank_batch_trains_nothing_and_still_has_a_graph() -> None:
    module = SftLoss(family("llama"))
    blank = collate_examples([])
    assert (blank.trained_tokens, blank.tokens) == (0, 0)
    loss = module(**blank.inputs)
    loss.backward()
    grads = gradients(module)
    assert loss.item() == 0.0
    assert set(grads) == {name for name, _ in module.named_parameters()}, "ranks exchange every gradient or hang"
    assert all(bool((gradient == 0).all()) for gradient in grads.values())


def test_the_first_token_of_a_document_is_predicted_by_no_other() -> None:
    every = [TokenizedRow(row.input_ids, np.ones(len(row), dtype=np.bool_)) for row in documents(4, 3)]
    batch = collate_examples([every])
    assert batch.inputs["loss_positions"].tolist() == [0, 1, 2, 4, 5]
    assert batch.trained_tokens == 5


def test_positions_restart_with_each_document_and_with_the_padding() -> None:
    rows = documents(3, 2, 4)
    assert collate_examples([rows[:2], rows[2:]]).inputs["positions"].tolist() == [[0, 1, 2, 0, 1], [0, 1, 2, 3, 0]]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", FAMILIES)
def test_check_forward_lets_every_family_pass_that_keeps_documents_apart(name: str, backend: str) -> None:
    check_forward(family(name, backend), packed=True)
    check_forward(family(name, backend), packed=False)


def test_check_forward_refuses_a_model_whose_documents_see_each_other(model_folder: Path) -> None:
    model = load_model(model_folder)
    inner = model.model.forward
    # the cache loses the mask of packed documents in silence: this is what a leaking family looks like
    model.model.forward = lambda **inputs: inner(**{**inputs, "use_cache": True})
    with pytest.raises(ModelError, match="packed rows depend on each other in this family; use packing: false"):
        check_forward(model, packed=True)
    check_forward(model, packed=False)


@pytest.mark.parametrize("name", ["lfm2", "falcon_h1", "jamba"])
def test_a_leak_is_found_however_small_the_weights(name: str) -> None:
    """At their usual initialization the logits of packed documents differ by 1e-3 only."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    more = {
        "jamba": {"num_experts": 2},
        "lfm2": {"layer_types": ["conv", "full_attention"]},
        "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16},
    }
    sizes = {
        **SIZES,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "initializer_range": 0.005,
        **more.get(name, {}),
    }
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **sizes)).eval()
    with pytest.raises(ModelError, match="packed rows depend on each other"):
        check_forward(model, packed=True)
    assert prefix_sharing_blocker(model) is not None
    check_forward(model, packed=False)


@pytest.mark.parametrize("name", ["gemma2", "gptj", "bloom", "mpt", "mamba", "gpt_oss", "falcon", "opt", "biogpt"])
def test_a_family_without_sdpa_or_packing_trains_unpacked(name: str, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    known = AutoConfig.for_model(name)
    sizes = {
        **SIZES,
        "num_hidden_layers": 2,
        "num_local_experts": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rotary_dim": 8,
        "ffn_dim": 96,
    }
    sizes = {
        key: value for key, value in sizes.items() if hasattr(known, key) and (name, key) != ("falcon", "head_dim")
    }
    AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **sizes)).save_pretrained(tmp_path)
    model = load_model(tmp_path)
    prepare_model(model, torch.device("cpu"), "auto", packed=False)
    rows = documents(5, 23, 12)
    batch = collate_examples([[row] for row in rows])
    ours = SftLoss(model.eval())(**batch.inputs).item()
    theirs = 0.0
    for row in rows:
        tokens = torch.from_numpy(row.input_ids.astype(np.int64))
        predicted = model(input_ids=tokens[None], use_cache=False).logits[0, :-1][row.loss_mask[1:]]
        theirs += torch.nn.functional.cross_entropy(predicted, tokens[1:][row.loss_mask[1:]], reduction="sum").item()
    assert ours == pytest.approx(theirs, rel=1e-5)


def test_check_forward_refuses_a_head_that_does_more_than_we_know_of(model_folder: Path) -> None:
    model = load_model(model_folder)
    inner = model.forward

    def scaled(**inputs: Any) -> Any:
        answer = inner(**inputs)
        answer.logits = answer.logits * 2
        return answer

    model.forward = scaled
    with pytest.raises(ModelError, match="the LM head is not a plain linear layer"):
        check_forward(model, packed=False)


def test_check_forward_knows_of_soft_caps_and_scales() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    families: dict[str, dict[str, Any]] = {
        "gemma2": {"final_logit_softcapping": 5.0, "head_dim": 16},
        "granite": {"logits_scaling": 8.0},
        "cohere": {"logit_scale": 0.5},
    }
    for name, more in families.items():
        settings = {**SIZES, "num_hidden_layers": 2, "num_key_value_heads": 2, "initializer_range": 0.2, **more}
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **settings)).eval()
        check_forward(model, packed=True)


def test_a_model_with_lora_has_the_same_loss_and_only_the_adapters_train(model_folder: Path) -> None:
    model = set_trainable(load_model(model_folder), TrainableConfig(trainable="lora", lora_r=4))
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    check_forward(model, packed=True)
    rows = documents(13, 8)
    module, batch = SftLoss(model), collate_examples([rows])
    labels = [torch.from_numpy(np.where(row.loss_mask, row.input_ids, -100).astype(np.int64))[None] for row in rows]
    tokens = [torch.from_numpy(row.input_ids.astype(np.int64))[None] for row in rows]
    theirs = sum(
        model(input_ids=ids, labels=wanted, use_cache=False).loss * int((wanted[:, 1:] != -100).sum())
        for ids, wanted in zip(tokens, labels, strict=True)
    )
    loss = module(**batch.inputs)
    loss.backward()
    torch.testing.assert_close(loss, theirs, atol=0, rtol=1e-5)
    grads = gradients(module)
    assert grads
    assert all("lora_" in name for name in grads)


def task_of(folder: Path, model_folder: Path, tokenizer: Any, **settings: Any) -> SftTask:
    loaded = load_recipe(tiny_recipe(folder, model_folder, **settings), environ={})
    data = load_conversations(loaded.recipe.data, loaded.recipe.seed, folder)
    model = load_model(model_folder)
    sft: SftConfig = loaded.recipe.stages["sft"]
    return SftTask(model, tokenizer, data, sft, eos_token_ids(model))


def everything(task: SftTask, rows: Sequence[int]) -> tuple[int, int]:
    batch = task.batch(rows)
    return batch.trained_tokens, batch.tokens


def test_the_task_packs_or_pads_the_same_rows(tmp_path: Path, model_folder: Path, tokenizer: Any) -> None:
    padded = task_of(tmp_path / "padded", model_folder, tokenizer)
    packed = task_of(tmp_path / "packed", model_folder, tokenizer, packing=True, max_length=128)
    assert (padded.rows, padded.held_out_rows) == (36, 4)
    assert packed.rows < padded.rows
    assert everything(padded, range(padded.rows)) == everything(packed, range(packed.rows))
    assert max(packed.row_length(row) for row in range(packed.rows)) <= 128
    assert padded.held_out_batch([]).trained_tokens == 0


def test_the_loss_of_packed_rows_is_the_loss_of_padded_rows(tmp_path: Path, model_folder: Path, tokenizer: Any) -> None:
    padded = task_of(tmp_path / "padded", model_folder, tokenizer)
    packed = task_of(tmp_path / "packed", model_folder, tokenizer, packing=True, max_length=128)
    with torch.no_grad():
        losses = [task.module(**task.batch(range(task.rows)).inputs).item() for task in (padded, packed)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
