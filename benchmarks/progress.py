"""Tell on stderr how far a measurement is: what is cut short leaves what it had found."""

from __future__ import annotations

import sys
import time


class Progress:
    """One measurement's clock."""

    def __init__(self, name: str) -> None:
        self._name, self._began = name, time.perf_counter()

    def tell(self, what: str) -> None:
        """A line with the seconds since it began."""
        print(f"{time.perf_counter() - self._began:7.1f} s  {self._name}: {what}", file=sys.stderr, flush=True)
