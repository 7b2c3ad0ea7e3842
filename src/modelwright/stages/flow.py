"""The pipeline as a flow: which stages are done, running, closed or still to come, told to the journal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from modelwright.runs.journal import Journal

State = Literal["to come", "running", "done", "accepted", "closed"]


class Flow:
    """Knows how each stage stands, and tells the whole line whenever one changes."""

    def __init__(self, stages: Iterable[str], journal: Journal) -> None:
        self._states: dict[str, State] = dict.fromkeys(stages, "to come")
        self._journal = journal

    def mark(self, stage: str, state: State) -> None:
        """Say how a stage stands now."""
        self._states[stage] = state
        told = [{"stage": name, "state": known} for name, known in self._states.items()]
        self._journal.add("flow", stage=stage, state=state, stages=told)
