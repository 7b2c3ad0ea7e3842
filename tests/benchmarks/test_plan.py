"""benchmarks.plan: cases at the limit of the memory, and a table that names wrong predictions."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks.plan import ALL_GPU_CASES, HELD_OUT_CASES, compare, lines, plan_case
from modelwright.plan.hardware import DeviceInfo

H200 = DeviceInfo("cuda", "NVIDIA H200", 150_109_880_320, True, 989.4e12)


@pytest.fixture(autouse=True)
def no_coefficients_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODELWRIGHT_CACHE", str(tmp_path))


def test_settings_at_the_edge_stand_on_both_sides_of_it() -> None:
    cases = {each.name: plan_case(each, H200) for each in (*ALL_GPU_CASES, *HELD_OUT_CASES) if not each.rows}
    assert len(cases) >= 5
    for name, (setting, plan, prediction) in cases.items():
        assert plan.micro_batch_size == setting.rows > 1
        assert prediction["said_to_fit"] == ("as many" in name), name
        assert 0.85 < prediction["needed_bytes"] / H200.memory < 1.25, name


def test_a_training_that_runs_out_though_it_was_said_to_fit_is_named() -> None:
    runs = []
    for number, each in enumerate(ALL_GPU_CASES[:3]):
        setting, _, prediction = plan_case(each, H200)
        run = {"setting": asdict(setting), "took": 1.0, **prediction}
        measured = {"peak_bytes": prediction["needed_bytes"], "tokens_per_second": 1e5, "accelerate_bytes": None}
        runs.append(run | (measured if number else {"ran_out": "micro-batch 16 runs out of memory"}))
    figures = compare({"device": asdict(H200), "runs": runs})
    assert len(figures["judged"]) == 2 and figures["calibration"]["H200"]["runs"] == 2
    assert lines(figures)[-1] == f"said to fit and ran out of memory: {ALL_GPU_CASES[0].name}"
