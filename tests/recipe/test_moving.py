"""Configurations of TRL and axolotl become recipes, and nothing of them is dropped in silence.

``UPDATE_GOLDEN=1 pytest tests/recipe/test_moving.py`` writes the recipes anew; read each before you keep it.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from modelwright.cli.main import main
from modelwright.data.chat import rows_to_conversations
from modelwright.data.readers import Row
from modelwright.errors import RecipeError, UsageError
from modelwright.recipe.convert import convert_config
from modelwright.recipe.diagnostics import FOREIGN_KEYS
from modelwright.recipe.fields import field_names, section_aliases
from modelwright.recipe.load import load
from modelwright.recipe.schema import DataConfig
from modelwright.recipe.source import ConfigNode, Origin, read_file

HOME = Path(__file__).parent / "moved"
CONFIGS = sorted(path for path in HOME.glob("*.yaml"))
RULED = {
    *("use_peft", "dtype", "datasets", "dataset_text_field", "dataset_test_split", "test_split_size", "loss_type"),
    *("disable_dropout", "truncation_mode", "packing_strategy", "lr_scheduler_kwargs", "bnb_4bit_quant_type"),
    *("deepspeed", "fsdp", "fsdp_config", "eval_strategy", "save_strategy"),
}
"""Names that have a rule of their own in the reader of TRL."""


def leaves(tree: ConfigNode) -> Iterator[str]:
    """The names of a configuration: its own keys, and those of the entries of its data sets."""
    for name, node in tree.mapping.items():
        items = node.value if isinstance(node.value, list) else []
        if items and isinstance(items[0].value, dict):
            yield from (f"{name}[0].{key}" for key in items[0].mapping)
            yield from (f"{name}[{number}]" for number in range(1, len(items)))
        else:
            yield name


def same(name: str) -> str:
    """Names that several readings share: a mapping of turns is told by its two fields."""
    return re.sub(r"message_property_mappings|\.field$", lambda found: "message_field_role" if "m" in found[0][:1] else
                  ".text_column", name)  # fmt: skip


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_configuration_becomes_the_recipe_beside_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(HOME)
    moved = convert_config(Path(path.name))
    golden = HOME / "recipes" / path.name
    if os.environ.get("UPDATE_GOLDEN") == "1":
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(moved.text, encoding="utf-8")
    assert moved.text == golden.read_text(encoding="utf-8")
    assert moved.tool == path.stem.partition("_")[0]
    loaded = load(golden, environ={})
    assert loaded.recipe == moved.recipe
    assert loaded.notes == ()


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_name_is_carried_or_told(path: Path) -> None:
    moved = convert_config(path)
    told = {*moved.converted, *(each.key for each in moved.unconverted)}
    roots = {re.split(r"[.\[]", name)[0] for name in told}
    tree, _ = read_file(path, Origin("recipe", path.name))
    for name in leaves(tree):
        whole = same(name) in told or any(other.startswith(f"{name}.") for other in told)
        assert whole or (name.startswith("test_datasets[0].") and "test_datasets" in roots), name
    for each in moved.unconverted:
        assert each.kind == "not_needed" or f"{each.key}" in moved.text
        assert each.advice in moved.text


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_planner_takes_the_recipe(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(HOME)
    wish = ["--set", "model.model_name_or_path=smollm2-135m"] if path.stem == "axolotl_own_format" else []
    with pytest.raises(SystemExit) as stop:
        main(["plan", f"recipes/{path.name}", "--gpus", "1xH100", "--json", "--rows", "1000", *wish])
    assert stop.value.code == 0, capsys.readouterr().err
    stages = json.loads(capsys.readouterr().out)["stages"]
    assert len(stages) == 1


def test_there_are_many_of_both_tools() -> None:
    assert len(CONFIGS) >= 10
    assert {path.stem.partition("_")[0] for path in CONFIGS} == {"trl", "axolotl"}


def test_every_setting_of_the_installed_trl_has_an_answer() -> None:
    found = importlib.util.find_spec("trl")
    if found is None or found.origin is None:
        pytest.skip("trl is not installed")
    home = Path(found.origin).parent
    shared = Path(str(importlib.util.find_spec("transformers").origin)).parent  # type: ignore[union-attr]
    files = [home / "trainer" / f"{name}_config.py" for name in ("sft", "dpo", "model", "base")]
    for file in (*files, home / "scripts" / "utils.py", shared / "training_args.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            wanted = isinstance(node, ast.ClassDef) and node.name in (
                *("SFTConfig", "DPOConfig", "ModelConfig", "_BaseConfig", "BaseConfig", "ScriptArguments"),
                *("DatasetMixtureConfig", "TrainingArguments"),
            )
            for field in node.body if wanted else ():  # type: ignore[attr-defined]
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    name = field.target.id
                    homes = [
                        s for s in ("", "model", "data", "sft", "dpo") if name in {*field_names(s), *section_aliases(s)}
                    ]
                    if not name.startswith("_") and name not in ("framework", "default_optim"):
                        assert homes or name in FOREIGN_KEYS or name in RULED, f"{file.name}: {name}"


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("base_model: m\nrl: kto\n", "this trains by kto, which is not offered; what is: sft, dpo, pretrain"),
        ("model_name_or_path: m\nnum_generations: 8\n", "this trains by grpo"),
        ("name: x\nmodel: {}\nsft: {}\n", "this looks like a recipe already"),
        ("alpha: 1\n", "say whose it is with --from"),
    ],
)
def test_what_cannot_be_moved_is_refused_with_a_letter(text: str, letter: str, tmp_path: Path) -> None:
    (tmp_path / "some.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=re.escape(letter)):
        convert_config(tmp_path / "some.yaml")


@pytest.mark.parametrize(
    ("word", "ours", "told"),
    [("true", True, ""), ("false", False, ""), ("none", False, ""), ("full", True, ""), ("selective", "selective", ""),
     ("offload", True, "not offloaded"), ("offload_disk", True, "not offloaded"), ("unsloth", True, "not offloaded")],
)  # fmt: skip
def test_what_axolotl_computes_again_is_carried_and_only_what_it_offloads_is_nearest(
    word: str, ours: bool | str, told: str, tmp_path: Path
) -> None:
    config = tmp_path / "some.yaml"
    text = "base_model: m\ndatasets: [{path: a.jsonl, type: alpaca}]\ngradient_checkpointing: %s\n"
    config.write_text(text % word + "gradient_checkpointing_kwargs: {use_reentrant: false}\n", encoding="utf-8")
    moved = convert_config(config)
    assert moved.recipe.stages["sft"].gradient_checkpointing == ours
    left = {each.key: each.advice for each in moved.unconverted}
    assert told in left.get("gradient_checkpointing", "") and bool(told) == ("gradient_checkpointing" in left)
    assert "without reentrance" in left["gradient_checkpointing_kwargs"]


def test_a_wrong_value_is_told_by_the_line_of_the_configuration(tmp_path: Path) -> None:
    config = tmp_path / "wrong.yaml"
    config.write_text("base_model: m\ndatasets: [{path: a.jsonl, type: alpaca}]\nlearning_rate: fast\n", "utf-8")
    with pytest.raises(RecipeError, match=r"wrong.yaml:3: sft.learning_rate is 'fast'; it wants a number above 0"):
        convert_config(config)


def test_convert_writes_a_recipe_and_says_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(HOME)
    target = tmp_path / "My-1.7B.yaml"  # the recipe, and so its run folder, is called as it was asked for
    for exit_code in (0, 2):  # the second time there is such a file
        with pytest.raises(SystemExit) as stop:
            main(["convert", "trl_sft_qlora.yaml", "-o", str(target)])
        assert int(stop.value.code or 0) == exit_code
    golden = (HOME / "recipes" / "trl_sft_qlora.yaml").read_text(encoding="utf-8")
    assert target.read_text(encoding="utf-8") == golden.replace("name: trl_sft_qlora", "name: my-1.7b", 1)
    told = capsys.readouterr().err
    assert "trl_sft_qlora.yaml:9: optim: paged_adamw_8bit was approximated; there are" in told
    assert "trl_sft_qlora.yaml:17: neftune_noise_alpha: 5 was not converted; noise on embeddings" in told
    assert "there is such a file already" in told


def test_turns_of_sharegpt_are_read_as_ours() -> None:
    turns = [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "Because."}]
    found = rows_to_conversations(
        [Row("a:1", {"talk": turns})], DataConfig(dataset_name="a", columns={"talk": "messages"})
    )
    assert found[0].messages == ({"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."})
