"""Goodput: the share of the time that went into steps whose result is kept, while a rank is killed again and again."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from modelwright.report.history import TIME_CATEGORIES, TimeBreakdown
from modelwright.runs import journal
from tests.faults.fault import Bench, Fault, Outcome
from tests.faults.ranks import Launch
from tests.faults.rig import told

EVERY_SECONDS, MINUTES = 30.0, 10.0
GOAL = 0.85


def under_kills(bench: Bench) -> Outcome:
    """R27: a launch whose only rank is killed every 30 s for ten minutes; the ledger of the run is its own judge."""
    folder, seconds = bench.place("goodput"), MINUTES * 60
    bench.recipe(folder, max_steps=100_000, save_steps=8, eval_steps=100_000, logging_steps=1)
    launch, kills = Launch(folder, per_node=1), 0
    began = time.time()
    try:
        process = launch.start()
        after = began + EVERY_SECONDS
        while (now := time.time()) < began + seconds and process.poll() is None:
            if now > after:
                kills += _kill_the_rank(launch)
                after += EVERY_SECONDS
            time.sleep(0.05)
        alive = process.poll() is None
        process.send_signal(signal.SIGTERM)
        code = process.wait(timeout=120)
    finally:
        launch.end()
    ledger = TimeBreakdown()
    for event in journal.read(launch.run / "journal.jsonl"):
        ledger.add(event)
    before = told(launch.run, "run")[0]["time"] - began  # the first start, which no journal can tell of
    parts = {**ledger.seconds, "startup": ledger.seconds["startup"] + before}
    whole = sum(parts.values())
    share = parts["productive"] / whole
    rest = sorted(((name, value) for name, value in parts.items() if name != "productive"), key=lambda each: -each[1])
    causes = ", ".join(f"{name} {value / whole:.1%}" for name, value in rest if value / whole >= 0.001)
    figure = f"{share:.1%} useful over {whole / 60:.1f} minutes and {kills} kills ({causes})"
    met = alive and code == 75 and kills >= 0.9 * (seconds / EVERY_SECONDS - 1) and share >= GOAL
    numbers = {"useful_share": round(share, 4), "kills": kills, "minutes": round(whole / 60, 2),
               "seconds_by_category": {name: round(parts[name], 1) for name in TIME_CATEGORIES}}  # fmt: skip
    return Outcome(figure, met, numbers)


def _kill_the_rank(launch: Launch) -> int:
    """SIGKILL to the process that trains now, where there is one."""
    for signs in Path(launch.folder).glob("modelwright-*/ranks.json"):
        with suppress(OSError, ValueError):
            for pid in _pids(signs):
                os.kill(pid, signal.SIGKILL)
                return 1
    return 0


def _pids(signs: Path) -> list[int]:
    import json

    return [int(pid) for pid in json.loads(signs.read_text(encoding="utf-8")).values()]


FAULTS = (
    Fault("R27", "killed every 30 s for 10 minutes", "SIGKILL to the rank under the launcher; seconds by cause",
          "85 % of the time useful", "–: nobody publishes it for a machine like this", under_kills, 620),
)  # fmt: skip
