"""Loading: who wins, where it says so, and that a resolved recipe is itself a recipe."""

from __future__ import annotations

from pathlib import Path

import pytest

from modelwright.errors import RecipeError
from modelwright.recipe.load import LoadedRecipe, builtin_recipes, dump_yaml, load
from modelwright.recipe.schema import Recipe
from modelwright.recipe.sections import CountOrFraction
from modelwright.recipe.stage_specs import SftConfig

BASE = """
name: base
model:
  model_name_or_path: tiny
data:
  dataset_name: field-guide
sft:
  learning_rate: 2e-4
  num_train_epochs: 2
  trainable: {last_layers: 2, lm_head: true}
gates:
  sft:
    eval_loss: {at_most: 2.0}
    steps: {at_least: 0.5}
env_overrides:
  EPOCHS: sft.num_train_epochs
  OUTPUT_DIR: output_dir
  LAYERS: sft.trainable.last_layers
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a base recipe, to work in."""
    (tmp_path / "low.yaml").write_text(BASE.lstrip())
    monkeypatch.chdir(tmp_path)
    return tmp_path


def child(text: str, *sets: str, **environ: str) -> LoadedRecipe:
    """Load a recipe that builds on the base."""
    Path("mine.yaml").write_text(f"base: low.yaml\nname: mine\n{text}")
    return load("mine.yaml", sets, environ)


def sft(loaded: LoadedRecipe) -> SftConfig:
    """The stage, which is there."""
    assert loaded.recipe.sft is not None
    return loaded.recipe.sft


@pytest.mark.parametrize("name", list(builtin_recipes()))
def test_every_shipped_recipe_loads(name: str) -> None:
    assert load(name, (), {}).recipe.name == name


def test_default_base_recipe_environment_and_command_line_win_in_this_order(folder: Path) -> None:
    key = "sft.num_train_epochs"
    Path("bare.yaml").write_text("name: x\nmodel: {model_name_or_path: m}\ndata: {dataset_name: d}\nsft: {}\n")
    section = "sft:\n  num_train_epochs: 3\n"
    layers = [
        (load("bare.yaml", (), {}), 1, "default"),
        (child(""), 2, "base low.yaml:8"),
        (child(section), 3, "mine.yaml:4"),
        (child(section, EPOCHS="4"), 4, "environment EPOCHS"),
        (child(section, f"{key}=5", EPOCHS="4"), 5, "--set"),
    ]
    assert [(sft(loaded).num_train_epochs, str(loaded.origins[key])) for loaded, _, _ in layers] == [
        (value, origin) for _, value, origin in layers
    ]


def test_a_threshold_knows_its_line(folder: Path) -> None:
    loaded = child("gates:\n  sft:\n    eval_loss: {at_most: 1.5}\n")
    assert loaded.origins["gates.sft.eval_loss.at_most"].line == 5
    assert str(loaded.origins["gates.sft.steps.at_least"]) == "base low.yaml:13"
    assert load("low.yaml", (), {}).origins["gates.sft.eval_loss.at_most"].location == "low.yaml:12"


def test_mappings_are_merged_and_lists_and_scalars_replace(folder: Path) -> None:
    loaded = child("sft:\n  learning_rate: 1e-5\ncompare:\n  prompts: [a, b]\n", "compare.prompts=[c]")
    assert sft(loaded).learning_rate == 1e-5
    assert sft(loaded).num_train_epochs == 2
    assert loaded.recipe.compare.prompts == ["c"]


def test_null_takes_back_what_the_base_said(folder: Path) -> None:
    loaded = child("gates:\n  sft:\n    eval_loss: null\nsft:\n  learning_rate: null\ncompare: null\n")
    assert list(loaded.recipe.gates["sft"]) == ["steps"]
    assert sft(loaded).learning_rate == 2e-5
    assert str(loaded.origins["sft.learning_rate"]) == "mine.yaml:7"


def test_a_section_of_the_base_can_be_taken_out(folder: Path) -> None:
    with pytest.raises(RecipeError, match="the recipe has no stage"):
        child("sft: null\ngates: null\n")


