"""What the data verbs say on a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

GREEN, PLAIN = "\x1b[32m", "\x1b[0m"
MOST_SHOWN, FEW_SHOWN = 20, 3
"""Problems shown one by one: few where all are of one kind."""


def audit_lines(name: str, told: dict[str, Any], quarantine: str) -> Iterator[str]:
    """An audit as lines, problems first."""
    alike = len(told["reasons"]) == 1
    for problem in told["problems"][: FEW_SHOWN if alike else MOST_SHOWN]:
        yield f"{problem['where']}: {problem['reason']}"
    good = "all can be used" if told["rows"] else "there is nothing in it"
    bad = f"{told['bad']:,} cannot be used and are listed in {quarantine}" if told["bad"] else good
    yield f"{name}: {told['rows']:,} rows, {bad}"
    if "lengths" not in told:
        return
    lengths, cut, twice, split = told["lengths"], told["truncated"], told["duplicates"], told["split"]
    yield (
        f"  tokens      {told['tokens']:,} (by {told['tokens_counted_by']}); half of the rows have at most "
        f"{lengths['median']:,}, 99 % at most {lengths['p99']:,}, the longest {lengths['longest']:,}"
    )
    yield f"  lengths     {_spark(lengths['counts'])}  {lengths['bins'][0]} to {lengths['longest']:,} tokens"
    lost = f"{cut['lost_tokens']:,} tokens at max_length {told['max_length']}"
    yield f"  truncated   {cut['rows']:,} rows ({cut['share']:.1%}) lose {lost}"
    often = f"; one stands {twice['most_often']} times: {twice['for_example']}" if twice["exact"] else ""
    yield f"  duplicates  {twice['exact']:,} the same, {twice['near']:,} nearly the same{often}"
    yield (
        f"  split       {split['train_rows']:,} to train on, {split['held_out_rows']:,} held out; "
        f"{split['questions_on_both_sides']} questions on both sides; a split by rows alone would leak "
        f"{split['leak_of_a_random_split']:.0%}"
    )
    padding = told["padding"]
    yield f"  padding     {padding['padded']:.1%} of a batch as rows come, {padding['packed']:.1%} packed"


def _spark(counts: Sequence[int]) -> str:
    """A histogram in a line."""
    marks, top = " ▁▂▃▄▅▆▇█", max([*counts, 1])
    return "".join(marks[-(-count * 8 // top)] for count in counts)


def coloured(pieces: Sequence[tuple[str, bool]], colours: bool) -> str:
    """Trained text in green, or between ⟦ and ⟧ where there are no colours; nothing that a terminal would act on."""
    before, after = (GREEN, PLAIN) if colours else ("⟦", "⟧")
    return "".join(f"{before}{_safe(text)}{after}" if trained else _safe(text) for text, trained in pieces)


def _safe(text: str) -> str:
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "�" for letter in text)
