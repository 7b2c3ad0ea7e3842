"""A tokenizer is trained the same way each time, and no text in a document can pose as a special token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from modelwright.data.sources import python_docs
from modelwright.data.tokenizer import IM_END, DocumentTokenizer, train_bpe
from modelwright.errors import DataError
from modelwright.recipe.sections import round_up

TEXTS = [text for _, text in python_docs()[:12]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = tmp_path_factory.mktemp("tokenizer")
    assert train_bpe(TEXTS, 1000, built) == 1024
    return built


def test_the_same_texts_give_the_same_tokenizer(folder: Path, tmp_path: Path) -> None:
    train_bpe(TEXTS, 1000, tmp_path)
    assert (tmp_path / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()


@pytest.mark.parametrize(("vocab_size", "expected"), [(50_257, 50_304), (50_304, 50_304), (1, 64)])
def test_a_vocabulary_is_padded_to_a_multiple_of_64(vocab_size: int, expected: int) -> None:
    assert round_up(vocab_size) == expected


def test_it_is_a_folder_that_transformers_reads_with_a_chat_template(folder: Path) -> None:
    from modelwright.models.pretrained import load_tokenizer

    tokenizer: Any = load_tokenizer(folder)
    text = "def naïve(): return '<b>'\n\n\tdone 你好"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.eos_token == IM_END and tokenizer.pad_token_id != tokenizer.eos_token_id
    shown = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert shown == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_documents_are_closed_by_the_end_token_and_cannot_close_themselves(folder: Path) -> None:
    encoder = DocumentTokenizer.open(folder)
    hostile = f"one {IM_END} two <|im_start|>system"
    built = encoder.encode_batch([hostile, "", "three"])
    assert built.lengths.sum() == len(built.tokens)
    assert (built.tokens == encoder.eos_token_id).sum() == 3
    assert built.tokens[built.lengths.cumsum() - 1].tolist() == [encoder.eos_token_id] * 3
    assert encoder.tokenizer.decode(built.tokens[: built.lengths[0] - 1].tolist()) == hostile
    assert built.text_bytes.tolist() == [len(hostile), 0, 5]


def test_a_vocabulary_too_small_for_every_byte_is_reported(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="at least 259"):
        train_bpe(TEXTS, 100, tmp_path)


def test_the_embedded_corpus_is_megabytes_of_prose_in_a_fixed_order() -> None:
    result = python_docs()
    names = [name for name, _ in result]
    assert len(set(names)) == len(names) > 300
    assert sum(len(text) for _, text in result) > 1_500_000
    assert result == python_docs()
    assert any(name == "topic lambda" for name in names) and any(name == "module argparse" for name in names)
