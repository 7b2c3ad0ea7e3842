"""Several sources are one data set: weights, counts, columns and prompts by source, a split in which none is lost."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from modelwright.data.audit import audit_recipe
from modelwright.data.chat import load_conversations
from modelwright.data.preferences import load_preferences
from modelwright.data.sampler import GlobalBatchSampler, epoch_rows
from modelwright.errors import DataError, RecipeError
from modelwright.models.pretrained import load_model
from modelwright.recipe.load import dump_yaml, load
from modelwright.recipe.sections import CountOrFraction, DataConfig
from modelwright.recipe.stage_specs import SftConfig
from modelwright.tasks.sft import SftTask
from tiny import tiny_pairs, tiny_recipe, tiny_rows


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two files of questions, in two formats."""
    write(tmp_path / "sums.jsonl", [{"question": r["question"], "answer": r["answer"]} for r in tiny_rows(30)])
    chats = [{"frage": f"Which road leads to {number}?", "antwort": f"Road {number}."} for number in range(10)]
    write(tmp_path / "roads.jsonl", chats)
    return tmp_path


ROADS = {"dataset_name": "roads.jsonl", "columns": {"frage": "prompt", "antwort": "completion"}}


def mixed(**settings: Any) -> DataConfig:
    mix = {"sums.jsonl": {"weight": 3}, "roads": {**ROADS, "weight": 1, "system_prompt": "You know roads."}}
    return DataConfig(**{"mix": mix, "system_prompt": "Be brief.", **settings})


def test_each_source_has_its_own_columns_and_prompt(folder: Path) -> None:
    data = load_conversations(mixed(), 42, folder)
    prompts = {item.source: item.messages[0]["content"] for item in data.train}
    assert prompts == {"sums.jsonl": "Be brief.", "roads": "You know roads."}
    assert [item.source for item in data.train] == ["sums.jsonl"] * 27 + ["roads"] * 9
    assert Counter(item.source for item in data.held_out) == {"sums.jsonl": 3, "roads": 1}
    assert data.quarantine.lines()[:2] == [
        "source sums.jsonl: 30 rows, 75.0% of the rows of a step", "source roads: 10 rows, 25.0% of the rows of a step",
    ]  # fmt: skip
    sources = data.manifest(mixed())["sources"]
    assert sources["roads"] == {"train_rows": 9, "held_out_rows": 1, "weight": 1.0}


def test_a_prompt_of_two_sources_is_held_out_of_both_or_of_none(folder: Path) -> None:
    write(folder / "again.jsonl", [{"question": r["question"], "answer": "Other."} for r in tiny_rows(30)])
    data = load_conversations(DataConfig(mix={"sums.jsonl": {}, "again.jsonl": {}}), 42, folder)
    train, held_out = ({item.last_user_message for item in items} for items in (data.train, data.held_out))
    assert not train & held_out
    assert {item.source for item in data.held_out} == {"sums.jsonl", "again.jsonl"}


def test_counts_and_fractions_take_the_first_rows_of_a_source(folder: Path) -> None:
    mix = {"sums.jsonl": {"max_rows": "10%"}, "roads": {**ROADS, "max_rows": 4}}
    data = load_conversations(DataConfig(mix=mix, test_size=CountOrFraction(0)), 42, folder)
    assert Counter(item.source for item in data.train) == {"sums.jsonl": 3, "roads": 4}
    assert data.train[-1].last_user_message == "Which road leads to 3?"


def test_weights_hold_within_one_percent_after_ten_thousand_rows(folder: Path, model_folder: Path) -> None:
    task = sft_task(folder, model_folder, mixed())
    sampler = GlobalBatchSampler(task.epoch_rows, 10, 10_000, 42, task.source_weights)
    rows = [row for step in range(sampler.steps) for row in sampler.batch_indices(step)]
    counts = Counter(task.row_sources[row] for row in rows)
    assert counts["roads"] / len(rows) == pytest.approx(0.25, abs=0.01)
    again = GlobalBatchSampler(task.epoch_rows, 10, 10_000, 42, task.source_weights)
    assert again.batch_indices(700) == rows[7000:7010], "a step is a function of the seed and its number"


