"""Reading YAML: values are what a person meant, lines are true, and nothing dangerous gets through."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from modelwright.errors import RecipeError
from modelwright.recipe.source import ConfigNode, Origin, read_file, read_text, read_value

ORIGIN = Origin("recipe", "mine.yaml")


def value_of(text: str) -> object:
    """One value as YAML reads it."""
    return read_text(f"key: {text}\n", ORIGIN)[0].mapping["key"].value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2e-4", 2e-4),
        ("5e-7", 5e-7),
        ("1e5", 1e5),
        ("1_000", 1000),
        ("0x10", 16),
        ("010", 10),
        ("true", True),
        ("no", "no"),
        ("off", "off"),
        ("'2e-4'", "2e-4"),
        ("2024-01-01", "2024-01-01"),
        ("10%", "10%"),
        ("null", None),
        ("~", None),
    ],
)
def test_a_value_is_what_its_writer_meant(text: str, value: object) -> None:
    parsed = value_of(text)
    assert parsed == value
    assert type(parsed) is type(value)


def test_every_key_and_item_knows_its_line() -> None:
    tree, _ = read_text("name: x\n\ncompare:\n  prompts:\n    - one\n\n    - two\n  style_patterns: []\n", ORIGIN)
    lines = {".".join(path): node.origin.line for path, node in tree.walk()}
    assert lines == {"name": 1, "compare": 3, "compare.prompts": 4, "compare.style_patterns": 8}
    second = tree.get(("compare", "prompts", "1"))
    assert second is not None
    assert second.origin.location == "mine.yaml:7"


def test_an_empty_value_is_distinguished_from_an_explicit_null() -> None:
    tree, _ = read_text("blank:\nnothing: null\nempty: ''\n", ORIGIN)
    assert [node.is_empty for node in tree.mapping.values()] == [True, False, False]


def test_anchors_and_merge_keys_work_and_the_nearer_key_wins() -> None:
    tree, problems = read_text("a: &a {x: 1, y: 2}\nb:\n  <<: *a\n  y: 3\n", ORIGIN)
    assert not problems
    assert {key: node.value for key, node in tree.mapping["b"].mapping.items()} == {"x": 1, "y": 3}


def test_a_billion_laughs_are_refused_within_a_second() -> None:
    lines = ["a0: &a0 [lol, lol, lol, lol, lol, lol, lol, lol, lol]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    started = time.process_time()
    with pytest.raises(RecipeError, match="over 20,000 values once its aliases are expanded"):
        read_text("\n".join(lines), ORIGIN)
    assert time.process_time() - started < 1


@pytest.mark.parametrize("text", ["a: &a [*a]\n", f"a: {'[' * 500}{']' * 500}\n", "[" * 5000, "a: &a {b: *a}\n"])
def test_a_bottomless_file_is_refused(text: str) -> None:
    with pytest.raises(RecipeError, match="nested too deeply"):
        read_text(text, ORIGIN)


def test_tags_are_refused_and_nothing_is_executed(tmp_path: Path) -> None:
    victim = tmp_path / "owned"
    _, problems = read_text(f"a: !!python/object/apply:os.system ['touch {victim}']\n", ORIGIN)
    assert [str(each) for each in problems] == [
        "mine.yaml:1: a has the tag !!python/object/apply:os.system; a recipe holds plain values only"
    ]
    assert not victim.exists()


def test_a_file_over_a_megabyte_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "big.yaml"
    path.write_text("description: " + "x" * 1_200_000)
    with pytest.raises(RecipeError) as caught:
        read_file(path, Origin("recipe", "big.yaml"))
    assert str(caught.value) == (
        "big.yaml: is 1.2 MB; it wants at most 1 MB, with data in a file of its own (data.train_file)"
    )


def test_a_byte_order_mark_does_not_hurt(tmp_path: Path) -> None:
    path = tmp_path / "windows.yaml"
    path.write_bytes(b"\xef\xbb\xbfname: x\r\nseed: 3\r\n")
    tree, _ = read_file(path, ORIGIN)
    assert tree.mapping["seed"] == ConfigNode(3, Origin("recipe", "mine.yaml", 2), "3")


def test_a_value_of_the_command_line_may_be_a_list_or_a_mapping() -> None:
    tree, _ = read_value("{last_layers: 2, head: true}", Origin("set"))
    assert {key: node.value for key, node in tree.mapping.items()} == {"last_layers": 2, "head": True}
    assert tree.mapping["head"].origin.location == "--set"
