"""benchmarks.mixed_lengths trains by the plan of three epochs and stops early; its table has a line for each case."""

from __future__ import annotations

import pytest
import torch

from benchmarks import mixed_lengths
from modelwright.errors import UsageError


@pytest.mark.parametrize("case", ["qwen3-0.6b", "dpo-llama-1b", "lora-llama-8b"])
def test_a_case_is_measured_on_a_cpu(case: str) -> None:
    torch.set_num_threads(1)
    texts = mixed_lengths.row_texts(24, 16)
    figures = mixed_lengths.measure_case(case, {"max_length": 64}, False, 2, "cpu", texts)
    ours = figures["ours"]
    assert "failed" not in ours, ours
    assert len(ours["losses"]) == 2
    assert ours["predicted_step_seconds"] and ours["predicted_memory_gb"] is not None
    lines = mixed_lengths.table([figures, {"case": "gone", "failed": "exit 1"}]).splitlines()
    assert lines[2].startswith(f"| {case}, max_length=64 | {ours['rows_per_second']} | – |")
    assert lines[3].startswith("| gone | exit 1 |")


def test_an_unknown_case_is_named() -> None:
    with pytest.raises(UsageError, match=r"no case 'gpt'; there are: qwen3-0.6b"):
        mixed_lengths.main(["gpt"])
