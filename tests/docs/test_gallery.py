"""The gallery: each report has its summary, the table says what they say, and nothing of a machine is in them."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

import pytest

GALLERY = Path(__file__).parents[2] / "docs" / "gallery"
HOURLY_COST = 4.5
ROWS = {match[1]: [cell.strip() for cell in line.strip("| ").split("|")]
        for line in (GALLERY / "README.md").read_text(encoding="utf-8").splitlines()
        if (match := re.match(r"\| \[([\w-]+)\]\(\1/report\.html\)", line))}  # fmt: skip
MACHINE_PATH = re.compile(r"/(?:tmp|work|home|root|Users|mnt|opt|var|usr|scratch)/")
REQUEST = re.compile(
    r"""https?://|url\((?!["']?data:)|@import|<(?:iframe|link|base)\b|(?:src|action)=["'](?!data:)|fetch\("""
)


def summary_of(name: str) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((GALLERY / name / "training_summary.json").read_text(encoding="utf-8"))
    return summary


def report_of(name: str) -> str:
    return (GALLERY / name / "report.html").read_text(encoding="utf-8")


def test_every_folder_is_in_the_table_and_has_a_report_and_its_summary() -> None:
    folders = {folder.name: {file.name for file in folder.iterdir()} for folder in GALLERY.iterdir() if folder.is_dir()}
    assert set(folders) == set(ROWS)
    assert all(files == {"report.html", "training_summary.json"} for files in folders.values())
    assert sum(file.stat().st_size for file in GALLERY.rglob("*.*")) < 1_000_000


@pytest.mark.parametrize("name", ROWS)
def test_gate_and_exit_code_are_those_of_the_summary_and_the_report(name: str) -> None:
    summary, cell = summary_of(name), re.sub(r" \(.*\)", "", ROWS[name][4])  # without those of earlier stages
    gate, *exit_codes = re.split(r",\s*(?:then )?", cell)
    assert summary["recipe"] == name
    assert summary["hardware"] == "NVIDIA H200"
    verdict = summary["verdict"]
    assert gate == ("no gate" if not verdict["checks"] else "open" if verdict["open"] else "closed")
    state = re.search(r'class="state ([\w-]+)"', report_of(name))
    assert state is not None
    # 3: a gate is closed, which a second command accepts; accepted in advance, the first one ends with 0
    assert exit_codes == ["0"] or ("accepted manually" in report_of(name) and exit_codes == ["3", "0"])
    assert state[1] == "finished" and verdict["open"]


@pytest.mark.parametrize("name", ROWS)
def test_loss_time_and_cost_are_those_of_the_summary(name: str) -> None:
    summary, row = summary_of(name), ROWS[name]
    change = summary["changes"]["eval_loss"]
    assert row[3].split(" (")[0] == f"{change['before']:.4g} → {change['after']:.4g}"
    cell = re.fullmatch(r"(\d+) s, \$(\d+\.\d\d)", row[2])
    assert cell is not None
    assert float(cell[2]) == pytest.approx(int(cell[1]) * HOURLY_COST / 3600, abs=0.0051)
    assert int(cell[1]) == pytest.approx(sum(summary["time"]["seconds_by_category"].values()), abs=6)


@pytest.mark.parametrize("name", ROWS)
def test_a_report_names_no_folder_of_a_machine_and_requests_nothing(name: str) -> None:
    report, summary = report_of(name), json.dumps(summary_of(name))
    for text in (report, summary):
        assert not MACHINE_PATH.search(text)
    assert "default-src 'none'" in html.unescape(report)
    assert not REQUEST.search(report)
    assert "<img" not in report
