"""benchmarks.tokenizing starts each side twice; the second start finds the tokens of the first."""

from __future__ import annotations

import pytest

from benchmarks import tokenizing
from modelwright.data.chat_tokens import MIN_CACHED_ITEMS


@pytest.mark.slow
def test_the_next_start_reads_what_the_first_one_tokenized() -> None:
    figures = tokenizing.measure(MIN_CACHED_ITEMS + 100, peer=False)
    first, following = (figures["modelwright"][start] for start in tokenizing.STARTS)
    assert first["rows"] == following["rows"] > MIN_CACHED_ITEMS
    assert following["seconds"] < first["seconds"] / 2
    [line] = tokenizing.lines(figures)
    assert line.startswith("modelwright, 2,100 rows: first start")


def test_a_side_that_failed_says_why() -> None:
    figures = {"rows": 10, "trl": {"first": {"failed": "no module named trl"}}}
    assert list(tokenizing.lines(figures)) == ["trl, 10 rows: first start no module named trl"]
