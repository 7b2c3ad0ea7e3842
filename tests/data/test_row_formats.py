"""Row statistics of a plan, estimated before anything is tokenized."""

from __future__ import annotations

from pathlib import Path
from statistics import mean

import pytest
from tokenizers import Tokenizer

from modelwright.data import chat, tokenizer
from modelwright.data.row_formats import estimate_row_stats
from modelwright.recipe.load import load

SMALL = ["prepare.vocab_size=800"]


def test_rows_are_counted_by_the_tokenizer_that_prepare_has_trained(tmp_path: Path) -> None:
    loaded = load("llama-tiny", SMALL, {})
    data = loaded.recipe.data_for("sft")
    rows = chat.load_conversations(data, loaded.recipe.seed, loaded.path.parent).train
    texts = ["".join(message["content"] for message in row.messages) for row in rows]
    tokenizer.train_bpe(texts[:20], 800, tmp_path)
    encoder = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    exact = mean(len(encoder.encode(text).ids) for text in texts)
    packed = estimate_row_stats(loaded.recipe, "sft", loaded.path.parent, tmp_path)
    unpacked = estimate_row_stats(
        load("llama-tiny", [*SMALL, "sft.packing=false"], {}).recipe, "sft", loaded.path.parent, tmp_path
    )
    assert unpacked.mean_length == pytest.approx(exact + 5 * mean(len(row.messages) for row in rows), rel=0.05)
    count = packed.count
    assert count is not None and count * packed.mean_length == pytest.approx(unpacked.mean_length * len(rows))
    assert count > packed.mean_length * count / packed.max_length, "rows that are not split leave free space"


def test_a_small_vocabulary_makes_short_tokens() -> None:
    recipe_dir = Path()
    means = [
        estimate_row_stats(
            load("llama-tiny", ["sft.packing=false", f"prepare.vocab_size={words}"], {}).recipe, "sft", recipe_dir
        ).mean_length
        for words in (800, 8_000, 50_304)
    ]
    assert means == sorted(means, reverse=True) and means[0] > 1.3 * means[2]


def test_a_system_prompt_of_all_rows_is_a_prefix_that_a_batch_has_once() -> None:
    prompt = "Answer in one short sentence. " * 20
    options = [f"sft.data.system_prompt={prompt}", "sft.packing=false"]
    plain, shared, apart = (
        estimate_row_stats(load("llama-tiny", options[first:] + more, {}).recipe, "sft", Path())
        for first, more in ((1, []), (0, []), (0, ["sft.share_prefix=false"]))
    )
    assert apart.prefix_length == 0 < plain.prefix_length < 25, "the rows have a short one of their own"
    longer = shared.prefix_length - plain.prefix_length
    assert longer > 100 and longer == pytest.approx(shared.mean_length - plain.mean_length, abs=2)
