"""Every shipped recipe loads, is found by name, and is written out as the same recipe."""

from __future__ import annotations

from pathlib import Path

import pytest

from modelwright.recipe.load import builtin_recipes, dump_yaml, load

ROOT = Path(__file__).parents[2]
NAMES = sorted(builtin_recipes())


def test_the_recipes_of_the_repository_are_the_shipped_ones() -> None:
    assert sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml")) == NAMES
    assert NAMES, "nothing is shipped"


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_recipe_loads_without_a_note(name: str) -> None:
    loaded = load(name, environ={})
    assert loaded.recipe.name == name
    assert loaded.recipe.description
    assert loaded.notes == ()


@pytest.mark.parametrize("name", NAMES)
def test_it_is_written_out_as_the_same_recipe(name: str, tmp_path: Path) -> None:
    recipe = load(name, environ={}).recipe
    written = tmp_path / "recipe.yaml"
    written.write_text(dump_yaml(recipe), encoding="utf-8")
    again = load(written, environ={}).recipe
    assert again == recipe.model_copy(update={"env_overrides": {}, "gates_file": None})
    assert dump_yaml(again) == dump_yaml(recipe)
