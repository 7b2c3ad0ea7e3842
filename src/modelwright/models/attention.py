"""Varlen attention for transformers over packed documents and shared prefixes, its forward pass and self-test.

SFT of a 3 B model with rows packed to 4096: 90 instead of 47 rows/s with a mask; after a shared prefix 301 instead of
217. DPO with the unshared layout: 52.7 instead of 51.1 pairs/s with that of SFT, 47.9 with a mask (H200, 2026-11-17,
`python -m benchmarks.ablation --only varlen-attention`, `prefix-varlen`, `unshared-layout`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

from modelwright.errors import ModelError, first_line

SOFT_CAPS, SCALES = ("final_logit_softcapping", "logits_soft_cap"), ("logit_scale", "lm_head_multiplier")
LOGIT_CONFIG_KEYS = (*SOFT_CAPS, *SCALES, "logits_scaling")
"""Config keys of model families that scale or cap their logits."""
FORWARD_TOLERANCE = 2e-2
"""Largest relative difference of logits by rounding in half precision; a wrong mask makes 0.3 and more."""
MAX_BLOCK_SIZE = 1024
"""Longest block of a layer that the self-test covers."""
EXACT_TOLERANCE, ROUNDING = 1e-3, 1e-6
"""The same in fp32 on a CPU: 1.7e-4 in SmolLM2-135M with one thread, 8e-5 with two; and of one computation twice."""


def hidden_states(
    model: Any, tokens: Tensor, positions: Tensor, mask: Any = None,
    cu_seqlens: Layout | None = None,
) -> Tensor:  # fmt: skip
    """Hidden states before the LM head: [rows, length, hidden].

    Positions that restart at 0 separate packed documents (not with use_cache, which ignores them). Our attention
    separates them by `cu_seqlens` instead, or takes a layout of shared prefixes; other implementations need a mask
    from `shared_prefix_mask`.
    tokens: [rows, length] int64, or embeddings [rows, length, hidden].
    """
    hidden: Tensor = base_outputs(model, tokens, positions, mask, cu_seqlens)[0]
    return hidden


def base_outputs(
    model: Any, tokens: Tensor, positions: Tensor, mask: Any = None,
    cu_seqlens: Layout | None = None, **options: bool,
) -> Any:  # fmt: skip
    """All outputs of the model below its LM head, with options such as output_router_logits (see `hidden_states`)."""
    inner = unwrap_peft(model)
    input_name = "inputs_embeds" if tokens.is_floating_point() else "input_ids"
    inputs = {input_name: tokens, "attention_mask": mask}
    if takes_positions(model):
        inputs["position_ids"] = positions
    is_ours = inner.config._attn_implementation == ATTN_NAME
    assert is_ours or not isinstance(cu_seqlens, (SharedPrefixLayout, UnsharedLayout)), "these need our own attention"
    if cu_seqlens is not None and is_ours:
        inputs |= varlen_kwargs(cu_seqlens, tokens.shape[1])
    return inner.base_model(**inputs, use_cache=False, **options)


def takes_positions(model: Any) -> bool:
    """Whether a model takes position ids; ALiBi and recurrent layers need none, and decoders such as BART's count."""
    return _takes_positions(type(unwrap_peft(model).base_model).forward)


@cache
def _takes_positions(forward: Callable[..., Any]) -> bool:
    return "position_ids" in inspect.signature(forward).parameters


def lm_head_weight(model: Any) -> Tensor | None:
    """The weight of a plain linear LM head, [vocab, hidden]; None for any other head."""
    inner = unwrap_peft(model)
    head = inner.get_output_embeddings()
    is_plain = type(head) is nn.Linear and head.bias is None
    is_plain = is_plain and not any(getattr(inner.config, name, None) for name in LOGIT_CONFIG_KEYS)
    return head.weight if is_plain else None


