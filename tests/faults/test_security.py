"""Hostile inputs do nothing: every reader returns a result or raises our error, and no code of theirs runs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.faults import leaks
from tests.faults.context import FaultContext
from tests.faults.fuzz import fuzz, target_by_name, targets
from tests.faults.hostile import CORPUS, Findings, HostileFolder, run_entry_points
from tests.faults.security import FAULTS, LOCK, normalized_name, read_constraints, read_lock

ROOT = Path(__file__).parents[2]
SEED = 20261115
FEW = {"recipe": 30, "setting": 30, "manifest": 12, "configuration": 30}
"""Readers of YAML take ten milliseconds and more for each input."""


@pytest.mark.parametrize("name", [target.name for target in targets()])
def test_no_input_makes_a_reader_fail_without_an_error_of_ours(name: str, tmp_path: Path) -> None:
    counts = fuzz(target_by_name(name), FEW.get(name, 60), SEED, tmp_path / "desk")
    assert counts.escaped == []
    assert counts.inputs >= FEW.get(name, 60)


def test_a_reader_that_fails_without_an_error_of_ours_is_noticed(tmp_path: Path) -> None:
    def careless(data: bytes, folder: Path) -> None:
        data.decode()

    counts = fuzz(replace(target_by_name("txt"), read=careless), 60, SEED, tmp_path / "desk")
    assert any(line.startswith("txt: UnicodeDecodeError") for line in counts.escaped)


def test_the_same_seed_gives_the_same_inputs(tmp_path: Path) -> None:
    inputs_of_runs: list[list[bytes]] = [[], []]
    for inputs in inputs_of_runs:
        fuzz(
            replace(target_by_name("json"), read=lambda data, folder, recorded=inputs: recorded.append(data)),
            40,
            SEED,
            tmp_path,
        )
    assert inputs_of_runs[0] == inputs_of_runs[1] and len(set(inputs_of_runs[0])) > 20


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory, fork_server: Any) -> Iterator[FaultContext]:
    """The short part of the scorecard, with the interpreter that all tests share."""
    context = FaultContext(tmp_path_factory.mktemp("security"), SEED, smoke=True, fork_server=fork_server)
    yield context
    context.close()


@pytest.mark.slow
@pytest.mark.parametrize("id", ["S1", "S2", "S3", "S4"])
def test_a_line_of_the_scorecard_is_met(id: str, context: FaultContext) -> None:
    result = next(fault for fault in FAULTS if fault.id == id).run(context)
    assert result.met, "\n".join((result.figure, *result.notes))


def test_code_that_runs_is_noticed(tmp_path: Path) -> None:
    def trusting(arguments: Sequence[str], folder: Path) -> tuple[int, str]:
        subprocess.run(["touch", str(tmp_path / "canary")], check=True)
        return 1, "Traceback (most recent call last)"

    findings = Findings()
    pickle = next(each for each in CORPUS if each.name == "pickle called rows.pkl")
    run_entry_points(
        pickle, HostileFolder(tmp_path / "place", tmp_path / "canary", tmp_path), trusting, findings, max_commands=1
    )
    assert findings.executed == ["pickle called rows.pkl, by run"] and len(findings.crashes) == 1


def test_the_pickles_of_the_corpus_are_real(tmp_path: Path) -> None:
    target = HostileFolder(tmp_path, tmp_path / "canary", tmp_path)
    subprocess.run([sys.executable, "-c", "import pickle, sys; pickle.load(sys.stdin.buffer)"], input=target.pickle)
    assert target.canary.exists(), "a payload that does nothing would prove nothing"


def test_a_secret_that_leaks_is_found(tmp_path: Path) -> None:
    def careless(arguments: Sequence[str], folder: Path, variables: Mapping[str, str]) -> tuple[int, str]:
        (folder / "args.json").write_text(json.dumps(dict(variables)), encoding="utf-8")
        return 0, variables["HF_TOKEN"] if arguments[0] == "report" else ""

    findings = leaks.search_leaks(tmp_path / "desk", tmp_path, careless, short=True)
    assert [leak.partition(":")[0] for leak in findings.leaks] == ["printed by report ./run", "args.json"]


def test_a_write_outside_is_found(tmp_path: Path) -> None:
    def careless(arguments: Sequence[str], folder: Path) -> tuple[int, str]:
        (folder.parent / "victim" / "kept.txt").write_text(" ".join(arguments), encoding="utf-8")
        return 0, ""

    findings = leaks.run_traversal(tmp_path / "root", tmp_path, careless, short=True)
    assert any("victim/kept.txt" in line for line in findings.writes)


def test_the_lock_holds_every_dependency_with_hashes_and_the_versions_of_the_constraints() -> None:
    packages = {each.name: each for each in read_lock(ROOT / LOCK)}
    pins = read_constraints(ROOT / "constraints.txt")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(name for extra in ("gguf", "dashboard", "track") for name in extras[extra])]
    missing = {normalized_name(re.split(r"[><=!~ \[;]", name)[0]) for name in wanted} - packages.keys()
    stale = {name for name, each in packages.items() if pins.get(name, each.version) != each.version}
    assert not missing and not stale, f"run: make lock ({sorted(missing | stale)})"
    assert all(each.hashes for each in packages.values())
    text = (ROOT / LOCK).read_text(encoding="utf-8")
    assert not re.search(r"https?:|index-url|find-links|file:", text), "a lock names no place"


def test_a_lock_that_is_stale_or_bare_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("a-b==1.0 ; sys_platform == 'linux' \\\n    --hash=sha256:" + "0" * 64 + "\nc==2\n")
    (tmp_path / "pins").write_text("# pinned\na_b==1.1\n")
    packages = read_lock(tmp_path / "lock")
    assert [(each.name, each.version, each.hashes) for each in packages] == [("a-b", "1.0", 1), ("c", "2", 0)]
    assert read_constraints(tmp_path / "pins") == {"a-b": "1.1"}
