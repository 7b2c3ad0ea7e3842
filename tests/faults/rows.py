"""Bad rows, damaged and missing shards, and a worker of the preparation that dies."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path

from benchmarks.common import children_of
from tests.faults.fault import Bench, Fault, Outcome
from tests.faults.harm import delete, flip_at, truncate
from tests.faults.rig import told, trace

ROWS = 1000
BAD = (b'{"text": "half a character: \xff"}', b'{"text": "no end', b'["a list"]', b'{"text": 7}', b'{"txt": "gone"}')
"""Rows that nothing can be learnt from: no UTF-8, no JSON, no object, no text, no such column."""
PREPARE = {"sequence_length": 32, "tokenizer": "model", "max_dropped_token_fraction": 1, "max_invalid_fraction": 0.05,
           "minhash_dedup": False}  # fmt: skip
PRETRAIN = {"max_length": 32, "max_steps": 4, "per_device_train_batch_size": 2, "precision": "fp32", "save_steps": 2,
            "eval_steps": 4}  # fmt: skip


def bad_rows(bench: Bench) -> Outcome:
    """R21: one row in a hundred is bad, then more than the recipe allows; then shards are cut, flipped and deleted."""
    draw, notes = bench.draw("R21"), []
    folder = bench.place("rows")
    places = sorted(draw.sample(range(1, ROWS + 1), ROWS // 100))
    recipe = _recipe(bench, folder, places)
    code, output = bench.run(recipe)
    listed = _quarantined(folder / "run")
    read = _documents_read(folder / "run")
    exact = code == 0 and listed == places and read == ROWS - len(places)
    notes += [] if exact else [f"seed {bench.seed}: exit {code}, listed {listed} of {places}: {output[-200:]}"]
    many = bench.place("many")
    code, output = bench.run(_recipe(bench, many, list(range(1, ROWS + 1, 16))))  # 6.3 %
    stopped = code == 2 and "cannot be used" in output and not told(many / "run", "step")
    notes += [] if stopped else [f"6 % bad: exit {code}: {output[-200:]}"]
    kinds = [("cut", truncate), ("one bit flipped", flip_at(0.7)), ("deleted", delete)]
    refused = 0
    for word, act in kinds:
        damaged = bench.place("shards")
        again = _recipe(bench, damaged, places)
        shutil.copytree(folder / "run/data", damaged / "run/data")
        act(damaged / "run/data/packed/train-00000.npy")
        code, output = bench.run(again)
        made_again = code == 0 and trace(damaged / "run", "pretrain") == trace(folder / "run", "pretrain")
        right = made_again or (code == 2 and "train-00000.npy" in output)
        refused += right
        notes += [] if right else [f"shard {word}: exit {code}: {output.strip()[-200:]}"]
    figure = (
        f"{len(listed)} of {len(places)} bad rows set aside and listed, {read} good ones kept; 6 % bad is "
        f"{'refused' if stopped else 'trained on'}; {refused} of {len(kinds)} damaged shards made again or refused"
    )
    met = exact and stopped and refused == len(kinds)
    numbers = {"bad": len(places), "listed": len(listed), "stopped_above_limit": stopped, "shards_noticed": refused}
    return Outcome(figure, met, numbers, None, tuple(notes))


def dead_worker(bench: Bench) -> Outcome:
    """R30: SIGKILL to a worker of the preparation while it is at work."""
    whole, folder = bench.place("whole"), bench.place("worker")
    code, output = bench.run(_recipe(bench, whole, [], parts=2))
    if code:
        return Outcome(f"exit {code} without any fault", False, notes=(output[-300:],))
    recipe = _recipe(bench, folder, [], parts=2)
    trial = bench.rig.start(["run", str(recipe)], folder, first=bench.worse)
    killed = _kill_a_worker(trial.pid)
    code, starts = trial.wait(), 1
    output = trial.output
    while code == 75 and starts < 3:
        code, output = bench.run(recipe)
        starts += 1
    same = code == 0 and _fingerprint(folder) == _fingerprint(whole)
    figure = f"{'finished by itself' if starts == 1 else f'finished after {starts} starts'}, shards " + (
        "bit-identical" if same else "different"
    )
    met = killed and same and starts == 1
    numbers = {"killed": killed, "starts": starts, "identical": same}
    return Outcome(figure, met, numbers, None, () if met else (output[-300:],))


def _kill_a_worker(pid: int) -> bool:
    """Wait for the first process below the run, and end it."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for child in children_of(pid):
            with suppress(OSError):
                if b"modelwright.data.prepare.executors" in Path(f"/proc/{child}/cmdline").read_bytes():
                    os.kill(child, signal.SIGKILL)
                    return True
        time.sleep(0.005)
    return False


def _recipe(bench: Bench, folder: Path, bad: list[int], parts: int = 1) -> Path:
    """Documents in some files, some rows of them bad, prepared by as many workers and trained on."""
    lines = [json.dumps({"text": f"Walk {n} began at gate {n % 7}. " + "The path was dry. " * (n % 5)}).encode()
             for n in range(1, ROWS + 1)]  # fmt: skip
    for turn, number in enumerate(bad):
        lines[number - 1] = BAD[turn % len(BAD)]
    (folder / "walks").mkdir()
    for part in range(parts):
        data = b"\n".join(lines[part * ROWS // parts : (part + 1) * ROWS // parts]) + b"\n"
        (folder / f"walks/part-{part}.jsonl").write_bytes(data)
    sections = {
        "name": "walks",
        "output_dir": str(folder / "run"),
        "model": {"model_name_or_path": str(bench.model)},
        "prepare": {**PREPARE, "num_proc": parts},
        "pretrain": {**PRETRAIN, "data": {"dataset_name": str(folder / "walks"), "test_size": 20}},
    }
    path = folder / "recipe.yaml"
    path.write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in sections.items()), encoding="utf-8")
    return path


def _quarantined(run: Path) -> list[int]:
    """Lines of the file that are listed as set aside."""
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
    Fault("R21", "bad rows, damaged and missing shards", "1 % and 6 % of bad rows; a shard cut, flipped, deleted",
          "rows lost = rows bad, all listed; above the limit and with a bad shard nothing is trained",
          "HF Trainer and datasets: not measured", bad_rows, 20),
    Fault("R30", "a data worker killed", "SIGKILL to a process of the preparation",
          "finished by itself, the same shards", "HF Trainer: a dead loader worker ends the run (measured Nov 2026)",
          dead_worker, 20),
)  # fmt: skip
