"""A full disk, one that cannot be written, and the order in which bytes reach it."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.faults.fault import (
    Bench,
    Fault,
    Outcome,
    Skipped,
    inject,
    need_command,
    need_root,
)
from tests.faults.rig import steps_of, told, trace

TRACED = "trace=write,pwrite64,fsync,fdatasync,rename,renameat,renameat2"
ANYBODY = 1000680000
"""A user id that nobody has, as clusters give them."""


@contextmanager
def small_disk(folder: Path, kilobytes: int) -> Iterator[Path]:
    """A disk of a few kilobytes, in memory."""
    need_root("mounts")
    place = folder / "disk"
    place.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(place)], capture_output=True
    )
    if done.returncode:
        raise Skipped(f"mounts are not allowed here: {done.stderr.decode().strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def full_disk(bench: Bench) -> Outcome:
    """R7: a disk with room for two checkpoints, seen full before the write or met in it; then room is made."""
    whole, size = bench.reference(), _checkpoint_bytes(bench)
    kinds = [("seen before", []), ("met in the write", [inject("blind_to_full_disk")])]
    resumed, harmed, notes = 0, 0, []
    for word, first in kinds:
        folder = bench.place("full")
        with small_disk(folder, int(2.7 * size / 1024)) as disk:
            recipe, where = bench.recipe(folder), ("--set", f"output_dir={disk / 'run'}")
            code, output = bench.run(recipe, *where, first=first)
            checkpoints = disk / "run/stages/sft/checkpoints"
            names = [path.name for path in sorted(checkpoints.iterdir())] if checkpoints.exists() else []
            subprocess.run(["mount", "-o", "remount,size=99m", str(disk)], check=True)
            again, later = bench.run(recipe, *where)
            found = [event["step"] for event in told(disk / "run", "resumed")]
            same = again == 0 and trace(disk / "run") == whole
            kept = [name for name in names if name.startswith("step-")]
            harmed += not kept or found[:1] != [int(kept[-1].split("-")[1])]
            resumed += code == 78 and same
            if code != 78 or not same:
                notes.append(f"{word}: exit {code}, then {again}: {output.strip()[-200:]} {later.strip()[-200:]}")
    figure = f"{resumed} of {len(kinds)} told with exit 78 and resumed by the same command; {harmed} checkpoints harmed"
    numbers = {"trials": len(kinds), "resumed": resumed, "checkpoints_harmed": harmed}
    return Outcome(figure, resumed == len(kinds) and not harmed, numbers, None, tuple(notes))


def unwritable(bench: Bench) -> Outcome:
    """R8: a read-only disk, and a folder of another user's."""
    folder = bench.place("unwritable")
    with small_disk(folder, 4096) as disk:
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        trials = [(disk / "run", []), (folder / "closed/run", [inject("without_powers")])]
        recipe = bench.recipe(folder)
        (folder / "closed").mkdir()
        (folder / "closed").chmod(0o555)
        steps, slowest, codes, notes = 0, 0.0, [], []
        for place, first in trials:
            began = time.monotonic()
            code, output = bench.run(recipe, "--set", f"output_dir={place}", first=first)
            slowest = max(slowest, time.monotonic() - began)
            codes.append(code)
            steps += len(steps_of(place))
            if code != 78 or "Traceback" in output:
                notes.append(f"{place.parent.name}: exit {code}: {output.strip()[-300:]}")
    figure = f"{steps} steps before the error, told in {slowest:.1f} s, exit {', '.join(map(str, sorted(set(codes))))}"
    met = steps == 0 and slowest < bench.limit(5) and set(codes) == {78} and not notes
    numbers = {"steps": steps, "slowest_seconds": round(slowest, 2)}
    return Outcome(figure, met, numbers, None, tuple(notes))