def test_the_later_choice_between_two_sources_of_data_wins(folder: Path) -> None:
    data = child("data:\n  train_file: songs.jsonl\n").recipe.data
    assert (data.dataset_name, data.train_file) == (None, "songs.jsonl")
    data = child("data:\n  train_file: songs.jsonl\n", "data.dataset_name=other").recipe.data
    assert (data.dataset_name, data.train_file) == ("other", None)


def test_the_later_choice_of_what_is_trained_wins(folder: Path) -> None:
    assert sft(child("sft:\n  trainable: {lora: true}\n")).trainable.last_layers is None
    assert sft(child("sft:\n  trainable: lora\n", "sft.trainable.last_layers=3")).trainable.last_layers == 3
    changed = sft(child("", "sft.trainable.norms=true")).trainable
    assert (changed.last_layers, changed.lm_head, changed.norms) == (2, True, True)


def test_the_later_choice_of_a_batch_wins(folder: Path) -> None:
    Path("low.yaml").write_text(BASE.replace("  learning_rate", "  global_batch_size: 64\n  learning_rate"))
    assert sft(child("sft:\n  gradient_accumulation_steps: 4\n")).global_batch_size is None
    assert sft(child("")).global_batch_size == 64


def test_bases_form_a_chain_and_may_be_shipped_ones(folder: Path) -> None:
    (folder / "deep").mkdir()
    Path("deep/middle.yaml").write_text("base: ../low.yaml\nname: middle\nsft:\n  max_length: 99\n")
    Path("top.yaml").write_text("base: deep/middle.yaml\nname: top\n")
    loaded = load("top.yaml", (), {})
    assert (sft(loaded).max_length, sft(loaded).num_train_epochs) == (99, 2)
    assert [str(loaded.origins[f"sft.{key}"]) for key in ("max_length", "num_train_epochs")] == [
        "base deep/middle.yaml:4",
        "base low.yaml:8",
    ]
    Path("top.yaml").write_text("base: quickstart\nname: top\n")
    loaded = load("top.yaml", (), {})
    assert str(loaded.origins["data.dataset_name"]).startswith("base quickstart.yaml:")


def test_a_recipe_that_takes_its_name_from_its_base_has_a_note(folder: Path) -> None:
    Path("mine.yaml").write_text("base: low.yaml\n")
    assert load("mine.yaml", (), {}).notes == (
        "low.yaml:1: the name base comes from the base; so does its folder, runs/base",
    )


def test_only_mapped_variables_are_heard_and_empty_ones_are_not(folder: Path) -> None:
    assert sft(child("", EPOCHS="", LEARNING_RATE="1")) == sft(child(""))
    assert child("", OUTPUT_DIR="2024").recipe.output_dir == "2024"
    assert sft(child("", LAYERS="4")).trainable.last_layers == 4


