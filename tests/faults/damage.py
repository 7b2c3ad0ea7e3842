"""Damaged files: flipped bits, truncated and deleted checkpoints, bad rows and shards, and a killed data worker."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path

from benchmarks.common import children_of
from tests.faults import hf_trainer
from tests.faults.context import FaultContext, FaultResult, FaultRow, count_text, inject, write_sections
from tests.faults.fork_server import RemoteCall, events_of, run_fingerprint
from tests.faults.injections import Damage, delete, empty, flip_at, truncate


def flipped_bits(context: FaultContext) -> FaultResult:
    """R5: one bit in each file in turn, at its beginning, in its middle, at its end and at random."""
    rng = context.rng("R5")
    positions = [rng.random()] if context.smoke else [0.0, 0.5, 1.0, rng.random(), rng.random()]
    flips = [(f"a bit at {position:.3f}", flip_at(position)) for position in positions]
    trials = [(name, *flip) for name in _checkpoint_files(context) for flip in flips]
    good, notes = _try_on_checkpoint(context, trials)
    models = _finished_files(context, rng) if not context.smoke else []
    for name, position in models:
        note = _try_on_model(context, name, position)
        good += not note
        notes += [note] * bool(note)
    of = len(trials) + len(models)
    figure = count_text(good, of, f"flips noticed: {len(trials)} in a checkpoint, {len(models)} in a finished model")
    numbers = {"flips": of, "noticed": good}
    return FaultResult(figure, good == of > 0, numbers, hf_trainer.flipped_bits(context), tuple(notes))


def truncated_files(context: FaultContext) -> FaultResult:
    """R6: each file truncated, emptied and deleted in turn; the checkpoint before it is used."""
    damages: list[tuple[str, Damage]] = [("cut in half", truncate), ("emptied", empty), ("deleted", delete)]
    trials = [(name, kind, act) for name in _checkpoint_files(context) for kind, act in damages]
    trials = trials[:: 3 if context.smoke else 1]
    good, notes = _try_on_checkpoint(context, trials)
    figure = count_text(good, len(trials), "runs bit-identical after resuming from the previous checkpoint")
    numbers = {"damaged": len(trials), "recovered": good}
    return FaultResult(figure, good == len(trials) > 0, numbers, hf_trainer.truncated_files(context), tuple(notes))


def _try_on_checkpoint(context: FaultContext, trials: list[tuple[str, str, Damage]]) -> tuple[int, list[str]]:
    """Damage one file of the newest checkpoint, resume, and check that the one before it was used."""
    reference, notes = context.reference(), []
    for name, kind, act in trials:
        recipe = context.new_recipe("damaged")
        run = recipe.parent / "run"
        shutil.copytree(killed_run(context), run, symlinks=True)
        last = newest_checkpoint(run)
        act(last / name)
        code, output = context.run(recipe)
        resumed = [event["step"] for event in events_of(run, "resumed")]
        before = int(last.name.split("-")[1]) - 3
        if code or f"checkpoint {last.name} moved to corrupt/" not in output or resumed[-1] != before:
            notes.append(f"{name}, {kind}: exit {code}, resumed from {resumed}: {output.strip()[-200:]}")
        elif run_fingerprint(run) != reference:
            notes.append(f"{name}, {kind}: it differs from the reference run")
    return len(trials) - len(notes), notes


def killed_run(context: FaultContext) -> Path:
    """The folder of a run that was killed at step 8 of 12, with checkpoints of steps 3 and 6."""
    return context.cached("killed run", lambda: _run(context, "killed", [inject("die_at_step", step=8)]))


def newest_checkpoint(run: Path) -> Path:
    """The newest checkpoint of a run."""
    return sorted((run / "stages/sft/checkpoints").glob("step-*"))[-1]


def _checkpoint_files(context: FaultContext) -> list[str]:
    return sorted(path.name for path in newest_checkpoint(killed_run(context)).iterdir())


def _finished_run(context: FaultContext) -> Path:
    """The folder of a run without faults."""
    return context.cached("finished run", lambda: _run(context, "finished", []))


def _run(context: FaultContext, name: str, first: list[RemoteCall]) -> Path:
    recipe = context.new_recipe(name)
    context.run(recipe, first=first)
    return recipe.parent / "run"


def _finished_files(context: FaultContext, rng: random.Random) -> list[tuple[str, float]]:
    """Every file of a finished stage, each with a position for the bit."""
    stage = _finished_run(context) / "stages/sft"
    files = [path for path in stage.rglob("*") if path.is_file() and "checkpoints" not in path.parts]
    names = sorted(str(path.relative_to(stage)) for path in files if path.name != "README.md")
    return [(name, rng.random()) for name in names]


def _try_on_model(context: FaultContext, name: str, position: float) -> str:
    """Flip a bit in a file of a finished stage and run again: it is rebuilt, or refused. Returns a note."""
    recipe = context.new_recipe("damaged")
    run = recipe.parent / "run"
    shutil.copytree(_finished_run(context), run, symlinks=True)
    flip_at(position)(run / "stages/sft" / name)
    code, output = context.run(recipe)
    if code == 0 and run_fingerprint(run) == context.reference():
        return ""
    return f"finished stage, {name} at {position:.3f}: exit {code}: {output.strip()[-200:]}"


ROWS = 1000
BAD_ROWS = (b'{"text": "bad: \xff"}', b'{"text": "no end', b'["a list"]', b'{"text": 7}', b'{"txt": "gone"}')
"""Invalid rows: not UTF-8, not JSON, not an object, no text, missing column."""
PREPARE = {"sequence_length": 32, "tokenizer": "model", "max_dropped_token_fraction": 1, "max_invalid_fraction": 0.05,
           "minhash_dedup": False}  # fmt: skip
PRETRAIN = {"max_length": 32, "max_steps": 4, "per_device_train_batch_size": 2, "precision": "fp32", "save_steps": 2,
            "eval_steps": 4}  # fmt: skip


def bad_rows(context: FaultContext) -> FaultResult:
    """R21: one row in a hundred is bad, then more than the recipe allows; then shards are cut, flipped and deleted."""
    rng, notes = context.rng("R21"), []
    folder = context.fresh_folder("rows")
    positions = sorted(rng.sample(range(1, ROWS + 1), ROWS // 100))
    recipe = _pretrain_recipe(context, folder, positions)
    code, output = context.run(recipe)
    quarantined = _quarantined(folder / "run")
    documents = _documents_read(folder / "run")
    exact = code == 0 and quarantined == positions and documents == ROWS - len(positions)
    if not exact:
        notes.append(f"seed {context.seed}: exit {code}, listed {quarantined} of {positions}: {output[-200:]}")
    many = context.fresh_folder("many")
    code, output = context.run(_pretrain_recipe(context, many, list(range(1, ROWS + 1, 16))))  # 6.3 %
    refused_many = code == 2 and "cannot be used" in output and not events_of(many / "run", "step")
    notes += [] if refused_many else [f"6 % bad: exit {code}: {output[-200:]}"]
    reference = run_fingerprint(folder / "run", "pretrain") if exact else None
    damages = [("cut", truncate), ("one bit flipped", flip_at(0.7)), ("deleted", delete)]
    refused = 0
    for kind, act in damages:
        damaged = context.fresh_folder("shards")
        again = _pretrain_recipe(context, damaged, positions)
        shutil.copytree(folder / "run/data", damaged / "run/data")
        act(damaged / "run/data/packed/train-00000.npy")
        code, output = context.run(again)
        prepared_again = code == 0 and run_fingerprint(damaged / "run", "pretrain") == reference
        right = prepared_again or (code == 2 and "train-00000.npy" in output)
        refused += right
        notes += [] if right else [f"shard {kind}: exit {code}: {output.strip()[-200:]}"]
    figure = (
        f"at 1 %, {len(quarantined)} of {len(positions)} bad rows skipped; "
        f"at 6 %, the file {'refused' if refused_many else 'trained on'}; "
        f"{refused} of {len(damages)} shards rebuilt or refused"
    )
    met = exact and refused_many and refused == len(damages)
    numbers = {"bad": len(positions), "listed": len(quarantined), "stopped_above_limit": refused_many,
               "shards_noticed": refused}  # fmt: skip
    return FaultResult(figure, met, numbers, None, tuple(notes))


def killed_worker(context: FaultContext) -> FaultResult:
    """R30: SIGKILL to a worker of the preparation while it is at work."""
    reference, folder = context.fresh_folder("whole"), context.fresh_folder("worker")
    code, output = context.run(_pretrain_recipe(context, reference, [], parts=2))
    if code:
        return FaultResult(f"exit {code} without any fault", False, notes=(output[-300:],))
    recipe = _pretrain_recipe(context, folder, [], parts=2)
    process = context.start(recipe)
    killed = _kill_worker(process.pid)
    code, starts = process.wait(), 1
    output = process.output
    while code == 75 and starts < 3:
        code, output = context.run(recipe)
        starts += 1
    same = code == 0 and _fingerprint(folder) == _fingerprint(reference)
    finished = "finished by itself" if starts == 1 else f"finished after {starts} starts"
    figure = f"the preparation {finished}, with {'the same' if same else 'different'} shards"
    met = killed and same and starts == 1
    numbers = {"killed": killed, "starts": starts, "identical": same}
    return FaultResult(figure, met, numbers, None, () if met else (output[-300:],))


def _kill_worker(pid: int) -> bool:
    """Wait for the first worker of a run, and kill it."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for child in children_of(pid):
            with suppress(OSError):
                if b"modelwright.data.prepare.executors" in Path(f"/proc/{child}/cmdline").read_bytes():
                    os.kill(child, signal.SIGKILL)
                    return True
        time.sleep(0.005)
    return False


