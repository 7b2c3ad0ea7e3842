"""Find the one rank whose end explains the ends of all others."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from modelwright.launch.rank import last_words
from modelwright.launch.signs import Signs
from modelwright.runs.beat import Standing

UNFORESEEN = 1


@dataclass(frozen=True)
class Cause:
    """Why the ranks of this node ended."""

    rank: int = -1
    """The rank that ended first, by its own doing or by somebody's."""
    reason: str = ""
    """What happened to it, as the rest of a sentence that begins with the rank."""
    exit_code: int = UNFORESEEN
    """What it left with; a signal's negative number where it was killed."""
    step: int = 0
    """Steps that were done by then."""
    wrote: bool = False
    """Whether it said so itself, on stderr."""

    @property
    def killed(self) -> bool:
        """Whether somebody else ended it."""
        return self.exit_code < 0

    @property
    def told(self) -> str:
        """The cause as half a sentence."""
        return f"rank {self.rank} {self.reason} after step {self.step}"

    def repeats(self, before: Cause) -> bool:
        """Whether the same happened before in the same place, which is no accident."""
        return (self.rank, self.reason, self.step) == (before.rank, before.reason, before.step)

    def letter(self, logs: Path) -> str:
        """What the person is told at the end: the rank's own words, once, where it left any."""
        said = last_words(logs, self.rank) if self.wrote else ""
        return said or f"{self.told}; the same command continues"


def find_cause(signs: Signs, beats: Mapping[int, Standing], exit_codes: Mapping[int, int]) -> Cause:
    """Killed ranks come first, then those with a reason of their own, in the order they ended."""
    step = max((at.step for at in beats.values()), default=0)
    pids = signs.pids
    silent = [rank for rank in sorted(pids) if rank not in beats or beats[rank].ending is None]
    for rank in silent:
        finding = signs.finding(pids[rank])
        if finding is None or "left waiting" not in finding:
            code = exit_codes.get(rank, -signal.SIGKILL)
            return Cause(rank, finding or _died(code), code if code else UNFORESEEN, step, wrote=code > 0)
    ended = sorted((at for at in beats.values() if at.ending), key=lambda at: (at.lost_others, at.ended_at))
    if not ended:
        return Cause(min(pids, default=0), "ended without a word", UNFORESEEN, step)
    first = ended[0]
    words = (first.ending or "").splitlines()[0]
    return Cause(first.rank, f"ended ({words})", first.exit_code, step, wrote=True)


def _died(code: int) -> str:
    if code >= 0:
        return f"ended with code {code} before it began"
    name = signal.Signals(-code).name
    hint = " (by hand, or by the kernel for want of memory)" if -code == signal.SIGKILL else ""
    return f"was killed by {name}{hint}"
