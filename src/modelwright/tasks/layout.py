"""Lay documents out for one forward pass: side by side in rows, or behind one beginning that all of them share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from modelwright.data.chat import Encoded
from modelwright.data.pack import document_starts
from modelwright.engine import fp8
from modelwright.engine.task import Batch
from modelwright.models.branches import paths_of
from modelwright.recipe.training import Training
from modelwright.tasks.losses import IGNORED

ALIGNED = 16
"""Rows of frozen models are padded to a multiple of this: attention on a CPU adds up the tail of a row that fills no
whole vector in another order, and a kept state must be the one that any batch would give."""
LEAST_SHARED = 16
"""A shared beginning of fewer tokens is not worth a mask."""
LONGEST_SHARED_ROW = 1536
"""Tokens in a row behind a shared beginning; its mask grows with the square."""
FEW = 16
"""Lengths in which packed rows come where layers are compiled: rows are nearly full, so that mostly it is one, and no
layer is compiled again for another, which takes twice the seconds of the first time."""
UNMASKED = math.inf
"""The same where attention needs no mask: then one row holds all."""


@dataclass(frozen=True)
class Piece:
    """A part of a document in a row."""

    document: int
    """Which document."""
    start: int
    """Its first token here."""
    stop: int
    """The token after its last one here."""


Rows = Sequence[Sequence[Piece]]


def multiple_of(settings: Training) -> int:
    """What the length of every row must be a multiple of for the arithmetic that is asked for."""
    return fp8.MULTIPLE if settings.precision == "fp8" else 1


def packed_multiple_of(settings: Training, length: int) -> int:
    """The same for rows that are packed up to a length; where layers are compiled, only few lengths come of it."""
    least = multiple_of(settings)
    compiles = settings.torch_compile or settings.precision == "fp8"
    return least * math.ceil(length / (FEW * least)) if compiles else least


def shared_beginning(documents: Sequence[Encoded]) -> int:
    """How many tokens all documents begin with, none of which foretells a trained one; 0 where it would not pay."""
    if len(documents) < 2:
        return 0
    first = documents[0].tokens
    shared = min(len(first), min(int(np.flatnonzero(document.trained)[0]) for document in documents) - 1)
    for document in documents[1:]:
        shared = min(shared, len(document))
        differ = np.flatnonzero(document.tokens[:shared] != first[:shared])
        shared = int(differ[0]) if len(differ) else shared
    return shared if shared >= LEAST_SHARED else 0


def side_by_side(groups: Sequence[Sequence[int]], documents: Sequence[Encoded]) -> Rows:
    """Each group of documents in a row of its own, one document after the other."""
    return [[Piece(number, 0, len(documents[number])) for number in group] for group in groups]


def behind(
    beginning: int, numbers: Sequence[int], documents: Sequence[Encoded], longest: float = LONGEST_SHARED_ROW
) -> Rows:
    """Documents behind their shared beginning, which stands once in each of as few even rows as their lengths allow."""
    lengths = [len(documents[number]) - beginning for number in numbers]
    even = sum(lengths) / shared_rows(beginning, sum(lengths), longest) if lengths else 0
    rows: list[list[Piece]] = []
    filled = 0
    for number, length in zip(numbers, lengths, strict=True):
        if not rows or filled >= even:
            rows.append([Piece(number, 0, beginning)])
            filled = 0
        rows[-1].append(Piece(number, beginning, beginning + length))
        filled += length
    return rows


def shared_rows(beginning: int, tokens: float, longest: float = LONGEST_SHARED_ROW) -> int:
    """Rows that so many tokens take behind a shared beginning."""
    return max(1, math.ceil(tokens / (max(longest, 2 * beginning) - beginning)))


def lay_out(
    rows: Rows, documents: Sequence[Encoded], beginning: int = 0, multiple: int = 1, spare: bool = False
) -> Batch:
    """Rows of equal length: tokens, positions, learnt places, and branches where a beginning is shared.

    Positions begin anew with each document, which keeps packed documents apart; padding stands to the right, where
    no real token can see it, so that no mask is needed. Behind a shared beginning (branch 0) each document has its own
    branch, and a mask is made of the branches. With `spare`, the number of learnt places is such a multiple too: those
    that are too many are followed by no token, which only a model that is not given the tokens can take.
    """
    longest = max((sum(piece.stop - piece.start for piece in row) for row in rows), default=2)
    length = -(-(longest + 2 * spare) // multiple) * multiple
    tokens = np.zeros((max(1, len(rows)), length), dtype=np.int64)
    positions, branches = np.zeros_like(tokens), np.zeros_like(tokens)
    learnt: list[np.ndarray[Any, Any]] = []
    for number, row in enumerate(rows):
        start = 0
        for branch, piece in enumerate(row):
            document, stop = documents[piece.document], start + piece.stop - piece.start
            tokens[number, start:stop] = document.tokens[piece.start : piece.stop]
            positions[number, start:stop] = np.arange(piece.start, piece.stop)
            branches[number, start:stop] = branch
            learnt.append(number * length + start + np.flatnonzero(document.trained[piece.start + 1 : piece.stop]))
            start = stop
        positions[number, start:] = np.arange(length - start)
        branches[number, start:] = len(row)
    places = np.concatenate(learnt) if learnt else np.zeros(0, dtype=np.int64)
    trained = len(places)
    if spare:
        tokens[-1, -1] = IGNORED
        places = np.concatenate([places, np.full(-trained % multiple, tokens.size - 2, dtype=np.int64)])
    inputs = {"tokens": tokens, "positions": positions, "learnt": places}
    if beginning:
        inputs["branches"] = branches
    elif any(len(row) > 1 for row in rows):
        inputs["documents"] = document_starts(positions)
    seen = sum(len(documents[piece.document]) for row in rows for piece in row if piece.start or not beginning)
    return Batch(inputs={name: torch.from_numpy(value) for name, value in inputs.items()}, trained=trained, tokens=seen)


def without_mask(batch: Batch) -> Batch:
    """The same batch for attention that is told by paths who sees whom."""
    inputs = dict(batch.inputs)
    keys, starts, _ = paths_of(inputs.pop("branches"))
    return replace(batch, inputs={**inputs, "keys": keys, "starts": starts})


def places_of(rows: Rows, starts: Sequence[int], shape: Sequence[int], beginning: int = 0) -> np.ndarray[Any, Any]:
    """Where the state of each place is kept: [rows, length] int64; padding takes any.

    starts: for each document, where its first token would stand; a shared beginning stands before all of them.
    """
    places = np.zeros(tuple(shape), dtype=np.int64)
    for number, row in enumerate(rows):
        start = 0
        for piece in row:
            stop = start + piece.stop - piece.start
            first = 0 if beginning and not piece.start else starts[piece.document] + piece.start
            places[number, start:stop] = np.arange(first, first + stop - start)
            start = stop
    return places
