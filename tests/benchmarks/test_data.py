"""The data benches measure what they say, on less text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import data
from tests.faults import prepare


def test_the_corpus_is_real_text_with_planted_copies() -> None:
    texts = data.read_corpus(2)
    assert sum(map(len, texts)) >= 2_000_000
    assert texts == data.read_corpus(2)
    copies = texts[-int(len(texts) * data.COPY_FRACTION / (1 + data.COPY_FRACTION)) :]
    assert any("changed" in copy for copy in copies)


def test_near_duplicates_and_reading_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "MEGABYTES", 2)
    monkeypatch.setattr(data, "PEER_MEGABYTES", 1)
    figures: dict[str, Any] = data.measure(["near_duplicates", "quality"])
    assert figures["near_duplicates"]["modelwright_mb_per_cpu_s"] > 1
    assert figures["quality"]["precision_at_0.7"] > 0.8
    assert any("near_duplicates" in line for line in data.lines(figures))


def test_a_large_file_is_written_without_saying_the_same_twice(tmp_path: Path) -> None:
    texts = data.read_corpus(0.2)
    rows = data.write_jsonl(texts, tmp_path / "raw.jsonl", 1)
    lines = (tmp_path / "raw.jsonl").read_text(encoding="utf-8").splitlines()
    assert rows == len(lines) == len(set(lines))
    assert prepare.KILLS == 20
