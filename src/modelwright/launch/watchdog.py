"""Judge from the beats of this node's ranks which of them is stopped, hangs, or is left over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from modelwright.runs.beat import Standing

STOPPED_SECONDS = 8.0
"""A process in the kernel's stopped state for so long was not stopped for a moment's look."""
LEFT_OVER_SECONDS = 10.0
"""A rank that gets nowhere for so long after another has gone is waiting for it."""
SILENT_SECONDS = 180.0
"""No beat at all: something holds the interpreter, or the kernel holds the process."""
LEAST_SECONDS, TIMES_THE_MEDIAN = 180.0, 20.0
"""A step may take so many times the median, and never less than this: compiling anew for longer rows takes minutes."""
LOST_SECONDS = 60.0
"""A node that is silent for so long is lost: a link that is cut for 40 s is waited for."""
FIRST_SECONDS = 1800.0
"""What has no median yet: loading, compiling, the first steps, waiting for a download or a checkpoint."""
PATIENT = ("starting", "waiting for rank 0", "gathering", "loading", "saving", "comparing")


@dataclass(frozen=True)
class Finding:
    """A rank that must go, and why."""

    rank: int
    """Its number."""
    pid: int
    """Its process."""
    reason: str
    """What was found, as the rest of a sentence that begins with the rank."""


@dataclass
class _Seen:
    """A rank as it was last seen, and since when each thing has been so."""

    standing: Standing
    beats_since: float
    moves_since: float
    stopped_since: float | None = None


class Pulses:
    """Knows from the agent's pulses which node has been silent for too long."""

    def __init__(self) -> None:
        self._turn = -1
        self._since: float | None = None

    def lost(self, pulse: tuple[int, Mapping[int, float]] | None, now: float) -> str | None:
        """Who is silent, as half a sentence; the main node, where the agent itself cannot reach it."""
        if pulse is None:
            return None
        turn, silences = pulse
        if turn != self._turn:
            self._turn, self._since = turn, now
        silent = [node for node, seconds in silences.items() if seconds >= LOST_SECONDS]
        if silent:
            return f"node {silent[0]} has been silent for {silences[silent[0]]:.0f} s"
        if silences and self._since is not None and now - self._since >= LOST_SECONDS:
            return f"the main node has not answered for {now - self._since:.0f} s"
        return None


class Watchdog:
    """Remembers how long each rank has been as it is."""

    def __init__(self) -> None:
        self._seen: dict[int, _Seen] = {}
        self._gone_since: float | None = None
        self._last_look: float | None = None

    def look(
        self, beats: Mapping[int, Standing], states: Mapping[int, str | None], now: float, stopping: bool = False
    ) -> list[Finding]:
        """What must go now; `states` are the kernel's letters by pid, `now` a clock that never jumps."""
        if self._last_look is not None and now - self._last_look > STOPPED_SECONDS / 2:
            self._forgive(now - self._last_look)  # the watcher itself was stopped: nobody is blamed for that time
        self._last_look = now
        for rank, standing in beats.items():
            self._note(rank, standing, states.get(standing.pid), now)
        alive = {rank for rank, at in beats.items() if states.get(at.pid) not in (None, "Z", "X") and not at.ending}
        self._gone_since = (self._gone_since or now) if stopping or len(alive) < len(beats) else None
        findings = [self._judge(self._seen[rank], now) for rank in sorted(alive)]
        return [found for found in findings if found is not None]

    def forget(self) -> None:
        """Begin anew: other processes have taken the ranks' places."""
        self._seen.clear()
        self._gone_since = None

    def _note(self, rank: int, standing: Standing, state: str | None, now: float) -> None:
        before = self._seen.get(rank)
        if before is None or before.standing.pid != standing.pid:
            self._seen[rank] = _Seen(standing, now, now)
            return
        if before.standing.count != standing.count:
            before.beats_since = now
        if before.standing.moves != standing.moves:
            before.moves_since = now
        before.stopped_since = (before.stopped_since or now) if state == "T" else None
        before.standing = standing

    def _judge(self, seen: _Seen, now: float) -> Finding | None:
        at = seen.standing
        still, silent = now - seen.moves_since, now - seen.beats_since
        if seen.stopped_since is not None and now - seen.stopped_since >= STOPPED_SECONDS:
            return Finding(at.rank, at.pid, f"has been stopped for {now - seen.stopped_since:.0f} s (SIGSTOP)")
        left_over = self._gone_since is not None and min(still, now - self._gone_since) >= LEFT_OVER_SECONDS
        if left_over and at.doing != "saving":
            return Finding(at.rank, at.pid, f"is left waiting, {at.doing}, since others have gone")
        if silent >= SILENT_SECONDS:
            return Finding(at.rank, at.pid, f"has given no sign of life for {silent:.0f} s, {at.doing}")
        if still >= limit(at):
            return Finding(at.rank, at.pid, f"hangs: {at.doing} after step {at.step} for {still:.0f} s{_usual(at)}")
        return None

    def _forgive(self, seconds: float) -> None:
        for seen in self._seen.values():
            seen.beats_since += seconds
            seen.moves_since += seconds
            seen.stopped_since = None


def limit(at: Standing) -> float:
    """How long a rank may be at what it is doing."""
    if at.doing in PATIENT or at.step_seconds is None:
        return FIRST_SECONDS
    return max(LEAST_SECONDS, TIMES_THE_MEDIAN * at.step_seconds)


def _usual(at: Standing) -> str:
    return f" (a step usually takes {at.step_seconds:.2g} s)" if at.step_seconds else ""
