"""Export a language model as one GGUF file, and compare its logits with those of the source."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from contextlib import redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from modelwright.errors import ModelError
from modelwright.runs.folder import read_json_object

if TYPE_CHECKING:  # heavy imports are in functions: stages/export asks unsupported_reason before it loads torch
    import numpy as np
    from torch import Tensor

GgufDtype = Literal["f16", "q8_0"]
MAX_DIFF = 1e-2
"""Largest allowed difference of a logit from the source with weights rounded to the same dtype: only the order of sums
differs."""
MAX_QUANTIZATION_LOSS = {"f16": 1e-2, "q8_0": 0.25}
"""Largest allowed change of a logit by rounding the weights, as a fraction of the largest logit."""
Q8_BLOCK = 32
"""Values per scale in q8_0."""
TOKEN_NORMAL, TOKEN_CONTROL, TOKEN_USER_DEFINED = 1, 3, 4
"""GGUF's token types."""


@dataclass(frozen=True)
class GgufCheck:
    """Logits of a GGUF file compared with those of its source."""

    max_diff_same_dtype: float
    """Largest difference of a logit from the source with weights rounded to the file's dtype."""
    max_diff: float
    """Largest difference of a logit from the source as trained."""
    relative_diff: float
    """The same as a fraction of the largest logit."""
    top1_agreement: float
    """Fraction of positions with the same top-1 token as the source."""
    positions: int
    """Number of positions compared."""


def write_gguf(source: Path, path: Path, dtype: GgufDtype, name: str) -> None:
    """Write the model of a folder, with its adapter merged, as one GGUF file."""
    try:
        import gguf
    except ImportError:
        raise ModelError("export: gguf is written with a package that is not installed: pip install gguf") from None
    from modelwright.models.pretrained import load_model, load_tokenizer
    from modelwright.models.trainable import merge_lora

    model, tokenizer = merge_lora(load_model(source)), load_tokenizer(source)
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


def compare_logits(source: Path, path: Path, dtype: GgufDtype) -> GgufCheck:
    """Load the file with transformers and compare its fp32 logits on a fixed text with the source's: as trained, and
    with weights rounded to the file's dtype."""
    import torch
    from transformers import AutoModelForCausalLM

    from modelwright.models.pretrained import load_model, load_tokenizer, silence_transformers
    from modelwright.models.trainable import merge_lora

    silence_transformers()
    model, tokens = load_model(source), probe_text_tokens(load_tokenizer(source))
    with torch.no_grad():
        trained = _logits(model, tokens)
        model = merge_lora(model)
        for weight in model.parameters():
            weight.copy_(torch.from_numpy(_roundtrip(weight.detach().float().numpy(), dtype)))
        rounded = _logits(model, tokens)
        del model
        with redirect_stderr(io.StringIO()):  # the loader prints a progress bar
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


def max_logit_diff(source: Path, exported: Path) -> float:
    """Largest difference of a logit of an exported model folder from its source's, as a fraction of the largest."""
    import torch

    from modelwright.models.attention import relative_gap
    from modelwright.models.pretrained import load_model, load_tokenizer

    tokens = probe_text_tokens(load_tokenizer(exported))
    with torch.no_grad():
        return relative_gap(_logits(load_model(source), tokens), _logits(load_model(exported), tokens))


def probe_text_tokens(tokenizer: Any) -> Tensor:
    """The tokens of a fixed text: [1, length] int64."""
    import torch

    text = "A rope of ten metres holds a tent in the wind. (1) Tie it low. (2) Look again at 07:30, and at noon!"
    return torch.tensor([tokenizer(text)["input_ids"][:64]])


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
    import numpy as np

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
    """Weights rounded to the file's dtype, in fp32."""
    import gguf
    import numpy as np

    if values.ndim == 1:
        return values
    if _is_q8(values, dtype):
        q8_0 = gguf.GGMLQuantizationType.Q8_0
        return gguf.dequantize(gguf.quantize(values, q8_0), q8_0)  # type: ignore[no-any-return]
    return values.astype(np.float16).astype(np.float32)


def _is_q8(values: np.ndarray[Any, Any], dtype: GgufDtype) -> bool:
    return dtype == "q8_0" and values.shape[-1] % Q8_BLOCK == 0


def _permute_rope(name: str, weight: Tensor, config: Any) -> Tensor:
    """Permute Llama's query and key rows to GGUF's RoPE layout, where rotated pairs are adjacent."""
    if not name.endswith(("q_proj.weight", "k_proj.weight")):
        return weight
    heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


GGUF_ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""GGUF architecture of each model_type whose export was compared with its source."""


def unsupported_reason(folder: Path) -> str | None:
    """Why a model folder cannot be exported to GGUF, from its JSON files alone; None if it can."""
    config = read_json_object(folder / "config.json")
    family = config.get("model_type")
    if family not in GGUF_ARCHITECTURES:
        return f"its family is {family!r}; gguf is written for {', '.join(GGUF_ARCHITECTURES)}"
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        return f"its positions are scaled ({rope.get('rope_type') or rope.get('type')}), which is not written yet"
    if config.get("attention_bias") and family == "llama":
        return "its attention has biases, which GGUF's llama does not"
    if pre_tokenizer(read_json_object(folder / "tokenizer.json")) is None:
        return "its tokenizer is none of the byte-level kinds that GGUF has a name for"
    return None


def pre_tokenizer(stored: Mapping[str, Any]) -> str | None:
    """GGUF's name of a pre-tokenizer, or None if it has none."""
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
