"""Documents of raw text as packed shards, made once and kept: concatenated and cut into rows, nothing truncated."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import xxhash

from modelwright.data.files import HALF_A_CHARACTER, Row, utf8_size
from modelwright.data.shard_writer import Block, write_part
from modelwright.data.shards import MANIFEST, Layout, seal
from modelwright.data.sources import read_training, read_validation
from modelwright.data.tokenizer import Encoder
from modelwright.errors import DataError, Problem
from modelwright.recipe.schema import Data
from modelwright.runs.folder import read_json

AT_ONCE = 256
"""Documents tokenized together."""


def pack_texts(data: Data, seed: int, beside: Path, encoder: Encoder, layout: Layout, folder: Path) -> None:
    """Leave the shards of a recipe's text in the folder; those that stand already for the same text are kept."""
    train, held_out = split(data, seed, beside)
    digest = xxhash.xxh3_128(json.dumps([encoder.fingerprint, layout.length]).encode())
    for text in (*train, "\0", *held_out):
        digest.update(text.encode())
    config = digest.hexdigest()
    if (folder / MANIFEST).exists() and read_json(folder / MANIFEST).get("config") == config:
        return
    (folder / MANIFEST).unlink(missing_ok=True)
    parts = {
        part: write_part(folder, part, layout, {data.source: _blocks(texts, encoder)}, f"{part} {config}")
        for part, texts in (("train", train), ("held_out", held_out))
        if texts
    }
    if not parts["train"]["rows"]:
        letter = f"all text together is shorter than one row of {layout.length} tokens; lower max_length"
        raise DataError([Problem(data.source, letter)])
    seal(folder, layout, parts, {"tokenizer": encoder.fingerprint, "config": config, "source": data.source})


def split(data: Data, seed: int, beside: Path) -> tuple[list[str], list[str]]:
    """The documents to train on and those held out, chosen by a hash of the seed and their text."""
    train = texts_of(read_training(data, beside), data)
    if data.validation_file:
        return train, texts_of(read_validation(data, beside), data)
    order = sorted(set(train), key=lambda text: (xxhash.xxh3_64_intdigest(f"{seed}:{text}".encode()), text))
    count = min(data.test_size.of(len(order)), len(order) - 1)
    chosen = set(order[:count])
    return [text for text in train if text not in chosen], [text for text in train if text in chosen]


def texts_of(rows: Sequence[Row], data: Data) -> list[str]:
    """The documents in the text column of rows; blank ones are passed over."""
    problems = []
    texts = []
    for row in rows:
        text = row.values.get(data.text_column)
        if isinstance(text, str) and utf8_size(text) is None:
            problems.append(Problem(row.where, HALF_A_CHARACTER))
        elif isinstance(text, str):
            texts += [text] if text.strip() else []
        else:
            seen = ", ".join(map(str, row.values))
            letter = f"there is no text in a column {data.text_column!r}; the columns are {seen}: data.text_column"
            problems.append(Problem(row.where, letter))
    if problems:
        raise DataError(problems[:20])
    if not texts:
        raise DataError([Problem(data.source, "there is no text in it")])
    return texts


def _blocks(texts: Sequence[str], encoder: Encoder) -> Iterator[Block]:
    for start in range(0, len(texts), AT_ONCE):
        documents = encoder.encode(texts[start : start + AT_ONCE])
        yield Block(len(documents.tokens), lambda documents=documents: documents)  # type: ignore[misc]
