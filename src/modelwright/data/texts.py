"""Documents of raw text as packed shards, made once and kept: concatenated and cut into rows, nothing truncated.

The text is read once to be known and divided, and once for each part to be packed, so that it need not fit the memory.
"""

from __future__ import annotations

import json
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from pathlib import Path

import numpy as np
import xxhash

from modelwright.data.files import Fault, Row, strictly, text_of
from modelwright.data.shard_writer import Block, write_part
from modelwright.data.shards import MANIFEST, Layout, seal
from modelwright.data.sources import local_path, training_rows, validation_rows
from modelwright.data.tokenizer import Encoder
from modelwright.errors import DataError, Problem
from modelwright.recipe.schema import Data
from modelwright.runs.folder import read_json

AT_ONCE = 256
"""Documents tokenized together."""


def pack_texts(data: Data, seed: int, beside: Path, encoder: Encoder, layout: Layout, folder: Path) -> None:
    """Leave the shards of a recipe's text in the folder; those that stand already for the same text are kept."""
    texts = _Texts(data, seed, beside)
    config = xxhash.xxh3_128_hexdigest(json.dumps([encoder.fingerprint, layout.length, texts.fingerprint]).encode())
    if (folder / MANIFEST).exists() and read_json(folder / MANIFEST).get("config") == config:
        return
    (folder / MANIFEST).unlink(missing_ok=True)
    parts = {
        part: write_part(folder, part, layout, {data.source: _blocks(some, encoder)}, f"{part} {config}")
        for part, some in texts.parts()
    }
    if not parts["train"]["rows"]:
        letter = f"all text together is shorter than one row of {layout.length} tokens; lower max_length"
        raise DataError([Problem(data.source, letter)])
    seal(folder, layout, parts, {"tokenizer": encoder.fingerprint, "config": config, "source": data.source})


class _Texts:
    """The documents of a recipe, to be read more than once: to train on, and held out by a hash of seed and text."""

    def __init__(self, data: Data, seed: int, beside: Path) -> None:
        self._data, self._seed, self._beside = data, seed, beside
        hashes, digest = array("Q"), xxhash.xxh3_128()
        for text in self._train():
            hashes.append(self._chance(text))
            digest.update(text.encode() + b"\0")
        if not hashes:
            raise DataError([Problem(data.source, "there is no text in it")])
        distinct = np.unique(np.frombuffer(hashes, dtype=np.uint64))
        count = 0 if data.validation_file else min(data.test_size.of(len(distinct)), len(distinct) - 1)
        self._limit = int(distinct[count - 1]) if count else -1
        for text in self._validation():
            digest.update(text.encode() + b"\1")
        self.fingerprint = f"{digest.hexdigest()} {self._limit}"

    def parts(self) -> Iterator[tuple[str, Iterator[str]]]:
        """Those to train on; then those held out, where there are some."""
        yield "train", (text for text in self._train() if self._chance(text) > self._limit)
        if self._limit >= 0 or self._data.validation_file:
            held_out = (text for text in self._train() if self._chance(text) <= self._limit)
            yield "held_out", chain(held_out, self._validation())

    def _train(self) -> Iterator[str]:
        return documents(strictly(training_rows(self._data, self._beside)), self._data.text_column)

    def _validation(self) -> Iterator[str]:
        return documents(strictly(validation_rows(self._data, self._beside)), self._data.text_column)

    def _chance(self, text: str) -> int:
        return xxhash.xxh3_64_intdigest(f"{self._seed}:{text}".encode())


def look(data: Data, seed: int, beside: Path) -> None:
    """Tell what is wrong with the first documents of both sides; all of them may be more than one wants to wait for."""
    named = local_path(data.source, beside)
    if named is not None and (named / MANIFEST).exists():
        return  # packed shards, which a run reads back
    for rows in (training_rows(data, beside), validation_rows(data, beside)):
        list(documents(strictly(islice(rows, AT_ONCE)), data.text_column))


def documents(rows: Iterable[Row], column: str) -> Iterator[str]:
    """The documents in the text column of rows; blank ones are passed over, and faults are raised at the end.

    Each kind of fault is told once, where it is met first: a column of another name is so in every row.
    """
    firsts: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for row in rows:
        text = text_of(row, column)
        if isinstance(text, Fault):
            if text.reason in firsts or len(firsts) < 20:
                firsts.setdefault(text.reason, text.where)
                counts[text.reason] += 1
        elif text.strip() and not firsts:
            yield text
    if firsts:
        more = {reason: f" ({counts[reason]:,} rows like it)" if counts[reason] > 1 else "" for reason in firsts}
        raise DataError([Problem(where, f"{reason}{more[reason]}") for reason, where in firsts.items()])


def _blocks(texts: Iterator[str], encoder: Encoder) -> Iterator[Block]:
    while some := list(islice(texts, AT_ONCE)):
        made = encoder.encode(some)
        yield Block(len(made.tokens), lambda made=made: made)  # type: ignore[misc]
