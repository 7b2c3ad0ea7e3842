"""What strangers hand us does nothing: every reader answers with a result or a letter, and nothing of it runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from modelwright.bench.reliability.fuzz import fuzz, named, targets

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