def compute_logits(model: Any, hidden: Tensor) -> Tensor:
    """Logits of selected positions, scaled and capped as the model family does. hidden: [positions, hidden]."""
    inner = unwrap_peft(model)
    logits: Tensor = inner.get_output_embeddings()(hidden)
    for cap in filter(None, (getattr(inner.config, name, None) for name in SOFT_CAPS)):
        logits = torch.tanh(logits / cap) * cap
    if divisor := getattr(inner.config, "logits_scaling", None):
        logits = logits / divisor
    for factor in filter(None, (getattr(inner.config, name, None) for name in SCALES)):
        logits = logits * factor
    return logits


@torch.no_grad()
def check_forward(model: Any, packed: bool) -> None:
    """Compare one document of a row of two with the model's own forward pass on it alone: the first, or if packed the
    second. Raises ModelError for a head that we do not know, or where one document depends on the other."""
    tokens = probe_tokens(model, _block_size(model) if packed else 0)
    length = tokens.shape[1] // 2
    positions = torch.arange(length, device=tokens.device).repeat(2).unsqueeze(0)
    cu_seqlens = torch.tensor([0, length, 2 * length], dtype=torch.int32, device=tokens.device) if packed else None
    first, second = slice(0, length), slice(length, None)
    document, other = (second, first) if packed else (first, second)
    was_training = model.training
    model.eval()
    try:
        alone = model(input_ids=tokens[:, document], use_cache=False).logits[0]
        hidden, grad = hidden_with_grad(model, document, tokens, positions, cu_seqlens=cu_seqlens)
        gap = relative_gap(alone, compute_logits(model, hidden[0, document]))
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise ModelError(f"model: this family cannot be trained here ({first_line(error)})") from None
    finally:
        model.train(was_training)
    if bool((grad[:, other] != 0).any()):
        reason = "packed rows depend on each other in this family; use packing: false" if packed else "it is not causal"
        raise ModelError(f"model: {reason}")
    if not gap <= tolerance(model):
        what = "packed documents have other positions" if packed else "the LM head is not a plain linear layer"
        raise ModelError(f"model: {what} (logits differ by {gap:.1e}); this family cannot be trained here yet")


class RopeLimit(NamedTuple):
    """Rotary embeddings whose frequencies depend on the longest row of a forward pass."""

    rope_type: str
    """longrope or dynamic."""
    max_length: int
    """Tokens up to which they are the usual ones."""


def rope_limit(model: Any) -> RopeLimit | None:
    """The length from which a row changes the positions of its neighbours; None for most models."""
    config = unwrap_peft(model).config.get_text_config()
    parameters = getattr(config, "rope_parameters", None) or {}
    by_layer = [each for each in parameters.values() if isinstance(each, dict)]
    for each in by_layer or [parameters]:
        if each.get("rope_type") == "longrope":
            return RopeLimit("longrope", int(each["original_max_position_embeddings"]))
        if each.get("rope_type") == "dynamic":
            return RopeLimit("dynamic", int(config.max_position_embeddings))
    return None


def tolerance(model: Any) -> float:
    """Largest relative difference of outputs that rounding makes on the model's device."""
    is_exact = next(model.parameters()).device.type == "cpu" and not getattr(model, "is_quantized", False)
    return EXACT_TOLERANCE if is_exact else FORWARD_TOLERANCE


