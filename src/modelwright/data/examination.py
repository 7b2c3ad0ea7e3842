"""Evaluation sets as hashes of their word runs, to keep what an examination asks out of what is learnt."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from modelwright.data import shingles, sources
from modelwright.data.dedup import contaminated
from modelwright.data.files import Fault
from modelwright.data.shingles import Array, Words
from modelwright.data.work import Work, put, put_facts

FEWEST = 4
"""Words below which an evaluation text says too little to be looked for."""


@dataclass(frozen=True)
class Examination:
    """What is asked, by the number of words in a run."""

    runs: dict[int, Array]
    """Sorted hashes of all runs of so many words: [count] uint32."""

    def asks(self, lots: Sequence[Words]) -> Array:
        """Whether each document holds a run of words that is asked: [documents] bool."""
        found = [contaminated(shingles.joined([lot.shingles(size) for lot in lots]), known)
                 for size, known in self.runs.items()]  # fmt: skip
        return np.logical_or.reduce(found) if found else np.zeros(sum(len(lot.edges) - 1 for lot in lots), np.bool_)

    @classmethod
    def read(cls, work: Work, step: str) -> Self:
        """As it was written for the workers."""
        sizes = work.facts(f"exam-{step}")["sizes"]
        return cls({int(size): np.array(work.array(f"exam-{step}", 0, f"runs-{size}")) for size in sizes})


def write(work: Work, step: str, names: Iterable[str], ngram: int, beside: Path) -> dict[str, Any]:
    """Read evaluation sets, every text in every column, and write their runs for the workers."""
    name = f"exam-{step}"
    if not work.done(name):
        texts: list[str] = []
        skipped = 0
        for source in names:
            for item in sources.read(source, None, beside):
                if not isinstance(item, Fault):
                    texts += _texts(item.values)
        runs: dict[int, list[Array]] = {}
        for lot in shingles.words(texts):
            counts = np.diff(lot.edges)
            skipped += int((counts < FEWEST).sum())
            for size in sorted({*counts[(counts >= FEWEST) & (counts < ngram)].tolist(), ngram}):
                found = lot.shingles(size)
                exact = found.counts > 0 if size == ngram else counts == size
                runs.setdefault(int(size), []).append(found.hashes[np.repeat(exact, found.counts)])
        with work.making(name) as folder:
            for size, lots in runs.items():
                put(folder, f"runs-{size}", np.unique(np.concatenate(lots)))
            put_facts(folder, {"sizes": sorted(runs), "texts": len(texts), "too_short": skipped})
    return work.facts(name)


def _texts(values: Any) -> Iterable[str]:
    """Every text in a value, however deep."""
    if isinstance(values, str):
        yield values
    elif isinstance(values, dict):
        for value in values.values():
            yield from _texts(value)
    elif isinstance(values, list):
        for value in values:
            yield from _texts(value)
