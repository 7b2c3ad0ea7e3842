"""Packed shards hold every token in order, are read at any length, and are the same bytes however often one stopped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from modelwright.data.shards import DocumentBatch, PackedDataset, ShardLayout, write_manifest, write_split
from modelwright.data.tokenizer import TokenizedDocuments
from modelwright.errors import DataError
from modelwright.runs.folder import hash_file

LAYOUT = ShardLayout(sequence_length=16, vocab_size=1000, rows_per_shard=4)


def documents(count: int, seed: int = 0) -> TokenizedDocuments:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 40, count)
    return TokenizedDocuments(rng.integers(0, 1000, int(lengths.sum())).astype(np.uint32), lengths, lengths * 4)


def blocks(count: int = 5) -> Iterator[DocumentBatch]:
    for seed in range(count):
        built = documents(12, seed)
        yield DocumentBatch(len(built.tokens), lambda built=built: built)  # type: ignore[misc]


def packed(folder: Path, **sources: Any) -> PackedDataset:
    facts = write_split(folder, "train", LAYOUT, sources or {"all": blocks()}, "fingerprint")
    write_manifest(folder, LAYOUT, {"train": facts}, {"tokenizer": "t"})
    return PackedDataset.open(folder)


def everything() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """All tokens of the blocks, and where documents begin."""
    built = [block.load() for block in blocks()]
    lengths = np.concatenate([each.lengths for each in built])
    return np.concatenate([each.tokens for each in built]), np.concatenate([[0], np.cumsum(lengths)[:-1]])


def test_rows_are_the_documents_one_after_the_other(tmp_path: Path) -> None:
    shards = packed(tmp_path)
    tokens, _ = everything()
    rows = len(tokens) // 16
    assert (shards.rows(), shards.tokens) == (rows, rows * 16)
    assert shards.manifest["splits"]["train"]["dropped_tokens"] == len(tokens) - rows * 16
    read, _ = shards.get_rows(range(rows))
    assert read.dtype == np.int64
    assert read.ravel().tolist() == tokens[: rows * 16].tolist()


def test_positions_restart_with_each_document(tmp_path: Path) -> None:
    shards = packed(tmp_path)
    _, begins = everything()
    _, positions = shards.get_rows(range(shards.rows()))
    flat, expected = positions.ravel(), np.zeros(shards.tokens, dtype=np.int64)
    for index in range(1, shards.tokens):
        expected[index] = 0 if index in begins or index % 16 == 0 else expected[index - 1] + 1
    assert flat.tolist() == expected.tolist()


@pytest.mark.parametrize("length", [2, 4, 8, 16])
def test_the_same_shards_are_read_at_every_length_that_divides_theirs(tmp_path: Path, length: int) -> None:
    shards = packed(tmp_path)
    assert shards.rows(length) == shards.rows() * 16 // length
    order = np.random.default_rng(1).permutation(shards.rows(length))
    tokens, positions = shards.get_rows(order, length)
    assert tokens.shape == positions.shape == (len(order), length)
    back = np.empty_like(tokens)
    back[order] = tokens
    assert back.ravel().tolist() == shards.get_rows(range(shards.rows()))[0].ravel().tolist()
    assert (positions[:, 0] == 0).all()


def test_a_length_that_does_not_divide_is_reported(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="a length that divides the stored 16"):
        packed(tmp_path).get_rows([0], 5)


@pytest.mark.parametrize(("vocab_size", "dtype"), [(50_304, "uint16"), (65_536, "uint16"), (65_537, "uint32")])
def test_tokens_are_as_narrow_as_the_vocabulary_allows(vocab_size: int, dtype: str) -> None:
    assert ShardLayout(16, vocab_size).dtype == dtype


def test_a_writer_that_was_stopped_after_any_shard_leaves_the_same_bytes(tmp_path: Path) -> None:
    packed(tmp_path / "whole", a=blocks(3), b=blocks(2))
    expected = {path.name: hash_file(path) for path in (tmp_path / "whole").iterdir()}

    class Killed(Exception):
        pass

    def until(limit: int) -> Iterator[DocumentBatch]:
        for number, block in enumerate(blocks(3)):
            if number == limit:
                raise Killed
            yield block

    for limit in range(3):
        folder = tmp_path / f"stopped-{limit}"
        with pytest.raises(Killed):
            write_split(folder, "train", LAYOUT, {"a": until(limit)}, "fingerprint")
        packed(folder, a=blocks(3), b=blocks(2))
        assert {path.name: hash_file(path) for path in folder.iterdir()} == expected


def test_shards_of_another_config_are_not_resumed(tmp_path: Path) -> None:
    def short() -> Iterator[DocumentBatch]:
        yield from blocks(2)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_split(tmp_path, "train", LAYOUT, {"all": short()}, "another fingerprint")
    assert packed(tmp_path).get_rows([0])[0].ravel().tolist() == everything()[0][:16].tolist()


def test_rows_of_each_source_are_contiguous(tmp_path: Path) -> None:
    shards = packed(tmp_path, wiki=blocks(3), books=blocks(2))
    sizes = [(source.name, source.rows) for source in shards.sources(8)]
    totals = [sum(block.tokens for block in blocks(count)) // 16 * 2 for count in (3, 2)]
    assert sizes == [("wiki", totals[0]), ("books", totals[1])]
    first_book = shards.get_rows([totals[0]], 8)[0][0]
    assert first_book.tolist() == documents(12, 0).tokens[:8].tolist()


def test_bytes_of_text_are_those_of_the_rows(tmp_path: Path) -> None:
    shards = packed(tmp_path)  # every token of these documents stands for four bytes
    assert shards.text_bytes == pytest.approx(4 * shards.tokens, rel=0.01)


def test_a_folder_without_a_manifest_and_a_damaged_shard_are_reported(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no manifest\.json"):
        PackedDataset.open(tmp_path)
    packed(tmp_path)
    shard = tmp_path / "train-00001.npy"
    full = shard.read_bytes()
    shard.write_bytes(full[:-1] + bytes([full[-1] ^ 1]))
    with pytest.raises(DataError, match=r"train-00001\.npy: this shard is damaged"):
        PackedDataset.open(tmp_path).verify()
    shard.write_bytes(full[:-3])
    with pytest.raises(DataError, match=r"train-00001\.npy: this shard is damaged"):
        PackedDataset.open(tmp_path)
    shard.unlink()
    with pytest.raises(DataError, match=r"train-00001\.npy: this shard is missing"):
        PackedDataset.open(tmp_path)


def test_shards_of_another_format_are_refused_with_one_sentence(tmp_path: Path) -> None:
    packed(tmp_path)
    manifest = tmp_path / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"format": 2', '"format": 1'))
    with pytest.raises(DataError, match=r"these shards have format 1 \(Modelwright 0\.1 wrote 1\); it wants format 2;"):
        PackedDataset.open(tmp_path)
