"""Why a rank leaves: left where the others, who only see that it is gone, can read it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from modelwright.errors import ModelwrightError, PeerLost, first_line

LISTEN_SECONDS = 0.3
LINGER_SECONDS = 5.0
"""How long a rank that keeps the store stays after a failure, so that the others can read why."""


class OtherRankFailed(ModelwrightError):
    """The main rank has written the letter; this one only leaves with the same code."""

    told_elsewhere = True

    def __init__(self, letter: str, exit_code: int) -> None:
        super().__init__(letter)
        self.exit_code = exit_code


class Exits:
    """Why a rank leaves is left in the store, where the others listen: in the middle of an exchange nobody can ask."""

    def __init__(self, store: Store, rank: int, size: int, hosts: bool) -> None:
        self._store, self._rank, self._size, self._hosts = store, rank, size, hosts
        self._heard: dict[str, Any] | None = None
        self._said = False
        self._over, self._wake = False, threading.Event()
        self._ear = threading.Thread(target=self._listen, daemon=True, name="exits")
        self._ear.start()

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Leave word of a failure; take a lost connection for what its other end has left word of."""
        try:
            yield
        except (PeerLost, OtherRankFailed):
            raise
        except RuntimeError as error:
            if not _is_lost_connection(error):
                raise
            raise self._cause(error) from None
        except BaseException as error:
            if hasattr(error, "exit_code"):  # a letter, or an order to stop
                self._say(str(error), error.exit_code)
            raise

    def close(self) -> None:
        """Stop listening; where this rank keeps the store and has said something, stay until the others heard it."""
        self._over = True
        self._wake.set()
        self._ear.join(LINGER_SECONDS)
        deadline = time.monotonic() + (LINGER_SECONDS if self._hosts and self._said else 0)
        with suppress(RuntimeError):
            while time.monotonic() < deadline and self._store.add("heard", 0) < self._size - 1:
                time.sleep(0.05)

    def _listen(self) -> None:
        """Look for word from time to time; woken up, once more."""
        last = False
        with suppress(RuntimeError):  # the store is gone, and its keeper with it
            while not last and self._heard is None:
                last = self._wake.wait(LISTEN_SECONDS)
                if not self._over and not self._said and self._store.check(["ending"]):
                    self._heard = json.loads(self._store.get("ending"))
                    self._store.add("heard", 1)

    def _say(self, letter: str, exit_code: int) -> None:
        self._said = True
        with suppress(RuntimeError):
            self._store.set("ending", json.dumps({"rank": self._rank, "letter": letter, "exit_code": exit_code}))

    def _cause(self, error: RuntimeError) -> ModelwrightError:
        self._wake.set()  # who leaves says so before it hangs up, so that one look is enough
        self._ear.join(LINGER_SECONDS)
        if self._heard is not None:
            return OtherRankFailed(self._heard["letter"], self._heard["exit_code"])
        reason = first_line(error).rpartition("] ")[2].partition(". ")[0]
        return PeerLost(f"rank {self._rank} lost the others ({reason}); the same command continues")


def _is_lost_connection(error: RuntimeError) -> bool:
    """Whether a collective failed because its other end is gone or silent."""
    words = ("onnection", "ocket", "imed out", "imeout", "NCCL", "Broken pipe", "Application timeout")
    return isinstance(error, dist.DistError) or ("gloo" in str(error) and any(word in str(error) for word in words))
