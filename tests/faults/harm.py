"""What befalls one file: a flipped bit, a lost half, nothing left in it, gone."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

Damage = Callable[[Path], None]


def flip_at(place: float) -> Damage:
    """Flip one bit of the byte at a place between 0 and 1."""

    def flip(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[min(len(data) - 1, int(len(data) * place))] ^= 1
        path.write_bytes(data)

    return flip


def truncate(path: Path) -> None:
    """Lose the second half."""
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    """Lose everything but the name."""
    os.truncate(path, 0)


def delete(path: Path) -> None:
    """Lose the name too."""
    path.unlink()
