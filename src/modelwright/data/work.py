"""The work folder of a preparation: every finished piece is a folder that is whole or absent.

The name of a step holds a hash of everything that decides its result, so a changed wish finds nothing to go on with,
and an unchanged one finds all that was done, whoever was killed and when.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from modelwright.data.shingles import Array
from modelwright.errors import StorageError, is_storage_failure
from modelwright.runs.folder import read_json, sync

FACTS = "facts.json"


def key_of(*wishes: Any) -> str:
    """A hash of plain values."""
    text = json.dumps(wishes, sort_keys=True, ensure_ascii=False, default=str)
    return xxhash.xxh3_64_hexdigest(text.encode())


@dataclass(frozen=True)
class Work:
    """Where pieces lie."""

    folder: Path
    """The work folder."""

    def piece(self, step: str, number: int = 0) -> Path:
        """The folder of one piece."""
        return self.folder / step / f"{number:05d}"

    def done(self, step: str, number: int = 0) -> bool:
        """Whether a piece is finished."""
        return self.piece(step, number).is_dir()

    def facts(self, step: str, number: int = 0) -> dict[str, Any]:
        """What a piece says about itself."""
        found: dict[str, Any] = read_json(self.piece(step, number) / FACTS)
        return found

    def array(self, step: str, number: int, name: str) -> Array:
        """An array of a piece, mapped, not read."""
        return np.lib.format.open_memmap(self.piece(step, number) / f"{name}.npy", mode="r")

    @contextmanager
    def making(self, step: str, number: int = 0) -> Iterator[Path]:
        """A folder to write a piece into; it gets its name, and lasts, when the block ends without an error."""
        final = self.piece(step, number)
        partial = final.with_name(f".{final.name}.{os.getpid()}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        try:
            partial.mkdir(parents=True)
            yield partial
            for path in partial.iterdir():
                sync(path)
            sync(partial)
            if final.exists():  # another worker was faster; its bytes are the same
                shutil.rmtree(partial)
                return
            partial.rename(final)
            sync(final.parent)
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            if is_storage_failure(error):
                raise StorageError(f"{final}: {error.strerror}; the same command goes on once there is room") from None
            raise


def put(folder: Path, name: str, array: Array) -> None:
    """Write an array into a piece that is being made."""
    with (folder / f"{name}.npy").open("wb") as file:
        np.lib.format.write_array(file, np.ascontiguousarray(array), allow_pickle=False)


def put_facts(folder: Path, facts: dict[str, Any]) -> None:
    """Write what a piece says about itself."""
    (folder / FACTS).write_text(json.dumps(facts, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