def order_of_writes(bench: Bench) -> Outcome:
    """R28: what a power cut would find, by the kernel's own account of the calls."""
    need_root("strace of another process")
    strace, folder = need_command("strace"), bench.place("power")
    log, go = folder / "calls.txt", folder / "go"
    recipe = bench.recipe(folder)
    first = (*bench.worse, inject("wait_for_file", path=str(go)))
    trial = bench.rig.start(["run", str(recipe)], folder, first=first)
    watcher = subprocess.Popen([strace, "-f", "-y", "-qq", "-e", TRACED, "-o", str(log), "-p", str(trial.pid)],
                               stderr=subprocess.PIPE)  # fmt: skip
    deadline = time.monotonic() + 20
    while _tracer_of(trial.pid) == 0 and watcher.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    attached = _tracer_of(trial.pid) != 0
    go.touch()
    code = trial.wait()
    watcher.wait(timeout=30)
    if not attached:
        assert watcher.stderr is not None
        raise Skipped(f"strace is not allowed here: {watcher.stderr.read().decode().strip()[:120]}")
    renames, faults = check_order(log.read_text(encoding="utf-8", errors="replace"), str(folder / "run"))
    figure = f"{renames} renames, {len(faults)} of them before their bytes or followed by no sync of the folder"
    met = code == 0 and renames >= 10 and not faults
    return Outcome(figure, met, {"renames": renames, "out_of_order": len(faults)}, None, tuple(faults[:10]))


CALL = re.compile(r"^\d+ +(\w+)\((.*)$")
HANDLE = re.compile(r"^\d+<([^>]*)>")
PATHS = re.compile(r'"([^"]*)"')


def check_order(text: str, root: str) -> tuple[int, list[str]]:
    """Renames inside a folder, and what is out of order: bytes and names not synced before, the new name not after.

    A folder renamed to its final name answers for every file in it, and for its own list of names. What becomes hidden
    or is set aside needs no sync: losing that move harms nothing.
    """
    unsynced: set[str] = set()
    waiting: str | None = None
    renames, faults = 0, []
    for call, rest in (found.groups() for found in map(CALL.match, text.splitlines()) if found):
        if call.startswith("rename"):
            source, target = PATHS.findall(rest)[:2]
            left = {path for path in unsynced if path == source or path.startswith(f"{source}/")}
            if _is_final(target, root):
                renames += 1
                faults += [f"{waiting} was renamed, and its folder not synced before the next rename"] * bool(waiting)
                faults += [f"{path} was renamed before it was synced" for path in sorted(left)]
                waiting = target
            unsynced = (unsynced - left) | {target + path.removeprefix(source) for path in left}
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
    """Whether a name is one that is looked for after a restart: inside the folder, nothing hidden, not set aside."""
    if not target.startswith(f"{root}/"):
        return False
    parts = target.removeprefix(f"{root}/").split("/")
    return not any(part.startswith(".") or part == "corrupt" for part in parts)


def _tracer_of(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in status.splitlines() if line.startswith("TracerPid")), 0)


def _checkpoint_bytes(bench: Bench) -> int:
    """What one checkpoint takes."""
    from tests.faults.damage import newest, stopped

    return sum(path.stat().st_size for path in newest(stopped(bench) / "run").iterdir())


FAULTS = (
    Fault("R7", "disk full in a save, then room", "tmpfs with room for two checkpoints, then remounted larger",
          "resumed without a person, 0 checkpoints harmed",
          "HF Trainer: not resumed until a person deletes the half one (measured Nov 2026)", full_disk, 8),
    Fault("R8", "output that cannot be written",
          "tmpfs remounted read-only; a folder of mode 0555, without root's powers",
          "0 steps before the error, under 5 s", "HF Trainer: 0 steps, 0.3 s (measured Nov 2026)", unwritable, 4),
    Fault("R28", "power cut", "strace: every rename's bytes synced before it, its folder after it",
          "0 out of order", "torch DCP syncs by default; HF Trainer never does (read Nov 2026)", order_of_writes, 6),
)  # fmt: skip