@pytest.mark.parametrize(("strategy", "rows"), [(None, 36), ("first_exhausted", 36), ("all_exhausted", 36)])
def test_an_epoch_ends_where_the_strategy_says(folder: Path, model_folder: Path, strategy: Any, rows: int) -> None:
    assert sft_task(folder, model_folder, mixed(stopping_strategy=strategy)).epoch_rows == rows  # 27 and 9, by 3 to 1
    assert epoch_rows([(90, 1.0), (10, 1.0)], strategy) == {"first_exhausted": 20, "all_exhausted": 180}.get(
        strategy or "", 100
    )


def sft_task(folder: Path, model_folder: Path, data: DataConfig, **settings: Any) -> SftTask:
    from modelwright.models.pretrained import load_tokenizer

    rows = load_conversations(data, 42, folder)
    return SftTask(
        load_model(model_folder), load_tokenizer(model_folder), rows, SftConfig(max_length=128, **settings), []
    )


def test_packed_rows_hold_one_source_each(folder: Path, model_folder: Path) -> None:
    task = sft_task(folder, model_folder, mixed(), packing=True)
    for pack, source in zip(task._packs, task.row_sources, strict=True):
        assert {task.examples[member].source for member in pack} == {source}
    assert task.source_weights == (
        (task.row_sources.count("sums.jsonl"), 3.0), (task.row_sources.count("roads"), 1.0))  # fmt: skip
    assert sorted(member for pack in task._packs for member in pack) == list(range(36))


def test_without_weights_an_epoch_has_every_row_once(folder: Path, model_folder: Path) -> None:
    task = sft_task(folder, model_folder, DataConfig(mix={"sums.jsonl": {}, "roads": ROADS}))
    assert task.source_weights == ()
    sampler = GlobalBatchSampler(task.epoch_rows, 6, 36, 1, task.source_weights)
    assert sorted(row for step in range(6) for row in sampler.batch_indices(step)) == list(range(36))


def test_held_out_rows_are_counted_by_source(folder: Path, model_folder: Path) -> None:
    assert sft_task(folder, model_folder, mixed()).held_out_sources == {"sums.jsonl": 3, "roads": 1}
    single = DataConfig(train_file="sums.jsonl")
    assert sft_task(folder, model_folder, single).held_out_sources == {}


def test_text_and_conversations_may_be_mixed(folder: Path, model_folder: Path) -> None:
    write(folder / "prose.jsonl", [{"text": f"The well number {number} is old."} for number in range(10)])
    mix = {"sums.jsonl": {}, "prose.jsonl": {"columns": {"text": "text"}}}
    task = sft_task(folder, model_folder, DataConfig(mix=mix))
    assert Counter(task.row_sources) == {"sums.jsonl": 27, "prose.jsonl": 9}
    assert all(row.loss_mask.all() == (row.source == "prose.jsonl") for row in task.train_set.rows)


def test_changed_weights_are_other_data(folder: Path) -> None:
    hashes = {load_conversations(data, 42, folder).fingerprint for data in (
        mixed(), mixed(stopping_strategy="first_exhausted"),
        mixed(mix={"sums.jsonl": 2, "roads": {**ROADS, "weight": 1}}),
    )}  # fmt: skip
    assert len(hashes) == 3


def test_pairs_of_two_sources_are_mixed(folder: Path) -> None:
    write(folder / "one.jsonl", tiny_pairs(20))
    write(folder / "two.jsonl", [{**pair, "prompt": f"Again: {pair['prompt']}"} for pair in tiny_pairs(10)])
    data = load_preferences(DataConfig(mix={"one.jsonl": 1, "two.jsonl": 3}), 42, folder)
    assert Counter(pair.source for pair in data.train) == {"one.jsonl": 18, "two.jsonl": 9}
    assert replace(data.train[0], source="").content == data.train[0].content


