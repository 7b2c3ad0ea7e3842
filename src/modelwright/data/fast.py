"""A faster tokenizer where it can be trusted: gigatoken, held against the tokenizer itself on the user's own text.

It is given the tokenizer without its special tokens, so that their text stays text. If one sample document comes out
otherwise, or the tokenizer is of a kind it does not know, the tokenizers library does the work, and that is said.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from modelwright.data.shard_writer import Documents
from modelwright.data.tokenizer import Encoder
from modelwright.data.work import Work, put_facts

PACKAGE = "gigatoken"


@dataclass(frozen=True)
class FastEncoder(Encoder):
    """The same tokens, some thirty times as fast."""

    quick: Any = None
    """gigatoken's tokenizer."""

    def encode(self, texts: Sequence[str]) -> Documents:
        """Tokens of each text with its end token."""
        found = self.quick.encode_batch(list(texts), parallel=False)
        return _closed(found, self.end, texts)


def _closed(found: Any, end: int, texts: Sequence[str]) -> Documents:
    """An awkward array of documents as one flat array, an end token after each."""
    import awkward

    counts = np.asarray(awkward.num(found, axis=1), dtype=np.int64)
    lengths = counts + 1
    tokens = np.full(int(lengths.sum()), end, dtype=np.uint32)
    inside = np.ones(len(tokens), dtype=np.bool_)
    inside[np.cumsum(lengths) - 1] = False
    tokens[inside] = np.asarray(awkward.flatten(found, axis=1))
    return Documents(tokens, lengths, np.array([len(text.encode()) for text in texts], dtype=np.int64))


def quick_encoder(folder: Path) -> FastEncoder | None:
    """gigatoken's form of a tokenizer, where it is installed and takes it."""
    try:
        import gigatoken
    except ImportError:
        return None
    plain = Encoder.open(folder)
    said = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    said["added_tokens"] = [token for token in said.get("added_tokens", []) if not token.get("special")]
    said["post_processor"] = None
    try:
        quick = gigatoken.Tokenizer.from_json(json.dumps(said))
    except Exception:  # whatever it does not know, the tokenizers library does
        return None
    return FastEncoder(plain.backend, plain.end, plain.fingerprint, quick)


def choose(folder: Path, samples: Sequence[str], wanted: bool, work: Work, step: str) -> dict[str, Any]:
    """Decide once which tokenizer encodes, and write it down for the workers."""
    name = f"encoder-{step}"
    if not work.done(name):
        with work.making(name) as made:
            put_facts(made, _judge(folder, samples, wanted))
    return work.facts(name)


def _judge(folder: Path, samples: Sequence[str], wanted: bool) -> dict[str, Any]:
    verdict = {"encoder": "tokenizers", "tokenizers": version("tokenizers"), "checked": 0}
    if not wanted:
        return {**verdict, "reason": "fast_tokenizer is false"}
    quick = quick_encoder(folder)
    if quick is None:
        return {**verdict, "reason": f"{PACKAGE} is not installed (pip install 'modelwright[fast]') or knows it not"}
    try:
        ours, theirs = Encoder.open(folder).encode(samples), quick.encode(samples)
    except Exception as error:
        return {**verdict, "reason": f"{PACKAGE} failed on this text ({type(error).__name__})"}
    if not np.array_equal(ours.lengths, theirs.lengths) or not np.array_equal(ours.tokens, theirs.tokens):
        return {**verdict, "checked": len(samples), "reason": f"{PACKAGE} gives other tokens for this text"}
    reason = f"same tokens for {len(samples)} sample documents"
    return {**verdict, "encoder": PACKAGE, PACKAGE: version(PACKAGE), "checked": len(samples), "reason": reason}


def open_encoder(folder: Path, work: Work, step: str) -> Encoder:
    """The tokenizer that was chosen; where gigatoken is not at hand, the library whose tokens are the same."""
    chosen = work.facts(f"encoder-{step}")
    quick = quick_encoder(folder) if chosen["encoder"] == PACKAGE and _at_hand(chosen) else None
    return quick or Encoder.open(folder)


def _at_hand(chosen: dict[str, Any]) -> bool:
    try:
        return bool(version(PACKAGE) == chosen[PACKAGE])
    except PackageNotFoundError:
        return False