def hidden_with_grad(
    model: Any, target: slice, tokens: Tensor, positions: Tensor, mask: Any = None, cu_seqlens: Any = None
) -> tuple[Tensor, Tensor]:
    """Hidden states, and the gradient of those at the target positions by all embeddings: [rows, length, width] each.

    It is exactly 0 at tokens that a target does not depend on, so that no dependence can hide behind small weights:
    packed LFM2, Falcon-H1 and Jamba at their usual initialization differ by 1e-3, and train to other weights.
    """
    embeddings: list[Tensor] = []

    def keep(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
        embeddings.append(output.detach().requires_grad_())
        return embeddings[-1].clone()  # some models change it in place

    hook = unwrap_peft(model).get_input_embeddings().register_forward_hook(keep)
    try:
        with torch.enable_grad():
            hidden = hidden_states(model, tokens, positions, mask, cu_seqlens)
            weights = torch.arange(hidden[:, target].numel(), device=hidden.device).cos().view_as(hidden[:, target])
            [grad] = torch.autograd.grad((hidden[:, target] * weights).sum(), embeddings[0])
    finally:
        hook.remove()
    return hidden.detach(), grad


@torch.no_grad()
def is_random(model: Any, forward: Callable[[], Tensor]) -> bool:
    """Whether two forward passes in training mode differ, by dropout or a router's jitter; lora_dropout counts too,
    which shows in no output while lora_B is zero."""
    if any(isinstance(module, nn.Dropout) and module.p and "lora_" in name for name, module in model.named_modules()):
        return True
    was_training, device = model.training, next(model.parameters()).device
    model.train()
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(1)
            first = forward()
            torch.manual_seed(2)
            return relative_gap(first, forward()) > ROUNDING
    finally:
        model.train(was_training)


def probe_tokens(model: Any, block_size: int = 0) -> Tensor:
    """A row for self-tests, of two halves longer than a block: [1, 24 + 2 blocks] int64, on the model's device."""
    vocab_size = min(unwrap_peft(model).config.get_text_config().vocab_size, 1000)
    stop = 27 + 2 * block_size
    return torch.arange(3, stop, device=next(model.parameters()).device).remainder(vocab_size).unsqueeze(0)


def _block_size(model: Any) -> int:
    """Tokens that a layer takes together, such as 128 in DeepSeek-V4: a leak from one document shows in longer ones."""
    rates = getattr(unwrap_peft(model).config.get_text_config(), "compress_rates", None) or {}
    return min(max(rates.values(), default=0), MAX_BLOCK_SIZE)


def relative_gap(expected: Tensor, actual: Tensor) -> float:
    """Largest difference as a fraction of the largest expected value."""
    expected = expected.float()
    return float((expected - actual.float()).abs().max() / expected.abs().max().clamp(min=1e-6))


def unwrap_peft(model: Any) -> Any:
    """The language model inside a peft wrapper; the LoRA layers stay in it."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


ATTN_NAME = "modelwright"
UNSUPPORTED = ("softcap", "s_aux", "head_mask", "position_bias")
"""Features of the attention of Gemma 2, GPT-OSS and others, which transformers passes by these names."""
# cuDNN first: 415 TFLOP/s forward and backward at length 2048 on an H200, FlashAttention-2 has 225
SDPA_BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION,
                 SDPBackend.MATH]  # fmt: skip
MAX_FP32_KEYS = 128
"""Keys up to which a CPU computes bf16 attention in fp32: 64 keys forward and backward 0.9 instead of 1.8 ms, 256 keys
5.5 and 6.7 (9 heads of 64, Xeon with bf16 matmuls, 2026-11-19)."""
VARLEN_NEEDS_GQA_FLAG = "enable_gqa" in inspect.signature(varlen_attn).parameters
HALF_DTYPES = (torch.bfloat16, torch.float16)


class SharedPrefixLayout(NamedTuple):
    """Varlen layout of continuations of one prefix: each is a document with the keys of the prefix and its own."""

    kv_index: Tensor
    """[keys] int64, index in the flattened rows of each key of each document."""
    cu_seqlens_qk: Tensor
    """[2, documents + 1] int32, cu_seqlens of queries and of keys."""
    first_use: Tensor
    """[tokens] int64, the first key of each token."""
    later_uses: Tensor
    """[prefix tokens, later documents] int64, the further keys of each token of a prefix; -1 for none."""
    prefix_number: Tensor
    """[tokens] int64, the row of each token in later_uses; -1 for none."""
    max_seqlen_k: int | None = None
    """Keys of the longest document; the row length if None."""

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The fields that are inputs of a micro-batch."""
        return {name: each for name, each in self._asdict().items() if isinstance(each, Tensor)}

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], max_seqlen_k: int | None = None) -> SharedPrefixLayout:
        """The layout of such inputs."""
        uses = tensors["first_use"], tensors["later_uses"], tensors["prefix_number"]
        return cls(tensors["kv_index"], tensors["cu_seqlens_qk"], *uses, max_seqlen_k)


