"""What a run survives, in a minute or two: a few trials of each fault with a fixed seed, and a judge that can fail."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import common as results
from modelwright.errors import UsageError
from tests.faults import scorecard
from tests.faults.context import FaultContext, FaultResult, FaultRow, FaultSkipped, inject
from tests.faults.fork_server import ForkServer
from tests.faults.storage import check_order

SMOKE = ("R1", "R2", "R3", "R4", "R5", "R6", "R7", "R8", "R9", "R10", "R11", "R18", "R20", "R21", "R22", "R23", "R25",
         "R28", "R29", "R30")  # fmt: skip
BY_ID = {fault.id: fault for fault in scorecard.FAULTS}


@pytest.fixture(scope="module")
def context(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultContext]:
    """One context for all tests: shared runs are made once."""
    yield FaultContext(tmp_path_factory.mktemp("bench"), scorecard.SEED, smoke=True, fork_server=fork_server)


@pytest.mark.parametrize("name", SMOKE)
def test_a_run_survives(context: FaultContext, name: str) -> None:
    row = scorecard.row(BY_ID[name], context)
    if row["verdict"] == "skipped":
        pytest.skip(row["figure"])
    assert row["verdict"] == "met", json.dumps(row, indent=1)


@pytest.mark.parametrize(("worse", "name"), [("save_in_place", "R3"), ("save_in_place", "R5"), ("unguarded", "R10")])
def test_a_worse_engine_is_reported_as_a_gap(
    context: FaultContext, tmp_path: Path, worse: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    damaged = FaultContext(tmp_path, scorecard.SEED, smoke=True, fork_server=context.fork_server)
    damaged.cached("model", lambda: context.model)
    damaged.extra_injections = (inject(worse),)
    row = scorecard.row(BY_ID[name], damaged)
    assert row["verdict"] == "gap", json.dumps(row, indent=1)


def test_what_cannot_be_injected_is_skipped_and_what_breaks_is_a_gap(tmp_path: Path) -> None:
    def lacks(context: FaultContext) -> FaultResult:
        raise FaultSkipped("needs root: mounts")

    def breaks(context: FaultContext) -> FaultResult:
        raise TimeoutError("process 7 did not end")

    def breaks_without_message(context: FaultContext) -> FaultResult:
        raise AssertionError

    context = FaultContext(tmp_path, 1)
    cases = (
        (lacks, "skipped", "needs root"),
        (breaks, "gap", "did not end"),
        (breaks_without_message, "gap", "Assert"),
    )
    for act, verdict, message in cases:
        row = scorecard.row(FaultRow("R1", "a name", "a way", "a goal", "–", act, 1), context)
        assert (row["verdict"], message in row["figure"]) == (verdict, True)


GOOD = """\
7 write(3</run/.step-1.partial/model>, "..."..., 9) = 9
7 fsync(3</run/.step-1.partial/model>) = 0
7 fsync(4</run/.step-1.partial>) = 0
7 rename("/run/.step-1.partial", "/run/step-1") = 0
7 fsync(5</run>) = 0
"""


def test_a_rename_before_its_bytes_or_without_a_sync_of_the_folder_is_found() -> None:
    assert check_order(GOOD, "/run") == (1, [])
    lines = GOOD.splitlines()
    (early,) = check_order("\n".join([lines[0], *lines[2:]]), "/run")[1]
    assert early == "/run/.step-1.partial/model was renamed before it was synced"
    (late,) = check_order("\n".join(lines[:4]), "/run")[1]
    assert late == "/run/step-1 was renamed, and its folder never synced"


def test_faults_are_chosen_by_name_and_range_and_unknown_ones_refused() -> None:
    assert [fault.id for fault in scorecard.select(["r1-R3", "R10"], ["R2"])] == ["R1", "R3", "R10"]
    assert {fault.id for fault in scorecard.select([], [])} == set(BY_ID)
    assert set(BY_ID) >= {f"R{number}" for number in range(1, 28)}
    with pytest.raises(UsageError, match="there is no fault 'R99'"):
        scorecard.select(["R99"], [])


def row_of(figure: str, verdict: str = "met") -> dict[str, Any]:
    return {"name": "a name", "injected": "a way", "figure": figure, "goal": "a goal", "verdict": verdict,
            "baseline": "–", "notes": ["seed 7"], "numbers": {}}  # fmt: skip


def test_a_part_that_is_measured_again_replaces_its_rows_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "ROOT", tmp_path)
    for rows in ({"R1": row_of("old"), "R3": row_of("kept")}, {"R1": row_of("new", "gap")}):
        scorecard.save_rows(results.result("reliability", {"rows": rows, "seed": 7, "smoke": False}))
    saved = results.load_result("reliability")
    assert saved is not None
    assert {name: row["figure"] for name, row in saved["figures"]["rows"].items()} == {"R1": "new", "R3": "kept"}
    assert scorecard.lines(saved["figures"])[-1] == "1 met, 1 gap, 0 skipped; seed 7"
    table = scorecard.as_markdown(saved["figures"])
    assert "gap: new (goal: a goal)" in table and "| kept |" in table


def test_the_page_shows_the_figures_that_were_kept() -> None:
    saved, page = results.load_result("reliability"), scorecard.page()
    assert saved is not None and page is not None
    assert scorecard.as_markdown(saved["figures"]) in page.read_text(encoding="utf-8")
