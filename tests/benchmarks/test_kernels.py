"""The kernel profile lists idle gaps of the device, also with several streams."""

from __future__ import annotations

from benchmarks.common import MAX_GAPS, Span, gpu_idle_gaps


def test_pauses_are_between_the_end_of_all_that_ran_and_the_next() -> None:
    spans = [Span(0, 1000, "long"), Span(100, 300, "overlapping"), Span(1500, 1600, "late"), Span(1600, 1700, "last")]
    total, longest = gpu_idle_gaps(spans[::-1])
    assert (total["name"], total["milliseconds"], total["calls"]) == ("idle", 0.25, 0.5)
    assert longest["name"] == "idle between long and late"


def test_only_the_longest_pauses_are_named() -> None:
    spans = [Span(10.0 * at, 10.0 * at + 1, f"kernel {at}") for at in range(20)]
    assert len(gpu_idle_gaps(spans)) == 1 + MAX_GAPS
