"""What measured runs have taught: coefficients of memory and time, by the card that was measured."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from modelwright.plan.gpus import Gpu
from modelwright.plan.memory import GUESSED_MEMORY, Fitted
from modelwright.plan.time import GUESSED_PACE, Pace
from modelwright.runs.caches import cache_dir

SHIPPED = Path(__file__).parent / "calibration.json"
OWN = "calibration.json"
UNMEASURED = 0.35
"""How far off a rate may be on a card that nobody measured."""
OTHER_CPU = "another processor"
CPU_MEMORY = Fitted(fixed=1e5)
"""A processor has no workspaces that count."""


@dataclass(frozen=True)
class Calibration:
    """The coefficients of one card, and how well they hold."""

    card: str
    """The card that was measured."""
    pace: Pace = GUESSED_PACE
    """Coefficients of time."""
    memory: Fitted = GUESSED_MEMORY
    """Coefficients of memory."""
    runs: int = 0
    """Measured runs that they were fitted to."""
    spread: float = UNMEASURED
    """Largest relative error of a predicted rate among them."""
    memory_spread: float = 0.1
    """Largest relative error of a predicted peak among them."""

    def sureness(self, gpu: Gpu) -> tuple[float, str]:
        """How far off a rate may be on this card, and why."""
        if not self.runs:
            return UNMEASURED, "a guess: no run was measured; modelwright plan --calibrate measures this machine"
        if self.card == OTHER_CPU:
            return UNMEASURED, "guessed from another processor; modelwright plan --calibrate measures this one"
        if self.card == gpu.name:
            return max(0.05, self.spread), f"fitted to {self.runs} measured runs on {self.card}"
        return UNMEASURED, f"by the data sheet of {gpu.name} and what {self.card} reaches of its own"

    def as_json(self) -> dict[str, Any]:
        """For the file."""
        return {
            "pace": self.pace.as_json(),
            "memory": {name: float(f"{value:.5g}") for name, value in asdict(self.memory).items()},
            "runs": self.runs,
            "spread": round(self.spread, 4),
            "memory_spread": round(self.memory_spread, 4),
        }


def calibration_for(gpu: Gpu) -> Calibration:
    """The coefficients of this card: the user's own, the shipped ones, or those of the card that was measured best."""
    own, shipped = _read(cache_dir() / OWN), _read(SHIPPED)
    known = {**shipped, **own}
    if gpu.name in known:
        return _of(gpu.name if gpu.name in own or gpu.name != "CPU" else OTHER_CPU, known[gpu.name])
    if gpu.name == "CPU":
        return Calibration("CPU", memory=CPU_MEMORY)
    measured = [name for name in known if name != "CPU"]
    best = max(measured, key=lambda name: int(known[name].get("runs", 0)), default=None)
    return _of(best, known[best]) if best else Calibration("none")


def _read(path: Path) -> dict[str, Any]:
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return told if isinstance(told, dict) else {}


def _of(card: str, told: dict[str, Any]) -> Calibration:
    names = {field.name for field in fields(Fitted)}
    fitted = {name: float(value) for name, value in told.get("memory", {}).items() if name in names}
    return Calibration(
        card=card,
        pace=Pace.from_json(told.get("pace", {})),
        memory=Fitted(**fitted),
        runs=int(told.get("runs", 0)),
        spread=float(told.get("spread", UNMEASURED)),
        memory_spread=float(told.get("memory_spread", 0.1)),
    )
