"""A window that moves over a JSON text, so that a long list need not fit the memory."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, TextIO

SPACE, DECODER = re.compile(r"[ \t\n\r]*"), json.JSONDecoder()
PIECE = 1 << 20
"""Characters read at once."""


class Window:
    """The part of a text that was read and not yet taken."""

    def __init__(self, file: TextIO) -> None:
        self._file, self._place, self._ended = file, 0, False
        self.text, self.lines = "", 1

    def peek(self) -> str:
        """The next letter that is no space, without taking it; empty at the end."""
        while True:
            found = SPACE.match(self.text, self._place)
            assert found is not None
            self._place = found.end()
            if self._place < len(self.text) or not self._more():
                return self.text[self._place : self._place + 1]

    def items(self) -> Iterator[Any]:
        """The values of a list that begins here, one by one."""
        self._place += 1
        if self.peek() != "]":
            yield self._value()
            while self.peek() == ",":
                self._place += 1
                self.peek()
                yield self._value()
            if self.peek() != "]":
                raise json.JSONDecodeError("Expecting ',' delimiter", self.text, self._place)
        self._place += 1
        if self.peek():
            raise json.JSONDecodeError("Extra data", self.text, self._place)

    def rest(self) -> Any:
        """All that is left, as one value."""
        while self._more():
            pass
        return json.loads(self.text)

    def _value(self) -> Any:
        while True:
            try:
                value, end = DECODER.raw_decode(self.text, self._place)
                if end < len(self.text) or self._ended:  # else more of it may follow
                    self._place = end
                    return value
            except json.JSONDecodeError:
                if self._ended:
                    raise
            self._more()

    def _more(self) -> bool:
        """Forget what was taken, and read as much again as is waiting."""
        waiting = self.text[self._place :]
        piece = self._file.read(max(PIECE, len(waiting)))
        self.lines += self.text.count("\n", 0, self._place)
        self.text, self._place, self._ended = waiting + piece, 0, not piece
        return bool(piece)
