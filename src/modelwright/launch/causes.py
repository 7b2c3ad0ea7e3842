"""Find the one rank whose end explains the ends of all others."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from pathlib import Path

from modelwright.errors import Diverged, GateClosed, Interrupted, Refused, StorageError, UsageError
from modelwright.launch.rank import last_words
from modelwright.launch.signs import Signs
from modelwright.runs.beat import Standing

UNFORESEEN = 1
LETTERS = {error.exit_code for error in (UsageError, GateClosed, Diverged, Refused, StorageError)}
"""What a rank leaves with after a letter: starting it again would change nothing."""
LETTER, RELAYED, KILLED, CRASHED, FOLLOWED, ENDED_BY_US = range(6)
"""How much an end explains, the most telling first; who only followed others comes late, whom we ended last."""


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
    relayed: str = ""
    """The letter of a rank elsewhere, as this one was told it."""
    lost: bool = False
    """Whether it only lost the others."""

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
        by_itself = not self.killed and not self.lost
        return by_itself and (self.rank, self.reason, self.step) == (before.rank, before.reason, before.step)

    def letter(self, logs: Path) -> str:
        """What the person is told at the end: the rank's own words, once, where it left any."""
        said = last_words(logs, self.rank) if self.wrote else self.relayed
        return said or f"{self.told}; the same command continues"


def find_cause(signs: Signs, beats: Mapping[int, Standing], exit_codes: Mapping[int, int], first: Set[int]) -> Cause:
    """The most telling end; `first` are the ranks that had gone before the agent asked the rest to go."""
    step = max((at.step for at in beats.values()), default=0)
    ends = []
    for rank, pid in signs.pids.items():
        at = beats.get(rank)
        if at is None or at.ending is None:
            weight, cause = _silent(rank, signs.finding(pid), exit_codes.get(rank, -signal.SIGKILL), rank in first)
        else:
            weight, cause = _spoken(at, signs.asked_to_stop)
        ends.append((weight, rank not in first, at.ended_at if at else 0.0, rank, cause))
    if not ends:
        return Cause(0, "ended without a word", step=step)
    found: Cause = min(ends, key=lambda end: end[:4])[-1]
    return replace(found, step=step)


def _silent(rank: int, finding: str | None, code: int, on_its_own: bool) -> tuple[int, Cause]:
    """A rank without last words: killed, or ended before it could speak."""
    left_over = finding is not None and "left waiting" in finding
    weight = KILLED if (on_its_own or finding) and not left_over else ENDED_BY_US
    return weight, Cause(rank, finding or _died(code), code or UNFORESEEN, wrote=code > 0)


def _spoken(at: Standing, asked: bool) -> tuple[int, Cause]:
    """A rank that said why it leaves; one that was asked to stop, or told of another's end, says little."""
    words = (at.ending or "").splitlines()[0]
    lost, relayed = at.lost_others and at.exit_code == UNFORESEEN, at.lost_others and at.exit_code != UNFORESEEN
    cause = Cause(at.rank, f"ended ({words})", at.exit_code, wrote=not relayed, relayed=at.ending or "", lost=lost)
    if at.exit_code in LETTERS:
        return (RELAYED if relayed else LETTER), cause
    if lost or (at.exit_code == Interrupted.exit_code and not asked):
        return FOLLOWED, cause
    return CRASHED, cause


def _died(code: int) -> str:
    if code >= 0:
        return f"ended with code {code} before it began"
    name = signal.Signals(-code).name
    hint = " (by hand, or by the kernel for want of memory)" if -code == signal.SIGKILL else ""
    return f"was killed by {name}{hint}"
