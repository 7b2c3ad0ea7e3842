"""Bits that flip, files that end early, files that are gone: in every file of a checkpoint and of a finished model."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

from tests.faults import baseline
from tests.faults.fault import Bench, Fault, Outcome, counted, inject
from tests.faults.harm import Damage, delete, empty, flip_at, truncate
from tests.faults.rig import told, trace


def flipped_bits(bench: Bench) -> Outcome:
    """R5: one bit in each file in turn, at its beginning, in its middle, at its end and at random."""
    draw = bench.draw("R5")
    places = [draw.random()] if bench.smoke else [0.0, 0.5, 1.0, draw.random(), draw.random()]
    trials = [(name, f"a bit at {place:.3f}", flip_at(place)) for name in _checkpoint_files(bench) for place in places]
    good, notes = _try_on_checkpoint(bench, trials)
    models = _finished_files(bench, draw) if not bench.smoke else []
    for name, place in models:
        note = _try_on_model(bench, name, place)
        good += not note
        notes += [note] * bool(note)
    of = len(trials) + len(models)
    figure = counted(good, of, f"noticed, in {len(_checkpoint_files(bench))} files of a checkpoint"
                     + (f" and {len(models)} of a finished stage" if models else ""))  # fmt: skip
    return Outcome(figure, good == of > 0, {"flips": of, "noticed": good}, baseline.flips(bench), tuple(notes))


def lost_bytes(bench: Bench) -> Outcome:
    """R6: each file cut, emptied and deleted in turn; the checkpoint before it takes over."""
    kinds: list[tuple[str, Damage]] = [("cut in half", truncate), ("emptied", empty), ("deleted", delete)]
    files = _checkpoint_files(bench)
    trials = [(name, word, act) for name in files for word, act in kinds]
    trials = trials[:: 3 if bench.smoke else 1]
    good, notes = _try_on_checkpoint(bench, trials)
    figure = counted(good, len(trials), "recovered from the checkpoint before, bit for bit")
    numbers = {"damaged": len(trials), "recovered": good}
    return Outcome(figure, good == len(trials) > 0, numbers, baseline.cuts(bench), tuple(notes))


def _try_on_checkpoint(bench: Bench, trials: list[tuple[str, str, Damage]]) -> tuple[int, list[str]]:
    """Damage one file of the newest checkpoint, go on, and see that the one before it was taken."""
    whole, notes = bench.reference(), []
    for name, word, act in trials:
        folder = bench.place("damaged")
        recipe = bench.recipe(folder)
        shutil.copytree(stopped(bench) / "run", folder / "run", symlinks=True)
        last = newest(folder / "run")
        act(last / name)
        code, output = bench.run(recipe)
        resumed = [event["step"] for event in told(folder / "run", "resumed")]
        before = int(last.name.split("-")[1]) - 3
        if code or f"checkpoint {last.name} moved to corrupt/" not in output or resumed[-1] != before:
            notes.append(f"{name}, {word}: exit {code}, went on from {resumed}: {output.strip()[-200:]}")
        elif trace(folder / "run") != whole:
            notes.append(f"{name}, {word}: it differs from the untouched run")
    return len(trials) - len(notes), notes


def stopped(bench: Bench) -> Path:
    """A run that was killed at step 8 of 12, with checkpoints of steps 3 and 6."""

    def stop() -> Path:
        folder = bench.place("stopped")
        bench.run(bench.recipe(folder), first=[inject("die_at_step", step=8)])
        return folder

    return bench.once("stopped", stop)


def newest(run: Path) -> Path:
    """The newest checkpoint of a run."""
    return sorted((run / "stages/sft/checkpoints").glob("step-*"))[-1]


def _checkpoint_files(bench: Bench) -> list[str]:
    return sorted(path.name for path in newest(stopped(bench) / "run").iterdir())


def _finished(bench: Bench) -> Path:
    """A run to which nothing has happened."""

    def finish() -> Path:
        folder = bench.place("finished")
        bench.run(bench.recipe(folder))
        return folder

    return bench.once("finished", finish)


def _finished_files(bench: Bench, draw: random.Random) -> list[tuple[str, float]]:
    """Every file that a finished stage answers for, each with a place for the bit."""
    stage = _finished(bench) / "run/stages/sft"
    files = [path for path in stage.rglob("*") if path.is_file() and "checkpoints" not in path.parts]
    names = sorted(str(path.relative_to(stage)) for path in files if path.name != "README.md")
    return [(name, draw.random()) for name in names]


def _try_on_model(bench: Bench, name: str, place: float) -> str:
    """Flip a bit in a file of a finished stage and start it again: it is made again, or refused. Returns a note."""
    folder = bench.place("damaged")
    recipe = bench.recipe(folder)
    shutil.copytree(_finished(bench) / "run", folder / "run", symlinks=True)
    flip_at(place)(folder / "run/stages/sft" / name)
    code, output = bench.run(recipe)
    if code == 0 and trace(folder / "run") == bench.reference():
        return ""
    return f"finished stage, {name} at {place:.3f}: exit {code}: {output.strip()[-200:]}"


FAULTS = (
    Fault("R5", "one bit flipped", "one byte XOR 1 in every file in turn", "100 % noticed",
          "HF Trainer: weights and optimizer 0 of 2, random numbers 1 of 1 (measured Nov 2026)", flipped_bits, 40),
    Fault("R6", "a file cut, emptied or gone", "every file of the newest checkpoint in turn",
          "100 % recovered from the one before",
          "HF Trainer: 0, it stops or starts the optimizer anew (measured Nov 2026)",
          lost_bytes, 20),
)  # fmt: skip