def test_the_real_environment_is_heard_when_none_is_given(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPOCHS", "7")
    assert load("low.yaml").recipe.sft == load("low.yaml", (), {"EPOCHS": "7"}).recipe.sft


def test_a_variable_does_not_bring_back_a_section_that_was_taken_out(folder: Path) -> None:
    with pytest.raises(RecipeError, match=r"^mine\.yaml:1: the recipe has no stage; it wants a section pretrain, "):
        child("sft: null\ngates: null\n", EPOCHS="3")


def test_the_command_line_may_map_a_variable(folder: Path) -> None:
    assert sft(child("", "env_overrides.RATE=sft.lr", RATE="1e-3")).learning_rate == 1e-3


def test_an_empty_mapping_of_the_command_line_clears_what_the_recipe_says(folder: Path) -> None:
    gated = "gates:\n  sft:\n    eval_loss: {at_most: 2}\n"
    assert child(gated).recipe.gates and not child(gated, "gates={}").recipe.gates
    assert not child(gated, "gates.sft={}").recipe.gates.get("sft")
    assert set(child(gated, "gates={}", "gates.sft.eval_loss.at_most=9").recipe.gates) == {"sft"}


def test_text_settings_take_the_command_line_as_it_is(folder: Path) -> None:
    loaded = child("", "data.system_prompt=You are: a ranger", "model.revision=1234567", "data.split_by='quoted'")
    assert loaded.recipe.data.system_prompt == "You are: a ranger"
    assert loaded.recipe.model.revision == "1234567"
    assert loaded.recipe.data.split_by == "quoted"


def test_a_missing_file_is_answered_with_the_nearest_name(folder: Path) -> None:
    for reference, message in {
        "loww.yaml": "loww.yaml: no such recipe file; did you mean low.yaml?",
        "quikstart": "quikstart: no such recipe file; did you mean quickstart?",
        "/nowhere/at/all.yaml": "/nowhere/at/all.yaml: no such recipe file; shipped recipes are",
    }.items():
        with pytest.raises(RecipeError) as caught:
            load(reference, (), {})
        assert str(caught.value).startswith(message)


def test_a_run_folder_is_answered_with_the_recipe_in_it(folder: Path) -> None:
    (folder / "runs").mkdir()
    (folder / "runs" / "recipe.yaml").write_text(BASE)
    with pytest.raises(
        RecipeError, match=r"runs: is a folder; it wants a recipe file; did you mean runs/recipe.yaml\?"
    ):
        load("runs", (), {})


@pytest.mark.parametrize("name", list(builtin_recipes()))
def test_a_resolved_recipe_loads_as_the_same_recipe_whatever_the_environment_says(name: str, folder: Path) -> None:
    stage = next(iter(load(name, (), {}).recipe.stages))
    sets = [f"{stage}.adam_epsilon=1e-9", f"{stage}.warmup_steps=5%", *["sft.trainable=lora"] * (stage == "sft")]
    first = load(name, sets, {"EPOCHS": "3"}).recipe
    Path("resolved.yaml").write_text(dump_yaml(first))
    again = load("resolved.yaml", (), {"EPOCHS": "9", "OUTPUT_DIR": "/elsewhere"}).recipe
    assert again == first.model_copy(update={"env_overrides": {}, "gates_file": None})
    assert dump_yaml(again) == dump_yaml(first)


def test_a_resolved_recipe_keeps_awkward_text(folder: Path) -> None:
    awkward = [
        "no",
        "2e-4",
        "5%",
        "a: b",
        "# not a comment",
        " spaced ",
        "line\nline\n",
        "ö → 🎵",
        "'",
        '"',
        "",
        "null",
    ]
    recipe = Recipe.model_validate(
        {
            "name": "x",
            "model": {"model_name_or_path": "123"},
            "data": {"train_file": "2024-01-01", "columns": {"no": "prompt", "1": "completion"}},
            "sft": {},
            "compare": {"prompts": awkward, "style_patterns": [r"\d+ [a-z]"]},
        }
    )
    Path("resolved.yaml").write_text(dump_yaml(recipe))
    assert load("resolved.yaml", (), {}).recipe == recipe


def test_yes_and_no_are_answers_and_numbers_are_not(folder: Path) -> None:
    assert sft(child("sft:\n  packing: yes\n  assistant_only_loss: off\n")).packing
    with pytest.raises(RecipeError, match=r"sft.learning_rate is true; it wants a number above 0"):
        child("sft:\n  learning_rate: true\n")


def test_a_fraction_of_steps_has_two_spellings(folder: Path) -> None:
    assert sft(child("sft:\n  warmup_steps: 5%\n")).warmup_steps == CountOrFraction(0.05)


def test_problems_after_problems_are_reported_at_once(folder: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        child("data:\n  max_rows: 0\n  train_file: x\n  dataset_name: y\nsft: null\nsed: 3\n")
    assert [problem.message.partition(" ")[0] for problem in caught.value.problems] == [
        "the",
        "data",
        "data.max_rows",
        "sed",
    ]


@pytest.mark.parametrize(
    ("setting", "note"),
    [
        (
            "sft.learning_rate=3.0",
            "sft.learning_rate is 3; adamw_torch usually diverges above 0.02; the default is 2e-05",
        ),
        (
            "sft.num_train_epochs=500",
            "sft.num_train_epochs is 500; every row is trained 500 times and may be learnt by",
        ),
    ],
)
def test_settings_that_are_nearly_always_mistakes_are_noted_with_the_number(setting: str, note: str) -> None:
    overrides = ["sft.max_steps=null", setting]
    assert [text[: len(note) + 7] for text in load("quickstart", overrides, {}).notes] == [f"--set: {note}"]


def test_no_shipped_recipe_has_a_setting_that_is_nearly_always_a_mistake() -> None:
    for name in builtin_recipes():
        assert not any("usual" in note for note in load(name, (), {}).notes), name
