"""The same faults done to the HF Trainer, in the same run and on the same machine; None where it is not installed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

from benchmarks.common import installed
from tests.faults import peer
from tests.faults.fault import Bench
from tests.faults.harm import delete, empty, flip_at, truncate
from tests.faults.rig import Call, Rig, Trial

PEER = ("transformers.models.llama.modeling_llama", "transformers.trainer", "tests.faults.peer")


class Peer:
    """HF Trainer runs, forked like ours."""

    def __init__(self, bench: Bench) -> None:
        self._bench, self._rig = bench, Rig(PEER)
        self._whole: dict[int, dict[str, Any]] = {}

    def start(self, folder: Path, **wishes: Any) -> Trial:
        """Start its training in a folder."""
        call = Call("tests.faults.peer", "train", (str(folder), str(self._bench.model)), wishes)
        return self._rig.fork(call, folder)

    def run(self, folder: Path, **wishes: Any) -> int:
        """Train to the end; the exit code."""
        return self.start(folder, **wishes).wait()

    def whole(self, save_every: int) -> dict[str, Any]:
        """What it comes to when nothing happens, and how long that takes."""
        if save_every not in self._whole:
            folder, began = self._bench.place("peer-whole"), time.monotonic()
            if self.run(folder, save_every=save_every):
                raise RuntimeError("the HF Trainer could not train the tiny model")
            self._whole[save_every] = {**result(folder), "seconds": time.monotonic() - began}
        return self._whole[save_every]

    def is_whole(self, folder: Path, save_every: int = peer.SAVE_EVERY) -> bool:
        """Whether a run ended as the untouched one did."""
        one, other = result(folder), self.whole(save_every)
        return bool(one["weights"] == other["weights"] and one["losses"] == other["losses"])

    def stopped(self) -> Path:
        """A folder whose run was killed at step 13, with checkpoints of steps 5 and 10."""

        def stop() -> Path:
            folder = self._bench.place("peer-stopped")
            self.run(folder, fault="die", at=13)
            return folder

        return self._bench.once("peer stopped", stop)

    def close(self) -> None:
        """Let its interpreter go."""
        self._rig.close()


def result(folder: Path) -> dict[str, Any]:
    """What a run of the peer left."""
    found: dict[str, Any] = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    return found


def peer_of(bench: Bench) -> Peer | None:
    """The peer, where it is installed and wanted."""
    if not bench.peers or installed("accelerate") is None:
        return None

    def begin() -> Peer:
        made = Peer(bench)
        bench.at_end.append(made.close)
        return made

    return bench.once("peer", begin)


def told(text: str) -> str:
    """A figure of the peer, with its version."""
    return f"HF Trainer {installed('transformers')}, this run: {text}"


def random_kills(bench: Bench, identical: bool = False) -> str | None:
    """Kills at random moments with saves as often as ours."""
    if (them := peer_of(bench)) is None:
        return None

    def kill() -> tuple[int, int, int]:
        draw, seconds = bench.draw("peer"), them.whole(2)["seconds"]
        landed = resumed = same = 0
        for _ in range(28):
            folder = bench.place("peer-kill")
            trial = them.start(folder, save_every=2)
            time.sleep(draw.uniform(0.02, seconds))
            if not trial.kill():
                continue
            landed += 1
            if them.run(folder, save_every=2) == 0:
                resumed += 1
                same += result(folder)["weights"] == them.whole(2)["weights"]
            if landed == 14:
                break
        return landed, resumed, same

    landed, resumed, same = bench.once("peer kills", kill)
    return told(f"{same if identical else resumed} of {landed}")


def kills_in_save(bench: Bench) -> str | None:
    """A kill at four moments of a save."""
    if (them := peer_of(bench)) is None:
        return None
    good = 0
    for moment in range(len(peer.IN_SAVE)):
        folder = bench.place("peer-save")
        them.run(folder, fault="kill in save", at=moment)
        good += them.run(folder) == 0
    return told(f"{good} of {len(peer.IN_SAVE)} resumed")


def flips(bench: Bench) -> str | None:
    """A bit in the middle of the newest checkpoint's weights and optimizer."""
    names = ("model.safetensors", "optimizer.pt")
    noticed = _after(bench, [(name, flip_at(0.5)) for name in names])
    return None if noticed is None else told(f"{sum(code != 0 for code, _ in noticed)} of {len(names)} noticed")


def cuts(bench: Bench) -> str | None:
    """Files of the newest checkpoint cut, emptied and deleted."""
    acts = [("model.safetensors", truncate), ("optimizer.pt", truncate), ("scheduler.pt", empty),
            ("trainer_state.json", delete), ("optimizer.pt", delete)]  # fmt: skip
    found = _after(bench, acts)
    return None if found is None else told(f"{sum(same for _, same in found)} of {len(acts)} recovered")


def _after(bench: Bench, acts: list[tuple[str, Any]]) -> list[tuple[int, bool]] | None:
    """Exit code after each damage, and whether the run then ended as the untouched one."""
    if (them := peer_of(bench)) is None:
        return None
    found = []
    for name, act in acts:
        folder = bench.place("peer-damaged")
        shutil.copytree(them.stopped() / "out", folder / "out")
        act(folder / "out/checkpoint-10" / name)
        code = them.run(folder)
        found.append((code, code == 0 and them.is_whole(folder)))
    return found


def not_a_number(bench: Bench) -> str | None:
    """A weight that is no number from step 12 on."""
    if (them := peer_of(bench)) is None:
        return None
    folder = bench.place("peer-nan")
    code = them.run(folder, fault="nan", at=12)
    clean = them.whole(peer.SAVE_EVERY)["train_loss"]
    if code:
        return told(f"exit {code}")
    found = result(folder)
    weights = "finite" if found["finite"] else "NaN"
    return told(f"exit 0, {weights} weights saved, train_loss {found['train_loss']:.2f} (clean: {clean:.2f})")


def finished_again(bench: Bench) -> str | None:
    """The same script once more after it has finished."""
    if (them := peer_of(bench)) is None:
        return None
    folder = bench.place("peer-again")
    them.run(folder, save_every=6)
    step = result(folder)["step"]
    code = them.run(folder, save_every=6)
    return told(f"{result(folder)['step'] - step} extra steps" if code == 0 else f"exit {code}")


def asked_to_stop(bench: Bench) -> str | None:
    """SIGTERM in the middle, as it is without further settings."""
    if (them := peer_of(bench)) is None:
        return None
    folder = bench.place("peer-asked")
    trial = them.start(folder, save_every=100)
    reached, deadline = 0, time.monotonic() + 60
    while reached < 7 and time.monotonic() < deadline:
        time.sleep(0.005)
        reached = _reached(folder)
    os.kill(trial.pid, signal.SIGTERM)
    code = trial.wait()
    saved = [int(path.name.split("-")[1]) for path in (folder / "out").glob("checkpoint-*")]
    return told(f"{_reached(folder) - max(saved, default=0)} steps lost, exit {code}")


def _reached(folder: Path) -> int:
    try:
        return int((folder / "reached").read_text(encoding="utf-8") or 0)
    except (OSError, ValueError):
        return 0