class FlatLayout(NamedTuple):
    """Documents end to end in one row."""

    cu_seqlens: Tensor
    """[documents + 1] int32, where each begins, and the end."""
    max_seqlen: int
    """Tokens that none of them exceeds, the same in every batch: a captured or compiled step keeps it."""


def register_attention(model: Any) -> None:
    """Set a model's attention implementation to ours."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTN_NAME, attention_forward)
    model.set_attn_implementation(ATTN_NAME)


def has_varlen(model: Any, precision: str) -> bool:
    """Whether our attention separates documents of a model on its GPU by a varlen kernel, without a mask."""
    config, device = unwrap_peft(model).config.get_text_config(), next(model.parameters()).device
    if device.type != "cuda" or precision == "fp32" or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    return config._attn_implementation == ATTN_NAME and not getattr(config, "attention_dropout", 0.0)


def varlen_kwargs(cu_seqlens: Layout, length: int) -> dict[str, Any]:
    """Keyword arguments that a transformers model passes to its attention.

    cu_seqlens: [documents + 1] int32 over the flattened rows, or a layout. length: tokens in a row.
    """
    if isinstance(cu_seqlens, FlatLayout):
        return varlen_kwargs(*cu_seqlens)
    if isinstance(cu_seqlens, UnsharedLayout):
        return {f"unshare_{name}": each for name, each in cu_seqlens._asdict().items()}
    if isinstance(cu_seqlens, SharedPrefixLayout):
        query_kwargs = varlen_kwargs(cu_seqlens.cu_seqlens_qk[0], cu_seqlens.max_seqlen_k or length)
        for dimension in (0, 1):  # another prefix or number of documents must not recompile a layer
            torch._dynamo.maybe_mark_dynamic(cu_seqlens.later_uses, dimension)
        uses = (cu_seqlens.kv_index, cu_seqlens.first_use, cu_seqlens.later_uses, cu_seqlens.prefix_number)
        return {**query_kwargs, "cu_seq_lens_k": cu_seqlens.cu_seqlens_qk[1], "kv_uses": uses}
    # another number of documents must not recompile a layer: 17 CPU-seconds with LoRA in fp8
    torch._dynamo.maybe_mark_dynamic(cu_seqlens, 0)
    return {"cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens, "max_length_q": length, "max_length_k": length}


def attention_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention within documents. query: [rows, heads, length, head_dim]; key, value with fewer heads (GQA)."""
    if unknown := [name for name in UNSUPPORTED if kwargs.get(name) is not None]:
        raise ModelError(f"model: our attention has no {unknown[0]}")
    # only eagerly, as check_forward runs it: a layer that reads its own number is compiled again for each layer
    if kwargs.get("sliding_window") is None and not torch.compiler.is_compiling() and _has_window(module):
        raise ModelError("model: its attention does not pass its sliding window on")
    if torch.is_autocast_enabled(query.device.type):
        compute_dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(compute_dtype), key.to(compute_dtype), value.to(compute_dtype)
    if "unshare_gather_index" in kwargs:
        layout = UnsharedLayout(*(kwargs[f"unshare_{name}"] for name in UnsharedLayout._fields))
        unshared = (unshare_prefix(query, layout), unshare_prefix(key, layout), unshare_prefix(value, layout))
        return reshare_prefix(_sdpa(unshared, None, dropout, scaling), layout, len(query)), None
    length = query.shape[2]
    max_seqlen = int(kwargs.get("max_length_k") or length)
    cu_seqlens: Tensor | None = kwargs.get("cu_seq_lens_q")
    window: int | None = kwargs.get("sliding_window")
    window = window if window is not None and window < min(length, max_seqlen) else None
    if kv_uses := kwargs.get("kv_uses"):
        assert cu_seqlens is not None
        cu_seqlens_qk = (cu_seqlens, kwargs["cu_seq_lens_k"])
        gathered_key, gathered_value = (_GatherKeys.apply(_flatten_rows(each), *kv_uses) for each in (key, value))  # type: ignore[no-untyped-call]
        qkv = (query, gathered_key, gathered_value)
        if not query.is_cuda:
            return _varlen_cpu(qkv, cu_seqlens_qk, window, scaling), None
        return _varlen(qkv, cu_seqlens_qk, max_seqlen, window, scaling), None
    is_plain = cu_seqlens is None and window is None
    if attention_mask is None and not is_plain:
        if query.is_cuda and query.dtype in HALF_DTYPES and dropout == 0.0:
            if cu_seqlens is None:
                ends = (len(query) + 1) * length
                cu_seqlens = torch.arange(0, ends, length, dtype=torch.int32, device=query.device)
            qkv = (query, _flatten_rows(key), _flatten_rows(value))
            return _varlen(qkv, (cu_seqlens, cu_seqlens), max_seqlen, window, scaling), None
        attention_mask = _document_mask(query, cu_seqlens, window)
    return _sdpa((query, key, value), attention_mask, dropout, scaling).transpose(1, 2), None


