"""Find and load language models: a folder before the hub, the embedded one by name, always a pinned revision."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from jinja2 import TemplateError
from torch import Tensor, nn

from modelwright.errors import ModelError, first_line
from modelwright.models import attention, smollm2, trust
from modelwright.models.quantized import is_quantized, loading
from modelwright.models.quiet import be_quiet, without_sklearn
from modelwright.models.spread import Spread
from modelwright.recipe.schema import Model
from modelwright.runs.folder import hash_file

CPU = torch.device("cpu")
WEIGHTS = (".safetensors",)
NOT_FETCHED = ["*.bin", "*.pt", "*.pth", "*.gguf", "*.msgpack", "*.h5", "*.onnx"]
"""Pickles, and other forms of the same weights."""
AFTER_HEAD = ("final_logit_softcapping", "logits_scaling", "logit_scale")
"""What some families do to the logits, by the names in their configuration."""
FORWARD_TOLERANCE = 2e-2
"""Relative difference of logits that two orders of arithmetic may make in low precision; a leak makes 0.3 and more."""


@dataclass(frozen=True)
class Found:
    """A model on this machine, and where it came from."""

    name: str
    """As the recipe calls it."""
    path: Path
    """The folder that holds it."""
    revision: str | None = None
    """The hub commit, where it came from the hub."""

    def fingerprint(self) -> str:
        """Hash of the configuration, the tokenizer and every weight: 0.1 s for 135 M parameters."""
        digest = xxhash.xxh3_128()
        for file in sorted(self.path.iterdir()):
            if file.suffix in WEIGHTS:
                digest.update(f"{file.name}:{hash_file(file)}".encode())
            elif file.suffix in (".json", ".jinja", ".txt", ".model") and file.is_file():
                digest.update(file.name.encode() + file.read_bytes())
        return digest.hexdigest()


def find(model: Model, beside: Path) -> Found:
    """Bring the model to this machine; every miss is one letter with the nearest names."""
    name = model.name
    if name == smollm2.NAME:
        return Found(name, smollm2.folder())
    for folder in (Path(name), beside / name):
        if (folder / "config.json").exists():
            return Found(name, folder.resolve())  # an adapter names its base by this path, from wherever it is read
        if folder.is_dir():
            raise ModelError(
                f"model: the folder {folder} has no config.json; it wants a folder that from_pretrained reads"
            )
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise ModelError(_no_such_model(name, beside))
    return _from_hub(name, model.revision, beside)


def _from_hub(name: str, revision: str | None, beside: Path) -> Found:
    from huggingface_hub import snapshot_download

    _ask_for_access(name)
    try:
        path = snapshot_download(name, revision=revision, ignore_patterns=NOT_FETCHED)
    except Exception as error:  # the hub client raises many kinds; each becomes one letter
        raise ModelError(
            f"{_no_such_model(name, beside)}, and the hub did not give it ({first_line(error)}); "
            "check the name, the network, and HF_TOKEN for a gated model"
        ) from None
    return Found(name, Path(path), Path(path).name)  # the cache names its folders by commit


def _ask_for_access(name: str) -> None:
    """One question to the hub before anything is fetched: whether a gated model may be had with this token."""
    from huggingface_hub import auth_check
    from huggingface_hub.constants import ENDPOINT
    from huggingface_hub.errors import GatedRepoError

    try:
        auth_check(name)
    except GatedRepoError:
        raise ModelError(
            f"model: {name} is gated, and no token that may read it was found; nothing was downloaded. Ask for access "
            f"on its page, {ENDPOINT.rstrip('/')}/{name}, then set "
            "HF_TOKEN or run: hf auth login"
        ) from None
    except Exception:  # the client raises many kinds
        return  # no such name, no network, offline: the download tells, or the cache has it


def grow_embeddings(model: Any, tokenizer: Any) -> int:
    """Give the model a row for each token that its tokenizer knows and it does not; returns how many were new."""
    words = int(model.get_input_embeddings().weight.shape[0])
    if len(tokenizer) <= words:
        return 0
    model.resize_token_embeddings(len(tokenizer))
    return len(tokenizer) - words


def _no_such_model(name: str, beside: Path) -> str:
    folder = (beside / name).parent
    around = [path.name for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []
    close = difflib.get_close_matches(Path(name).name, [*around, smollm2.NAME], n=2)
    hint = f" (did you mean {' or '.join(close)}?)" if close else ""
    return f"model: there is no folder or embedded model {name!r}{hint}"


def load_tokenizer(path: Path) -> Any:
    """The tokenizer of a model folder."""
    with without_sklearn():
        from transformers import AutoTokenizer

    be_quiet()
    trust.check_tokenizer(path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # the library raises many kinds; each becomes one letter
        raise ModelError(f"model: the tokenizer of {path} could not be loaded ({first_line(error)})") from None
    _try_template(tokenizer, path)
    if tokenizer.pad_token_id is None and tokenizer.eos_token_id is not None:
        tokenizer.pad_token = tokenizer.eos_token  # eos stays trained: what trains goes by place, never by token
    return tokenizer


def load_model(path: Path, attending: str = "auto", quantization: str = "none", device: torch.device = CPU) -> Any:
    """The model of a folder with fp32 weights; an adapter folder gives its base with the adapter put on.

    A quantized model is read onto its device at once, since it cannot be moved there afterwards.
    """
    from transformers import AutoModelForCausalLM

    be_quiet()
    if (path / trust.ADAPTER).exists():
        return _load_adapter(path, attending)
    trust.check_model(path)
    implementation = "sdpa" if attending == "auto" else attending
    quantized = loading(quantization, device)
    try:
        model, read = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation=implementation, output_loading_info=True,
            use_safetensors=True, trust_remote_code=False, **quantized
        )  # fmt: skip
    except Exception as error:  # the library raises many kinds; each becomes one letter
        raise ModelError(f"model: {path} could not be loaded ({first_line(error)})") from None
    if missing := sorted(read["missing_keys"]):  # the library would fill them with random numbers
        raise ModelError(
            f"model: {path} lacks {len(missing)} weights that its config.json asks for, such as {missing[0]}"
        )
    return model


def _load_adapter(path: Path, attending: str) -> Any:
    from peft import PeftModel

    base = load_model(trust.adapter_base(path), attending)
    try:
        return PeftModel.from_pretrained(base, path)
    except Exception as error:  # the library raises many kinds; each becomes one letter
        raise ModelError(f"model: the adapter {path} could not be loaded ({first_line(error)})") from None


def _try_template(tokenizer: Any, path: Path) -> None:
    """Let the chat template render two turns within bounds, before it is given every row; what it refuses is its own
    affair and told where it matters."""
    if isinstance(tokenizer.chat_template, str):
        with trust.within_bounds(f"model: the chat template of {path}"):
            try:
                tokenizer.apply_chat_template(trust.TRIAL, tokenize=False)
            except (TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError):
                return


def hidden_states(
    model: Any, tokens: Tensor, positions: Tensor, mask: Any = None,
    documents: Tensor | attention.Paths | Spread | None = None,
) -> Tensor:  # fmt: skip
    """What the model thinks at each place, before its head: [rows, length, width].

    Positions that begin anew separate packed documents; with the cache on that separation is lost in silence. Our own
    attention separates them by `documents` instead: where each begins in the flattened rows, and where the last ends;
    and it alone takes paths, or answers laid apart, which say without a mask what documents share.
    A mask says who sees whom, in the form that `branch_mask` gives it.
    tokens: [rows, length] int64, or what stands in for their embeddings: [rows, length, width].
    """
    inner = bare(model)
    named = "inputs_embeds" if tokens.is_floating_point() else "input_ids"
    inputs = {named: tokens, "position_ids": positions, "attention_mask": mask}
    is_ours = inner.config._attn_implementation == attention.NAME
    assert is_ours or not isinstance(documents, attention.Paths | Spread), "only our own attention takes paths"
    if documents is not None and is_ours:
        inputs |= attention.documents_as_arguments(documents, tokens.shape[1])
    hidden: Tensor = inner.base_model(**inputs, use_cache=False)[0]
    return hidden


def plain_head(model: Any) -> Tensor | None:
    """The head's weights, where the head is one matrix and nothing more: [words, width]."""
    inner = bare(model)
    head = inner.get_output_embeddings()
    is_plain = type(head) is nn.Linear and head.bias is None
    return head.weight if is_plain and not any(getattr(inner.config, name, None) for name in AFTER_HEAD) else None


