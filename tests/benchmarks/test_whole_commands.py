"""benchmarks.whole_commands runs real commands with empty and with warm caches; the parts add up to the wall time."""

from __future__ import annotations

import pytest

from benchmarks import whole_commands
from modelwright.errors import UsageError


@pytest.mark.slow
def test_a_command_is_timed_from_its_start_to_its_exit() -> None:
    figures = whole_commands.measure(["sft"], ["sft.logging_steps=1"], "cpu")
    runs = figures["commands"]["sft"]
    assert list(runs) == ["empty caches", "warm caches"]
    for run in runs.values():
        assert "failed" not in run, run
        assert run["steps"] == whole_commands.STEPS["cpu"]
        assert run["first_step"] < run["wall_seconds"]
        accounted = sum(run["parts"].values()) + run["after_the_last_event"]
        assert accounted == pytest.approx(run["wall_seconds"], abs=1.0)
    [table] = whole_commands.lines(figures)
    assert table.count("| sft |") == 2


def test_a_failed_command_says_why() -> None:
    runs = {"empty caches": {"failed": "exit 2: no such file"}}
    [table] = whole_commands.lines({"commands": {"sft": runs}})
    assert table.splitlines()[-1].endswith("exit 2: no such file |")


def test_an_unknown_command_is_named() -> None:
    with pytest.raises(UsageError, match="--only is 'gpt'; it wants one of sft, survival"):
        whole_commands.main(["gpt"])
