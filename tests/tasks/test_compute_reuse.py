"""Reused computation is what every step would compute: cached frozen layers bit for bit, shared prefixes to 1e-5."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from families import BACKENDS, FAMILIES, family
from modelwright.data.chat import load_conversations
from modelwright.data.chat_tokens import TokenizedRow
from modelwright.engine.distributed import World
from modelwright.engine.trainer import Engine
from modelwright.models import attention
from modelwright.models.activation_checkpoint import enable_activation_checkpointing
from modelwright.models.prefix_sharing import prefix_sharing_blocker, supports_layout
from modelwright.models.pretrained import eos_token_ids, load_model, load_tokenizer
from modelwright.models.trainable import count_parameters, decoder_layers, set_trainable
from modelwright.plan.hardware import probe_device
from modelwright.plan.stage import plan_stage
from modelwright.recipe.load import load as load_recipe
from modelwright.recipe.stage_specs import SftConfig, TrainableConfig
from modelwright.runs.folder import read_json
from modelwright.tasks.batching import (
    NO_ROW_LIMIT,
    cache_index_of,
    collate_rows,
    layout_rows,
    layout_shared_prefix,
    shared_prefix_length,
    to_varlen,
)
from modelwright.tasks.frozen_cache import (
    TOKENS_PER_FORWARD,
    CacheLocation,
    FrozenLayers,
    HiddenStateCache,
    choose_location,
    num_frozen_layers,
)
from modelwright.tasks.sft import SftLoss, SftTask, find_compute_reuse
from tiny import tiny_model, tiny_recipe

SYSTEM = "You count ropes and tents and knots for a scout troop. Say the sum first, then whether to count again."
LAST_LAYER = {"last_layers": 1, "lm_head": True}


@pytest.fixture(scope="module")
def deep_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers and a head of its own."""
    return tiny_model(tmp_path_factory.mktemp("deep"), layers=4, tied=False)


def random_examples(*lengths: int, seed: int = 0) -> list[TokenizedRow]:
    """Random examples whose second half is trained."""
    rng = np.random.default_rng(seed)
    return [
        TokenizedRow(rng.integers(3, 300, length, dtype=np.int32), np.arange(length) >= length // 2)
        for length in lengths
    ]


def gradients(module: torch.nn.Module) -> dict[str, Tensor]:
    results = {name: weight.grad.clone() for name, weight in module.named_parameters() if weight.grad is not None}
    module.zero_grad(set_to_none=True)
    return results


def rows_with_shared_prefix(*lengths: int) -> list[TokenizedRow]:
    """Random examples after the same 20 tokens."""
    first = random_examples(20, seed=5)[0].input_ids
    untrained = np.zeros(20, dtype=np.bool_)
    return [
        TokenizedRow(np.concatenate([first, each.input_ids]), np.concatenate([untrained, each.loss_mask]))
        for each in random_examples(*lengths)
    ]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_shared_prefix_gives_the_loss_and_the_gradients_of_full_rows(name: str, backend: str) -> None:
    module, rows = SftLoss(family(name, backend)), rows_with_shared_prefix(40, 35, 50, 44)
    shared_length = shared_prefix_length(rows)
    assert shared_length == 20
    plain = collate_rows(layout_rows([[0], [1], [2], [3]], list(map(len, rows))), rows)
    shared = collate_rows(layout_shared_prefix(shared_length, range(4), list(map(len, rows))), rows, shared_length)
    assert (shared.trained_tokens, shared.tokens) == (plain.trained_tokens, plain.tokens)
    assert shared.inputs["tokens"].numel() < plain.inputs["tokens"].numel()
    losses, results = [], []
    for batch in (plain, shared):
        loss = module(**batch.inputs)
        loss.backward()
        losses.append(loss.item())
        results.append(gradients(module))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    for name, gradient in results[0].items():
        assert (gradient - results[1][name]).abs().max() < 1e-5 * gradient.abs().max(), name


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "smollm3"])
def test_a_shared_prefix_needs_no_mask_with_varlen_attention(name: str) -> None:
    model, rows = copy.deepcopy(family(name)), rows_with_shared_prefix(40, 35, 50, 44)
    attention.register_attention(model)
    module = SftLoss(model)
    masked = collate_rows(layout_shared_prefix(20, range(4), list(map(len, rows)), max_row_length=130), rows, 20)
    assert len(masked.inputs["tokens"]) == 2
    in_one_row = collate_rows(
        layout_shared_prefix(20, range(4), list(map(len, rows)), NO_ROW_LIMIT), rows, 20, multiple=128
    )
    assert in_one_row.inputs["tokens"].shape == (1, 256)
    losses, results = [], []
    for batch in (masked, to_varlen(masked), to_varlen(in_one_row)):
        loss = module(**batch.inputs)
        loss.backward()
        losses.append(loss.item())
        results.append(gradients(module))
    assert losses[1:] == pytest.approx([losses[0]] * 2, rel=1e-6)
    for name, gradient in results[0].items():
        for other in results[1:]:
            assert (gradient - other[name]).abs().max() < 1e-5 * gradient.abs().max(), name


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "smollm3"])
def test_a_shared_prefix_needs_no_mask_on_a_gpu(name: str) -> None:
    model, rows = copy.deepcopy(family(name)).cuda(), rows_with_shared_prefix(40, 35, 50, 44)
    attention.register_attention(model)
    assert supports_layout(model)
    module, masked = SftLoss(model), collate_rows(layout_shared_prefix(20, range(4), list(map(len, rows))), rows, 20)
    losses, results = [], []
    for batch in (
        masked,
        to_varlen(
            collate_rows(layout_shared_prefix(20, range(4), list(map(len, rows)), NO_ROW_LIMIT), rows, 20, multiple=128)
        ),
    ):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = module(**batch.inputs_on(torch.device("cuda")))
        loss.backward()
        losses.append(loss.item())
        results.append(torch.cat([gradient.flatten() for gradient in gradients(module).values()]))
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)
    assert torch.cosine_similarity(*results, dim=0) > 0.99


