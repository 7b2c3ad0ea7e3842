"""What strangers hand us does nothing: every reader answers with a result or a letter, and nothing of it runs."""

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

from tests.faults import canaries, supply, traversal
from tests.faults.fault import Bench
from tests.faults.fuzz import fuzz, named, targets
from tests.faults.hostile_doors import Findings, carry
from tests.faults.hostile_files import CORPUS, Place
from tests.faults.security import FAULTS

ROOT = Path(__file__).parents[2]
SEED = 20261115
FEW = {"recipe": 30, "setting": 30, "manifest": 12, "configuration": 30}
"""Readers of YAML take ten milliseconds and more for each input."""


@pytest.mark.parametrize("name", [target.name for target in targets()])
def test_no_input_makes_a_reader_fail_without_a_letter(name: str, tmp_path: Path) -> None:
    tally = fuzz(named(name), FEW.get(name, 60), SEED, tmp_path / "desk")
    assert tally.escaped == []
    assert tally.inputs >= FEW.get(name, 60)


def test_a_reader_that_fails_without_a_letter_is_noticed(tmp_path: Path) -> None:
    def careless(given: bytes, folder: Path) -> None:
        given.decode()

    tally = fuzz(replace(named("txt"), read=careless), 60, SEED, tmp_path / "desk")
    assert any(line.startswith("txt: UnicodeDecodeError") for line in tally.escaped)


def test_the_same_seed_gives_the_same_inputs(tmp_path: Path) -> None:
    seen: list[list[bytes]] = [[], []]
    for inputs in seen:
        fuzz(replace(named("json"), read=lambda given, folder, kept=inputs: kept.append(given)), 40, SEED, tmp_path)
    assert seen[0] == seen[1] and len(set(seen[0])) > 20


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory, rig: Any) -> Iterator[Bench]:
    """The short part of the scorecard, with the interpreter that all tests share."""
    made = Bench(tmp_path_factory.mktemp("security"), SEED, smoke=True, rig=rig)
    yield made
    made.close()


@pytest.mark.slow
@pytest.mark.parametrize("id", ["S1", "S2", "S3", "S4"])
def test_a_line_of_the_scorecard_is_met(id: str, bench: Bench) -> None:
    outcome = next(fault for fault in FAULTS if fault.id == id).do(bench)
    assert outcome.met, "\n".join((outcome.figure, *outcome.notes))


def test_code_that_runs_is_noticed(tmp_path: Path) -> None:
    def trusting(words: Sequence[str], folder: Path) -> tuple[int, str]:
        subprocess.run(["touch", str(tmp_path / "canary")], check=True)
        return 1, "Traceback (most recent call last)"

    found = Findings()
    pickle = next(each for each in CORPUS if each.name == "pickle called rows.pkl")
    carry(pickle, Place(tmp_path / "place", tmp_path / "canary", tmp_path), trusting, found, most_doors=1)
    assert found.executed == ["pickle called rows.pkl, by run"] and len(found.unforeseen) == 1


def test_the_pickles_of_the_corpus_are_real(tmp_path: Path) -> None:
    place = Place(tmp_path, tmp_path / "canary", tmp_path)
    subprocess.run([sys.executable, "-c", "import pickle, sys; pickle.load(sys.stdin.buffer)"], input=place.pickle)
    assert place.canary.exists(), "a payload that does nothing would prove nothing"


def test_a_secret_that_leaks_is_found(tmp_path: Path) -> None:
    def careless(words: Sequence[str], folder: Path, variables: Mapping[str, str]) -> tuple[int, str]:
        (folder / "args.json").write_text(json.dumps(dict(variables)), encoding="utf-8")
        return 0, variables["HF_TOKEN"] if words[0] == "report" else ""

    found = canaries.work(tmp_path / "desk", tmp_path, careless, short=True)
    assert [leak.partition(":")[0] for leak in found.leaks] == ["printed by report ./run", "args.json"]


def test_a_write_outside_is_found(tmp_path: Path) -> None:
    def careless(words: Sequence[str], folder: Path) -> tuple[int, str]:
        (folder.parent / "victim" / "kept.txt").write_text(" ".join(words), encoding="utf-8")
        return 0, ""

    found = traversal.lead_out(tmp_path / "root", tmp_path, careless, short=True)
    assert any("victim/kept.txt" in line for line in found.writes)


def test_the_lock_holds_every_dependency_with_hashes_and_the_versions_of_the_constraints() -> None:
    packages = {each.name: each for each in supply.read(ROOT / supply.LOCK)}
    pins = supply.pinned(ROOT / "constraints.txt")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(name for extra in ("gguf", "board", "track") for name in extras[extra])]
    missing = {supply.plain(re.split(r"[><=!~ \[;]", name)[0]) for name in wanted} - packages.keys()
    stale = {name for name, each in packages.items() if pins.get(name, each.version) != each.version}
    assert not missing and not stale, f"run: make lock ({sorted(missing | stale)})"
    assert all(each.hashes for each in packages.values())
    text = (ROOT / supply.LOCK).read_text(encoding="utf-8")
    assert not re.search(r"https?:|index-url|find-links|file:", text), "a lock names no place"


def test_a_lock_that_is_stale_or_bare_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("a-b==1.0 ; sys_platform == 'linux' \\\n    --hash=sha256:" + "0" * 64 + "\nc==2\n")
    (tmp_path / "pins").write_text("# pinned\na_b==1.1\n")
    found = supply.read(tmp_path / "lock")
    assert [(each.name, each.version, each.hashes) for each in found] == [("a-b", "1.0", 1), ("c", "2", 0)]
    assert supply.pinned(tmp_path / "pins") == {"a-b": "1.1"}
