"""SIGKILL at random moments and inside a save, SIGTERM with a grace period, a finished run started again; goodput."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelwright.report.history import TIME_CATEGORIES, TimeBreakdown
from modelwright.runs import journal
from tests.faults import hf_trainer
from tests.faults.context import FaultContext, FaultResult, FaultRow, count_text, exit_codes, inject
from tests.faults.fork_server import ForkedProcess, events_of, run_fingerprint, steps_of
from tests.faults.two_nodes import Launch, rank_pids

FREQUENT_SAVES: dict[str, Any] = {"max_steps": 24, "save_steps": 2, "eval_steps": 24}
"""Settings with which a fifth of the time is spent in saves."""
GRACE_SECONDS = 30.0


@dataclass(frozen=True)
class Kill:
    """One run that was killed once and started again."""

    resumed: bool
    """Whether the same command finished it."""
    identical: bool
    """Whether it then equals the reference run, bit for bit."""
    repeated: int
    """Steps done twice."""
    note: str = ""
    """What went wrong."""


def random_kills(context: FaultContext) -> list[Kill]:
    """Kill runs at random moments between their start and their end, and finish each with the same command."""
    return context.cached("random kills", lambda: _random_kills(context))


def _random_kills(context: FaultContext) -> list[Kill]:
    rng, count = context.rng("R1"), context.num_trials(50, 10)
    reference, length = context.reference(**FREQUENT_SAVES), _run_seconds(context)
    done: list[Kill] = []
    for number in range(2 * count):
        recipe, moment = context.new_recipe("kill", **FREQUENT_SAVES), rng.uniform(0.02, length)
        process = context.start(recipe)
        time.sleep(moment)
        if not process.kill():
            continue  # it had ended before
        where = f"seed {context.seed}, kill {number} after {moment:.3f} s"
        done.append(_resume_and_compare(context, recipe, reference, where))
        if len(done) == count:
            break
        if len(done) % 10 == 0:
            context.log(f"  {len(done)} of {count} kills")
    return done


def _run_seconds(context: FaultContext) -> float:
    """How long a run takes; the moments of the kills are random in it."""
    recipe, began = context.new_recipe("length", **FREQUENT_SAVES), time.monotonic()
    context.run(recipe)
    return time.monotonic() - began


def _resume_and_compare(context: FaultContext, recipe: Path, reference: dict[str, Any], where: str) -> Kill:
    run = recipe.parent / "run"
    code, output = context.run(recipe)
    if code:
        return Kill(False, False, 0, f"{where}: exit {code}: {output.strip()[-200:]}")
    repeated = len(events_of(run, "step")) - len(steps_of(run))
    same = run_fingerprint(run) == reference
    return Kill(True, same, repeated, "" if same else f"{where}: it differs from the reference run")


def resume(context: FaultContext) -> FaultResult:
    """R1: how many killed runs resume without a person."""
    kills = random_kills(context)
    good = sum(kill.resumed for kill in kills)
    numbers = {"kills": len(kills), "resumed": good, "share_of_time_in_saves": _save_time_fraction(context)}
    figure = count_text(good, len(kills), "runs resumed")
    notes = tuple(kill.note for kill in kills if not kill.resumed)
    return FaultResult(figure, good == len(kills) > 0, numbers, hf_trainer.random_kills(context), notes)


def identity(context: FaultContext) -> FaultResult:
    """R2: how many of them equal the reference run, bit for bit."""
    kills = random_kills(context)
    good = sum(kill.identical for kill in kills)
    figure = count_text(good, len(kills), "runs bit-identical after resuming")
    notes = tuple(kill.note for kill in kills if not kill.identical)
    numbers = {"kills": len(kills), "identical": good}
    return FaultResult(figure, good == len(kills) > 0, numbers, hf_trainer.random_kills(context, identical=True), notes)


def repeated_steps(context: FaultContext) -> FaultResult:
    """R4: how many steps are done twice."""
    kills = random_kills(context)
    largest, interval = max((kill.repeated for kill in kills), default=0), int(FREQUENT_SAVES["save_steps"])
    figure = f"at most {largest} steps, with a save every {interval} steps"
    numbers = {"most_steps_redone": largest, "save_interval": interval}
    return FaultResult(figure, bool(kills) and all(kill.resumed for kill in kills) and largest <= interval, numbers)


def kills_in_save(context: FaultContext) -> FaultResult:
    """R3: kill a run at every moment of one save: before each call that changes the disk, and inside its files."""
    reference, save = context.reference(), 9  # the third save also deletes the first
    code, output = context.run(context.new_recipe("moments"), first=[inject("kill_in_save", step=save, moment=0)])
    if code:
        return FaultResult(f"exit {code} without any fault", False, notes=(output[-300:],))
    moments = int(output.split("moments: ")[1].split()[0])
    chosen = range(1, moments + 1, max(1, moments // 5) if context.smoke else 1)
    good, notes = 0, []
    for moment in chosen:
        recipe = context.new_recipe("in-save")
        code, output = context.run(recipe, first=[inject("kill_in_save", step=save, moment=moment)])
        if code != -signal.SIGKILL:
            notes.append(f"moment {moment} of {moments}: exit {code} in place of a kill")
            continue
        kill = _resume_and_compare(context, recipe, reference, f"killed at moment {moment} of {moments}")
        good += kill.identical
        notes += [kill.note] * (not kill.identical)
    figure = count_text(good, len(chosen), "runs bit-identical after resuming")
    numbers = {"moments": len(chosen), "resumed": good}
    return FaultResult(figure, good == len(chosen) > 3, numbers, hf_trainer.kills_in_save(context), tuple(notes))


def sigterm(context: FaultContext) -> FaultResult:
    """R9: SIGTERM at random moments of a run whose checkpoints are far apart."""
    settings = {"max_steps": 12, "save_steps": 100}
    reference, rng, count = context.reference(**settings), context.rng("R9"), context.num_trials(10, 3)
    lost, codes, slowest, same, notes = 0, [], 0.0, 0, []
    for number in range(count):
        recipe, moment = context.new_recipe("sigterm", **settings), rng.uniform(0.1, 1.6)
        run = recipe.parent / "run"
        process = context.start(recipe, first=[inject("slow_steps", seconds=0.15)])
        _wait_for_journal(run)  # a process that has not started has nothing to save
        time.sleep(moment)
        seconds, code = _terminate(process, context.time_limit(GRACE_SECONDS))
        slowest = max(slowest, seconds)
        if code == 0:
            continue  # it had ended before
        codes.append(code)
        reached = max(steps_of(run), default=0)
        finished, output = context.run(recipe)
        resumed = events_of(run, "resumed")
        lost += reached - (resumed[-1]["step"] if resumed else 0)
        steps_equal = not finished and run_fingerprint(run)["steps"] == reference["steps"]
        same += steps_equal and run_fingerprint(run)["files"] == reference["files"]
        if finished or not steps_equal:
            where = f"seed {context.seed}, trial {number}, SIGTERM after {moment:.2f} s"
            notes.append(f"{where}: exit {finished}: {output[-200:]}")
    identical = count_text(same, len(codes), "runs bit-identical after resuming")
    figure = f"{identical}; {lost} steps lost; exit {exit_codes(codes)} within {slowest:.1f} s"
    in_time = slowest < context.time_limit(GRACE_SECONDS)
    met = bool(codes) and lost == 0 and set(codes) == {75} and same == len(codes) and in_time
    numbers = {"signals": len(codes), "steps_lost": lost, "identical": same, "slowest_seconds": round(slowest, 2)}
    return FaultResult(figure, met, numbers, hf_trainer.sigterm(context), tuple(notes))


def _terminate(process: ForkedProcess, grace: float) -> tuple[float, int]:
    """SIGTERM, and SIGKILL when the grace is over: seconds and exit code."""
    began = time.monotonic()
    os.kill(process.pid, signal.SIGTERM)
    try:
        code = process.wait(grace)
    except TimeoutError:
        code = -signal.SIGKILL
    return time.monotonic() - began, code


def restart_finished(context: FaultContext) -> FaultResult:
    """R25: the command of a finished run once more."""
    recipe = context.new_recipe("again")
    run = recipe.parent / "run"
    if context.run(recipe)[0]:
        return FaultResult("the run could not be finished", False)
    before, steps = _bytes_of(run), len(events_of(run, "step"))
    code, output = context.run(recipe)
    extra = len(events_of(run, "step")) - steps
    changed = [name for name, data in _bytes_of(run).items() if before.get(name) != data]
    figure = f"{extra} extra steps; {len(changed)} files of models or checkpoints changed"
    met = code == 0 and extra == 0 and not changed
    numbers = {"extra_steps": extra, "files_changed": len(changed)}
    notes = () if met else (output[-300:], *changed)
    return FaultResult(figure, met, numbers, hf_trainer.restart_finished(context), notes)


def _bytes_of(run: Path) -> dict[str, bytes]:
    """Every file of the stages except the model card, which has a date."""
    files = [path for path in (run / "stages").rglob("*") if path.is_file() and path.name != "README.md"]
    return {str(path.relative_to(run)): path.read_bytes() for path in files}


def _save_time_fraction(context: FaultContext) -> float:
    """The fraction of time between the first and the last step spent in saves, in a run without faults."""

    def fraction() -> float:
        recipe = context.new_recipe("saves", **FREQUENT_SAVES)
        context.run(recipe)
        steps, saves = (events_of(recipe.parent / "run", name) for name in ("step", "checkpoint_saved"))
        spent = sum(float(save["seconds"]) for save in saves)
        return spent / max(1e-9, float(saves[-1]["time"]) - float(steps[0]["time"]))

    return round(context.cached("save time fraction", fraction), 3)


def _wait_for_journal(run: Path) -> None:
    deadline = time.monotonic() + 60
    while not events_of(run, "run") and time.monotonic() < deadline:
        time.sleep(0.01)


KILL_INTERVAL_SECONDS, MINUTES = 30.0, 10.0
GOODPUT_GOAL = 0.85


def goodput(context: FaultContext) -> FaultResult:
    """R27: a launch whose only rank is killed every 30 s for ten minutes; measured by the time breakdown of the run."""
    folder, seconds = context.fresh_folder("goodput"), MINUTES * 60
    context.recipe(folder, max_steps=100_000, save_steps=8, eval_steps=100_000, logging_steps=1)
    launch, kills = Launch(folder, per_node=1), 0
    began = time.time()
    try:
        process = launch.start()
        after = began + KILL_INTERVAL_SECONDS
        while (now := time.time()) < began + seconds and process.poll() is None:
            if now > after:
                kills += _kill_rank(launch)
                after += KILL_INTERVAL_SECONDS
            time.sleep(0.05)
        alive = process.poll() is None
        process.send_signal(signal.SIGTERM)
        code = process.wait(timeout=120)
    finally:
        launch.close()
    breakdown = TimeBreakdown()
    for event in journal.read(launch.run / "journal.jsonl"):
        breakdown.add(event)
    first = events_of(launch.run, "run")[0]
    first_startup = first["time"] - first["import_seconds"] - began  # of the launcher, before its rank
    seconds_by_category = {**breakdown.seconds, "startup": breakdown.seconds["startup"] + first_startup}
    total = sum(seconds_by_category.values())
    productive = seconds_by_category["productive"] / total
    figure = f"{productive:.1%} of the time went into steps whose result was kept"
    met = alive and code == 75 and kills >= 0.9 * (seconds / KILL_INTERVAL_SECONDS - 1) and productive >= GOODPUT_GOAL
    rounded = {name: round(seconds_by_category[name], 1) for name in TIME_CATEGORIES}
    numbers = {"useful_share": round(productive, 4), "kills": kills, "minutes": round(total / 60, 2),
               "seconds_by_category": rounded}  # fmt: skip
    return FaultResult(figure, met, numbers)


def _kill_rank(launch: Launch) -> int:
    """SIGKILL to the rank that runs now; 1 if there is one."""
    with suppress(OSError, ValueError, StopIteration):
        for pid in rank_pids(launch.folder):
            os.kill(pid, signal.SIGKILL)
            return 1
    return 0


FAULTS = (
    FaultRow("R1", "killed at a random moment", "SIGKILL at U(0, length of the run), saves every 2 steps",
             "100 % resumed without a person", "HF Trainer 5.22: 10 of 14 (measured Nov 2026)", resume, 120),
    FaultRow("R2", "the kills of R1: are the results equal?", "the same kills, compared with a reference run",
             "100 % bit-identical", "HF Trainer 5.22: 10 of 14 (measured Nov 2026)", identity, 1),
    FaultRow("R3", "killed during a save", "SIGKILL before each call that changes the disk, and between tensors",
             "100 % resumed", "HF Trainer 5.22: 0 of 4 (measured Nov 2026)", kills_in_save, 60),
    FaultRow("R4", "the kills of R1: how many steps are repeated?", "the kills of R1", "at most one save interval",
             "HF Trainer: at most 2 steps, in the runs that resume (measured Nov 2026)", repeated_steps, 1),
    FaultRow("R9", "SIGTERM, with 30 s until SIGKILL", "SIGTERM at random moments, SIGKILL 30 s later",
             "0 steps lost, bit-identical, exit 75",
             "HF Trainer: 7 steps lost; with its own option 1, other weights, exit 0 (measured Nov 2026)",
             sigterm, 40),
    FaultRow("R25", "a finished run is started again", "the same command twice", "0 extra steps, nothing changed",
             "HF Trainer: 1 extra step, one more checkpoint (measured Nov 2026)", restart_finished, 4),
    FaultRow("R27", "killed every 30 s for 10 minutes", "SIGKILL to the rank under the launcher; seconds by cause",
             "85 % of the time useful", "–", goodput, 620),
)  # fmt: skip
