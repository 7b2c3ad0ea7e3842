"""SIGKILL at random moments, SIGKILL inside a save, SIGTERM with a grace period, and a finished run started again."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.faults import baseline
from tests.faults.fault import Bench, Fault, Outcome, counted, inject
from tests.faults.rig import Trial, steps_of, told, trace

OFTEN: dict[str, Any] = {"max_steps": 24, "save_steps": 2, "eval_steps": 24}
"""Settings with which a fifth of the time goes into saves."""
GRACE_SECONDS = 30.0


@dataclass(frozen=True)
class Kill:
    """What became of one run that was killed once."""

    moment: float
    """Seconds after its start."""
    resumed: bool
    """Whether the same command brought it to its end."""
    identical: bool
    """Whether it then was the run to which nothing happened, bit for bit."""
    redone: int
    """Steps done twice."""
    note: str = ""
    """What went wrong."""


def random_kills(bench: Bench) -> list[Kill]:
    """Kill runs at random moments between their start and their end, and finish each with the same command."""
    return bench.once("random kills", lambda: _random_kills(bench))


def _random_kills(bench: Bench) -> list[Kill]:
    draw, wanted = bench.draw("R1"), bench.trials(50, 10)
    whole, length = bench.reference(**OFTEN), _length(bench)
    done: list[Kill] = []
    for number in range(2 * wanted):
        folder = bench.place("kill")
        recipe = bench.recipe(folder, **OFTEN)
        moment = draw.uniform(0.02, length)
        trial = bench.rig.start(["run", str(recipe)], folder, first=bench.worse)
        time.sleep(moment)
        if not trial.kill():
            continue  # it was done before
        done.append(_finished(bench, folder, moment, whole, f"seed {bench.seed}, kill {number} after {moment:.3f} s"))
        if len(done) == wanted:
            break
        if len(done) % 10 == 0:
            bench.say(f"  {len(done)} of {wanted} kills")
    return done


def _length(bench: Bench) -> float:
    """How long a run lasts from its start to its end here and now: the moments are drawn from it."""
    folder, began = bench.place("length"), time.monotonic()
    bench.run(bench.recipe(folder, **OFTEN))
    return time.monotonic() - began


def _finished(bench: Bench, folder: Path, moment: float, whole: dict[str, Any], where: str) -> Kill:
    run = folder / "run"
    code, output = bench.run(folder / "recipe.yaml")
    if code:
        return Kill(moment, False, False, 0, f"{where}: exit {code}: {output.strip()[-200:]}")
    redone = len(told(run, "step")) - len(steps_of(run))
    same = trace(run) == whole
    return Kill(moment, True, same, redone, "" if same else f"{where}: it differs from the untouched run")


def resume(bench: Bench) -> Outcome:
    """R1: how many killed runs go on without a person."""
    kills = random_kills(bench)
    good = sum(kill.resumed for kill in kills)
    numbers = {"kills": len(kills), "resumed": good, "share_of_time_in_saves": _share_of_saves(bench)}
    return Outcome(
        counted(good, len(kills), f"resumed; {numbers['share_of_time_in_saves']:.0%} of the time was in saves"),
        good == len(kills) > 0, numbers, baseline.random_kills(bench), tuple(k.note for k in kills if not k.resumed),
    )  # fmt: skip


def identity(bench: Bench) -> Outcome:
    """R2: how many of them end bit for bit as if nothing had happened."""
    kills = random_kills(bench)
    good = sum(kill.identical for kill in kills)
    figure = counted(good, len(kills), "equal in loss, data order and weights, bit for bit")
    notes = tuple(kill.note for kill in kills if not kill.identical)
    numbers = {"kills": len(kills), "identical": good}
    return Outcome(figure, good == len(kills) > 0, numbers, baseline.random_kills(bench, identical=True), notes)


def redone_steps(bench: Bench) -> Outcome:
    """R4: how many steps are done twice."""
    kills = random_kills(bench)
    most, interval = max((kill.redone for kill in kills), default=0), int(OFTEN["save_steps"])
    figure = f"at most {most} steps with a save every {interval}: {most / interval:.1f} × the interval"
    numbers = {"most_steps_redone": most, "save_interval": interval}
    return Outcome(figure, bool(kills) and all(kill.resumed for kill in kills) and most <= interval, numbers)


def kills_in_save(bench: Bench) -> Outcome:
    """R3: kill a run at every moment of one save: before each call that changes the disk, and inside its files."""
    whole, save = bench.reference(), 9  # the third save also forgets the first
    folder = bench.place("moments")
    code, output = bench.run(bench.recipe(folder), first=[inject("kill_in_save", step=save, moment=0)])
    if code:
        return Outcome(f"exit {code} without any fault", False, notes=(output[-300:],))
    moments = int(output.split("moments: ")[1].split()[0])
    chosen = range(1, moments + 1)
    if bench.smoke:
        chosen = range(1, moments + 1, max(1, moments // 5))
    good, notes = 0, []
    for moment in chosen:
        folder = bench.place("in-save")
        recipe = bench.recipe(folder)
        code, output = bench.run(recipe, first=[inject("kill_in_save", step=save, moment=moment)])
        if code != -signal.SIGKILL:
            notes.append(f"moment {moment} of {moments}: exit {code} in place of a kill")
            continue
        kill = _finished(bench, folder, moment, whole, f"killed at moment {moment} of {moments}")
        good += kill.identical
        notes += [kill.note] * (not kill.identical)
    figure = counted(good, len(chosen), "moments of a save resumed, bit for bit")
    numbers = {"moments": len(chosen), "resumed": good}
    return Outcome(figure, good == len(chosen) > 3, numbers, baseline.kills_in_save(bench), tuple(notes))


def asked_to_stop(bench: Bench) -> Outcome:
    """R9: SIGTERM at random moments of a run whose checkpoints are far apart."""
    settings = {"max_steps": 12, "save_steps": 100}
    whole, draw, count = bench.reference(**settings), bench.draw("R9"), bench.trials(10, 3)
    lost, codes, slowest, same, notes = 0, [], 0.0, 0, []
    for number in range(count):
        folder = bench.place("asked")
        recipe = bench.recipe(folder, **settings)
        moment = draw.uniform(0.1, 1.6)
        slowed = (*bench.worse, inject("slow_steps", seconds=0.15))
        trial = bench.rig.start(["run", str(recipe)], folder, first=slowed)
        _wait_for_journal(folder / "run")  # an interpreter that has not begun has nothing to save
        time.sleep(moment)
        seconds, code = _ask(trial, bench.limit(GRACE_SECONDS))
        slowest = max(slowest, seconds)
        if code == 0:
            continue  # it was done before
        codes.append(code)
        reached = max(steps_of(folder / "run"), default=0)
        finished, output = bench.run(recipe)
        resumed = told(folder / "run", "resumed")
        lost += reached - (resumed[-1]["step"] if resumed else 0)
        steps_equal = not finished and trace(folder / "run")["steps"] == whole["steps"]
        same += steps_equal and trace(folder / "run")["files"] == whole["files"]
        if finished or not steps_equal:
            notes.append(
                f"seed {bench.seed}, trial {number}, asked after {moment:.2f} s: exit {finished}: {output[-200:]}"
            )
    right = all(code == 75 for code in codes)
    figure = f"{lost} steps lost over {len(codes)} signals; {same} bit-identical; exit {_all(codes)}; {slowest:.1f} s"
    met = bool(codes) and lost == 0 and right and same == len(codes) and slowest < bench.limit(GRACE_SECONDS)
    numbers = {"signals": len(codes), "steps_lost": lost, "identical": same, "slowest_seconds": round(slowest, 2)}
    return Outcome(figure, met, numbers, baseline.asked_to_stop(bench), tuple(notes))


def _ask(trial: Trial, grace: float) -> tuple[float, int]:
    """SIGTERM, and SIGKILL when the grace is over: seconds and exit code."""
    began = time.monotonic()
    os.kill(trial.pid, signal.SIGTERM)
    try:
        code = trial.wait(grace)
    except TimeoutError:
        code = -signal.SIGKILL
    return time.monotonic() - began, code


def finished_again(bench: Bench) -> Outcome:
    """R25: the command of a finished run once more."""
    folder = bench.place("again")
    recipe = bench.recipe(folder)
    if bench.run(recipe)[0]:
        return Outcome("the run could not be finished", False)
    before, steps = _bytes_of(folder / "run"), len(told(folder / "run", "step"))
    code, output = bench.run(recipe)
    extra = len(told(folder / "run", "step")) - steps
    changed = [name for name, data in _bytes_of(folder / "run").items() if before.get(name) != data]
    figure = f"{extra} extra steps, {len(changed)} files of models and checkpoints changed"
    met = code == 0 and extra == 0 and not changed
    numbers = {"extra_steps": extra, "files_changed": len(changed)}
    return Outcome(figure, met, numbers, baseline.finished_again(bench), () if met else (output[-300:], *changed))


def _bytes_of(run: Path) -> dict[str, bytes]:
    """Every file of the stages but the card, which tells the time."""
    files = [path for path in (run / "stages").rglob("*") if path.is_file() and path.name != "README.md"]
    return {str(path.relative_to(run)): path.read_bytes() for path in files}


def _share_of_saves(bench: Bench) -> float:
    """How much of the time between the first step and the last was spent in saves, in an undisturbed run."""

    def share() -> float:
        folder = bench.place("share")
        bench.run(bench.recipe(folder, **OFTEN))
        steps, saves = told(folder / "run", "step"), told(folder / "run", "checkpoint_saved")
        spent = sum(float(save["seconds"]) for save in saves)
        return spent / max(1e-9, float(saves[-1]["time"]) - float(steps[0]["time"]))

    return round(bench.once("share of saves", share), 3)


def _wait_for_journal(run: Path) -> None:
    deadline = time.monotonic() + 60
    while not told(run, "run") and time.monotonic() < deadline:
        time.sleep(0.01)


def _all(codes: list[int]) -> str:
    return ", ".join(str(code) for code in sorted(set(codes))) or "none"


FAULTS = (
    Fault("R1", "killed at a random moment", "SIGKILL at U(0, length of the run), saves every 2 steps",
          "100 % resumed without a person", "HF Trainer 5.22: 10 of 14 (measured Nov 2026)", resume, 120),
    Fault("R2", "killed at a random moment", "the same kills, held against an untouched run",
          "100 % bit-identical", "HF Trainer 5.22: 10 of 14 (measured Nov 2026)", identity, 1),
    Fault("R3", "killed inside a save", "SIGKILL before each call that changes the disk, and between tensors",
          "100 % resumed", "HF Trainer 5.22: 0 of 4 (measured Nov 2026)", kills_in_save, 60),
    Fault("R4", "steps done twice after a kill", "the kills of R1", "at most one save interval",
          "HF Trainer: 1.0 × where it resumes (measured Nov 2026)", redone_steps, 1),
    Fault("R9", "asked to stop, 30 s of grace", "SIGTERM at random moments, SIGKILL 30 s later",
          "0 steps lost, bit-identical, exit 75",
          "HF Trainer: 7 steps lost; with its own option 1, other weights, exit 0 (measured Nov 2026)",
          asked_to_stop, 40),
    Fault("R25", "a finished run started again", "the same command twice", "0 extra steps, nothing changed",
          "HF Trainer: 1 extra step, one more checkpoint (measured Nov 2026)", finished_again, 4),
)  # fmt: skip
