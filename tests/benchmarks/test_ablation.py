"""Every special path can be switched off alone, and its work is the same without it."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks import ablation, common, speed_table
from modelwright.errors import UsageError

ROOT = Path(__file__).parents[2]


def test_a_path_is_measured_on_and_off_with_the_same_losses() -> None:
    figures = ablation.measure(["selective-checkpointing"], tiny=True)
    path = figures["paths"]["selective-checkpointing"]
    assert path["largest_loss_difference"] == 0 and path["ratio"] > 0
    assert "selective-checkpointing: " in list(ablation.lines(figures))[1]


@pytest.mark.parametrize("path", ablation.PATHS, ids=ablation.NAMES)
def test_every_path_is_still_where_its_switch_expects_it(path: ablation.SpecialPath) -> None:
    assert (ROOT / "src" / "modelwright" / path.file).exists() and path.work in ablation.WORKS
    if "adamw_triton" in path.file and find_spec("triton") is None:
        pytest.skip("triton is not installed")
    with path.patch():
        pass


def test_an_unknown_path_is_answered_with_those_there_are() -> None:
    with pytest.raises(UsageError, match="--only is 'graphs'; it wants one of cuda-graphs, "):
        ablation.measure(["graphs"])


def test_a_run_that_fails_says_why() -> None:
    failed = {"failed": "OutOfMemoryError: no"}
    run = {"step_seconds": 1.0, "per_second": 2.0, "memory_gb": 3.0, "losses": [1.0]}
    path = ablation.PATHS[0]
    compared = ablation.compare(path, ablation.WORKS[path.work], [run], [failed])
    assert "ratio" not in compared
    figures = {"device": "a GPU", "tiny": False, "paths": {path.name: compared}}
    assert "off OutOfMemoryError: no" in list(ablation.lines(figures))[1]


def test_the_table_of_special_paths_is_made_from_the_result() -> None:
    result = common.load_result("ablation-gpu")
    assert result is not None
    assert ablation.table(result) in (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")


def test_the_speed_table_says_which_goals_are_met() -> None:
    variants = {"ours, bf16": {"rows_per_second": 300.0}, "TRL, a": {"rows_per_second": 60.0}}
    figures = {"sft": {"variants": variants}, "dpo": {"variants": {}}}
    sft, dpo = speed_table.lines(figures)
    assert sft.split() == ["SFT", "3", "B", "5.00", "×", "TRL", "at", "least", "3.5", "met"] and "failed" in dpo
