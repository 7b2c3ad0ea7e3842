"""Write TensorBoard's event files: a scalar is forty bytes in a known frame, for which no library need be loaded.

The frame: length, its checksum, the record, its checksum (CRC-32C, masked as TFRecord does); the record: an Event in
protobuf's wire form. TensorBoard's own reader is the test's oracle.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Mapping
from pathlib import Path

POLYNOMIAL = 0x82F63B78
MASK = 0xA282EAD8
STARTS = 1
"""SessionLog.START: what came before from this step on is forgotten."""


class EventFile:
    """One event file, added to as the run goes."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / f"events.out.tfevents.{time.time():.0f}.modelwright.{os.getpid()}").open("ab")
        self._write(_text(3, "brain.Event:2"), 0, time.time())

    def scalars(self, values: Mapping[str, float], step: int, when: float) -> None:
        """Add the values of a step."""
        each = b"".join(
            _message(1, _text(1, tag) + b"\x15" + struct.pack("<f", value)) for tag, value in values.items()
        )
        self._write(_message(5, each), step, when)

    def begin_again(self, step: int, when: float) -> None:
        """Say that everything after a step is done again."""
        self._write(_message(7, b"\x08" + _varint(STARTS)), step + 1, when)

    def close(self) -> None:
        """Stop writing."""
        self._file.close()

    def _write(self, body: bytes, step: int, when: float) -> None:
        record = b"\x09" + struct.pack("<d", when) + b"\x10" + _varint(step) + body
        length = struct.pack("<Q", len(record))
        self._file.write(length + _sum(length) + record + _sum(record))
        self._file.flush()


def _table() -> list[int]:
    found = []
    for number in range(256):
        for _ in range(8):
            number = number >> 1 ^ POLYNOMIAL if number & 1 else number >> 1
        found.append(number)
    return found


TABLE = _table()


def _sum(data: bytes) -> bytes:
    left = 0xFFFFFFFF
    for byte in data:
        left = TABLE[(left ^ byte) & 0xFF] ^ left >> 8
    left ^= 0xFFFFFFFF
    return struct.pack("<I", ((left >> 15 | left << 17) + MASK) & 0xFFFFFFFF)


def _varint(number: int) -> bytes:
    parts = bytearray()
    while number > 0x7F:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*parts, number])


def _message(field: int, body: bytes) -> bytes:
    return bytes([field << 3 | 2]) + _varint(len(body)) + body


def _text(field: int, text: str) -> bytes:
    return _message(field, text.encode())