def test_a_source_without_rows_is_named(folder: Path) -> None:
    write(folder / "none.jsonl", [])
    with pytest.raises(DataError, match=r"none\.jsonl: there is no row in it, or test_size holds out all of them"):
        load_conversations(DataConfig(mix={"sums.jsonl": {}, "none.jsonl": {}}), 42, folder)


def recipe_with(folder: Path, model_folder: Path, data: str, *gates: str) -> Path:
    path = tiny_recipe(folder, model_folder)
    lines = path.read_text(encoding="utf-8").splitlines()
    other_lines = [line for line in lines if not line.startswith(("  train_file", "  columns", "  test_size"))]
    text = "\n".join(other_lines).replace("data:", f"data:\n{data}")
    path.write_text("\n".join([text, *gates, ""]), encoding="utf-8")
    return path


ROADS_YAML = "{dataset_name: roads.jsonl, weight: 1, columns: {frage: prompt, antwort: completion}}"
MIX = f"  mix: {{sums.jsonl: 3, roads: {ROADS_YAML}}}"
GATE = "gates: {sft: {eval_loss.roads: {at_most: 99, times: base_eval_loss.roads}}}"


def test_a_recipe_says_it_in_one_line_and_its_gates_know_the_sources(folder: Path, model_folder: Path) -> None:
    loaded = load(recipe_with(folder, model_folder, MIX, GATE), (), {})
    assert loaded.recipe.data is not None and loaded.recipe.data.weights == {"sums.jsonl": 3.0, "roads": 1.0}
    (folder / "saved.yaml").write_text(dump_yaml(loaded.recipe), encoding="utf-8")
    saved = load(folder / "saved.yaml", (), {}).recipe
    assert saved == loaded.recipe and saved.data is not None and saved.data.parts == loaded.recipe.data.parts
    with pytest.raises(RecipeError, match=r"gates.sft.eval_loss.raods is not a metric of this stage; did you mean"):
        load(recipe_with(folder, model_folder, MIX, GATE.replace("eval_loss.roads: {", "eval_loss.raods: {")), (), {})
    ((_, report),) = audit_recipe(str(recipe_with(folder, model_folder, MIX)), ())
    assert report.rows == 40 and report.lines()[1] == "source roads: 10 rows, 25.0% of the rows of a step"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("  mix: {sums.jsonl: 3, roads.jsonl: {}}", "has a mix in which roads.jsonl has no weight"),
        ("  mix: {sums.jsonl: {}}\n  stopping_strategy: first_exhausted", "stopping_strategy, which wants a mix with"),
        ("  mix: {sums.jsonl: {wieght: 1}}", "wieght"),
        ("  mix: {sums.jsonl: many}", "mix"),
        ("  mix: {sums.jsonl: -1}", "it wants a weight above 0"),
    ],
)
def test_a_mistake_in_a_mixture_is_one_message(folder: Path, model_folder: Path, data: str, message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load(recipe_with(folder, model_folder, data), (), {})
    assert message in str(caught.value)
    assert len(caught.value.problems) == 1


def test_a_mix_of_raw_text_without_prepare_is_refused(folder: Path, model_folder: Path) -> None:
    mix = "  mix: {prose.jsonl: 1, more.jsonl: 1}"
    text = recipe_with(folder, model_folder, mix).read_text(encoding="utf-8").replace("sft:", "pretrain:")
    (folder / "recipe.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(RecipeError, match="has a mix of raw text, which wants a section prepare"):
        load(folder / "recipe.yaml", (), {})


def test_a_source_without_a_name_is_not_the_current_folder(folder: Path, model_folder: Path) -> None:
    with pytest.raises(RecipeError, match=r"has a source without a name in data\.mix"):
        load(recipe_with(folder, model_folder, '  mix: {"": {}}'), (), {})
