"""The folder through which supervisor, agent and ranks of one node tell each other how things stand."""

from __future__ import annotations

import json
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelwright.launch.watchdog import Finding


@dataclass(frozen=True)
class Signs:
    """Small files in a folder of this machine; each is written by one side and read by the other."""

    folder: Path
    """The folder, where the ranks' beats are too."""

    def tell(self, line: str) -> None:
        """Say something to the person, on stderr: stdout belongs to the first rank."""
        print(f"launch: {line}", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Before ranks are started: forget those before them."""
        for path in (*self.folder.glob("rank-*.json"), *self.folder.glob("finding-*.json"), self.folder / "stopping"):
            path.unlink(missing_ok=True)

    def started(self, pids: dict[int, int]) -> None:
        """The agent has started these ranks."""
        self._write("ranks.json", {str(rank): pid for rank, pid in pids.items()})

    @property
    def pids(self) -> dict[int, int]:
        """The ranks that were started last, by number."""
        return {int(rank): pid for rank, pid in (self._read("ranks.json") or {}).items()}

    def stopping(self) -> None:
        """The agent has asked its ranks to stop."""
        (self.folder / "stopping").touch()

    @property
    def is_stopping(self) -> bool:
        return (self.folder / "stopping").exists()

    def finished(self) -> None:
        """Every rank of this node is done; what is left is to wait for other nodes."""
        (self.folder / "finished").touch()

    @property
    def is_finished(self) -> bool:
        return (self.folder / "finished").exists()

    def ask_to_stop(self) -> None:
        """The person, or the cluster, wants this node to stop."""
        (self.folder / "asked").touch()

    @property
    def asked_to_stop(self) -> bool:
        return (self.folder / "asked").exists()

    def found(self, finding: Finding) -> None:
        """The supervisor ends a rank, for this reason."""
        self._write(f"finding-{finding.pid}.json", {**finding.__dict__, "at": time.monotonic()})

    def finding(self, pid: int) -> str | None:
        """Why the supervisor ended a process, if it did."""
        value = self._read(f"finding-{pid}.json")
        return value["reason"] if value else None

    def pulse(self, turn: int, silences: dict[int, float]) -> None:
        """The agent has reached the main node, and knows how long other nodes have been silent."""
        self._write("pulse.json", {"turn": turn, "silences": {str(node): at for node, at in silences.items()}})

    @property
    def last_pulse(self) -> tuple[int, dict[int, float]] | None:
        """The agent's last success in reaching the main node."""
        value = self._read("pulse.json")
        return (value["turn"], {int(node): at for node, at in value["silences"].items()}) if value else None

    def end(self, exit_code: int, letter: str | None) -> None:
        """The agent leaves."""
        self._write("ending.json", {"exit_code": exit_code, "letter": letter})

    @property
    def ending(self) -> tuple[int, str | None] | None:
        """How the agent left, where it said so."""
        value = self._read("ending.json")
        return (value["exit_code"], value["letter"]) if value else None

    def _write(self, name: str, value: dict[str, Any]) -> None:
        partial = self.folder / f".{name}.{threading.get_ident()}"
        partial.write_text(json.dumps(value), encoding="utf-8")
        partial.replace(self.folder / name)

    def _read(self, name: str) -> dict[str, Any] | None:
        try:
            value = json.loads((self.folder / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return value if isinstance(value, dict) else None
