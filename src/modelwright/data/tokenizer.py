"""Train a byte-level BPE tokenizer, and tokenize documents with an EOS token after each."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import xxhash

from modelwright.errors import DataError, ModelError, Problem
from modelwright.runs.folder import read_json, write_json, write_text

NDArray = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class TokenizedDocuments:
    """Tokens of many documents, each with its end token, one after the other."""

    tokens: NDArray
    """All of them: [sum of lengths]."""
    lengths: NDArray
    """Tokens in each document: [documents] int64."""
    text_bytes: NDArray
    """UTF-8 bytes of each document: [documents] int64."""


IM_END, IM_START, PAD_TOKEN = "<|im_end|>", "<|im_start|>", "<|pad|>"
"""Special tokens of a tokenizer trained here; the end token closes documents and turns alike."""
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCAB_MULTIPLE = 64
"""Vocabularies are rounded up to this, so that the matrix of the head fits a GPU's tiles."""
MIN_VOCAB_SIZE = 256 + 3
"""Every byte and the special tokens."""
TOKENIZER_FILES = (
    "tokenizer*.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "*.jinja",
    "*.model",
    "vocab.*",
    "merges.txt",
)
"""What a tokenizer is made of, in the folder of a model."""


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Lay the files of a tokenizer into another folder, byte by byte."""
    if source.resolve() == folder.resolve():
        return
    folder.mkdir(parents=True, exist_ok=True)
    for pattern in TOKENIZER_FILES:
        for file in sorted(source.glob(pattern)):
            (folder / file.name).write_bytes(file.read_bytes())


def pad_vocab_size(vocab_size: int) -> int:
    """The vocabulary that a model is built with: the next multiple of 64."""
    return -(-vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


def train_bpe(texts: Iterable[str], vocab_size: int, folder: Path) -> int:
    """Learn a byte-level BPE of so many tokens and save it as a folder that from_pretrained reads.

    Returns the padded vocabulary. The same texts give the same files. Text that is too small for so many tokens gives
    fewer.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if vocab_size < MIN_VOCAB_SIZE:
        message = (
            f"vocab_size is {vocab_size}; it wants at least {MIN_VOCAB_SIZE}, for every byte and the special tokens"
        )
        raise DataError([Problem("prepare.vocab_size", message)])
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[IM_END, IM_START, PAD_TOKEN],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    write_text(folder / "tokenizer.json", bpe.to_str(pretty=True) + "\n")
    write_text(folder / "chat_template.jinja", CHATML)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": IM_END, "pad_token": PAD_TOKEN,
              "model_max_length": 1 << 20, "clean_up_tokenization_spaces": False}  # fmt: skip
    write_json(folder / "tokenizer_config.json", config)
    return pad_vocab_size(bpe.get_vocab_size())


@dataclass(frozen=True)
class DocumentTokenizer:
    """A tokenizer as documents meet it: special tokens written in a text are plain text, an end token closes it."""

    tokenizer: Any
    """The tokenizers library's own object."""
    eos_token_id: int
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
        tokenizer = Tokenizer.from_str(text)
        tokenizer.encode_special_tokens = True  # a document that says <|im_end|> must not end there
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return cls(tokenizer, _find_eos_token_id(folder, tokenizer), xxhash.xxh3_128_hexdigest(text.encode()))

    @property
    def vocab_size(self) -> int:
        """Token ids are below this multiple of 64."""
        return pad_vocab_size(max(self.tokenizer.get_vocab(with_added_tokens=True).values()) + 1)

    def encode_batch(self, texts: Sequence[str]) -> TokenizedDocuments:
        """Tokens of each text with its end token."""
        encodings = self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return concat_with_eos([encoding.ids for encoding in encodings], self.eos_token_id, texts)


def concat_with_eos(token_ids: Sequence[Any], eos_token_id: int, texts: Sequence[str]) -> TokenizedDocuments:
    """Lay token lists one after the other, each with an end token."""
    lengths = np.array([len(document) + 1 for document in token_ids], dtype=np.int64)
    tokens = np.full(int(lengths.sum()), eos_token_id, dtype=np.uint32)
    start = 0
    for document in token_ids:
        tokens[start : start + len(document)] = document
        start += len(document) + 1
    return TokenizedDocuments(tokens, lengths, np.array([len(text.encode()) for text in texts], dtype=np.int64))


def _find_eos_token_id(folder: Path, tokenizer: Any) -> int:
    """The end token by name, as the tokenizer's folder says it."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        eos_token = read_json(folder / name).get("eos_token") if (folder / name).exists() else None
        token = eos_token.get("content") if isinstance(eos_token, dict) else eos_token
        if token is not None and (token_id := tokenizer.token_to_id(token)) is not None:
            return int(token_id)
    token_id = json.loads((folder / "config.json").read_text()).get("eos_token_id") if (
        folder / "config.json"
    ).exists() else None  # fmt: skip
    if isinstance(token_id, int):
        return token_id
    raise ModelError(f"{folder}: its tokenizer names no end token (eos_token), which must close each document")