def _has_window(module: Any) -> bool:
    """Whether the config gives this attention layer a sliding window."""
    config = getattr(module, "config", None)
    types, layer = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    is_full = types and layer is not None and types[layer] != "sliding_attention"
    return bool(getattr(config, "sliding_window", None)) and not is_full


def _sdpa(
    qkv: tuple[Tensor, Tensor, Tensor], attention_mask: Tensor | None, dropout: float, scaling: float | None
) -> Tensor:
    """Attention over rows of one length, causal without a mask: [rows, heads, length, head_dim]."""
    query, key, value = qkv
    # a branch, since under torch.compile the comparison may be symbolic, which the kernel does not take
    is_causal = attention_mask is None and query.shape[2] == key.shape[2]
    mask_kwargs: dict[str, Any] = {"is_causal": True} if is_causal else {"attn_mask": attention_mask}
    if query.is_cuda and query.dtype not in HALF_DTYPES and (repeats := query.shape[1] // key.shape[1]) > 1:
        # the memory-efficient fp32 kernel has no GQA: 14 GB instead of 35 at length 2048
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    with sdpa_kernel(SDPA_BACKENDS, set_priority=True):
        gqa = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, scale=scaling, enable_gqa=gqa, **mask_kwargs
        )


def _varlen(
    qkv: tuple[Tensor, Tensor, Tensor], cu_seqlens_qk: tuple[Tensor, Tensor], max_seqlen: int, window: int | None,
    scaling: float | None,
) -> Tensor:  # fmt: skip
    """FlashAttention over documents: [rows, length, heads, head_dim]. Keys and values are [keys, heads, head_dim].

    A document with fewer queries than keys has the queries of its last keys.
    """
    query, key, value = qkv
    rows, heads, length, depth = query.shape
    window_size = (-1 if window is None else window - 1, 0)
    # torch 2.11 takes fewer key heads without a flag; later versions have one
    gqa: dict[str, Any] = {"enable_gqa": True} if key.shape[1] != heads and VARLEN_NEEDS_GQA_FLAG else {}
    q, lengths = _flatten_rows(query), (*cu_seqlens_qk, max_seqlen, max_seqlen)
    out = varlen_attn(q, key, value, *lengths, scale=scaling, window_size=window_size, **gqa)
    assert isinstance(out, Tensor)
    return out.view(rows, length, heads, depth)


