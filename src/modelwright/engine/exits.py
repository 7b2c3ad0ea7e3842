"""Why a rank leaves: left where the others, who only see that it is gone, can read it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from modelwright.errors import ModelwrightError, PeerLost

LINGER_SECONDS = 5.0
"""How long a rank that keeps the store stays after a failure, so that the others can read why."""


class OtherRankFailed(ModelwrightError):
    """The main rank has written the letter; this one only leaves with the same code."""

    told_elsewhere = True

    def __init__(self, letter: str, exit_code: int) -> None:
        super().__init__(letter)
        self.exit_code = exit_code


class Exits:
    """Why a rank leaves is left in the store, so that the others, who only see it gone, can say so too."""

    def __init__(self, store: Store, rank: int, size: int, hosts: bool) -> None:
        self._store, self._rank, self._size, self._hosts, self._failed = store, rank, size, hosts, False

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Leave word of a failure; take a lost connection for what its other end has left word of."""
        try:
            yield
        except (PeerLost, OtherRankFailed):
            self._failed = True
            raise
        except ModelwrightError as error:
            self._failed = True
            self._say(f"{error}", error.exit_code)
            raise
        except RuntimeError as error:
            self._failed = True
            if not _is_lost_connection(error):
                raise
            raise self._cause(error) from None

    def wait_for_others(self) -> None:
        """Where this rank keeps the store, stay until the others have read it, for a moment."""
        with suppress(RuntimeError):
            if self._failed:
                self._store.add("left", 1)
                deadline = time.monotonic() + (LINGER_SECONDS if self._hosts else 0)
                while time.monotonic() < deadline and self._store.add("left", 0) < self._size:
                    time.sleep(0.05)

    def _say(self, letter: str, exit_code: int) -> None:
        with suppress(RuntimeError):
            self._store.set("ending", json.dumps({"rank": self._rank, "letter": letter, "exit_code": exit_code}))

    def _cause(self, error: RuntimeError) -> ModelwrightError:
        with suppress(RuntimeError):
            if self._store.check(["ending"]):
                said = json.loads(self._store.get("ending"))
                return OtherRankFailed(said["letter"], said["exit_code"])
        reason = str(error).strip().splitlines()[0].rpartition("] ")[2]
        return PeerLost(f"rank {self._rank} lost the others ({reason}); the same command continues")


def _is_lost_connection(error: RuntimeError) -> bool:
    """Whether a collective failed because its other end is gone or silent."""
    words = ("onnection", "ocket", "imed out", "imeout", "NCCL", "Broken pipe", "Application timeout")
    return isinstance(error, dist.DistError) or ("gloo" in str(error) and any(word in str(error) for word in words))
