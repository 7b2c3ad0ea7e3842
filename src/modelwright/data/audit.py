"""Look at data before it is trained on: every problem with its place, and what the numbers foretell. Needs no torch."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from modelwright.data import dedup, minhash, sources
from modelwright.data.conversations import converse, split
from modelwright.data.files import Fault, Row, text_of
from modelwright.data.pack import pack
from modelwright.data.preferences import pair_up
from modelwright.data.shingles import Array, shingle
from modelwright.data.stream import Order
from modelwright.data.summary import histogram
from modelwright.data.tokenizer import Encoder
from modelwright.errors import DataError, Problem
from modelwright.recipe.schema import Data

Kind = Literal["conversations", "pairs", "text"]
CHARACTERS_PER_TOKEN = 4.0
"""What a token stands for where no tokenizer is at hand."""
OVERHEAD = 5
"""Tokens that a chat template adds to a turn, about."""


@dataclass(frozen=True)
class Item:
    """A usable row, as far as an audit needs it."""

    where: str
    """Where it was found."""
    text: str
    """All its words."""
    turns: int
    """Messages in it."""
    group: str
    """What it is split by."""
    question: str
    """What is asked, which should not stand on both sides, whatever the split goes by."""


@dataclass(frozen=True)
class Frame:
    """What the data is going to be used for."""

    kind: Kind
    """Conversations, pairs of answers, or raw text."""
    max_length: int
    """Longest row in tokens."""
    batch: int
    """Rows a device takes at once."""
    seed: int
    """Decides the split and the order."""
    encoder: Encoder | None = None
    """The tokenizer, where its folder is at hand."""


@dataclass
class Audit:
    """What was found."""

    rows: int = 0
    """Rows that were read."""
    faults: list[Fault] = field(default_factory=list)
    """Rows that cannot be used."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What the usable rows foretell."""

    @property
    def bad_share(self) -> float:
        """Share of rows that cannot be used."""
        return len(self.faults) / max(1, self.rows)

    def as_json(self, most: int = 50) -> dict[str, Any]:
        """For machines: the first problems, and all the numbers."""
        reasons = Counter(_kind_of(fault.reason) for fault in self.faults)
        problems = [{"where": f.where, "reason": f.reason, "found": f.found} for f in self.faults[:most]]
        return {"rows": self.rows, "bad": len(self.faults), "bad_share": round(self.bad_share, 4),
                "reasons": dict(reasons.most_common()), "problems": problems, **self.facts}  # fmt: skip


def audit(data: Data, frame: Frame, beside: Path) -> Audit:
    """Read everything once, set aside what cannot be used, and measure the rest."""
    found = Audit()
    items = list(_usable(sources.read(data.source, data, beside), data, frame.kind, found))
    held = list(_usable(sources.read(data.validation_file, None, beside), data, frame.kind, found)) if (
        data.validation_file) else None  # fmt: skip
    if not items:
        return found
    lengths = _lengths([*items], frame)
    found.facts = {
        "kind": frame.kind,
        "tokens_counted_by": "the model's tokenizer" if frame.encoder else "4 characters a token",
        "tokens": int(lengths.sum()),
        "lengths": histogram(lengths),
        "max_length": frame.max_length,
        "truncated": _truncated(lengths, frame),
        "duplicates": _duplicates(items, data.system_prompt or ""),
        "split": _overlap(items, held, data, frame.seed),
        "padding": _padding(lengths, frame),
    }
    return found


def _usable(rows: Iterator[Row | Fault], data: Data, kind: Kind, found: Audit) -> Iterator[Item]:
    read: dict[Kind, Callable[[Row, Data], Item]] = {"conversations": _conversation, "pairs": _pair, "text": _text}
    for row in rows:
        found.rows += 1
        if isinstance(row, Fault):
            found.faults.append(row)
            continue
        try:
            yield read[kind](row, data)
        except DataError as error:
            shown = json.dumps(row.values, ensure_ascii=False, default=str)[:120]
            found.faults.append(Fault(row.where, error.problems[0].message, shown))


def _conversation(row: Row, data: Data) -> Item:
    made = converse([row], data)[0]
    text = "\n".join(turn["content"] for turn in made.messages)
    return Item(row.where, text, len(made.messages), made.group, _folded(made.question))


def _pair(row: Row, data: Data) -> Item:
    pairs = pair_up([row], data)
    if not pairs:
        raise DataError([Problem(row.where, "the two answers are the same; there is nothing to prefer")])
    made = pairs[0]
    longer = max((made.chosen, made.rejected), key=lambda side: sum(len(turn["content"]) for turn in side))
    turns = (*made.prompt, *longer)
    return Item(row.where, "\n".join(turn["content"] for turn in turns), len(turns), made.group, made.group)