def _pretrain_recipe(context: FaultContext, folder: Path, bad: list[int], parts: int = 1) -> Path:
    """Documents in some files, some rows of them bad, prepared by as many workers and trained on."""
    lines = [json.dumps({"text": f"Walk {n} began at gate {n % 7}. " + "The path was dry. " * (n % 5)}).encode()
             for n in range(1, ROWS + 1)]  # fmt: skip
    for turn, number in enumerate(bad):
        lines[number - 1] = BAD_ROWS[turn % len(BAD_ROWS)]
    (folder / "walks").mkdir()
    for part in range(parts):
        data = b"\n".join(lines[part * ROWS // parts : (part + 1) * ROWS // parts]) + b"\n"
        (folder / f"walks/part-{part}.jsonl").write_bytes(data)
    sections = {
        "name": "walks",
        "output_dir": str(folder / "run"),
        "model": {"model_name_or_path": str(context.model)},
        "prepare": {**PREPARE, "num_proc": parts},
        "pretrain": {**PRETRAIN, "data": {"dataset_name": str(folder / "walks"), "test_size": 20}},
    }
    return write_sections(folder / "recipe.yaml", sections)


def _quarantined(run: Path) -> list[int]:
    """Line numbers in the quarantine file."""
    path = run / "data/packed/quarantine.jsonl"
    if not path.exists():
        return []
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return sorted(int(str(row["where"]).rpartition(":")[2]) for row in rows)


def _documents_read(run: Path) -> int:
    path = run / "data/packed/report.json"
    return int(json.loads(path.read_text(encoding="utf-8"))["documents"]["read"]) if path.exists() else 0


def _fingerprint(folder: Path) -> str:
    path = folder / "run/data/packed/manifest.json"
    return str(json.loads(path.read_text(encoding="utf-8"))["fingerprint"])


FAULTS = (
    FaultRow("R5", "one bit of a file flipped", "one byte XOR 1 in every file in turn", "100 % noticed",
             "HF Trainer: weights and optimizer 0 of 2, random numbers 1 of 1 (measured Nov 2026)", flipped_bits, 40),
    FaultRow("R6", "a checkpoint file truncated, emptied or deleted", "every file of the newest checkpoint in turn",
             "100 % recovered from the one before",
             "HF Trainer: 0, it stops or resets the optimizer (measured Nov 2026)",
             truncated_files, 20),
    FaultRow("R21", "1 % or 6 % bad rows; damaged or missing data shards",
             "1 % and 6 % of bad rows; a shard cut, flipped, deleted",
             "rows lost = rows bad, all listed; above the limit and with a bad shard nothing is trained", "–", bad_rows,
             20),
    FaultRow("R30", "a worker process of the data preparation is killed", "SIGKILL to a process of the preparation",
             "finished by itself, the same shards",
             "HF Trainer: a killed data loader worker ends the run (measured Nov 2026)", killed_worker, 20),
)  # fmt: skip