def logits_of(model: Any, hidden: Tensor) -> Tensor:
    """The head's answer for chosen places, with what some families do to it afterwards. hidden: [places, width]."""
    inner = bare(model)
    logits: Tensor = inner.get_output_embeddings()(hidden)
    if cap := getattr(inner.config, "final_logit_softcapping", None):
        logits = torch.tanh(logits / cap) * cap
    if divisor := getattr(inner.config, "logits_scaling", None):
        logits = logits / divisor
    if factor := getattr(inner.config, "logit_scale", None):
        logits = logits * factor
    return logits


def move(model: Any, device: torch.device, wished: str) -> None:
    """Bring a model to its device, with the fastest attention there that keeps documents apart."""
    if not is_quantized(model):
        model.to(device)
    if device.type == "cuda" and wished == "auto":
        usual = model.config._attn_implementation
        attention.install(model)
        try:
            check_forward(model)
            return
        except ModelError:  # a family whose attention does more than ours
            model.set_attn_implementation(usual)
    check_forward(model)


@torch.no_grad()
def check_forward(model: Any) -> None:
    """Hold our way through the model against its own, and packed documents apart, before anything is trained.

    A model family that does something else after its head, or a backend that lets documents see each other,
    is refused here rather than trained on wrongly.
    """
    words = min(model.config.get_text_config().vocab_size, 1000)
    device = next(model.parameters()).device
    tokens = torch.arange(3, 27, device=device).remainder(words).unsqueeze(0)
    positions = torch.arange(12, device=device).repeat(2).unsqueeze(0)
    was_training = model.training
    model.eval()
    alone = model(input_ids=tokens[:, 12:], use_cache=False).logits[0]
    documents = torch.tensor([0, 12, 24], dtype=torch.int32, device=device)
    ours = logits_of(model, hidden_states(model, tokens, positions, documents=documents)[0, 12:])
    model.train(was_training)
    gap = float((alone.float() - ours.float()).abs().max() / alone.float().abs().max().clamp(min=1e-6))
    if gap > FORWARD_TOLERANCE:
        raise ModelError(
            f"model: packed documents see each other, or the head does more than we know of (logits differ by "
            f"{gap:.1e}); this family cannot be trained here yet"
        )


def stop_tokens(model: Any) -> list[int]:
    """The tokens that end an answer, by the model's own generation settings."""
    ends = model.generation_config.eos_token_id
    return [] if ends is None else [ends] if isinstance(ends, int) else list(ends)


def bare(model: Any) -> Any:
    """The language model under an adapter wrapper; the adapters stay in its layers."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model