def test_many_examples_fill_even_rows_after_copies_of_the_shared_prefix() -> None:
    rows = rows_with_shared_prefix(*[100] * 40)
    laid = layout_shared_prefix(20, range(40), list(map(len, rows)))
    assert [len(row) for row in laid] == [15, 15, 13]
    assert sorted(piece.example for row in laid for piece in row[1:]) == list(range(40))
    assert all((row[0].start, row[0].stop) == (0, 20) for row in laid)


def test_nothing_is_shared_that_a_row_is_trained_on_or_that_is_short() -> None:
    rows = rows_with_shared_prefix(30, 31)
    assert shared_prefix_length(rows) == 20
    early = [TokenizedRow(row.input_ids, np.arange(len(row)) >= 18) for row in rows]
    assert shared_prefix_length(early) == 17, "position 17 predicts token 18, which is trained"
    assert shared_prefix_length([TokenizedRow(row.input_ids, np.arange(len(row)) >= 9) for row in rows]) == 0
    assert shared_prefix_length(rows[:1]) == 0


@pytest.mark.parametrize("lengths", [(30, 41), (30, 30)], ids=["of several lengths", "cut to one length"])
def test_nothing_is_shared_where_the_prompts_are_trained_too(lengths: tuple[int, int]) -> None:
    rows = [TokenizedRow(row.input_ids, np.ones(len(row), dtype=np.bool_)) for row in rows_with_shared_prefix(*lengths)]
    assert shared_prefix_length(rows) == 0, "assistant_only_loss: false trains every token of the prefix"


@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_in_two_halves_is_the_model(name: str) -> None:
    model = family(name)
    for depth in range(1, len(decoder_layers(model)) + 1):
        assert FrozenLayers(model, depth).blocker() is None, depth


def task_of(folder: Path, model_folder: Path, model: Any = None, **settings: Any) -> tuple[SftTask, Any, SftConfig]:
    stage = {"trainable": LAST_LAYER, "max_length": 128, "max_steps": 5, **settings}
    recipe = load_recipe(tiny_recipe(folder, model_folder, **stage), environ={}).recipe
    data = load_conversations(recipe.data.model_copy(update={"system_prompt": SYSTEM}), recipe.seed, folder)
    sft = recipe.sft
    assert sft is not None
    model = set_trainable(load_model(model_folder) if model is None else model, sft)
    return SftTask(model, load_tokenizer(model_folder), data, sft, eos_token_ids(model)), model, sft


