"""Our attention equals that of transformers, and separates packed documents without a mask."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from modelwright.data.packing import cu_seqlens_from_positions
from modelwright.errors import ModelError
from modelwright.models import attention, pretrained
from modelwright.models.attention import hidden_states
from modelwright.models.prefix_sharing import shared_prefix_layout
from zoo import build


def models(folder: Path) -> tuple[Any, Any]:
    theirs, ours = pretrained.load_model(folder).eval(), pretrained.load_model(folder).eval()
    attention.register_attention(ours)
    return theirs, ours


@torch.no_grad()
def test_packed_documents_are_apart_as_in_a_mask_written_out(model_folder: Path) -> None:
    theirs, ours = models(model_folder)
    tokens = torch.randint(3, 300, (2, 24), generator=torch.Generator().manual_seed(0))
    positions = torch.stack([torch.cat([torch.arange(10), torch.arange(14)]), torch.arange(24)])
    cu_seqlens = torch.from_numpy(cu_seqlens_from_positions(positions.numpy()))
    expected = hidden_states(theirs, tokens, positions)
    torch.testing.assert_close(hidden_states(ours, tokens, positions, cu_seqlens=cu_seqlens), expected)
    leaking = hidden_states(ours, tokens, positions)
    assert not torch.allclose(leaking, expected, atol=1e-3)


@torch.no_grad()
def test_rows_of_one_document_need_no_starts(model_folder: Path) -> None:
    theirs, ours = models(model_folder)
    tokens = torch.arange(3, 51).view(2, 24)
    positions = torch.arange(24).expand(2, 24)
    torch.testing.assert_close(hidden_states(ours, tokens, positions), hidden_states(theirs, tokens, positions))


@pytest.mark.parametrize("heads", [4, 2])
@pytest.mark.parametrize("window", [None, 5])
def test_a_window_and_fewer_key_heads_are_honoured(window: int | None, heads: int) -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(1, 4, 12, 8), torch.randn(1, heads, 12, 8), torch.randn(1, heads, 12, 8)
    out, _ = attention.attention_forward(None, query, key, value, None, sliding_window=window)
    scores = query @ key.repeat_interleave(4 // heads, 1).transpose(2, 3) / 8**0.5
    distance = torch.arange(12)[:, None] - torch.arange(12)[None]
    visible = (distance >= 0) & (distance < (window or 12))
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    torch.testing.assert_close(out.transpose(1, 2), weights @ value.repeat_interleave(4 // heads, 1))


def test_starts_of_documents_are_filled_up_to_few_sizes() -> None:
    starts = cu_seqlens_from_positions(torch.tensor([[0, 1, 2, 0, 1], [0, 1, 0, 1, 2]]).numpy())
    assert starts[:5].tolist() == [0, 3, 5, 7, 10]
    assert (len(starts), set(starts[5:].tolist())) == (64, {10})


def compiled_graphs(model: Any) -> list[Any]:
    """Compile each layer; the list gets every graph that is compiled."""
    torch._dynamo.reset()
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    for layer in model.base_model.layers:
        layer.compile(backend=backend)
    return graphs


@torch.no_grad()
def test_more_documents_compile_no_layer_again(model_folder: Path) -> None:
    _, ours = models(model_folder)
    graphs = compiled_graphs(ours)
    tokens = torch.randint(3, 300, (2, 96), generator=torch.Generator().manual_seed(0))
    sizes = set()
    for length in (48, 4, 2):  # 5, 49 and 97 starts
        positions = torch.arange(96).remainder(length).expand(2, 96)
        cu_seqlens = torch.from_numpy(cu_seqlens_from_positions(positions.numpy()))
        sizes.add(len(cu_seqlens))
        hidden_states(ours, tokens, positions, cu_seqlens=cu_seqlens)
    assert sizes == {64, 128}
    assert len(graphs) == 1  # and the same for every layer


@torch.no_grad()
@pytest.mark.parametrize(("name", "kinds"), [("llama", 1), ("gpt_neox", 1), ("qwen3", 1), ("gemma3_text", 2)])
def test_layers_of_one_kind_are_compiled_once(name: str, kinds: int) -> None:
    sizes = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6,
             "num_attention_heads": 4, "num_key_value_heads": 4, "sliding_window": 16, "head_dim": 16}  # fmt: skip
    types = {"layer_types": ["sliding_attention", "full_attention"] * 3} if kinds == 2 else {}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **sizes, **types))
    attention.register_attention(model)
    graphs = compiled_graphs(model)
    hidden_states(model, torch.randint(3, 300, (2, 48)), torch.arange(48).expand(2, 48))
    assert len(graphs) == kinds


@torch.no_grad()
@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "phimoe"])
def test_our_attention_refuses_what_it_does_not_compute(name: str, tmp_path: Path) -> None:
    """Soft caps, attention sinks, and a window that the layer does not pass on: the model keeps its own attention."""
    build(name, tmp_path)
    model = pretrained.load_model(tmp_path)
    attention.register_attention(model)
    with pytest.raises(ModelError, match=r"our attention has no (softcap|s_aux)|does not pass its sliding window on"):
        model(input_ids=torch.arange(3, 30)[None])


@pytest.mark.parametrize(
    "segments", [[[0, 0, 0, 1, 1, 2, 3, 3]], [[0, 0, 1, 2, 2], [0, 0, 0, 0, 1]], [[1, 1, 1]]], ids=str
)
def test_the_gradient_of_gathered_keys_is_that_of_index_select(segments: list[list[int]]) -> None:
    layout = shared_prefix_layout(torch.tensor(segments))
    tokens = torch.tensor(segments).numel()
    flat = torch.randn(tokens, 2, 3, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn(len(layout.kv_index), 2, 3, dtype=torch.float64)
    uses = layout.first_use, layout.later_uses, layout.prefix_number
    gathered = attention._GatherKeys.apply(flat, layout.kv_index, *uses)
    expected = flat.index_select(0, layout.kv_index)
    assert torch.equal(gathered, expected)
    (grad,) = torch.autograd.grad(gathered, flat, upstream)
    torch.testing.assert_close(grad, torch.autograd.grad(expected, flat, upstream)[0])


def test_short_documents_in_bf16_are_computed_in_fp32_on_a_cpu() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 2, 30, 8, generator=generator).bfloat16() for _ in range(3))
    starts = torch.tensor([0, 12, 30], dtype=torch.int32)

    def attend(*qkv: torch.Tensor) -> torch.Tensor:
        flat = (qkv[0], *(attention._flatten_rows(each) for each in qkv[1:]))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return attention._varlen_cpu(flat, (starts, starts), None, None)

    out = attend(query, key, value)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, attend(query.float(), key.float(), value.float()).bfloat16(), rtol=0, atol=0)
