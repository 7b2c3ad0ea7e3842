"""Every saving gives what the plain computation gives: model, rows and settings are drawn at random, and the loss and
the gradients with the saving are compared with those of each row alone without it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from modelwright.data.chat import ConversationDataset
from modelwright.data.chat_tokens import TokenizedDataset, TokenizedRow
from modelwright.data.preferences import TokenizedPair
from modelwright.engine.distributed import World
from modelwright.models.activation_checkpoint import enable_activation_checkpointing
from modelwright.models.attention import register_attention
from modelwright.models.prefix_sharing import prefix_sharing_blocker
from modelwright.models.trainable import decoder_layers, set_trainable
from modelwright.recipe.stage_specs import PreferenceConfig, SftConfig
from modelwright.tasks import losses
from modelwright.tasks.batching import collate_examples
from modelwright.tasks.dpo import DpoLoss, collate_pairs
from modelwright.tasks.frozen_cache import CacheLocation
from modelwright.tasks.losses import fused_linear_cross_entropy, summed_cross_entropy
from modelwright.tasks.sft import SftLoss, SftTask, find_compute_reuse

NIGHTLY = bool(os.environ.get("NIGHTLY"))
DRAWS = 200 if NIGHTLY else 6
"""Random cases for each saving; ``NIGHTLY=1 pytest tests/tasks/test_differential.py`` finds rare ones."""
VOCAB = 90


def draw_model(rng: np.random.Generator) -> Any:
    """A tiny model of a random family, size, backend and window, with weights of order one."""
    from transformers import AutoConfig, AutoModelForCausalLM

    name = str(rng.choice(["llama", "qwen2", "gemma3_text", "gpt_neox", "smollm3", "gpt2", "mixtral", "olmo2"]))
    heads = int(rng.choice([2, 4]))
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": 8 * heads, "intermediate_size": 8 * int(rng.integers(2, 6)),
        "num_hidden_layers": int(rng.integers(2, 5)), "num_attention_heads": heads, "head_dim": 8,
        "num_key_value_heads": int(rng.choice([1, heads])), "max_position_embeddings": 256, "num_local_experts": 3,
        "tie_word_embeddings": bool(rng.integers(2)), "sliding_window": int(rng.choice([5, 64])), "pad_token_id": 0,
    }  # fmt: skip
    known = AutoConfig.for_model(name)
    sizes = {key: value for key, value in sizes.items() if key in known.to_dict() or key in known.attribute_map}
    sizes |= {key: 0.0 for key, value in known.to_dict().items() if "drop" in key and isinstance(value, float)}
    config = AutoConfig.for_model(name, **sizes, bos_token_id=None, eos_token_id=1, initializer_range=0.3)
    torch.manual_seed(int(rng.integers(1 << 30)))
    model = AutoModelForCausalLM.from_config(config, attn_implementation=str(rng.choice(["sdpa", "eager"]))).eval()
    if rng.integers(4) == 0 and model.config._attn_implementation == "sdpa":
        register_attention(model)
    return model


def draw_rows(rng: np.random.Generator) -> list[TokenizedRow]:
    """Rows of many lengths after a prefix that they share, or nearly, with any tokens trained."""
    prefix = rng.integers(3, VOCAB, int(rng.integers(1, 50)), dtype=np.int32)
    rows, all_trained = [], rng.integers(6) == 0
    for _ in range(int(rng.integers(2, 7))):
        tail = rng.integers(3, VOCAB, int(rng.integers(2, 30)), dtype=np.int32)
        tokens = np.concatenate([prefix, tail])
        loss_mask = np.concatenate([np.zeros(len(prefix), dtype=np.bool_), rng.random(len(tail)) < 0.5])
        loss_mask |= all_trained
        loss_mask[-1] = True
        rows.append(TokenizedRow(tokens, loss_mask))
    return rows


def draw_task(model: Any, rows: list[TokenizedRow], settings: SftConfig) -> SftTask:
    with patch("modelwright.tasks.sft.tokenize_conversations", return_value=TokenizedDataset(rows=rows)):
        return SftTask(model, None, ConversationDataset([], [], ""), settings, [])


def with_gradients(model: Any, loss: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad(set_to_none=True)
    loss.sum().backward()
    return loss.detach(), {name: w.grad.clone() for name, w in model.named_parameters() if w.grad is not None}


def assert_equal(ours: tuple[Tensor, dict[str, Tensor]], plain: tuple[Tensor, dict[str, Tensor]], case: str) -> None:
    torch.testing.assert_close(ours[0], plain[0], rtol=1e-4, atol=1e-4, msg=lambda text: f"{case}: {text}")
    assert set(ours[1]) == set(plain[1]), case
    one, other = (torch.cat([grads[name].flatten() for name in ours[1]]) for grads in (ours[1], plain[1]))
    assert float((one - other).norm()) <= 2e-4 * float(other.norm()) + 1e-6, case


@pytest.mark.parametrize("saving", ["packing", "share_prefix", "cache", "all"])
def test_a_saving_of_sft_changes_no_loss_and_no_gradient(saving: str, tmp_path: Any) -> None:
    used = 0
    for seed in range(DRAWS):
        rng = np.random.default_rng([seed, len(saving)])
        model, rows = draw_model(rng), draw_rows(rng)
        options: dict[str, Any] = {"max_length": 256, "precision": "fp32", "router_aux_loss_coef": 0,
                                   "packing": saving in ("packing", "all"),
                                   "share_prefix": saving in ("share_prefix", "all")}  # fmt: skip
        if saving in ("cache", "all"):
            options["trainable"] = {"last_layers": 1}
            model = set_trainable(model, SftConfig(**options))
        case = f"{saving} {seed} {model.config.model_type} {model.config._attn_implementation}"
        plain_loss = torch.stack([SftLoss(model)(**collate_examples([[row]]).inputs) for row in rows]).sum()
        plain = with_gradients(model, plain_loss)
        task = draw_task(model, rows, SftConfig(**options))
        reuse = find_compute_reuse(task, model, SftConfig(**options))
        if reuse.frozen_layers is not None:
            cache = task.enable_cache(reuse.frozen_layers, torch.device("cpu"))
            cache.fill(World(), torch.no_grad, CacheLocation("memory", tmp_path, "a"))
        used += bool(reuse.frozen_layers) if saving == "cache" else bool(task.prefix_length or options["packing"])
        order = rng.permutation(task.rows).tolist()
        cut = int(rng.integers(0, task.rows + 1))  # two micro-batches
        parts = [task.module(**task.batch(part).inputs) for part in (order[:cut], order[cut:])]
        assert_equal(with_gradients(model, torch.stack(parts).sum()), plain, case)
    assert used >= DRAWS // 3, "the saving is used in the cases that are drawn"


def compile_layers(model: Any) -> None:
    torch.compiler.reset()
    for layer in decoder_layers(model):
        layer.compile()


@pytest.mark.parametrize(
    "saving",
    [
        pytest.param(lambda model: enable_activation_checkpointing(model, True), id="checkpointing"),
        pytest.param(lambda model: enable_activation_checkpointing(model, "selective"), id="selective"),
        pytest.param(compile_layers, id="compile", marks=pytest.mark.skipif(not NIGHTLY, reason="takes minutes")),
    ],
)
def test_layers_that_are_recomputed_or_compiled_change_no_loss_and_no_gradient(saving: Callable[[Any], None]) -> None:
    for seed in range(4 if saving is compile_layers else DRAWS):
        rng = np.random.default_rng([seed, 17])
        model, rows = draw_model(rng).train(), draw_rows(rng)
        case = f"{seed} {model.config.model_type} {model.config._attn_implementation}"
        inputs = [collate_examples([[row]]).inputs for row in rows]
        plain = with_gradients(model, torch.stack([SftLoss(model)(**row) for row in inputs]).sum())
        saving(model)
        ours = with_gradients(model, torch.stack([SftLoss(model)(**row) for row in inputs]).sum())
        ours = (ours[0], {name.replace("_orig_mod.", ""): grad for name, grad in ours[1].items()})
        assert_equal(ours, plain, case)


def test_a_prompt_computed_once_changes_no_log_prob_and_no_gradient() -> None:
    for seed in range(DRAWS):
        rng = np.random.default_rng([seed, 99])
        model = draw_model(rng)
        pairs = []
        for _ in range(int(rng.integers(1, 4))):
            prompt, *answers = (rng.integers(3, VOCAB, int(rng.integers(1, 30)), dtype=np.int32) for _ in range(3))
            masks = [rng.random(len(answer)) < 0.7 for answer in answers]
            pairs.append(TokenizedPair(prompt, *(TokenizedRow(a, m) for a, m in zip(answers, masks, strict=True))))
        case = f"{seed} {model.config.model_type} {model.config._attn_implementation}"
        assert prefix_sharing_blocker(model) is None, case
        results = [with_gradients(model, DpoLoss(model, PreferenceConfig())(**collate_pairs(pairs, shared).inputs))
                   for shared in (True, False)]  # fmt: skip
        assert_equal(results[0], results[1], case)


def test_the_chunked_loss_is_the_plain_loss() -> None:
    for seed in range(4 * DRAWS):
        rng = np.random.default_rng([seed, 7])
        torch.manual_seed(seed)
        tokens, width = int(rng.integers(1, 40)), int(rng.integers(1, 20))
        hidden, head = (torch.randn(size, width, requires_grad=True) for size in (tokens, VOCAB))
        targets = torch.from_numpy(rng.integers(0, VOCAB, tokens))
        targets[torch.from_numpy(rng.random(tokens) < 0.2)] = losses.IGNORE_INDEX
        with patch.object(losses, "LOSS_CHUNK", int(rng.integers(1, 12))):
            ours = fused_linear_cross_entropy(hidden, head, targets)
        plain = summed_cross_entropy(F.linear(hidden, head), targets)
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5)
        for one, other in zip(
            torch.autograd.grad(ours * 0.7, (hidden, head)),
            torch.autograd.grad(plain * 0.7, (hidden, head)),
            strict=True,
        ):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