def train(folder: Path, model_folder: Path, **settings: Any) -> tuple[list[float], dict[str, Tensor], Engine]:
    """Losses before, in and after five steps, and the weights they leave."""
    task, model, sft = task_of(folder, model_folder, **settings)
    engine = Engine(task, sft, plan_stage(sft, task.rows, 1, probe_device()), World(), seed=3)
    find_compute_reuse(task, model, sft).precompute(engine, folder / "cache", "model")
    losses = [engine.evaluate()["eval_loss"]]
    losses += [report.loss for report in engine.steps()]
    return [*losses, engine.evaluate()["eval_loss"]], engine.trainable_params, engine


def test_cached_frozen_layers_give_the_run_without_the_cache_bit_for_bit(deep_model: Path, tmp_path: Path) -> None:
    if not _rows_are_computed_alike():
        pytest.skip("this processor's kernels add a row up in another order in another batch")
    plain, weights, _ = train(tmp_path / "plain", deep_model, cache_frozen_layers="off", share_prefix=False)
    for where in ("memory", "disk"):
        losses, moved, engine = train(tmp_path / where, deep_model, cache_frozen_layers=where, share_prefix=False)
        assert engine.task.loss_module.cache is not None  # type: ignore[attr-defined]
        assert losses == plain
        assert all(torch.equal(weights[name], weight) for name, weight in moved.items())


def test_cached_frozen_layers_after_a_shared_prefix_give_the_plain_losses(deep_model: Path, tmp_path: Path) -> None:
    plain, _, engine = train(tmp_path / "plain", deep_model, cache_frozen_layers="off", share_prefix=False)
    assert engine.task.prefix_length == 0  # type: ignore[attr-defined]
    for packing in (False, True):
        both, _, engine = train(tmp_path / str(packing), deep_model, packing=packing)
        assert engine.task.prefix_length > 16  # type: ignore[attr-defined]
        if not packing:
            assert both == pytest.approx(plain, rel=1e-5)
        else:
            assert both[0] == pytest.approx(plain[0], rel=1e-5)


def test_states_cached_with_varlen_attention_are_those_cached_with_a_mask(deep_model: Path, tmp_path: Path) -> None:
    task, model, _ = task_of(tmp_path, deep_model)
    assert task.use_varlen_prefix and model.config._attn_implementation == attention.ATTN_NAME
    results = []
    for paths in (False, True):
        state_cache = HiddenStateCache(
            FrozenLayers(model, 3), task.examples, task.prefix_length, torch.device("cpu"), paths
        )
        state_cache.fill(World(), torch.no_grad, CacheLocation("memory", tmp_path, "a"))
        results.append(state_cache)
    masked, unmasked = results
    assert masked.states is not None and unmasked.states is not None
    assert len(unmasked.blocks[0].rows) == 1 < len(masked.blocks[0].rows)
    torch.testing.assert_close(unmasked.states, masked.states, rtol=1e-5, atol=1e-5)


def _rows_are_computed_alike() -> bool:
    inputs, weight = torch.randn(64, 128), torch.randn(64, 128)
    heads = torch.randn(2, 4, 64, 16)
    intact, part = (F.scaled_dot_product_attention(x, x, x, is_causal=True) for x in (heads, heads[:1, :, :32]))
    linear = torch.equal(F.linear(inputs[:32], weight), F.linear(inputs, weight)[:32])
    return linear and torch.equal(part, intact[:1, :, :32])


