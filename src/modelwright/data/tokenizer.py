"""Turn text into tokens: train a byte-level BPE, and encode documents so that no text can pose as a special token."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import xxhash

from modelwright.data.shard_writer import Documents
from modelwright.errors import DataError, ModelError, Problem
from modelwright.runs.folder import read_json, write_json, write_text

END, BEGIN, PAD = "<|im_end|>", "<|im_start|>", "<|pad|>"
"""Special tokens of a tokenizer trained here; the end token closes documents and turns alike."""
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MULTIPLE = 64
"""Vocabularies are rounded up to this, so that the matrix of the head fits a GPU's tiles."""
FEWEST = 256 + 3
"""Every byte and the special tokens."""


FILES = (
    "tokenizer*.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "*.jinja",
    "*.model",
    "vocab.*",
    "merges.txt",
)
"""What a tokenizer is made of, in the folder of a model."""


def copy(source: Path, folder: Path) -> None:
    """Lay the files of a tokenizer into another folder, byte by byte."""
    if source.resolve() == folder.resolve():
        return
    folder.mkdir(parents=True, exist_ok=True)
    for pattern in FILES:
        for file in sorted(source.glob(pattern)):
            (folder / file.name).write_bytes(file.read_bytes())


def padded(vocab_size: int) -> int:
    """The vocabulary that a model is built with: the next multiple of 64."""
    return -(-vocab_size // MULTIPLE) * MULTIPLE


def train(texts: Iterable[str], vocab_size: int, folder: Path) -> int:
    """Learn a byte-level BPE of so many tokens and save it as a folder that from_pretrained reads.

    Returns the padded vocabulary. The same texts give the same files. Text that is too small for so many tokens gives
    fewer.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if vocab_size < FEWEST:
        letter = f"vocab_size is {vocab_size}; it wants at least {FEWEST}, for every byte and the special tokens"
        raise DataError([Problem("prepare.vocab_size", letter)])
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END, BEGIN, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    write_text(folder / "tokenizer.json", bpe.to_str(pretty=True) + "\n")
    write_text(folder / "chat_template.jinja", CHATML)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "pad_token": PAD,
              "model_max_length": 1 << 20, "clean_up_tokenization_spaces": False}  # fmt: skip
    write_json(folder / "tokenizer_config.json", config)
    return padded(bpe.get_vocab_size())


@dataclass(frozen=True)
class Encoder:
    """A tokenizer as documents meet it: special tokens written in a text are plain text, an end token closes it."""

    backend: Any
    """The tokenizers library's own object."""
    end: int
    """The token that closes a document."""
    fingerprint: str
    """Hash of the tokenizer's file."""

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Read tokenizer.json and the name of the end token beside it."""
        from tokenizers import Tokenizer

        path = folder / "tokenizer.json"
        if not path.exists():
            raise ModelError(f"{folder}: there is no tokenizer.json in it")
        text = path.read_text(encoding="utf-8")
        backend = Tokenizer.from_str(text)
        backend.encode_special_tokens = True  # a document that says <|im_end|> must not end there
        backend.no_truncation()
        backend.no_padding()
        return cls(backend, _end_token(folder, backend), xxhash.xxh3_128_hexdigest(text.encode()))

    @property
    def vocab_size(self) -> int:
        """Token ids are below this multiple of 64."""
        return padded(max(self.backend.get_vocab(with_added_tokens=True).values()) + 1)

    def encode(self, texts: Sequence[str]) -> Documents:
        """Tokens of each text with its end token."""
        encodings = self.backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return join([encoding.ids for encoding in encodings], self.end, texts)


def join(ids: Sequence[Any], end: int, texts: Sequence[str]) -> Documents:
    """Lay token lists one after the other, each with an end token."""
    lengths = np.array([len(each) + 1 for each in ids], dtype=np.int64)
    tokens = np.full(int(lengths.sum()), end, dtype=np.uint32)
    start = 0
    for each in ids:
        tokens[start : start + len(each)] = each
        start += len(each) + 1
    return Documents(tokens, lengths, np.array([len(text.encode()) for text in texts], dtype=np.int64))


def _end_token(folder: Path, backend: Any) -> int:
    """The end token by name, as the tokenizer's folder says it."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        said = read_json(folder / name).get("eos_token") if (folder / name).exists() else None
        word = said.get("content") if isinstance(said, dict) else said
        if word is not None and (number := backend.token_to_id(word)) is not None:
            return int(number)
    number = json.loads((folder / "config.json").read_text()).get("eos_token_id") if (
        folder / "config.json"
    ).exists() else None  # fmt: skip
    if isinstance(number, int):
        return number
    raise ModelError(f"{folder}: its tokenizer names no end token (eos_token), which must close each document")
