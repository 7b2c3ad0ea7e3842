"""Save a model as a folder that from_pretrained reads, whole or not at all."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from torch import Tensor

from modelwright.errors import StorageError, is_storage_failure
from modelwright.runs.folder import sync_folder


def save_model(model: Any, tokenizer: Any, weights: dict[str, Tensor], folder: Path) -> None:
    """Write weights and tokenizer beside the place, then move them into it; `weights` are whole, sharded or not."""
    partial = folder.with_name(f".{folder.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        model.save_pretrained(partial, state_dict=weights)
        tokenizer.save_pretrained(partial)
        for path in partial.iterdir():
            path.chmod(0o644)  # the writer makes weights private, which a shared volume's next reader cannot use
            _sync(path)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
        sync_folder(folder.parent)
    except Exception as error:
        shutil.rmtree(partial, ignore_errors=True)
        if (isinstance(error, OSError) and is_storage_failure(error)) or "os error 28" in str(error):
            raise StorageError(
                f"{folder}: the model could not be written ({error}); the checkpoints are unharmed"
            ) from None
        raise


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