def test_what_lies_below_the_first_moving_layer_keeps_no_gradient_no_activation_and_no_moment(
    deep_model: Path, tmp_path: Path
) -> None:
    checkpointing: Any
    for checkpointing in (False, "selective", True):
        task, model, sft = task_of(tmp_path, deep_model, cache_frozen_layers="off")
        if checkpointing:
            enable_activation_checkpointing(model, checkpointing)
        model.train()
        outputs: list[Tensor] = []
        hooks = [layer.register_forward_hook(partial(_note_output, outputs)) for layer in decoder_layers(model)]
        task.module(**task.batch([0, 1]).inputs).backward()
        assert [output.requires_grad for output in outputs[:4]] == [False, False, False, True]
        for hook in hooks:
            hook.remove()
        live = {name for name, weight in model.named_parameters() if weight.grad is not None}
        assert live == {name for name, _ in model.named_parameters() if name.startswith(("model.layers.3.", "lm_head"))}
    engine = Engine(task, sft, plan_stage(sft, task.rows, 1, probe_device()), World(), seed=3)
    next(engine.steps())
    assert len(engine.optimizer.state) == len(live)


def _note_output(outputs: list[Tensor], _layer: torch.nn.Module, _inputs: Any, output: Tensor) -> None:
    outputs.append(output)


