"""Cold rooms stay cold: help, checks and plans answer at once, because nothing heavy is imported for them."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
BROKEN = ROOT / "tests" / "recipe" / "broken"
COLD = ("recipe", "runs", "plan", "report", "launch", "cli")
HEAVY = ("torch", "transformers", "datasets", "trl", "peft", "accelerate")
HELP_CPU_SECONDS = 0.3
ANSWER_CPU_SECONDS = 1.0
TRIES = 10
"""Times a command may try: what else the machine does makes caches cold, and CPU seconds longer."""


def cpu_seconds(*arguments: str, limit: float, exit_code: int = 0) -> float:
    """The least CPU time that a command takes, tried until it is within its limit."""
    best = float("inf")
    for _ in range(TRIES):
        if best < limit:
            break
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            [sys.executable, "-m", "modelwright", *arguments],
            cwd=BROKEN,
            env={"PYTHONPATH": str(SOURCE), "PATH": "/usr/bin:/bin"},
            capture_output=True,
            check=False,
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert done.returncode == exit_code, done.stderr.decode()
        best = min(best, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return best


@pytest.mark.parametrize("verb", [(), ("check",), ("explain",), ("recipes",)])
def test_help_costs_under_a_third_of_a_cpu_second(verb: tuple[str, ...]) -> None:
    assert cpu_seconds(*verb, "--help", limit=HELP_CPU_SECONDS) < HELP_CPU_SECONDS


@pytest.mark.parametrize("recipe", ["many_at_once.yaml", "unknown_flat_axolotl.yaml", "yaml_billion_laughs.yaml"])
def test_a_wrong_recipe_is_answered_in_under_a_cpu_second(recipe: str) -> None:
    assert cpu_seconds("check", recipe, limit=ANSWER_CPU_SECONDS, exit_code=2) < ANSWER_CPU_SECONDS


def modules(room: str) -> list[str]:
    """Every module of a room."""
    files = sorted((SOURCE / "modelwright" / room).rglob("*.py"))
    dotted = (".".join(file.relative_to(SOURCE).with_suffix("").parts) for file in files)
    return [name.removesuffix(".__init__") for name in dotted]


@pytest.mark.parametrize("room", COLD)
def test_importing_a_cold_room_imports_nothing_heavy(room: str) -> None:
    names = modules(room)
    if not names:
        pytest.skip(f"there is no {room} yet")
    program = f"import importlib, sys\nfor name in {names!r}: importlib.import_module(name)\n"
    program += f"print(*(name for name in {HEAVY!r} if name in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": str(SOURCE), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [], f"{room} imports {done.stdout.strip()}"


def test_the_command_knows_where_each_verb_stands() -> None:
    from modelwright.cli.main import COMMANDS, build_app

    for room, verbs in COMMANDS.items():
        app = build_app(verbs[0])
        found = [told.name for told in (*app.registered_commands, *app.registered_groups)]
        assert tuple(found) == verbs, room.__name__
