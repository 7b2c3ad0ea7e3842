"""Configurations of TRL and axolotl become recipes, and no setting is dropped silently.

``UPDATE_GOLDEN=1 pytest tests/recipe/test_convert.py`` rewrites the recipes; read the diff.
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
from modelwright.errors import UsageError
from modelwright.recipe.convert import convert_config
from modelwright.recipe.convert.common import render_yaml, to_flow_style
from modelwright.recipe.diagnostics import FOREIGN_KEYS
from modelwright.recipe.fields import field_names, section_aliases
from modelwright.recipe.load import load
from modelwright.recipe.sections import DataConfig
from modelwright.recipe.source import ConfigNode, Origin, make_node, read_file, read_text, read_value
from modelwright.recipe.stage_specs import STAGES

HOME = Path(__file__).parent / "converted"
CONFIGS = sorted(path for path in HOME.glob("*.yaml"))
RULED = {
    *("use_peft", "dtype", "datasets", "dataset_text_field", "dataset_test_split", "test_split_size", "loss_type"),
    *("disable_dropout", "truncation_mode", "packing_strategy", "lr_scheduler_kwargs", "bnb_4bit_quant_type"),
    *("deepspeed", "fsdp", "fsdp_config", "eval_strategy", "save_strategy"),
}
"""Names that have a rule of their own in the converter of TRL."""


def leaves(tree: ConfigNode) -> Iterator[str]:
    """The names of a configuration: its own keys, and those of the entries of its data sets."""
    for name, node in tree.mapping.items():
        items = node.value if isinstance(node.value, list) else []
        if items and isinstance(items[0].value, dict):
            yield from (f"{name}[0].{key}" for key in items[0].mapping)
            yield from (f"{name}[{number}]" for number in range(1, len(items)))
        else:
            yield name


def normalized(name: str) -> str:
    """Names under which a setting is reported: a mapping of turn fields by its two fields."""
    return re.sub(r"message_property_mappings|\.field$", lambda match: "message_field_role" if "m" in match[0][:1] else
                  ".text_column", name)  # fmt: skip


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_configuration_becomes_its_golden_recipe(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(HOME)
    converted = convert_config(Path(path.name))
    golden = HOME / "recipes" / path.name
    if os.environ.get("UPDATE_GOLDEN") == "1":
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(converted.text, encoding="utf-8")
    assert converted.text == golden.read_text(encoding="utf-8")
    assert converted.tool == path.stem.partition("_")[0]
    loaded = load(golden, environ={})
    assert loaded.recipe == converted.recipe
    assert loaded.notes == ()


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_name_is_converted_or_reported(path: Path) -> None:
    converted = convert_config(path)
    reported = {*converted.converted, *(each.key for each in converted.unconverted)}
    roots = {re.split(r"[.\[]", name)[0] for name in reported}
    tree, _ = read_file(path, Origin("recipe", path.name))
    for name in leaves(tree):
        is_reported = normalized(name) in reported or any(other.startswith(f"{name}.") for other in reported)
        assert is_reported or (name.startswith("test_datasets[0].") and "test_datasets" in roots), name
    for each in converted.unconverted:
        assert each.kind == "not_needed" or f"{each.key}" in converted.text
        assert each.advice in converted.text


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_planner_takes_the_recipe(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(HOME)
    overrides = ["--set", "model.model_name_or_path=smollm2-135m"] if path.stem == "axolotl_own_format" else []
    with pytest.raises(SystemExit) as stop:
        main(["plan", f"recipes/{path.name}", "--gpus", "1xH100", "--json", "--rows", "1000", *overrides])
    assert stop.value.code == 0, capsys.readouterr().err
    stages = json.loads(capsys.readouterr().out)["stages"]
    assert len(stages) == 1


def test_a_configuration_of_trl_s_orpo_is_named_by_the_command(tmp_path: Path) -> None:
    path = tmp_path / "orpo.yaml"
    path.write_text("model_name_or_path: m\ndataset_name: d\nbeta: 0.2\nmax_completion_length: 256\n", encoding="utf-8")
    converted = convert_config(path, stage="orpo")
    assert converted.recipe.orpo is not None and converted.recipe.orpo.beta == 0.2
    assert [each.key for each in converted.unconverted if each.kind == "unsupported"] == []


def test_there_are_many_of_both_tools() -> None:
    assert len(CONFIGS) >= 10
    assert {path.stem.partition("_")[0] for path in CONFIGS} == {"trl", "axolotl"}


def test_every_setting_of_the_installed_trl_has_an_answer() -> None:
    spec = importlib.util.find_spec("trl")
    if spec is None or spec.origin is None:
        pytest.skip("trl is not installed")
    home = Path(spec.origin).parent
    shared = Path(str(importlib.util.find_spec("transformers").origin)).parent  # type: ignore[union-attr]
    files = [home / "trainer" / f"{name}_config.py" for name in ("sft", "dpo", "model", "base")]
    files += [home / "experimental" / "orpo" / "orpo_config.py", home / "scripts" / "utils.py"]
    for file in (*files, shared / "training_args.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            wanted = isinstance(node, ast.ClassDef) and node.name in (
                *("SFTConfig", "DPOConfig", "ORPOConfig", "ModelConfig", "_BaseConfig", "BaseConfig"),
                *("ScriptArguments", "DatasetMixtureConfig", "TrainingArguments"),
            )
            for field in node.body if wanted else ():  # type: ignore[attr-defined]
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    name = field.target.id
                    homes = [
                        s for s in ("", "model", "data", *STAGES) if name in {*field_names(s), *section_aliases(s)}
                    ]
                    if not name.startswith("_") and name not in ("framework", "default_optim"):
                        assert homes or name in FOREIGN_KEYS or name in RULED, f"{file.name}: {name}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("base_model: m\nrl: kto\n", "this trains by kto (rl: kto), which is not offered; what is: pretrain, sft, dpo"),
        ("model_name_or_path: m\nnum_generations: 8\n", "this trains by grpo"),
        ("name: x\nmodel: {}\nsft: {}\n", "this looks like a recipe already"),
        ("alpha: 1\n", "say whose it is with --from"),
    ],
)
def test_what_cannot_be_converted_is_refused_with_a_message(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "some.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=re.escape(message)):
        convert_config(tmp_path / "some.yaml")


@pytest.mark.parametrize(
    ("word", "ours", "advice"),
    [("true", True, ""), ("false", False, ""), ("none", False, ""), ("full", True, ""), ("selective", "selective", ""),
     ("offload", True, "not offloaded"), ("offload_disk", True, "not offloaded"), ("unsloth", True, "not offloaded")],
)  # fmt: skip
def test_checkpointing_of_axolotl_is_converted_and_only_offloading_is_approximated(
    word: str, ours: bool | str, advice: str, tmp_path: Path
) -> None:
    config = tmp_path / "some.yaml"
    text = "base_model: m\ndatasets: [{path: a.jsonl, type: alpaca}]\ngradient_checkpointing: %s\n"
    config.write_text(text % word + "gradient_checkpointing_kwargs: {use_reentrant: false}\n", encoding="utf-8")
    converted = convert_config(config)
    assert converted.recipe.stages["sft"].gradient_checkpointing == ours
    unconverted = {each.key: each.advice for each in converted.unconverted}
    assert advice in unconverted.get("gradient_checkpointing", "")
    assert bool(advice) == ("gradient_checkpointing" in unconverted)
    assert "non-reentrant" in unconverted["gradient_checkpointing_kwargs"]


@pytest.mark.parametrize(("strategy", "ours"), [("bfd", "bfd"), ("bfd_split", "bfd_split"), ("wrapped", None)])
def test_a_packing_strategy_that_is_ours_too_is_converted(strategy: str, ours: str | None, tmp_path: Path) -> None:
    config = tmp_path / "some.yaml"
    config.write_text(f"model_name_or_path: m\ndataset_name: d\npacking: true\npacking_strategy: {strategy}\n", "utf-8")
    converted = convert_config(config)
    approximated = [each.key for each in converted.unconverted if each.kind == "approximated"]
    assert (converted.recipe.stages["sft"].packing_strategy == ours) == ("packing_strategy" not in approximated)


def test_full_determinism_is_kept_and_its_default_does_not_turn_ours_off(tmp_path: Path) -> None:
    path = tmp_path / "trl.yaml"
    for value in ("true", "false"):
        path.write_text(f"model_name_or_path: m\ndataset_name: d\nfull_determinism: {value}\n")
        assert ("deterministic: true" in convert_config(path).text) == (value == "true")


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
    stderr = capsys.readouterr().err
    assert "trl_sft_qlora.yaml:9: optim: paged_adamw_8bit was approximated; there are" in stderr
    assert "trl_sft_qlora.yaml:17: neftune_noise_alpha: 5 was not converted; NEFTune noise" in stderr
    assert "there is such a file already" in stderr


@pytest.mark.parametrize(
    "text",
    ["no", "1e-4", "010", ".inf", "...", "./a b", ".hidden", "a: b", "a #b", "- x", "? x", "", "<<", "a, b", "é\n😀",
     "tab\t", "\x85", "x\u2028y", "\x07", "train[:90%]", "C:\\x", "~", "~/models", "12:30", "'q'", '"q"'],
)  # fmt: skip
def test_text_is_read_back_as_the_same_text(text: str) -> None:
    origin = Origin("recipe", "some.yaml")
    tree = make_node({"name": text, "sft": {"run": {text: [text, {"key": text}]}}}, origin)
    rendered = render_yaml(tree, {"sft.run": "a comment"}, ["head", "", "more"])
    assert f"{{key: {to_flow_style(make_node(text, origin))}}}]}}" in rendered  # on one line, with its comment
    loaded, problems = read_text(rendered, origin)
    assert not problems
    values = [loaded.get(path) for path in (("name",), ("sft", "run", text, "0"), ("sft", "run", text, "1", "key"))]
    assert [node and node.value for node in values] == [text] * 3


def test_numbers_stay_as_written() -> None:
    numbers = ["1e-4", "5.0e-7", "1E-4", "0x1F", "0o17", "010", "1_000", ".inf", "+5", "1.", "0.10"]
    nodes = [read_value(number, Origin("recipe", "some.yaml"))[0] for number in numbers]
    assert [to_flow_style(node) for node in nodes] == numbers


@pytest.mark.parametrize(
    ("name", "optim", "settings", "note"),
    [
        ("adamw_torch_fused", "adamw_torch", {}, ""),
        ("paged_adamw_8bit", "adamw_torch", {}, "adamw_torch is written; exp_avg_dtype: bf16 saves memory"),
        ("adafactor", "adamw_torch", {}, "there are adamw_torch, sgd, lion; adamw_torch is written"),
        ("sgd", "sgd", {"momentum": 0}, ""),
        ("lion_32bit", "lion", {"adam_beta2": 0.999}, ""),
        ("lion_8bit", "lion", {"adam_beta2": 0.999}, "there are adamw_torch, sgd, lion; lion is written"),
        ("paged_lion_32bit", "lion", {"adam_beta2": 0.999}, "there are adamw_torch, sgd, lion; lion is written"),
        ("lion_pytorch", "lion", {}, ""),
    ],
)
def test_an_optimizer_is_converted_by_its_name_with_the_other_tools_defaults(
    tmp_path: Path, name: str, optim: str, settings: dict[str, float], note: str
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"model_name_or_path: m\ndataset_name: d\noptim: {name}\n", encoding="utf-8")
    converted = convert_config(path)
    stage = converted.recipe.stages["sft"]
    assert stage.optim == optim
    written = {"momentum": stage.momentum, "adam_beta2": stage.adam_beta2}
    assert written == {"momentum": 0.9, "adam_beta2": 0.99 if optim == "lion" else 0.999, **settings}
    notes = [each.advice for each in converted.unconverted if each.key == "optim"]
    assert len(notes) == bool(note) and note in "".join(notes)


def test_turns_of_sharegpt_are_read_as_ours() -> None:
    turns = [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "Because."}]
    conversations = rows_to_conversations(
        [Row("a:1", {"talk": turns})], DataConfig(dataset_name="a", columns={"talk": "messages"})
    )
    assert conversations[0].messages == (
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": "Because."},
    )
