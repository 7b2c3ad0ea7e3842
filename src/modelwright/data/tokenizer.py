"""Train a byte-level BPE tokenizer, and tokenize documents with an EOS token after each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Self

import numpy as np
import xxhash

from modelwright.data.packing import NDArray
from modelwright.errors import DataError, ModelError, Problem, first_line
from modelwright.recipe.sections import round_up
from modelwright.runs.folder import read_json_object, read_regular, write_json, write_text


@dataclass(frozen=True)
class TokenizedDocuments:
    """Tokens of many documents, concatenated, each with its EOS token."""

    tokens: NDArray
    """All token ids: [sum of lengths]."""
    lengths: NDArray
    """Tokens in each document: [documents] int64."""
    text_bytes: NDArray
    """UTF-8 bytes of each document: [documents] int64."""


IM_END, IM_START, PAD_TOKEN = "<|im_end|>", "<|im_start|>", "<|pad|>"
"""Special tokens of a tokenizer trained here; <|im_end|> is EOS of documents and chat turns."""
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MIN_VOCAB_SIZE = 256 + 3
"""All bytes and the special tokens."""
TOKENIZER_FILES = ("tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "*.jinja", "*.model", "vocab.*",
                   "merges.txt")  # fmt: skip
"""Files of a tokenizer in the folder of a model."""


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy the files of a tokenizer into another folder."""
    if source.resolve() == folder.resolve():
        return
    folder.mkdir(parents=True, exist_ok=True)
    for pattern in TOKENIZER_FILES:
        for file in sorted(source.glob(pattern)):
            (folder / file.name).write_bytes(file.read_bytes())


def train_bpe(texts: Iterable[str], vocab_size: int, folder: Path) -> int:
    """Train a byte-level BPE and save it as a folder that from_pretrained reads; returns the padded vocabulary size.

    The same texts give the same files; too little text gives a smaller vocabulary.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if vocab_size < MIN_VOCAB_SIZE:
        wanted = f"it wants at least {MIN_VOCAB_SIZE}, for every byte and the special tokens"
        raise DataError([Problem("prepare.vocab_size", f"vocab_size is {vocab_size}; {wanted}")])
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
    return round_up(bpe.get_vocab_size())


@dataclass(frozen=True)
class DocumentTokenizer:
    """Tokenizes documents: special tokens in a text are plain text, and EOS follows each document."""

    tokenizer: Any
    """A `tokenizers.Tokenizer`."""
    eos_token_id: int
    """Added after each document."""
    fingerprint: str
    """Hash of tokenizer.json."""

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Read tokenizer.json and the EOS token of a folder."""
        from tokenizers import Tokenizer

        path = folder / "tokenizer.json"
        if not path.exists():
            raise ModelError(f"{folder}: there is no tokenizer.json in it")
        try:
            text = read_regular(path).decode()
            tokenizer = Tokenizer.from_str(text)
        except Exception as error:  # tokenizers raises its base class
            raise ModelError(f"{path} could not be read ({first_line(error)})") from None
        tokenizer.encode_special_tokens = True  # <|im_end|> in a text must not end the document
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return cls(tokenizer, _find_eos_token_id(folder, tokenizer), xxhash.xxh3_128_hexdigest(text.encode()))

    @property
    def vocab_size(self) -> int:
        """Token ids are below this; a multiple of 64."""
        return round_up(max(self.tokenizer.get_vocab(with_added_tokens=True).values()) + 1)

    def encode_batch(self, texts: Sequence[str]) -> TokenizedDocuments:
        """Token ids of each text, followed by EOS."""
        ids = [encoding.ids for encoding in self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]
        counts = np.array([len(document) for document in ids], dtype=np.int64)
        flat = np.fromiter(chain.from_iterable(ids), dtype=np.uint32, count=int(counts.sum()))
        return concat_with_eos(flat, counts, self.eos_token_id, texts)


def concat_with_eos(ids: NDArray, counts: NDArray, eos_token_id: int, texts: Sequence[str]) -> TokenizedDocuments:
    """Insert EOS after each document; ids: [sum of counts], counts: [documents] int64."""
    lengths = counts + 1
    tokens = np.full(int(lengths.sum()), eos_token_id, dtype=np.uint32)
    inside = np.ones(len(tokens), dtype=np.bool_)
    inside[np.cumsum(lengths) - 1] = False
    tokens[inside] = ids
    return TokenizedDocuments(tokens, lengths, np.array([len(text.encode()) for text in texts], dtype=np.int64))


def _find_eos_token_id(folder: Path, tokenizer: Any) -> int:
    """The id of the EOS token, by the files of the tokenizer's folder."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        eos_token = read_json_object(folder / name).get("eos_token")
        token = eos_token.get("content") if isinstance(eos_token, dict) else eos_token
        if isinstance(token, str) and (token_id := tokenizer.token_to_id(token)) is not None:
            return int(token_id)
    token_id = read_json_object(folder / "config.json").get("eos_token_id")
    if isinstance(token_id, int):
        return token_id
    raise ModelError(f"{folder}: its tokenizer names no end token (eos_token), which must close each document")
