"""Export a language model as one GGUF file, and compare its logits with those of the source."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from contextlib import redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from modelwright.errors import ModelError
from modelwright.models.pretrained import load_model, load_tokenizer, silence_transformers

GgufDtype = Literal["f16", "q8_0"]
MAX_DIFF = 1e-2
"""How far a logit of the file may be from its source's in the same kind of numbers: rounding is in both, so this is 0
but for the order of sums, and anything more is a mistake of ours."""
MAX_QUANTIZATION_LOSS = {"f16": 1e-2, "q8_0": 0.25}
"""How far rounding itself may move a logit, as a share of the largest."""
Q8_BLOCK = 32
"""Numbers that share a scale in q8_0."""
TOKEN_NORMAL, TOKEN_CONTROL, TOKEN_USER_DEFINED = 1, 3, 4
"""What GGUF calls the kinds of tokens."""


@dataclass(frozen=True)
class GgufCheck:
    """A file held against its source."""

    max_diff_same_dtype: float
    """The largest difference of a logit from the source's, the source's weights rounded to the same kind of numbers."""
    max_diff: float
    """The largest difference of a logit from the source's as it was trained."""
    relative_diff: float
    """The same, as a share of the largest logit."""
    top1_agreement: float
    """Share of places where file and source as it was trained think the same token the likeliest."""
    positions: int
    """Places that were looked at."""


def write_gguf(source: Path, path: Path, dtype: GgufDtype, name: str) -> None:
    """Write the model of a folder (an adapter is merged first) as one file."""
    try:
        import gguf
    except ImportError:
        raise ModelError("export: gguf is written with a package that is not installed: pip install gguf") from None
    model, tokenizer = _load_merged(source), load_tokenizer(source)
    config = model.config
    family = GGUF_ARCHITECTURES[config.model_type]
    writer = gguf.GGUFWriter(str(path), family)
    if "mistral" not in name:  # transformers takes a name with this word for another family
        writer.add_name(name)
    _add_config(writer, config, dtype)
    _add_tokenizer(writer, tokenizer, config.vocab_size)
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, family.upper()), config.num_hidden_layers)
    for ours, tensor in model.state_dict().items():
        if ours == "lm_head.weight" and config.tie_word_embeddings:
            continue
        theirs = names.get_name(ours, try_suffixes=(".weight", ".bias"))
        if theirs is None:
            raise ModelError(f"export: GGUF has no name for {ours}")
        values = _permute_rope(ours, tensor.float(), config) if family == "llama" else tensor.float()
        _add_tensor(writer, theirs, values, dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@torch.no_grad()
def compare_logits(source: Path, path: Path, dtype: GgufDtype) -> GgufCheck:
    """Read the file with transformers' own loader and compare its logits on a fixed text, computed in fp32, with the
    source's: as it was trained, and with its weights in the file's kind of numbers."""
    from transformers import AutoModelForCausalLM

    silence_transformers()
    model, tokenizer = _load_merged(source), load_tokenizer(source)
    text = "A rope of ten metres holds a tent in the wind. (1) Tie it low. (2) Look again at 07:30, and at noon!"
    tokens = torch.tensor([tokenizer(text)["input_ids"][:64]])
    trained = _logits(model, tokens)
    for weight in model.parameters():
        weight.copy_(torch.from_numpy(_roundtrip(weight.detach().float().numpy(), dtype)))
    rounded = _logits(model, tokens)
    del model
    with redirect_stderr(io.StringIO()):  # the loader draws a bar of its own
        loaded = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    logits = _logits(loaded, tokens)
    max_diff = float((logits - trained).abs().max())
    return GgufCheck(
        max_diff_same_dtype=float((logits - rounded).abs().max()),
        max_diff=max_diff,
        relative_diff=max_diff / max(float(trained.abs().max()), 1e-6),
        top1_agreement=float((logits.argmax(-1) == trained.argmax(-1)).float().mean()),
        positions=tokens.shape[1],
    )


def _load_merged(source: Path) -> Any:
    """The model of a folder, an adapter merged into its base."""
    model = load_model(source)
    return model.merge_and_unload() if hasattr(model, "merge_and_unload") else model


def _logits(model: Any, tokens: Tensor) -> Tensor:
    logits: Tensor = model.eval()(input_ids=tokens, use_cache=False).logits[0].float()
    return logits


def _add_config(writer: Any, config: Any, dtype: GgufDtype) -> None:
    import gguf

    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    rope = getattr(config, "rope_parameters", None) or {}
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(float(rope.get("rope_theta") or getattr(config, "rope_theta", None) or 10000.0))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16 if dtype == "f16" else gguf.LlamaFileType.MOSTLY_Q8_0)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)


