"""What several GPUs should give is arithmetic that can be checked by hand."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from benchmarks import scale
from modelwright.errors import UsageError
from modelwright.plan.hardware import GPUS

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "many-nodes.md"
COMMAND = typer.Typer(add_completion=False)
COMMAND.command()(scale.main)
SURVIVAL = "SmolLM3-3B, last 2 + head"


@pytest.fixture(scope="module")
def paper() -> dict[tuple[str, str], dict[str, Any]]:
    """By GPU and case."""
    rows = scale.measure((), [GPUS[name] for name in scale.GPU_NAMES])["paper"]
    return {(row["gpu"], row["case"]): row for row in rows}


def times(row: dict[str, Any], link: str, kind: str = "times") -> dict[str, float | None]:
    return next(each for each in row["links"] if each["link"] == link)[kind]


def test_a_slower_link_never_makes_gpus_faster(paper: dict[tuple[str, str], dict[str, Any]]) -> None:
    for row in paper.values():
        for world in map(str, scale.WORLDS):
            speedups = [each["times"][world] or 0.0 for each in row["links"]]
            assert speedups == sorted(speedups, reverse=True), row
            assert [each["bytes_per_second"] for each in row["links"]] == sorted(
                (each["bytes_per_second"] for each in row["links"]), reverse=True
            )


def test_four_times_on_four_gpus_is_a_question_of_the_link(paper: dict[tuple[str, str], dict[str, Any]]) -> None:
    row = paper["L40S", SURVIVAL]
    assert row["trained_parameters"] == pytest.approx(418.9e6, rel=1e-3)
    needed = row["four_times_from_bytes_per_second"]
    assert 25e9 / 8 < needed < 100e9 / 8
    assert (times(row, "100 Gbit/s")["4"] or 0.0) >= 3.8 > (times(row, "25 Gbit/s")["4"] or 0.0)
    cached = paper["L40S", "SmolLM3-3B, last 2 + untied head, cached frozen layers"]
    assert cached["four_times_from_bytes_per_second"] > 5 * needed, "a faster GPU needs a faster link"


def test_the_seconds_on_a_slow_link_are_those_of_the_gradients(paper: dict[tuple[str, str], dict[str, Any]]) -> None:
    row = paper["H200", SURVIVAL]
    tokens = 4 * 8 * 2 * 370
    seconds = tokens / ((times(row, "10 Gbit/s")["4"] or 0.0) * row["one_gpu_tokens_per_second"])
    alone = tokens / 4 / row["one_gpu_tokens_per_second"]
    on_the_link = row["trained_parameters"] * 2 * 1.5 / (10e9 / 8)
    assert on_the_link < seconds < on_the_link + alone, "gradients in bf16, three quarters of them there and back"


def test_the_guide_has_the_figures_of_today(paper: dict[tuple[str, str], dict[str, Any]]) -> None:
    """UPDATE_GOLDEN=1 rewrites them."""
    text = GUIDE.read_text(encoding="utf-8")
    for name in scale.cases():
        rows = [paper[gpu, name] for gpu in ("L40S", "H200")]
        needed = [row["four_times_from_bytes_per_second"] for row in rows]
        cells = [f"{link * 8 / 1e9:,.0f} Gbit/s" if link else "no link" for link in needed]
        line = f"| {name} | {rows[0]['trained_parameters'] / 1e6:,.0f} M | {' | '.join(cells)} |"
        text = re.sub(rf"^\| {re.escape(name)} \|.*$", line, text, flags=re.MULTILINE)
    over = {link: times(paper["L40S", SURVIVAL], link)["4"] for link in ("100 Gbit/s", "25 Gbit/s", "10 Gbit/s")}
    sentence = re.compile(
        r"(over 100 Gbit/s \()[\d.]+(\),\s+not\s+over\s+25\s+\()[\d.]+(\)\s+or\s+10\s+\()[\d.]+(?=\))"
    )
    text, count = sentence.subn("\\g<1>{:.2f}\\g<2>{:.2f}\\g<3>{:.2f}".format(*over.values()), text)
    assert count == 1
    if os.environ.get("UPDATE_GOLDEN"):
        GUIDE.write_text(text, encoding="utf-8")
    assert GUIDE.read_text(encoding="utf-8") == text


def test_a_batch_that_is_shared_gains_less_than_one_that_grows(paper: dict[tuple[str, str], dict[str, Any]]) -> None:
    for row in paper.values():
        for each in row["links"]:
            for world, grown in each["times"].items():
                same_batch = each["times_same_batch"][world]
                assert grown is None or same_batch is None or same_batch <= grown * 1.01, (row["case"], each)


def test_what_does_not_fit_is_reported_and_a_gpu_without_nvlink_has_none(
    paper: dict[tuple[str, str], dict[str, Any]],
) -> None:
    row = paper["L40S", "Llama-7B, all weights"]
    assert not row["one_gpu_fits"]
    assert times(row, "PCIe")["2"] is None
    assert times(row, "PCIe", "sharding")["4"] == "fsdp"
    assert "NVLink" not in {each["link"] for each in row["links"]}
    assert "NVLink" in {each["link"] for each in paper["H200", SURVIVAL]["links"]}


def test_the_tables_are_printed_as_text_and_as_json() -> None:
    plain = CliRunner().invoke(COMMAND, ["--paper", "--gpu", "l40s"])
    assert plain.exit_code == 0, plain.output
    assert "L40S, SmolLM3-3B, last 2 + head: 418.9 M parameters trainable" in plain.output
    assert "does not fit" in plain.output and "had it memory enough" in plain.output
    result = json.loads(CliRunner().invoke(COMMAND, ["--paper", "--gpu", "L40S", "--json"]).stdout)
    assert "measured" not in result["figures"]
    assert {row["gpu"] for row in result["figures"]["paper"]} == {"L40S"}


def test_measured_ranks_are_printed_with_the_load_of_the_machine() -> None:
    rank = {"tokens_per_second": 500.0, "efficiency": 0.9, "fastest_efficiency": 0.95}
    lines = scale.lines({"measured": {"setting": "tiny", "load_before": 3.0, "ranks": {"2": rank}}, "paper": []})
    assert lines[1] == "2 ranks: 500 tokens/s, efficiency 90% (by the fastest steps 95%)"
    assert lines[2].startswith("the machine was busy (3 ")


def test_an_unknown_gpu_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="--gpu is 'K80'; known are T4"):
        scale.gpu_by_name("K80")


@pytest.mark.parametrize("text", [None, "{", "[]", '{"runs": []}'])
def test_judging_runs_that_are_missing_is_a_usage_error(text: str | None, tmp_path: Path) -> None:
    from benchmarks.plan import read_runs

    path = tmp_path / "runs.json"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=r"it wants a runs\.json that benchmarks.plan --into FOLDER has written"):
        read_runs([path])