def _varlen_cpu(
    qkv: tuple[Tensor, Tensor, Tensor], cu_seqlens_qk: tuple[Tensor, Tensor], window: int | None, scaling: float | None
) -> Tensor:
    """The same on a CPU, document by document: a mask over all took two fifths of the time of a 135 M model whose rows
    share 260 tokens."""
    query, key, value = qkv
    rows, heads, length, depth = query.shape
    flat, repeats = _flatten_rows(query), heads // key.shape[1]
    if repeats > 1:
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    outputs: list[Tensor] = []
    for (first, last), (start, stop) in zip(*(pairwise(each.tolist()) for each in cu_seqlens_qk), strict=True):
        queries, keys = last - first, stop - start
        distance = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)[None, :]
        visible = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
        compute_dtype = torch.float32 if keys <= MAX_FP32_KEYS else query.dtype
        parts = (flat[first:last], key[start:stop], value[start:stop])
        q, k, v = (part.transpose(0, 1)[None].to(compute_dtype) for part in parts)
        with torch.autocast("cpu", enabled=False):
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible[None, None], scale=scaling)
        outputs.append(out[0].transpose(0, 1).to(query.dtype))
    return torch.cat(outputs).view(rows, length, heads, depth)


def _flatten_rows(x: Tensor) -> Tensor:
    """[rows, heads, length, head_dim] to [rows × length, heads, head_dim]."""
    rows, heads, length, depth = x.shape
    return x.transpose(1, 2).reshape(rows * length, heads, depth)


def _document_mask(query: Tensor, cu_seqlens: Tensor | None, window: int | None) -> Tensor:
    """Causal mask within documents, for devices and dtypes without varlen attention: [rows, 1, length, length] bool."""
    rows, _, length, _ = query.shape
    positions = torch.arange(length, device=query.device)
    distance = positions[:, None] - positions[None, :]
    visible = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
    if cu_seqlens is None:
        return visible[None, None].expand(rows, 1, length, length)
    flat = torch.arange(rows * length, dtype=cu_seqlens.dtype, device=query.device)
    document_ids = torch.bucketize(flat, cu_seqlens, right=True).view(rows, length)
    return (visible[None] & (document_ids[:, :, None] == document_ids[:, None, :]))[:, None]


LENGTH_MULTIPLE = 8
"""Row lengths are a multiple of this for the fastest kernels."""


class UnsharedLayout(NamedTuple):
    """Indices between rows of a prompt with two answers and one row per answer, each with a copy of the prompt."""

    gather_index: Tensor
    """[answers, length] int32, index in the flattened rows; any for padding."""
    scatter_index: Tensor
    """[2, tokens] int32, first and second index of a token in the flattened answers; -1 for none."""
    first_use: Tensor
    """[answers × length] int32, the token whose first copy this is; -1 for none."""


Layout = Tensor | SharedPrefixLayout | UnsharedLayout | FlatLayout
"""How attention separates documents: by cu_seqlens alone, or by one of these."""


