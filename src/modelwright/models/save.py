"""Write a model folder atomically, merge a LoRA adapter into its base, and write .pth files."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modelwright.errors import StorageError, UsageError, is_storage_failure
from modelwright.models.pretrained import load_model, load_tokenizer
from modelwright.runs.folder import fsync_path


def save_model(model: Any, tokenizer: Any, weights: dict[str, Tensor], folder: Path) -> None:
    """Write a language model as a folder that from_pretrained reads; `weights` are full tensors."""
    with atomic_model_folder(folder) as partial:
        model.save_pretrained(partial, state_dict=weights)
        tokenizer.save_pretrained(partial)


def merge_adapter(adapter: Path, folder: Path) -> None:
    """Merge a LoRA adapter into its base model and write a folder that needs no peft."""
    if not (adapter / "adapter_config.json").exists():
        raise UsageError(f"{adapter} is no adapter folder (no adapter_config.json); there is nothing to merge")
    merged = load_model(adapter).merge_and_unload()
    save_model(merged, load_tokenizer(adapter), dict(merged.state_dict()), folder)


@contextmanager
def atomic_model_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder that is synced and renamed to `folder` at the end."""
    partial = folder.with_name(f".{folder.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        for path in partial.rglob("*"):
            # safetensors writes with mode 0600, which other users of a shared volume cannot read
            path.chmod(0o755 if path.is_dir() else 0o644)
            fsync_path(path)
        fsync_path(partial)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
        fsync_path(folder.parent)
    except Exception as error:
        shutil.rmtree(partial, ignore_errors=True)
        if is_storage_failure(error):
            message = f"{folder}: the model could not be written ({error}); the checkpoints are unharmed"
            raise StorageError(message) from None
        raise


def save_pth(path: Path, contents: Mapping[str, Any]) -> None:
    """Write a .pth file and check that it loads with weights_only=True."""
    torch.save(dict(contents), path)
    torch.load(path, weights_only=True, map_location="cpu")