def _text(row: Row, data: Data) -> Item:
    text = text_of(row, data.text_column)
    if isinstance(text, Fault):
        raise DataError([Problem(text.where, text.reason)])
    if not text.strip():
        raise DataError([Problem(row.where, f"{data.text_column!r} is empty; it wants text")])
    group = str(row.values.get(data.split_by)) if data.split_by else text
    return Item(row.where, text, 0, group, group)


def _folded(text: str) -> str:
    """A text as it is compared: small letters, single spaces."""
    return " ".join(text.lower().split())


def _kind_of(reason: str) -> str:
    """A reason without what differs from row to row."""
    return reason.partition(";")[0].partition(" (")[0].partition(" is {")[0]


def _lengths(items: Sequence[Item], frame: Frame) -> Array:
    """Tokens of each row: its words, and about what the chat template adds."""
    texts = [item.text for item in items]
    if frame.encoder:
        words = frame.encoder.encode(texts).lengths
    else:
        words = np.array([max(1, round(len(text) / CHARACTERS_PER_TOKEN)) for text in texts])
    return np.asarray(words + OVERHEAD * np.array([item.turns for item in items]))


def _truncated(lengths: Array, frame: Frame) -> dict[str, Any]:
    if frame.kind == "text":  # packed, never cut
        return {"rows": 0, "share": 0.0, "lost_tokens": 0}
    over = np.maximum(lengths - frame.max_length, 0)
    share = float((over > 0).mean())
    return {"rows": int((over > 0).sum()), "share": round(share, 4), "lost_tokens": int(over.sum())}


def _duplicates(items: Sequence[Item], system_prompt: str) -> dict[str, Any]:
    """Rows that say the same; a long system prompt, which all rows share, would make all of them nearly the same."""
    texts = [item.text.removeprefix(f"{system_prompt}\n") for item in items]
    times = Counter(texts)
    signatures = minhash.signatures(shingle(texts, minhash.SIZE))
    everyone = np.ones(len(texts), dtype=np.bool_)
    edges = [dedup.band_edges(keys, everyone, lambda numbers: signatures[numbers], 0.7)
             for keys in minhash.band_keys(signatures)]  # fmt: skip
    lowest = dedup.refined(dedup.clusters(len(texts), np.concatenate(edges)), lambda n: signatures[n], 0.7)
    near = int((lowest != np.arange(len(texts))).sum())
    exact = len(texts) - len(times)
    most = times.most_common(1)[0]
    return {"exact": exact, "near": max(0, near - exact), "most_often": most[1],
            "for_example": " ".join(most[0].split())[:100] if most[1] > 1 else None}  # fmt: skip


def _overlap(items: Sequence[Item], held: Sequence[Item] | None, data: Data, seed: int) -> dict[str, Any]:
    """What stands on both sides of the split, and what a split by rows alone would have leaked."""
    train, held_out = (list(items), list(held)) if held is not None else split(items, data, seed)
    groups = {item.group for item in train}
    words = {item.text for item in train}
    chance = np.random.Generator(np.random.Philox(key=[seed, len(items)])).permutation(len(items))
    count = max(1, len(held_out))
    random_train = {items[place].question for place in chance[count:]}
    leaked = sum(items[place].question in random_train for place in chance[:count])
    return {
        "train_rows": len(train),
        "held_out_rows": len(held_out),
        "groups": len({item.group for item in items}),
        "groups_on_both_sides": len(groups & {item.group for item in held_out}),
        "questions_on_both_sides": len({item.question for item in train} & {item.question for item in held_out}),
        "held_out_rows_seen_in_training": sum(item.text in words for item in held_out),
        "leak_of_a_random_split": round(leaked / count, 4),
    }


def _padding(lengths: Array, frame: Frame) -> dict[str, Any]:
    """Share of each batch that would be padding: as rows come, and packed."""
    cut = np.minimum(lengths, frame.max_length)
    if frame.kind == "text":
        return {"padded": 0.0, "packed": 0.0}
    order = Order(len(cut), frame.batch, len(cut), frame.seed)
    rows = [cut[order.at(step)] for step in range(order.steps)]
    padded = 1 - cut.sum() / sum(int(batch.max()) * len(batch) for batch in rows)
    packed = 1 - cut.sum() / (len(pack(cut.tolist(), frame.max_length)) * frame.max_length)
    return {"padded": round(float(padded), 4), "packed": round(float(packed), 4)}