def states(folder: Path, task: SftTask, frozen: FrozenLayers, fingerprint: str = "a") -> tuple[HiddenStateCache, str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(TOKENS_PER_FORWARD, "cpu", 400)
        state_cache = HiddenStateCache(frozen, task.examples, task.prefix_length, torch.device("cpu"))
    message = state_cache.fill(World(), torch.no_grad, CacheLocation("disk", folder, fingerprint))
    return state_cache, message


def test_states_on_disk_are_reused_and_damaged_ones_are_recomputed(deep_model: Path, tmp_path: Path) -> None:
    task, model, _ = task_of(tmp_path, deep_model)
    folder, frozen = tmp_path / "kept", FrozenLayers(model, 3)
    state_cache, message = states(folder, task, frozen)
    num_blocks = len(state_cache.blocks)
    assert num_blocks > 1
    assert f"{num_blocks} of {num_blocks} blocks recomputed" in message
    assert state_cache.states is not None
    intact = state_cache.states.clone()
    assert f"0 of {num_blocks} blocks recomputed" in states(folder, task, frozen)[1]
    with (folder / "states.bin").open("r+b") as file:
        file.seek(state_cache.blocks[1].first * intact.shape[1] * 4 + 5)
        file.write(b"\x77")
    repaired, message = states(folder, task, frozen)
    assert f"1 of {num_blocks} blocks recomputed" in message
    assert repaired.states is not None
    assert torch.equal(repaired.states, intact)
    assert (
        f"{num_blocks} of {num_blocks} blocks recomputed"
        in states(folder, task, frozen, fingerprint="another model")[1]
    )
    (folder / "states.bin").write_bytes(b"cut short")
    assert (
        f"{num_blocks} of {num_blocks} blocks recomputed"
        in states(folder, task, frozen, fingerprint="another model")[1]
    )
    assert read_json(folder / "manifest.json")["blocks"]


def test_states_go_to_disk_where_memory_is_short() -> None:
    assert choose_location(1000, World(), "auto") == "device memory"
    assert choose_location(10**18, World(), "auto") == "disk"
    assert choose_location(1000, World(), "disk") == "disk"


def test_the_plan_says_what_is_saved_and_a_tied_head_what_it_costs(
    deep_model: Path, model_folder: Path, tmp_path: Path
) -> None:
    task, model, sft = task_of(tmp_path, deep_model, num_train_epochs=4, max_steps=None)
    frozen, prefix = find_compute_reuse(task, model, sft).describe(plan_stage(sft, task.rows, 1, probe_device()))
    assert frozen.startswith("3 of 4 layers frozen: outputs cached, about 1.")
    assert "over 4 epochs" in frozen
    assert prefix.startswith(f"{task.prefix_length}-token shared prefix computed once per batch, about 1.")
    task, model, sft = task_of(tmp_path, model_folder)
    (tied, _) = find_compute_reuse(task, model, sft).describe(plan_stage(sft, task.rows, 1, probe_device()))
    assert "untie_lm_head: true" in tied
    assert num_frozen_layers(model) == 0


def test_the_flops_of_a_shared_prefix_are_counted_once_per_batch(model_folder: Path, tmp_path: Path) -> None:
    """Of a 284-token prefix they made the MFU 104 %."""
    task, model, sft = task_of(tmp_path, model_folder)
    counts = count_parameters(model)
    size, tokens = 16, task.train_set.stats()["tokens"] / task.rows
    shared = find_compute_reuse(task, model, sft).flops_per_token(counts, size)
    computed = tokens * size - (size - 1) * task.prefix_length
    assert shared == pytest.approx((4 * counts.total + 2 * counts.trained) * computed / (tokens * size))
    task.prefix_length = 0
    assert find_compute_reuse(task, model, sft).flops_per_token(counts, size) == 4 * counts.total + 2 * counts.trained


def test_what_is_trainable_decides_what_can_be_cached(deep_model: Path) -> None:
    def depth(**trainable: Any) -> int:
        return num_frozen_layers(set_trainable(load_model(deep_model), TrainableConfig(trainable=trainable)))

    assert depth(last_layers=2) == 2
    assert depth(lm_head=True) == 4
    assert depth(last_layers=1, norms=True) == 0
    model = set_trainable(load_model(deep_model), TrainableConfig(trainable={"last_layers": 1}))
    model.model.norm.requires_grad_(True)
    assert num_frozen_layers(model) == 3
    model.model.embed_tokens.requires_grad_(True)
    assert num_frozen_layers(model) == 0


def test_a_model_that_drops_out_at_random_caches_and_shares_nothing(deep_model: Path, tmp_path: Path) -> None:
    model = load_model(deep_model)
    for layer in decoder_layers(model):
        layer.self_attn.attention_dropout = 0.1
    task, model, sft = task_of(tmp_path, deep_model, model)
    reuse = find_compute_reuse(task, model, sft)
    assert task.prefix_length == 0, "rows would share the noise of the prefix, or varlen attention drop it"
    assert reuse.frozen_layers is None
    assert reuse.cache_blocker == (
        "frozen layers are recomputed every step: they draw random numbers in training (dropout or jitter)"
    )


def test_jitter_is_randomness_and_so_is_the_dropout_of_lora(deep_model: Path) -> None:
    model = load_model(deep_model)
    frozen = FrozenLayers(model, 2)
    assert frozen.blocker() is None and prefix_sharing_blocker(model) is None

    def jitter(_module: Any, inputs: tuple[Tensor]) -> tuple[Tensor]:
        noise = torch.empty_like(inputs[0]).uniform_(0.99, 1.01)
        return (inputs[0] * noise if model.training else inputs[0],)

    hook = decoder_layers(model)[3].mlp.register_forward_pre_hook(jitter)
    assert frozen.blocker() is None, "it is above the frozen layers"
    assert "random numbers" in str(prefix_sharing_blocker(model))
    hook.remove()
    decoder_layers(model)[1].mlp.register_forward_pre_hook(jitter)
    assert "random numbers" in str(frozen.blocker())
    for dropout, shares in ((0.0, True), (0.1, False)):
        adapted = set_trainable(load_model(deep_model), TrainableConfig(trainable="lora", lora_dropout=dropout))
        assert (prefix_sharing_blocker(adapted) is None) == shares


def test_padded_loss_positions_for_a_gpu_change_neither_the_loss_nor_the_counts(
    deep_model: Path, tmp_path: Path
) -> None:
    task, model, _ = task_of(tmp_path, deep_model)
    state_cache = task.enable_cache(FrozenLayers(model, 3), torch.device("cpu"))
    state_cache.fill(World(), torch.no_grad, CacheLocation("memory", tmp_path, "a"))
    rows = layout_shared_prefix(task.prefix_length, [0, 5, 7], task.lengths)
    plain = state_cache.batch(rows)
    spare = collate_rows(rows, task.examples, task.prefix_length, 128, pad_loss_positions=True)
    assert state_cache.states is not None
    cache_index = cache_index_of(rows, state_cache.offsets, spare.inputs["tokens"].shape, task.prefix_length)
    assert spare.trained_tokens == plain.trained_tokens == len(plain.inputs["loss_positions"])
    assert len(spare.inputs["loss_positions"]) % 128 == 0
    losses = [
        task.module(**plain.inputs).item(),
        task.module(**spare.inputs, states=state_cache.states[torch.from_numpy(cache_index)]).item(),
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
