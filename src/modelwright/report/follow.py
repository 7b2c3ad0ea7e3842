"""Follow journals as they grow: read what is new, keep a story of bounded size, draw only what changed."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass
from pathlib import Path

from modelwright.report.page import sections
from modelwright.report.story import Story
from modelwright.report.view import View, view_of
from modelwright.runs.folder import RunFolder

PIECE = 1 << 20
"""Bytes that are read at once."""
LONGEST_LINE = 1 << 24
"""Bytes of a line; what is longer is none of ours and is passed over."""


class Follower:
    """One run's story, read on from where it was left; several windows share it."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._begin()
        self._drawn: tuple[int, dict[str, str]] = (-1, {})

    def catch_up(self) -> int:
        """Take in what the journal has gained; returns the place in it, which changes when the story does."""
        with self._lock:
            try:
                size = self.folder.journal.stat().st_size
                if size < self._place:  # another run has begun in this folder
                    self._begin()
                with self.folder.journal.open("rb") as file:
                    file.seek(self._place)
                    while piece := file.read(PIECE):
                        self._place += len(piece)
                        self._take(piece)
            except OSError:
                pass
            return self._place

    def sections(self) -> dict[str, str]:
        """The parts of its page as the story stands, drawn once for all windows."""
        place = self.catch_up()
        with self._lock:
            if self._drawn[0] != place:
                self._drawn = (place, sections(self.folder, self.story))
            return self._drawn[1]

    def view(self) -> View:
        """The run as it stands."""
        self.catch_up()
        return view_of(self.folder, self.story)

    def _begin(self) -> None:
        self.story, self._place, self._rest = Story(), 0, b""

    def _take(self, piece: bytes) -> None:
        *lines, self._rest = (self._rest + piece).split(b"\n")
        if len(self._rest) > LONGEST_LINE:
            self._rest = b""
        for line in lines:
            try:
                event = json.loads(line)
            except ValueError:  # torn by a kill
                continue
            if isinstance(event, dict):
                self.story.add(event)


@dataclass(frozen=True)
class Shelf:
    """The runs that are shown, by a name that is safe in an address: nothing of an address ever becomes a path."""

    asked: tuple[RunFolder, ...]
    """The runs that were named; without any, all under `place`."""
    place: Path
    """Where runs are looked for."""
    known: dict[str, Follower]
    """Those that somebody looked at."""

    def runs(self) -> dict[str, Follower]:
        """Every run, newest first."""
        found = self.asked or [RunFolder(path.parent) for path in self.place.glob("*/journal.jsonl")]
        for folder in sorted(found, key=_age):
            if not any(each.folder == folder for each in self.known.values()):
                name, number = folder.path.resolve().name, 1
                while name in self.known:
                    number += 1
                    name = f"{folder.path.resolve().name}-{number}"
                self.known[name] = Follower(folder)
        kept = {name: each for name, each in self.known.items() if each.folder.journal.exists()}
        return dict(sorted(kept.items(), key=lambda item: _age(item[1].folder)))


def _age(folder: RunFolder) -> float:
    try:
        return -folder.journal.stat().st_mtime
    except OSError:
        return 0.0
