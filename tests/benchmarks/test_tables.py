"""The figures of docs/benchmarks.md are those of benchmarks/results.

``UPDATE_GOLDEN=1 pytest tests/benchmarks/test_tables.py`` rewrites the tables.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from benchmarks.plan import page
from benchmarks.tables import MARK, TABLES, _with_torchtitan, fill, gpu_table
from tests.faults.scorecard import BEGIN, END_MARK, as_markdown

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "benchmarks.md"
PREDICTIONS = ROOT / "docs" / "reference" / "predictions.md"
RESULTS = ROOT / "benchmarks" / "results"


def test_the_tables_of_the_page_are_made_from_the_results() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert all(MARK.format(name=name) in text for name in TABLES)
    if os.environ.get("UPDATE_GOLDEN") == "1":
        PAGE.write_text(fill(text, RESULTS), encoding="utf-8")
    assert fill(text, RESULTS) == PAGE.read_text(encoding="utf-8")


def test_the_page_of_plans_is_made_from_the_results() -> None:
    now = page(json.loads((RESULTS / "plan.json").read_text(encoding="utf-8")))
    if os.environ.get("UPDATE_GOLDEN") == "1":
        PREDICTIONS.write_text(now, encoding="utf-8")
    assert PREDICTIONS.read_text(encoding="utf-8") == now


def test_a_figure_that_was_typed_by_hand_is_found() -> None:
    text = PAGE.read_text(encoding="utf-8")
    start = text.index(MARK.format(name="gpu"))
    changed = text[:start] + text[start:].replace("tokens/s", "tokens/h", 1)
    assert changed != text
    assert fill(changed, RESULTS) == fill(text, RESULTS)


def test_the_table_of_faults_is_made_from_the_results() -> None:
    rows = json.loads((RESULTS / "reliability.json").read_text(encoding="utf-8"))["figures"]["rows"]
    text = (ROOT / "docs" / "concepts" / "what-a-run-survives.md").read_text(encoding="utf-8")
    table = text.partition(BEGIN)[2].partition(END_MARK)[0]
    assert table.strip() == as_markdown({"rows": rows}).strip()
    assert f"{len(rows)} fault tests" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_each_workload_besides_pretraining_has_its_own_row_with_its_date(tmp_path: Path) -> None:
    fast = {"tokens_per_second": 16500.0, "mfu": 0.55, "memory_gb": 98.0}
    slow = {"tokens_per_second": 9000.0, "mfu": 0.3, "memory_gb": 60.0}
    figures = {
        "lora": {
            "measured": {"date": "2026-11-16T00:05:00+00:00"},
            "device": "NVIDIA H200",
            "variants": {"ours, bf16": fast, "HF Trainer and PEFT": slow},
        },
        "sft": {
            "variants": {"ours, bf16": {"rows_per_second": 210.0}, "TRL, a": {"rows_per_second": 48.0}, "TRL, b": {}}
        },
        "fp32": {"variants": {"ours, tf32": fast, "ours, fp32": slow}},
        "dpo": {
            "setting": "16-layer Llama, and more",
            "variants": {name: {"pairs_per_second": 50.0, "memory_gb": 30.0} for name in ("ours, bf16", "TRL, bf16")},
        },
        "start": {"warm": {"seconds": 14.2}, "saves": [{"share_of_a_minute": 0.011}, {"share_of_a_minute": 0.004}]},
    }
    assert gpu_table(tmp_path).count("\n") == 2, "a head, and nothing measured"
    saved = {"date": "2026-11-15T09:00:00+00:00", "machine": {"cores": 2, "cpu": "Neoverse-N1"}, "figures": figures}
    (tmp_path / "speed.json").write_text(json.dumps(saved), encoding="utf-8")
    table = gpu_table(tmp_path)
    lora = "16,500 tokens/s (55.0% MFU, 98 GB) in bf16 | HF Trainer 9,000 tokens/s | `benchmarks.speed --work lora`"
    assert f"{lora} | 2026-11-16, NVIDIA H200 |" in table
    assert "`benchmarks.speed --work sft` | 2026-11-15, 2 × Neoverse-N1 |" in table
    assert "210 rows/s | TRL 48 rows/s" in table
    assert "16 k tokens/s with TF32, 9 k tokens/s without | –" in table
    assert "DPO, 16-layer Llama, 512 prompt" in table and "50.0 pairs/s, 30 GB | TRL 50.0, 30 GB" in table
    assert "14.2 s" in table and "1.1% of the time" in table


def test_torchtitan_is_listed_with_the_other_peer_where_it_was_measured() -> None:
    absent = {"torchtitan, bf16": {"failed": "torchtitan is not installed"}}
    measured = {"torchtitan, bf16": {"tokens_per_second": 12000.0}, "torchtitan, fp8": {"tokens_per_second": 13000.0}}
    assert _with_torchtitan("HF Trainer 9,000 tokens/s", absent) == "HF Trainer 9,000 tokens/s"
    assert (
        _with_torchtitan("HF Trainer 9,000 tokens/s", measured)
        == "HF Trainer 9,000 tokens/s; torchtitan 13,000 tokens/s"
    )
    assert _with_torchtitan("–", measured) == "torchtitan 13,000 tokens/s" and _with_torchtitan("–", absent) == "–"
