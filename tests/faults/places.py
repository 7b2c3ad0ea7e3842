"""Where a run finds itself: a user that nobody knows, a home and a root that cannot be written, a broken cache."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from modelwright.launch.supervisor import package_pythonpath
from tests.faults.disk import ANYBODY
from tests.faults.fault import Bench, Fault, Outcome, Skipped, counted, need_command, need_root
from tests.faults.rig import steps_of

COMPILED = {"torch_compile": True, "packing": True, "max_length": 32, "max_steps": 2, "save_steps": 2,
            "gradient_accumulation_steps": 1, "held_out": 0}  # fmt: skip
"""One shape and nothing measured, so that one graph is compiled."""
COMPILE_SECONDS = 900.0
WRITABLE_ROOT = "the root stays writable"


def nobody(bench: Bench) -> Outcome:
    """R23: a cold start as on OpenShift: random user id, group 0, HOME=/, and a root that cannot be written."""
    need_root("other user ids and mounts")
    for name in ("unshare", "setpriv"):
        need_command(name)
    with _open_folder(bench) as folder:
        who = ["setpriv", "--reuid", str(ANYBODY), "--regid", "0", "--clear-groups"]
        source = package_pythonpath().split(os.pathsep)[0]  # this package; what it needs is installed
        where = ["env", "-i", "HOME=/", "PATH=/usr/bin:/bin", f"PYTHONPATH={source}", "PYTHONDONTWRITEBYTECODE=1"]
        command = [*who, *where, sys.executable, "-m", "modelwright", "run", str(folder / "recipe.yaml")]
        script = f'{reachable(Path(source))}{_read_only_root(folder)}exec "$@"'
        done = subprocess.run(["unshare", "-m", "bash", "-c", script, "-", *command],
                              capture_output=True, text=True, cwd=folder, timeout=280, check=False)  # fmt: skip
        if "unshare:" in done.stderr:
            raise Skipped(f"namespaces are not allowed here: {done.stderr.strip()[:120]}")
        steps = len(steps_of(folder / "run"))
    root = "writable" if WRITABLE_ROOT in done.stderr else "read-only"
    figure = f"exit {done.returncode} after {steps} steps, root {root}"
    met = done.returncode == 0 and steps == 12
    notes = () if met else (done.stderr.strip()[-400:],)
    return Outcome(figure, met, {"exit_code": done.returncode, "steps": steps, "root": root}, None, notes)


@contextmanager
def _open_folder(bench: Bench) -> Iterator[Path]:
    """A folder that anybody may write, outside of those that only this user may enter, with model and recipe."""
    folder = Path(tempfile.mkdtemp(prefix="nobody-"))
    try:
        shutil.copytree(bench.model, folder / "model")
        recipe = bench.recipe(folder)
        recipe.write_text(recipe.read_text(encoding="utf-8").replace(str(bench.model), str(folder / "model")), "utf-8")
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o777 if path.is_dir() else 0o666)
        yield folder
    finally:
        shutil.rmtree(folder)


def reachable(here: Path) -> str:
    """Shell that hides each closed folder on the way to Python and to us behind one that holds just these."""
    wanted = {Path(sys.base_prefix), Path(sys.prefix), here}
    places = sorted(place for place in wanted if not wanted & set(place.parents))
    closed = {top: place for place in places for top in reversed(place.parents) if not top.stat().st_mode & 0o001}
    tops = [top for top in closed if not closed.keys() & set(top.parents)]
    lines = []
    for number, top in enumerate(tops):
        inside = [place for place in places if top in place.parents]
        held = [f"$held/{number}-{each}" for each in range(len(inside))]
        lines += [f"mkdir -p {keep} && mount --bind {place} {keep}" for place, keep in zip(inside, held, strict=True)]
        lines.append(f"mount -t tmpfs -o mode=755 tmpfs {top}")
        lines += [f"mkdir -p {place} && mount --bind {keep} {place}" for place, keep in zip(inside, held, strict=True)]
    made = "held=$(mktemp -d) && mount -t tmpfs tmpfs $held"
    return "".join(f"{line} && " for line in [made, *lines]) if lines else ""


def _read_only_root(folder: Path) -> str:
    """Shell after which only this folder can be written."""
    return (
        f"mount --bind {folder} {folder} && cd {folder} && "
        f"{{ mount -o remount,bind,ro / 2>/dev/null || echo '{WRITABLE_ROOT}' >&2; }} && "
    )


def broken_cache(bench: Bench) -> Outcome:
    """R24: what torch.compile has kept is cut in half, one kind of file after the other."""
    if shutil.which("cc") is None and shutil.which("gcc") is None:
        raise Skipped("needs a C++ compiler: torch.compile has none to cache")
    folder = bench.place("compile")
    code, output = _compiled_run(bench, folder)
    if code:
        return Outcome(f"exit {code} with a fresh cache", False, notes=(output[-300:],))
    losses = [step["loss"] for step in steps_of(folder / "run").values()]
    kinds = sorted({_kind(path) for path in _kept(folder)})
    if bench.smoke:
        kinds = [kind for kind in kinds if kind == ".so"]
    good, notes = 0, []
    for kind in kinds:
        damaged = bench.place("compile-damaged")
        shutil.copytree(folder / "cache", damaged / "cache", symlinks=True)
        for path in _kept(damaged):
            if _kind(path) == kind:
                os.truncate(path, path.stat().st_size // 2)
        code, output = _compiled_run(bench, damaged)
        found = [step["loss"] for step in steps_of(damaged / "run").values()]
        right = code == 0 and all(abs(a - b) < 1e-4 for a, b in zip(found, losses, strict=True))
        good += right
        notes += [] if right else [f"{kind} cut: exit {code}: {output.strip()[-300:]}"]
    figure = counted(good, len(kinds), f"kinds of files cut, and the run finished ({', '.join(kinds)})")
    numbers = {"kinds": len(kinds), "finished": good, "files": len(_kept(folder))}
    return Outcome(figure, good == len(kinds) > 0, numbers, None, tuple(notes))


def _compiled_run(bench: Bench, folder: Path) -> tuple[int, str]:
    recipe = bench.recipe(folder, **COMPILED)
    place = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"), "TRITON_CACHE_DIR": str(folder / "cache/triton"),
             "TORCHINDUCTOR_COMPILE_THREADS": "1"}  # fmt: skip
    trial = bench.rig.start(["run", str(recipe)], folder, place, bench.worse)
    return trial.wait(COMPILE_SECONDS), trial.output


def _kept(folder: Path) -> list[Path]:
    return [path for path in (folder / "cache").rglob("*") if path.is_file() and path.stat().st_size > 1]


def _kind(path: Path) -> str:
    """A file by its suffix; graphs are kept without one."""
    return path.suffix or "graphs"


FAULTS = (
    Fault("R23", "a user nobody knows, no home", "cold start with a random user id, group 0, HOME=/, read-only root",
          "exit 0", "transformers and datasets fail on /.cache (measured Nov 2026)", nobody, 25),
    Fault("R24", "a broken compile cache", "each kind of file that torch.compile keeps, cut in half",
          "100 % of the runs finish", "torch 2.13: a cut .so ends the run (measured Nov 2026)", broken_cache, 120),
)  # fmt: skip