def _add_tokenizer(writer: Any, tokenizer: Any, vocab_size: int) -> None:
    stored = json.loads(tokenizer.backend_tokenizer.to_str())
    tokens = {token_id: token for token, token_id in tokenizer.get_vocab().items()}
    added = {entry["id"]: entry["special"] for entry in stored["added_tokens"]}
    token_types = [
        TOKEN_CONTROL if added.get(n) else TOKEN_USER_DEFINED if n in added or n not in tokens else TOKEN_NORMAL
        for n in range(vocab_size)
    ]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer(stored))
    writer.add_token_list([tokens.get(token_id, f"[PAD{token_id}]") for token_id in range(vocab_size)])
    writer.add_token_types(token_types)
    writer.add_token_merges([each if isinstance(each, str) else " ".join(each) for each in stored["model"]["merges"]])
    for token_id, add in (
        (tokenizer.bos_token_id, writer.add_bos_token_id),
        (tokenizer.eos_token_id, writer.add_eos_token_id),
        (tokenizer.pad_token_id, writer.add_pad_token_id),
        (tokenizer.unk_token_id, writer.add_unk_token_id),
    ):
        if token_id is not None:
            add(token_id)
    writer.add_add_bos_token(tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id])
    writer.add_add_space_prefix(False)
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)


def _add_tensor(writer: Any, name: str, tensor: Tensor, dtype: GgufDtype) -> None:
    import gguf

    values = tensor.contiguous().numpy()
    if values.ndim == 1:
        writer.add_tensor(name, values.astype(np.float32))
        return
    if np.abs(values).max(initial=0.0) > np.finfo(np.float16).max:
        raise ModelError(f"export: {name} holds a number that f16 cannot; nothing was written")
    if _is_q8(values, dtype):
        packed = gguf.quantize(values, gguf.GGMLQuantizationType.Q8_0)
        writer.add_tensor(name, packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    else:
        writer.add_tensor(name, values.astype(np.float16))


def _roundtrip(values: np.ndarray[Any, Any], dtype: GgufDtype) -> np.ndarray[Any, Any]:
    """Weights as the file keeps them, in fp32 again."""
    import gguf

    if values.ndim == 1:
        return values
    if _is_q8(values, dtype):
        q8_0 = gguf.GGMLQuantizationType.Q8_0
        return gguf.dequantize(gguf.quantize(values, q8_0), q8_0)  # type: ignore[no-any-return]
    return values.astype(np.float16).astype(np.float32)


def _is_q8(values: np.ndarray[Any, Any], dtype: GgufDtype) -> bool:
    return dtype == "q8_0" and values.shape[-1] % Q8_BLOCK == 0


def _permute_rope(name: str, weight: Tensor, config: Any) -> Tensor:
    """Llama's queries and keys as GGUF turns them: pairs that are turned together stand side by side."""
    if not name.endswith(("q_proj.weight", "k_proj.weight")):
        return weight
    heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


GGUF_ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""The families whose layers GGUF knows and we have held against their source, by what GGUF calls them."""


def unsupported_reason(folder: Path) -> str | None:
    """Why a model folder cannot become GGUF, from its small files alone; None where it can."""
    config = _read_json(folder / "config.json")
    family = config.get("model_type")
    if family not in GGUF_ARCHITECTURES:
        return f"its family is {family!r}; gguf is written for {', '.join(GGUF_ARCHITECTURES)}"
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        return f"its positions are scaled ({rope.get('rope_type') or rope.get('type')}), which is not written yet"
    if config.get("attention_bias") and family == "llama":
        return "its attention has biases, which GGUF's llama does not"
    if pre_tokenizer(_read_json(folder / "tokenizer.json")) is None:
        return "its tokenizer is none of the byte-level kinds that GGUF has a name for"
    return None


def pre_tokenizer(stored: Mapping[str, Any]) -> str | None:
    """What GGUF calls this way of cutting text into words, where it has a name for it."""
    if (stored.get("model") or {}).get("type") != "BPE":
        return None
    first = stored.get("pre_tokenizer") or {}
    steps = first.get("pretokenizers", [first])
    kinds = [step.get("type") for step in steps]
    if not kinds or kinds[-1] != "ByteLevel":
        return None
    if kinds == ["ByteLevel"] and steps[0].get("use_regex", True):
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and steps[0].get("individual_digits"):
        return "smollm"
    pattern = json.dumps(steps[0].get("pattern", ""))
    if kinds == ["Split", "ByteLevel"] and "{1,3}" in pattern:
        return "llama-bpe"
    return "qwen2" if kinds == ["Split", "ByteLevel"] and "p{N}|" in pattern else None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
