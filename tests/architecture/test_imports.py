"""Imports go downward only, between packages and modules; the torch-free packages never import torch."""

from __future__ import annotations

import ast
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
BROKEN_RECIPES = ROOT / "tests" / "recipe" / "broken"
LAYERS = (
    ("errors",),
    ("recipe", "runs"),
    ("plan", "data", "models", "report"),
    ("engine", "launch", "cluster", "serve"),
    ("tasks",),
    ("stages",),
    ("cli",),
)
LAYER_OF = {package: number for number, layer in enumerate(LAYERS) for package in layer}
TORCH_FREE = ("recipe", "runs", "plan", "report", "launch", "cluster", "cli")
HEAVY = ("torch", "transformers", "datasets", "trl", "peft", "accelerate")
HELP_CPU_SECONDS = 0.3
CHECK_CPU_SECONDS = 1.0
REFERENCE_CPU_SECONDS = 0.25
"""What Python takes to start and to add ten million numbers on the machine where the limits were set."""
ATTEMPTS = 10
"""Repetitions of a timed command; the fastest counts, because other processes make caches cold."""
FILES = sorted((SOURCE / "modelwright").rglob("*.py"))


def module_name(file: Path) -> str:
    """The dotted name of a source file."""
    return ".".join(file.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")


def package_name(module: str) -> str:
    """The package directly below modelwright that a module is in; the root has none."""
    return (*module.split("."), "")[1]


MODULES = {module_name(file) for file in FILES}


def imported_modules(tree: ast.AST, module: str, is_package: bool = False) -> Iterator[tuple[int, str]]:
    """Line and dotted name of every import of our own modules, also those inside functions."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parts = module.split(".")
            above = ".".join(parts[: len(parts) + is_package - node.level]) if node.level else ""
            base = ".".join(part for part in (above, node.module) if part)
            # the imported name may be a module (`engine.trainer`) or a symbol in one (`engine.task.Task`)
            names = [f"{base}.{alias.name}" for alias in node.names]
        for name in names:
            if name.split(".")[0] == "modelwright":
                yield getattr(node, "lineno", 0), name


def upward_imports(text: str, module: str) -> list[str]:
    """Every import from a package that is not below, with its line."""
    here = package_name(module)
    return [
        f"{line}: {here} imports {package}"
        for line, name in dict.fromkeys(imported_modules(ast.parse(text), module))
        if (package := package_name(name)) in LAYER_OF and package != here and LAYER_OF[package] >= LAYER_OF[here]
    ]


@pytest.mark.parametrize("file", FILES, ids=module_name)
def test_a_package_imports_only_from_lower_layers(file: Path) -> None:
    module = module_name(file)
    if package_name(module) in ("", "__main__"):
        return
    problems = upward_imports(file.read_text(encoding="utf-8"), module)
    assert not problems, "\n".join(f"{file.relative_to(ROOT)}:{line}" for line in problems)


def test_every_package_has_a_layer() -> None:
    packages = {package_name(module) for module in MODULES} - {"", "__main__"}
    assert packages <= set(LAYER_OF), f"no layer for {', '.join(sorted(packages - set(LAYER_OF)))}"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("from modelwright.tasks.sft import SftTask", "1: engine imports tasks"),
        ("def warm():\n    import modelwright.stages.pipeline", "2: engine imports stages"),
        ("from modelwright import cli", "1: engine imports cli"),
        ("from ..serve.generate import TextGenerator", "1: engine imports serve"),
        ("from modelwright.cluster import lint", "1: engine imports cluster"),
    ],
)
def test_an_import_upwards_or_sideways_is_noticed(text: str, problem: str) -> None:
    assert upward_imports(text, "modelwright.engine.trainer") == [problem]


def test_imports_downwards_and_within_the_package_are_fine() -> None:
    lines = [
        "from modelwright import __version__, errors",
        "from modelwright.engine.distributed import World",
        "from .spike_guard import SpikeGuard",
        "import torch",
    ]
    assert upward_imports("\n".join(lines), "modelwright.engine.trainer") == []


def module_graph() -> dict[str, set[str]]:
    """Which of our modules each one imports when it is imported itself."""
    graph: dict[str, set[str]] = {}
    for file in FILES:
        module = module_name(file)
        tree = ast.parse(file.read_text(encoding="utf-8"))
        top_level = ast.Module(
            body=[node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)], type_ignores=[]
        )
        graph[module] = set()
        for _, name in imported_modules(top_level, module, file.name == "__init__.py"):
            target = name if name in MODULES else name.rpartition(".")[0]
            if target in MODULES and target != module:
                graph[module].add(target)
    return graph


def find_cycle(graph: dict[str, set[str]]) -> list[str]:
    """One circle of imports, or nothing."""
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return []
        for target in sorted(graph.get(module, ())):
            if cycle := visit(target, (*path, module)):
                return cycle
        done.add(module)
        return []

    return next((cycle for module in sorted(graph) if (cycle := visit(module, ()))), [])


def test_modules_do_not_import_each_other_in_a_circle() -> None:
    assert not find_cycle(module_graph())


def test_a_circle_is_noticed() -> None:
    assert find_cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]


@pytest.mark.parametrize("package", TORCH_FREE)
def test_importing_a_torch_free_package_imports_nothing_heavy(package: str) -> None:
    names = sorted(module for module in MODULES if package_name(module) == package)
    assert names
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
    assert done.stdout.split() == [], f"{package} imports {done.stdout.strip()}"


def cpu_seconds(*arguments: str, limit: float, exit_code: int = 0) -> float:
    """The least CPU time of a command, repeated until it is within its limit; on a slower machine, or one whose other
    processes make it slower, so much less as a fixed sum takes longer there."""
    best = float("inf")
    for _ in range(ATTEMPTS):
        if best < limit:
            break
        slowness = max(1.0, _cpu_seconds_of("-c", "sum(range(10_000_000))") / REFERENCE_CPU_SECONDS)
        best = min(best, _cpu_seconds_of("-m", "modelwright", *arguments, exit_code=exit_code) / slowness)
    return best


def _cpu_seconds_of(*arguments: str, exit_code: int = 0) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=BROKEN_RECIPES,
        env={"PYTHONPATH": str(SOURCE), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        check=False,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == exit_code, done.stderr.decode()
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.parametrize("command", [(), ("check",), ("explain",), ("recipes",)])
def test_help_costs_under_a_third_of_a_cpu_second(command: tuple[str, ...]) -> None:
    assert cpu_seconds(*command, "--help", limit=HELP_CPU_SECONDS) < HELP_CPU_SECONDS


@pytest.mark.parametrize("recipe", ["many_at_once.yaml", "unknown_flat_axolotl.yaml", "yaml_billion_laughs.yaml"])
def test_a_wrong_recipe_is_answered_in_under_a_cpu_second(recipe: str) -> None:
    assert cpu_seconds("check", recipe, limit=CHECK_CPU_SECONDS, exit_code=2) < CHECK_CPU_SECONDS


def test_each_command_is_registered_by_the_module_that_lists_it() -> None:
    from modelwright.cli.main import COMMANDS, build_app

    for module, commands in COMMANDS.items():
        app = build_app(commands[0])
        entries = (*app.registered_commands, *app.registered_groups)
        registered = [entry.name for entry in entries if not entry.hidden]
        assert tuple(registered) == commands, module.__name__
