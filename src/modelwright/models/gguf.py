"""Write a language model as one GGUF file, and hold it against its source by reading it back with another reader."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from modelwright.errors import ModelError
from modelwright.models.gguf_names import FAMILIES, pre_tokenizer
from modelwright.models.quiet import be_quiet
from modelwright.models.text import load_model, load_tokenizer

Kind = Literal["f16", "q8_0"]
MOST_OFF = 1e-2
"""How far a logit of the file may be from its source's in the same kind of numbers: rounding is in both, so this is 0
but for the order of sums, and anything more is a mistake of ours."""
MOST_LOST = {"f16": 1e-2, "q8_0": 0.25}
"""How far rounding itself may move a logit, as a share of the largest."""
BLOCK = 32
"""Numbers that share a scale in q8_0."""
NORMAL, CONTROL, USER = 1, 3, 4
"""What GGUF calls the kinds of tokens."""


@dataclass(frozen=True)
class Held:
    """A file held against its source."""

    in_kind: float
    """The largest difference of a logit from the source's, the source's weights rounded to the same kind of numbers."""
    absolute: float
    """The largest difference of a logit from the source's as it was trained."""
    share: float
    """The same, as a share of the largest logit."""
    agree: float
    """Share of places where file and source as it was trained think the same token the likeliest."""
    places: int
    """Places that were looked at."""


def write_gguf(source: Path, path: Path, kind: Kind, name: str) -> None:
    """Write the model of a folder (an adapter is merged first) as one file."""
    try:
        import gguf
    except ImportError:
        raise ModelError("export: gguf is written with a package that is not installed: pip install gguf") from None
    model, tokenizer = _whole(source), load_tokenizer(source)
    config = model.config
    family = FAMILIES[config.model_type]
    writer = gguf.GGUFWriter(str(path), family)
    if "mistral" not in name:  # transformers takes a name with this word for another family
        writer.add_name(name)
    _add_shape(writer, config, kind)
    _add_tokenizer(writer, tokenizer, config.vocab_size)
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, family.upper()), config.num_hidden_layers)
    for ours, tensor in model.state_dict().items():
        if ours == "lm_head.weight" and config.tie_word_embeddings:
            continue
        theirs = names.get_name(ours, try_suffixes=(".weight", ".bias"))
        if theirs is None:
            raise ModelError(f"export: GGUF has no name for {ours}")
        values = _ordered(ours, tensor.float(), config) if family == "llama" else tensor.float()
        _add_tensor(writer, theirs, values, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@torch.no_grad()
def hold_against(source: Path, path: Path, kind: Kind) -> Held:
    """Read the file with transformers' own loader and compare its logits on a fixed text, computed in fp32, with the
    source's: as it was trained, and with its weights in the file's kind of numbers."""
    from transformers import AutoModelForCausalLM

    be_quiet()
    model, tokenizer = _whole(source), load_tokenizer(source)
    text = "A rope of ten metres holds a tent in the wind. (1) Tie it low. (2) Look again at 07:30, and at noon!"
    tokens = torch.tensor([tokenizer(text)["input_ids"][:64]])
    trained = _logits(model, tokens)
    for weight in model.parameters():
        weight.copy_(torch.from_numpy(_kept(weight.detach().float().numpy(), kind)))
    rounded = _logits(model, tokens)
    del model
    with redirect_stderr(io.StringIO()):  # the loader draws a bar of its own
        read = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    found = _logits(read, tokens)
    absolute = float((found - trained).abs().max())
    return Held(
        in_kind=float((found - rounded).abs().max()),
        absolute=absolute,
        share=absolute / max(float(trained.abs().max()), 1e-6),
        agree=float((found.argmax(-1) == trained.argmax(-1)).float().mean()),
        places=tokens.shape[1],
    )


def _whole(source: Path) -> Any:
    """The model of a folder, an adapter merged into its base."""
    model = load_model(source)
    return model.merge_and_unload() if hasattr(model, "merge_and_unload") else model


def _logits(model: Any, tokens: Tensor) -> Tensor:
    found: Tensor = model.eval()(input_ids=tokens, use_cache=False).logits[0].float()
    return found


def _add_shape(writer: Any, config: Any, kind: Kind) -> None:
    import gguf

    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    rope = getattr(config, "rope_parameters", None) or {}
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_rope_dimension_count(width)
    writer.add_rope_freq_base(float(rope.get("rope_theta") or getattr(config, "rope_theta", None) or 10000.0))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16 if kind == "f16" else gguf.LlamaFileType.MOSTLY_Q8_0)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)


def _add_tokenizer(writer: Any, tokenizer: Any, words: int) -> None:
    stored = json.loads(tokenizer.backend_tokenizer.to_str())
    known = {number: token for token, number in tokenizer.get_vocab().items()}
    added = {entry["id"]: entry["special"] for entry in stored["added_tokens"]}
    kinds = [CONTROL if added.get(n) else USER if n in added or n not in known else NORMAL for n in range(words)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer(stored))
    writer.add_token_list([known.get(number, f"[PAD{number}]") for number in range(words)])
    writer.add_token_types(kinds)
    writer.add_token_merges([each if isinstance(each, str) else " ".join(each) for each in stored["model"]["merges"]])
    for number, add in (
        (tokenizer.bos_token_id, writer.add_bos_token_id),
        (tokenizer.eos_token_id, writer.add_eos_token_id),
        (tokenizer.pad_token_id, writer.add_pad_token_id),
        (tokenizer.unk_token_id, writer.add_unk_token_id),
    ):
        if number is not None:
            add(number)
    writer.add_add_bos_token(tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id])
    writer.add_add_space_prefix(False)
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)


def _add_tensor(writer: Any, name: str, tensor: Tensor, kind: Kind) -> None:
    import gguf

    values = tensor.contiguous().numpy()
    if values.ndim == 1:
        writer.add_tensor(name, values.astype(np.float32))
        return
    if np.abs(values).max(initial=0.0) > np.finfo(np.float16).max:
        raise ModelError(f"export: {name} holds a number that f16 cannot; nothing was written")
    if _in_blocks(values, kind):
        packed = gguf.quantize(values, gguf.GGMLQuantizationType.Q8_0)
        writer.add_tensor(name, packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    else:
        writer.add_tensor(name, values.astype(np.float16))


def _kept(values: np.ndarray[Any, Any], kind: Kind) -> np.ndarray[Any, Any]:
    """Weights as the file keeps them, in fp32 again."""
    import gguf

    if values.ndim == 1:
        return values
    if _in_blocks(values, kind):
        eight = gguf.GGMLQuantizationType.Q8_0
        return gguf.dequantize(gguf.quantize(values, eight), eight)  # type: ignore[no-any-return]
    return values.astype(np.float16).astype(np.float32)


def _in_blocks(values: np.ndarray[Any, Any], kind: Kind) -> bool:
    return kind == "q8_0" and values.shape[-1] % BLOCK == 0


def _ordered(name: str, weight: Tensor, config: Any) -> Tensor:
    """Llama's queries and keys as GGUF turns them: pairs that are turned together stand side by side."""
    if not name.endswith(("q_proj.weight", "k_proj.weight")):
        return weight
    heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)