def unshared_layout(segment_ids: Tensor) -> UnsharedLayout:
    """The layout of rows of a prompt and two answers. segment_ids: [rows, length] int64, 0, 1, 2, and 3 for padding."""
    sizes = list(zip(*((segment_ids == segment).sum(1).tolist() for segment in range(3)), strict=True))
    max_length = max(prompt + max(two) for prompt, *two in sizes)
    max_length = -(-max_length // LENGTH_MULTIPLE) * LENGTH_MULTIPLE
    starts = list(range(0, segment_ids.numel(), segment_ids.shape[1]))
    return unshared_layout_at(starts, sizes, segment_ids.numel(), max_length)


def unshared_layout_at(
    starts: Sequence[int], sizes: Sequence[tuple[int, int, int]], tokens: int, max_length: int
) -> UnsharedLayout:
    """The layout of pairs that start here among so many tokens; sizes: of prompt, chosen and rejected answer."""
    gather_index = np.repeat(np.asarray(starts), 2)[:, None].repeat(max_length, 1)
    scatter_index = np.full((2, tokens), -1)
    for row, (begin, (prompt, one, other)) in enumerate(zip(starts, sizes, strict=True)):
        slot = 2 * row * max_length
        chosen_index = np.arange(prompt + one)
        rejected_index = np.concatenate([np.arange(prompt), prompt + one + np.arange(other)])
        gather_index[2 * row, : len(chosen_index)] = begin + chosen_index
        gather_index[2 * row + 1, : len(rejected_index)] = begin + rejected_index
        scatter_index[0, begin + chosen_index] = slot + chosen_index
        scatter_index[0, begin + rejected_index[prompt:]] = slot + max_length + prompt + np.arange(other)
        scatter_index[1, begin : begin + prompt] = slot + max_length + np.arange(prompt)
    first, first_use = scatter_index[0], np.full(gather_index.size, -1)
    first_use[first[first >= 0]] = np.flatnonzero(first >= 0)
    # int32: index arithmetic of the gathers is half as expensive as with int64 on a GPU
    indices = (gather_index, scatter_index, first_use)
    return UnsharedLayout(*(torch.from_numpy(index.astype(np.int32)) for index in indices))


def unshare_prefix(x: Tensor, layout: UnsharedLayout) -> Tensor:
    """Rows to answers: [rows, heads, length, head_dim] to [answers, heads, max_length, head_dim]."""
    heads, depth = x.shape[1], x.shape[3]
    gathered: Tensor = _UnsharePrefix.apply(_flatten_rows(x), layout.gather_index.flatten(), layout.scatter_index)  # type: ignore[no-untyped-call]
    return gathered.view(*layout.gather_index.shape, heads, depth).transpose(1, 2)


def reshare_prefix(x: Tensor, layout: UnsharedLayout, rows: int) -> Tensor:
    """Answers to rows: [answers, heads, max_length, head_dim] to [rows, length, heads, head_dim]."""
    heads, depth = x.shape[1], x.shape[3]
    gathered: Tensor = _ResharePrefix.apply(_flatten_rows(x), layout.scatter_index[0], layout.first_use)  # type: ignore[no-untyped-call]
    return gathered.view(rows, -1, heads, depth)


class _GatherKeys(torch.autograd.Function):
    """Keys or values of documents with a shared prefix; the backward gathers and sums, since adding at an index is slow
    where it is deterministic."""

    @staticmethod
    def forward(
        ctx: Any, flat: Tensor, kv_index: Tensor, first_use: Tensor, later_uses: Tensor, prefix_number: Tensor
    ) -> Tensor:
        ctx.save_for_backward(first_use, later_uses, prefix_number)
        return flat.index_select(0, kv_index)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        first_use, later_uses, prefix_number = ctx.saved_tensors
        later = _gather_or_zero(gradient, later_uses.flatten()).view(*later_uses.shape, *gradient.shape[1:]).sum(1)
        total = gradient.index_select(0, first_use) + _gather_or_zero(later, prefix_number)
        return total, None, None, None, None


class _UnsharePrefix(torch.autograd.Function):
    """A gather whose backward is two gathers and a sum, since scatter-add is slow."""

    @staticmethod
    def forward(ctx: Any, flat: Tensor, gather_index: Tensor, scatter_index: Tensor) -> Tensor:
        ctx.save_for_backward(scatter_index)
        return flat.index_select(0, gather_index)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (scatter_index,) = ctx.saved_tensors
        return _gather_or_zero(gradient, scatter_index[0]) + _gather_or_zero(gradient, scatter_index[1]), None, None


class _ResharePrefix(torch.autograd.Function):
    """A gather of the first copy of each token, with a gather as backward."""

    @staticmethod
    def forward(ctx: Any, flat: Tensor, scatter_index: Tensor, first_use: Tensor) -> Tensor:
        ctx.save_for_backward(first_use)
        return flat.index_select(0, scatter_index.clamp(min=0))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (first_use,) = ctx.saved_tensors
        return _gather_or_zero(gradient, first_use), None, None


def _gather_or_zero(values: Tensor, index: Tensor) -> Tensor:
    """Values at an index, zero where it is -1."""
    gathered = values.index_select(0, index.clamp(min=0))
    return torch.where((index >= 0)[:, None, None], gathered, gathered.new_zeros(()))
