"""A full disk, a read-only disk, the order of writes and syncs, and the cost of a verified checkpoint."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.faults.context import (
    FaultContext,
    FaultResult,
    FaultRow,
    FaultSkipped,
    exit_codes,
    inject,
    require_command,
    require_root,
)
from tests.faults.fork_server import RemoteCall, events_of, run_fingerprint, steps_of

TRACED = "trace=write,pwrite64,fsync,fdatasync,rename,renameat,renameat2"
UNKNOWN_UID = 1000680000
"""A user id without a user, as clusters assign them."""


@contextmanager
def small_disk(folder: Path, kilobytes: int) -> Iterator[Path]:
    """A disk of a few kilobytes, in memory."""
    require_root("mounts")
    mount_point = folder / "disk"
    mount_point.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(mount_point)], capture_output=True
    )
    if done.returncode:
        raise FaultSkipped(f"mounts are not allowed here: {done.stderr.decode().strip()}")
    try:
        yield mount_point
    finally:
        subprocess.run(["umount", "-l", str(mount_point)], check=True)


def full_disk(context: FaultContext) -> FaultResult:
    """R7: a disk with space for two checkpoints, detected before the write or by the write; then it is enlarged."""
    reference, size = context.reference(), _checkpoint_bytes(context)
    kinds = [("detected before", []), ("detected by the write", [inject("blind_to_full_disk")])]
    resumed, harmed, notes = 0, 0, []
    for kind, first in kinds:
        folder = context.fresh_folder("full")
        with small_disk(folder, int(2.7 * size / 1024)) as disk:
            recipe, where = context.recipe(folder), ("--set", f"output_dir={disk / 'run'}")
            code, output = context.run(recipe, *where, first=first)
            checkpoints = disk / "run/stages/sft/checkpoints"
            names = [path.name for path in sorted(checkpoints.iterdir())] if checkpoints.exists() else []
            subprocess.run(["mount", "-o", "remount,size=99m", str(disk)], check=True)
            again, later = context.run(recipe, *where)
            resumed_from = [event["step"] for event in events_of(disk / "run", "resumed")]
            same = again == 0 and run_fingerprint(disk / "run") == reference
            complete = [name for name in names if name.startswith("step-")]
            harmed += not complete or resumed_from[:1] != [int(complete[-1].split("-")[1])]
            resumed += code == 78 and same
            if code != 78 or not same:
                notes.append(f"{kind}: exit {code}, then {again}: {output.strip()[-200:]} {later.strip()[-200:]}")
    figure = (
        f"{resumed} of {len(kinds)} runs exited with 78, then resumed on the larger disk; {harmed} checkpoints damaged"
    )
    numbers = {"trials": len(kinds), "resumed": resumed, "checkpoints_harmed": harmed}
    return FaultResult(figure, resumed == len(kinds) and not harmed, numbers, None, tuple(notes))


def read_only(context: FaultContext) -> FaultResult:
    """R8: a read-only disk, and a folder of another user's."""
    folder = context.fresh_folder("unwritable")
    with small_disk(folder, 4096) as disk:
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        trials = [(disk / "run", []), (folder / "closed/run", [inject("drop_capabilities")])]
        recipe = context.recipe(folder)
        (folder / "closed").mkdir()
        (folder / "closed").chmod(0o555)
        steps, slowest, codes, notes = 0, 0.0, [], []
        for output_dir, first in trials:
            began = time.monotonic()
            code, output = context.run(recipe, "--set", f"output_dir={output_dir}", first=first)
            slowest = max(slowest, time.monotonic() - began)
            codes.append(code)
            steps += len(steps_of(output_dir))
            if code != 78 or "Traceback" in output:
                notes.append(f"{output_dir.parent.name}: exit {code}: {output.strip()[-300:]}")
    figure = f"error after {steps} steps and {slowest:.1f} s, exit {exit_codes(codes)}"
    met = steps == 0 and slowest < context.time_limit(5) and set(codes) == {78} and not notes
    numbers = {"steps": steps, "slowest_seconds": round(slowest, 2)}
    return FaultResult(figure, met, numbers, None, tuple(notes))


def order_of_writes(context: FaultContext) -> FaultResult:
    """R28: what would be on disk after a power cut, by the system calls that strace saw."""
    require_root("strace of another process")
    strace, folder = require_command("strace"), context.fresh_folder("power")
    log, go = folder / "calls.txt", folder / "go"
    recipe = context.recipe(folder)
    process = context.start(recipe, first=[inject("wait_for_file", path=str(go))])
    watcher = subprocess.Popen([strace, "-f", "-y", "-qq", "-e", TRACED, "-o", str(log), "-p", str(process.pid)],
                               stderr=subprocess.PIPE)  # fmt: skip
    deadline = time.monotonic() + 120
    while _tracer_pid(process.pid) == 0 and watcher.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    attached = _tracer_pid(process.pid) != 0
    go.touch()
    code = process.wait()
    watcher.wait(timeout=120)
    if not attached:
        assert watcher.stderr is not None
        raise FaultSkipped(f"strace is not allowed here: {watcher.stderr.read().decode().strip()[:120]}")
    renames, faults = check_order(log.read_text(encoding="utf-8", errors="replace"), str(folder / "run"))
    figure = f"{renames - len(faults)} of {renames} files synced, then renamed, then their folders synced"
    met = code == 0 and renames >= 10 and not faults
    return FaultResult(figure, met, {"renames": renames, "out_of_order": len(faults)}, None, tuple(faults[:10]))


CALL = re.compile(r"^\d+ +(\w+)\((.*)$")
HANDLE = re.compile(r"^\d+<([^>]*)>")
PATHS = re.compile(r'"([^"]*)"')


