"""benchmarks.decoding measures decoder, generate and a real server with a tiny model, and says what failed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("starlette", reason="serving needs the extra dashboard")
pytest.importorskip("uvicorn", reason="serving needs the extra dashboard")

from benchmarks import decoding
from modelwright.errors import UsageError


def test_every_part_is_measured_on_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.set_num_threads(1)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setitem(decoding.PARTS, "broken", lambda bench: bench.nothing)
    decoding.main(["decoder", "generate", "broken", "serve", "answers"], "cpu", 300, tmp_path / "figures.json")
    result = json.loads((tmp_path / "figures.json").read_text())
    rows = result["figures"]["rows"]
    assert rows.pop("broken") == {"failed": "AttributeError: 'Bench' object has no attribute 'nothing'"}
    assert len(rows) == 10 and not [row for row in rows.values() if "failed" in row or "error" in row], rows
    served = {name: row for name, row in rows.items() if name.startswith("serve")}
    assert [(row["lost"], row["of"]) for row in served.values()] == [(0, 2), (0, 8), (0, 8), (0, 8)]
    assert result["machine"]["torch"] and result["figures"]["device"] == "cpu"
    lines = capsys.readouterr().out.splitlines()
    assert "| broken | failed: AttributeError: 'Bench' object has no attribute 'nothing' | |" in [
        line.replace("  ", " ") for line in lines
    ]


def test_an_unknown_part_is_named() -> None:
    with pytest.raises(UsageError, match=r"no part 'decode'; there are: decoder, generate"):
        decoding.main(["decode"])
