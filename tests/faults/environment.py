"""The environment of a run: unknown user, read-only root, broken compile cache, concurrent runs, changed settings."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from modelwright.launch.supervisor import package_pythonpath
from tests.faults.context import (
    FaultContext,
    FaultResult,
    FaultRow,
    FaultSkipped,
    count_text,
    inject,
    require_command,
    require_root,
)
from tests.faults.fork_server import run_fingerprint, steps_of, wait_for_step
from tests.faults.injections import flip_at
from tests.faults.storage import UNKNOWN_UID

COMPILE_SETTINGS = {"torch_compile": True, "packing": True, "max_length": 32, "max_steps": 2, "save_steps": 2,
            "gradient_accumulation_steps": 1, "held_out": 0}  # fmt: skip
"""One shape and no evaluation, so that one graph is compiled."""
COMPILE_SECONDS = 900.0
WRITABLE_ROOT = "the root stays writable"


def unknown_user(context: FaultContext) -> FaultResult:
    """R23: a cold start as on OpenShift: random user id, group 0, HOME=/, and a root that cannot be written."""
    require_root("other user ids and mounts")
    for name in ("unshare", "setpriv"):
        require_command(name)
    with _world_writable_folder(context) as folder:
        user = ["setpriv", "--reuid", str(UNKNOWN_UID), "--regid", "0", "--clear-groups"]
        source = package_pythonpath().split(os.pathsep)[0]  # this package; its dependencies are installed
        environ = ["env", "-i", "HOME=/", "PATH=/usr/bin:/bin", f"PYTHONPATH={source}", "PYTHONDONTWRITEBYTECODE=1"]
        command = [*user, *environ, sys.executable, "-m", "modelwright", "run", str(folder / "recipe.yaml")]
        script = f'{bind_mount_script(Path(source))}{_read_only_root(folder)}exec "$@"'
        done = subprocess.run(["unshare", "-m", "bash", "-c", script, "-", *command],
                              capture_output=True, text=True, cwd=folder, timeout=280, check=False)  # fmt: skip
        if "unshare:" in done.stderr:
            raise FaultSkipped(f"namespaces are not allowed here: {done.stderr.strip()[:120]}")
        steps = len(steps_of(folder / "run"))
    root = "writable" if WRITABLE_ROOT in done.stderr else "read-only"
    figure = f"{steps} of 12 steps, exit {done.returncode}; the root file system was {root}"
    met = done.returncode == 0 and steps == 12
    notes = () if met else (done.stderr.strip()[-400:],)
    return FaultResult(figure, met, {"exit_code": done.returncode, "steps": steps, "root": root}, None, notes)


@contextmanager
def _world_writable_folder(context: FaultContext) -> Iterator[Path]:
    """A folder that anybody may write, outside of those that only this user may enter, with model and recipe."""
    folder = Path(tempfile.mkdtemp(prefix="nobody-"))
    try:
        shutil.copytree(context.model, folder / "model")
        recipe = context.recipe(folder)
        recipe.write_text(
            recipe.read_text(encoding="utf-8").replace(str(context.model), str(folder / "model")), "utf-8"
        )
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o777 if path.is_dir() else 0o666)
        yield folder
    finally:
        shutil.rmtree(folder)


def bind_mount_script(package: Path) -> str:
    """Shell that replaces each unreadable parent folder of Python and of us by one with only these bind-mounted."""
    wanted = {Path(sys.base_prefix), Path(sys.prefix), package}
    paths = sorted(path for path in wanted if not wanted & set(path.parents))
    closed = {top: path for path in paths for top in reversed(path.parents) if not top.stat().st_mode & 0o001}
    tops = [top for top in closed if not closed.keys() & set(top.parents)]
    lines = []
    for number, top in enumerate(tops):
        inside = [path for path in paths if top in path.parents]
        binds = [f"$binds/{number}-{each}" for each in range(len(inside))]
        lines += [f"mkdir -p {bind} && mount --bind {path} {bind}" for path, bind in zip(inside, binds, strict=True)]
        lines.append(f"mount -t tmpfs -o mode=755 tmpfs {top}")
        lines += [f"mkdir -p {path} && mount --bind {bind} {path}" for path, bind in zip(inside, binds, strict=True)]
    setup = "binds=$(mktemp -d) && mount -t tmpfs tmpfs $binds"
    return "".join(f"{line} && " for line in [setup, *lines]) if lines else ""


def _read_only_root(folder: Path) -> str:
    """Shell after which only this folder can be written."""
    return (
        f"mount --bind {folder} {folder} && cd {folder} && "
        f"{{ mount -o remount,bind,ro / 2>/dev/null || echo '{WRITABLE_ROOT}' >&2; }} && "
    )


def broken_cache(context: FaultContext) -> FaultResult:
    """R24: files of the torch.compile cache are truncated, one kind after the other."""
    if shutil.which("cc") is None and shutil.which("gcc") is None:
        raise FaultSkipped("needs a C++ compiler: torch.compile has none to cache")
    folder = context.fresh_folder("compile")
    code, output = _compiled_run(context, folder)
    if code:
        return FaultResult(f"exit {code} with a fresh cache", False, notes=(output[-300:],))
    losses = [step["loss"] for step in steps_of(folder / "run").values()]
    kinds = sorted({_kind(path) for path in _cache_files(folder)})
    if context.smoke:
        kinds = [kind for kind in kinds if kind == ".so"]
    good, notes = 0, []
    for kind in kinds:
        damaged = context.fresh_folder("compile-damaged")
        shutil.copytree(folder / "cache", damaged / "cache", symlinks=True)
        for path in _cache_files(damaged):
            if _kind(path) == kind:
                os.truncate(path, path.stat().st_size // 2)
        code, output = _compiled_run(context, damaged)
        damaged_losses = [step["loss"] for step in steps_of(damaged / "run").values()]
        right = code == 0 and all(abs(a - b) < 1e-4 for a, b in zip(damaged_losses, losses, strict=True))
        good += right
        notes += [] if right else [f"{kind} cut: exit {code}: {output.strip()[-300:]}"]
    figure = count_text(good, len(kinds), "runs finished")
    numbers = {"kinds": len(kinds), "finished": good, "files": len(_cache_files(folder))}
    return FaultResult(figure, good == len(kinds) > 0, numbers, None, tuple(notes))


def _compiled_run(context: FaultContext, folder: Path) -> tuple[int, str]:
    recipe = context.recipe(folder, **COMPILE_SETTINGS)
    variables = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"), "TRITON_CACHE_DIR": str(folder / "cache/triton"),
             "TORCHINDUCTOR_COMPILE_THREADS": "1"}  # fmt: skip
    process = context.start(recipe, environ=variables)
    return process.wait(COMPILE_SECONDS), process.output


def _cache_files(folder: Path) -> list[Path]:
    return [path for path in (folder / "cache").rglob("*") if path.is_file() and path.stat().st_size > 1]


def _kind(path: Path) -> str:
    """A file by its suffix; graphs have none."""
    return path.suffix or "graphs"


CHANGES = (
    ("learning rate", ("--set", "sft.learning_rate=5e-4"), "sft.learning_rate was 0.001, now 0.0005"),
    ("batch", ("--set", "sft.gradient_accumulation_steps=4"), "sft.gradient_accumulation_steps was 2, now 4"),
    ("steps", ("--set", "sft.max_steps=20"), "sft.max_steps was 12, now 20"),
    ("rows", (), "data.fingerprint changed"),
    ("seed", ("--set", "seed=7"), "seed was"),
    ("model", (), "model.fingerprint changed"),
)
"""What is changed, how, and the message that must name it."""


def concurrent_runs(context: FaultContext) -> FaultResult:
    """R18: a second process in the folder of a running one."""
    reference, folder = context.reference(), context.fresh_folder("two")
    recipe = context.recipe(folder)
    running = context.start(recipe, first=[inject("slow_steps", seconds=0.4, after=2)])
    wait_for_step(folder / "run", 2)
    began = time.monotonic()
    code, output = context.run(recipe)
    seconds = time.monotonic() - began
    unharmed = running.wait() == 0 and run_fingerprint(folder / "run") == reference
    state = "unharmed" if unharmed else "harmed"
    figure = f"the second run exits with {code} after {seconds:.1f} s; the first run is {state}"
    met = code == 77 and seconds < context.time_limit(5) and unharmed and "is in use by process" in output
    numbers = {"seconds": round(seconds, 2), "exit_code": code, "unharmed": unharmed}
    return FaultResult(figure, met, numbers, None, () if met else (output[-300:],))


def changed_settings(context: FaultContext) -> FaultResult:
    """R20: resuming with another learning rate, batch, number of steps, seed, other rows, another model."""
    good, notes, changes = 0, [], CHANGES[:: 3 if context.smoke else 1]
    for what, options, message in changes:
        recipe = context.new_recipe("changed")
        context.run(recipe, first=[inject("die_at_step", step=8)])
        if what == "rows":
            with (recipe.parent / "rows.jsonl").open("a", encoding="utf-8") as rows:
                rows.write(json.dumps({"prompt": "One more?", "completion": "One more."}) + "\n")
        if what == "model":
            options = ("--set", f"model.model_name_or_path={_other_model(context)}")
        code, output = context.run(recipe, *options)
        refused = code == 77 and message in output
        good += refused
        if not refused:
            notes.append(f"{what}: exit {code}: {output.strip()[-200:]}")
    figure = count_text(good, len(changes), "changed settings named and refused (exit 77)")
    return FaultResult(figure, good == len(changes), {"changes": len(changes), "refused": good}, None, tuple(notes))


def _other_model(context: FaultContext) -> str:
    """The same model with one bit of one weight different."""
    folder = context.folder / "other-model"
    shutil.copytree(context.model, folder, dirs_exist_ok=True)
    flip_at(0.5)(folder / "model.safetensors")
    return str(folder)


FAULTS = (
    FaultRow("R23", "a random user id without a home folder",
             "cold start with a random user id, group 0, HOME=/, read-only root", "exit 0",
             "transformers and datasets fail: they cannot write to /.cache (measured Nov 2026)", unknown_user, 25),
    FaultRow("R24", "a file of torch.compile's cache cut in half",
             "each kind of file that torch.compile keeps, cut in half", "100 % of the runs finish",
             "torch 2.13: a cut .so file ends the run (measured Nov 2026)", broken_cache, 120),
    FaultRow("R18", "two runs in one folder", "the same command while the first is running",
             "the second refused in 5 s, the first unharmed",
             "HF Trainer: both runs exit with 0 and delete each other's checkpoints (measured Nov 2026)",
             concurrent_runs, 6),
    FaultRow("R20", "a setting is changed before resuming",
             "learning rate, batch, steps, seed, rows, model changed after a kill", "100 % refused by name",
             "HF Trainer: 4 of 4 changed settings accepted, one with a warning (measured Nov 2026)", changed_settings,
             12),
)  # fmt: skip