def check_order(text: str, root: str) -> tuple[int, list[str]]:
    """Renames inside a folder, and those out of order: data not synced before, or the parent folder not after.

    A folder renamed to its final name must have all of its files and its own entries synced. Renames to hidden names or
    into corrupt/ need no sync: losing them harms nothing.
    """
    unsynced: set[str] = set()
    waiting: str | None = None
    renames, faults = 0, []
    for call, rest in (match.groups() for match in map(CALL.match, text.splitlines()) if match):
        if call.startswith("rename"):
            source, target = PATHS.findall(rest)[:2]
            open_paths = {path for path in unsynced if path == source or path.startswith(f"{source}/")}
            if _is_final(target, root):
                renames += 1
                faults += [f"{waiting} was renamed, and its folder not synced before the next rename"] * bool(waiting)
                faults += [f"{path} was renamed before it was synced" for path in sorted(open_paths)]
                waiting = target
            unsynced = (unsynced - open_paths) | {target + path.removeprefix(source) for path in open_paths}
        elif (handle := HANDLE.match(rest)) is not None and handle.group(1).startswith(root):
            path = handle.group(1)
            if call in ("write", "pwrite64"):
                unsynced |= {path, str(Path(path).parent)}
            else:
                unsynced.discard(path)
            if call not in ("write", "pwrite64") and waiting and path == str(Path(waiting).parent):
                waiting = None
    return renames, [*faults, *([f"{waiting} was renamed, and its folder never synced"] if waiting else [])]


def _is_final(target: str, root: str) -> bool:
    """Whether a restart reads this name: inside the folder, not hidden, not under corrupt/."""
    if not target.startswith(f"{root}/"):
        return False
    parts = target.removeprefix(f"{root}/").split("/")
    return not any(part.startswith(".") or part == "corrupt" for part in parts)


def _tracer_pid(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in status.splitlines() if line.startswith("TracerPid")), 0)


def _checkpoint_bytes(context: FaultContext) -> int:
    """What one checkpoint takes."""
    from tests.faults.damage import killed_run, newest_checkpoint

    return sum(path.stat().st_size for path in newest_checkpoint(killed_run(context)).iterdir())


MEGABYTES, TURNS = 128, 9
MAX_TIMES_PLAIN, MAX_STALL = 1.25, 0.02
MINUTE = 60.0


def checkpoint_cost(context: FaultContext) -> FaultResult:
    """R26: seconds of our save compared with safetensors' save_file and one fsync."""
    folder = context.fresh_folder("cost")
    process = context.fork_server.fork(RemoteCall("tests.faults.storage", "measure_saves", (str(folder),)), folder)
    if process.wait():
        return FaultResult("it could not be measured", False, notes=(process.output[-300:],))
    seconds: dict[str, Any] = json.loads((folder / "answer.json").read_text(encoding="utf-8"))
    times, stall = seconds["verified"] / seconds["plain"], seconds["verified"] / MINUTE
    figure = f"{seconds['verified']:.2f} s for {MEGABYTES} MiB (a plain save: {seconds['plain']:.2f} s)"
    numbers = {**seconds, "times_plain": round(times, 3), "stall_share": round(stall, 5)}
    return FaultResult(figure, times <= MAX_TIMES_PLAIN and stall < MAX_STALL, numbers)


def measure_saves(folder: str) -> None:
    """Both kinds in turn, and the median of each; both are durable when they return."""
    import time
    from statistics import median

    import torch
    from safetensors.torch import save_file

    from modelwright.engine.checkpoint import CheckpointManager, LazyTensor, Snapshot
    from modelwright.runs.folder import fsync_path

    path = Path(folder)
    count = MEGABYTES // 8
    weights = {f"layer.{n}": torch.randn(1 << 21) for n in range(count)}  # 8 MiB each
    lazy = [LazyTensor(name, tuple(w.shape), w.dtype, lambda w=w: w) for name, w in weights.items()]  # type: ignore[misc]
    checkpoints = CheckpointManager(path / "verified", 2, lambda line: None)
    seconds: dict[str, list[float]] = {"plain": [], "verified": []}
    for turn in range(TURNS + 1):
        began = time.perf_counter()
        save_file(weights, path / "plain.safetensors")
        fsync_path(path / "plain.safetensors")
        middle = time.perf_counter()
        checkpoints.save(Snapshot(turn, {"cursor": {"step": turn}}, {"model.safetensors": lazy}), True)
        if turn:  # the first one warms up
            seconds["plain"].append(middle - began)
            seconds["verified"].append(time.perf_counter() - middle)
    (path / "answer.json").write_text(json.dumps({k: round(median(v), 4) for k, v in seconds.items()}), "utf-8")


FAULTS = (
    FaultRow("R7", "disk full during a save, later enlarged",
             "tmpfs with space for two checkpoints, then remounted larger",
             "resumed without a person, 0 checkpoints harmed",
             "HF Trainer: resumes only after the incomplete checkpoint is deleted by hand (measured Nov 2026)",
             full_disk, 8),
    FaultRow("R8", "an output folder that cannot be written",
             "tmpfs remounted read-only; a folder of mode 0555, without root's powers",
             "0 steps before the error, under 5 s",
             "HF Trainer: error after 0 steps and 0.3 s (measured Nov 2026)", read_only, 4),
    FaultRow("R28", "power cut (only the order of system calls checked)",
             "strace: every rename's bytes synced before it, its folder after it",
             "0 out of order", "torch DCP syncs by default; HF Trainer does not sync",
             order_of_writes, 6),
    FaultRow("R26", "no fault: the time to save a checkpoint",
             f"{MEGABYTES} MiB saved in turn: verified, and plain with one sync",
             "at most 1.25 × a plain save, under 2 % of the time", "–", checkpoint_cost, 25),
)  # fmt: skip
