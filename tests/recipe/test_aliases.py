"""Other tools' names: each leads to a setting that exists, is noted once, and never decides silently."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path

import pytest

from modelwright.errors import RecipeError
from modelwright.recipe.diagnostics import FOREIGN_KEY_HINTS, SECTION_ALIASES
from modelwright.recipe.fields import (
    CONVERTED_ALIASES,
    KEY_ALIASES,
    RENAMED_KEYS,
    RENAMED_METRICS,
    VALUE_ALIASES,
    all_sections,
    field_names,
    get_field,
    section_aliases,
)
from modelwright.recipe.load import LoadedRecipe, builtin_recipes, load
from modelwright.recipe.stage_specs import STAGES, SftConfig

RENAMED = Path(__file__).parent / "renamed"
"""Recipes with every key of version 0.1 that has another name now, and the same under the new names."""
HEAD = "name: x\nmodel: {model_name_or_path: m}\ndata: {dataset_name: d}\n"


def read(tmp_path: Path, text: str, *sets: str) -> LoadedRecipe:
    """Load a recipe from text."""
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    return load(path, sets, {})


def test_every_other_name_leads_to_a_setting_that_exists() -> None:
    tables = {*KEY_ALIASES, *CONVERTED_ALIASES, *RENAMED_KEYS}
    assert {"", "model", "data", "training", "compare"} <= tables
    for table in tables:
        sections = {"training": STAGES, "trainable": ("sft.trainable",)}.get(table, (table,))
        known = {name for section in sections for name in field_names(section)}
        converted = (alias.canonical for alias in CONVERTED_ALIASES.get(table, {}).values())
        assert {*KEY_ALIASES.get(table, {}), *RENAMED_KEYS.get(table, {}).values(), *converted} <= known


def test_no_alias_is_also_a_name_of_ours_or_listed_twice() -> None:
    for section in all_sections():
        assert not set(section_aliases(section)) & set(field_names(section))
    for names in KEY_ALIASES.values():
        others = [name for group in names.values() for name in group.split()]
        assert len(others) == len(set(others))


VALUE_SECTIONS = (("sft",), ("model",), ("gates", "sft", "eval_loss"))


def test_every_word_for_a_value_leads_to_a_value_that_is_allowed() -> None:
    for name, words in VALUE_ALIASES.items():
        setting = next(filter(None, (get_field((*path, name)) for path in VALUE_SECTIONS)), None)
        assert setting is not None
        for ours in words.values():
            assert ours is None or not setting.choices or str(ours).lower() in setting.choices


def test_hints_and_section_names_are_not_settings_of_ours() -> None:
    ours = {name for section in all_sections() for name in field_names(section)}
    assert not ours & (set(FOREIGN_KEY_HINTS) - {"lora"})  # lora alone is asked for in more places than it is a setting
    assert not set(field_names("")) & set(SECTION_ALIASES)  # they are asked for at the top level only


@pytest.mark.parametrize(
    ("written", "key", "value"),
    [
        ("lr: 1e-4", "learning_rate", 1e-4),
        ("epochs: 3", "num_train_epochs", 3),
        ("num_epochs: 3", "num_train_epochs", 3),
        ("micro_batch_size: 2", "per_device_train_batch_size", 2),
        ("effective_batch_size: 64", "global_batch_size", 64),
        ("max_seq_length: 128", "max_length", 128),
        ("sequence_len: 128", "max_length", 128),
        ("cutoff_len: 128", "max_length", 128),
        ("max_seq_len: 128", "max_length", 128),
        ("sample_packing: true", "packing", True),
        ("lr_scheduler: linear", "lr_scheduler_type", "linear"),
        ("bf16: true", "precision", "bf16"),
        ("bf16: yes", "precision", "bf16"),
        ("fp16: true", "precision", "fp16"),
        ("bf16: false", "precision", "auto"),
        ("precision: bfloat16", "precision", "bf16"),
        ("mixed_precision: no", "precision", "fp32"),
        ("lora_rank: 8", "lora_r", 8),
        ("peft_use_dora: true", "use_dora", True),
        ("load_in_4bit: true", "quantization", "nf4"),
        ("lora_target: all", "lora_target_modules", "all-linear"),
        ("lora_target: q_proj, v_proj", "lora_target_modules", ["q_proj", "v_proj"]),
        ("train_on_inputs: true", "assistant_only_loss", False),
        ("max_steps: -1", "max_steps", None),
        ("gradient_checkpointing: full", "gradient_checkpointing", True),
        ("activation_checkpointing: selective", "gradient_checkpointing", "selective"),
        ("activation_checkpointing: none", "gradient_checkpointing", False),
    ],
)
def test_another_name_is_read_as_ours_with_one_note(tmp_path: Path, written: str, key: str, value: object) -> None:
    sets = ["sft.trainable=lora"] if key in SftConfig.LORA_KEYS else []
    loaded = read(tmp_path, f"{HEAD}sft:\n  {written}\n", *sets)
    assert getattr(loaded.recipe.sft, key) == value
    assert loaded.notes
    assert loaded.notes[0].startswith(f"{tmp_path}/mine.yaml:5: sft.{written.partition(':')[0]}")
    assert loaded.origins[f"sft.{key}"].line == 5


@pytest.mark.parametrize("written", ["use_peft: true", "adapter: lora", "finetuning_type: lora", "trainable: lora"])
def test_lora_has_four_spellings(tmp_path: Path, written: str) -> None:
    recipe = read(tmp_path, f"{HEAD}sft:\n  {written}\n").recipe
    assert recipe.sft is not None
    assert recipe.sft.trainable.lora


def test_a_ratio_of_warm_up_is_a_share(tmp_path: Path) -> None:
    recipe = read(tmp_path, f"{HEAD}sft:\n  warmup_ratio: 0.1\n").recipe
    assert recipe.sft is not None
    assert recipe.sft.warmup_steps.resolve(200) == 20


def test_a_file_may_say_that_the_other_precision_is_off(tmp_path: Path) -> None:
    loaded = read(tmp_path, f"{HEAD}sft:\n  fp16: false\n  bf16: true\n")
    assert loaded.recipe.sft is not None
    assert loaded.recipe.sft.precision == "bf16"
    assert [note.partition(": ")[2] for note in loaded.notes] == [
        "sft.fp16: false is ignored",
        "sft.bf16: true is read as precision: bf16",
    ]


def test_a_later_layer_may_use_another_name_for_what_an_earlier_one_said(tmp_path: Path) -> None:
    (tmp_path / "low.yaml").write_text(f"{HEAD}sft:\n  precision: bf16\n  max_length: 512\n")
    loaded = read(tmp_path, "base: low.yaml\nname: y\nsft:\n  fp16: true\n", "sft.max_seq_length=128")
    assert loaded.recipe.sft is not None
    assert (loaded.recipe.sft.precision, loaded.recipe.sft.max_length) == ("fp16", 128)
    assert str(loaded.origins["sft.max_length"]) == "--set"
    assert "--set: sft.max_seq_length is read as max_length" in loaded.notes


def test_switching_bf16_off_undoes_the_base(tmp_path: Path) -> None:
    (tmp_path / "low.yaml").write_text(f"{HEAD}sft:\n  bf16: true\n")
    loaded = read(tmp_path, "base: low.yaml\nname: y\nsft:\n  bf16: false\n")
    assert loaded.recipe.sft is not None
    assert loaded.recipe.sft.precision == "auto"


def test_flash_attention_is_a_setting_of_the_model(tmp_path: Path) -> None:
    text = HEAD.replace("{model_name_or_path: m}", "{base_model: m, use_flash_attention: true}")
    model = read(tmp_path, f"{text}sft: {{}}\n").recipe.model
    assert (model.model_name_or_path, model.attn_implementation) == ("m", "flash_attention_2")


@pytest.mark.parametrize("name", list(builtin_recipes()))
def test_our_own_files_use_our_own_names(name: str) -> None:
    assert load(name, (), {}).notes == ()


def test_every_name_of_version_0_1_is_read_as_todays_with_a_note() -> None:
    noted = set()
    for name in ("text", "images"):
        old, new = (load(RENAMED / f"{version}_{name}.yaml", (), {"HEAD": "true"}) for version in ("old", "new"))
        dumped = [{**loaded.recipe.model_dump(), "env_overrides": {}, "gates_file": ""} for loaded in (old, new)]
        assert dumped[0] == dumped[1]
        assert new.notes == ()
        noted |= {re.sub(r"^\S+: ", "", note) for note in old.notes}
    keys = {pair for table in (*RENAMED_KEYS.values(), RENAMED_METRICS) for pair in table.items()}
    matches = (re.fullmatch(r"(?:\S+\.)?(\w+) is now called (\w+)", note) for note in noted)
    assert {(match[1], match[2]) for match in matches if match} == keys
    assert {note for note in noted if " is read as " in note} == {
        "gates.sft.exactness.times: base_exactness is read as times: base_answer_f1",
        "gates.sft.parent_eval_loss.plus: exactness is read as plus: answer_f1",
        "gates.dpo.eval_loss.times: parent_base_exactness is read as times: parent_base_answer_f1",
    }


def test_a_setting_under_its_old_name_may_be_set_and_mapped(tmp_path: Path) -> None:
    text = f"{HEAD}sft: {{trainable: {{last_layers: 1}}}}\ncluster: {{}}\nenvironment: {{HEAD: sft.trainable.head}}\n"
    sets = ("weights=fp32", "cluster.variables.NCCL_DEBUG=1", "gates.sft.exactness.at_least=0.5", "compare.prompts=[a]")
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    recipe = load(path, sets, {"HEAD": "true"}).recipe
    assert recipe.sft is not None and recipe.cluster is not None
    assert (recipe.sft.param_dtype, recipe.sft.trainable.lm_head) == ("fp32", True)
    assert recipe.cluster.env == {"NCCL_DEBUG": "1"}
    assert recipe.gates["sft"]["answer_f1"].at_least == 0.5


def test_a_problem_names_the_key_that_was_written(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"mine\.yaml:5: sft\.weights is 'bf8'; it wants one of auto, fp32, bf16"):
        read(tmp_path, f"{HEAD}sft:\n  weights: bf8\n")
    with pytest.raises(RecipeError, match=r"gates\.sft\.exactness is another name for answer_f1 \(line 7\)"):
        gates = "gates:\n  sft:\n    answer_f1: {at_least: 0}\n    exactness: {at_least: 0}\n"
        read(tmp_path, f"{HEAD}sft: {{}}\n{gates}")


def test_two_names_for_one_setting_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"sft\.lr is another name for learning_rate \(line 5\)"):
        read(tmp_path, f"{HEAD}sft:\n  learning_rate: 1\n  lr: 2\n")


def test_a_removed_setting_is_ignored_with_a_note(tmp_path: Path) -> None:
    loaded = read(tmp_path, f"{HEAD}sft:\n  tune_products: always\n  lr: 1e-4\n")
    assert loaded.recipe.sft is not None and loaded.recipe.sft.learning_rate == 1e-4
    assert any("sft.tune_products is ignored: it was removed in 0.2" in note for note in loaded.notes)
    with pytest.raises(RecipeError, match=r"model\.tune_products is unknown; it was removed in 0\.2; leave it out"):
        read(tmp_path, HEAD.replace("{model_name_or_path: m}", "{model_name_or_path: m, tune_products: never}"))


OURS_ALONE = {
    "param_dtype",  # what they are kept in; theirs follows from how the model was loaded
    "cuda_graphs",  # theirs is a mode of torch_compile
    "ema_decay",  # they have none; the name is timm's
    "early_stopping_patience",  # arguments of their EarlyStoppingCallback
    "early_stopping_threshold",
    "exp_avg_dtype",  # the name Megatron has for it
    "precision",  # theirs is bf16 and fp16; ours also says fp32 and auto
    "data",  # of one stage alone
    "quantization",  # theirs is load_in_4bit and load_in_8bit, which are read as this
    "distributed_strategy",  # theirs is a launcher's file
    "max_skipped_steps",
    "profile_memory",
    "async_save",
    "spike_factor",
    "decay_steps",
    "momentum",
    "global_batch_size",
    "trainable",
    "cache_frozen_layers",
    "share_prefix",
    "max_truncated_rows",
    "scale_lr_by_world_size",
    "fp8_validation",
    "fp8_scaling",
    "max_eval_samples",  # the name in the example scripts of transformers
    "deterministic",  # theirs, full_determinism, is off by default; it is an alias
}


def fields_of(module: str, class_name: str) -> set[str]:
    """The annotated names in a class of an installed package, read without importing it."""
    package, _, inside = module.partition(".")
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{package} is not installed")
    source = Path(spec.submodule_search_locations[0]) / f"{inside.replace('.', '/')}.py"
    classes = [node for node in ast.parse(source.read_text()).body if isinstance(node, ast.ClassDef)]
    body = next(node.body for node in classes if node.name == class_name)
    return {node.target.id for node in body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}


def test_our_names_for_training_are_those_of_trl_and_transformers() -> None:
    theirs = (
        fields_of("trl.trainer.sft_config", "SFTConfig")
        | fields_of("trl.trainer.base_config", "_BaseConfig")
        | fields_of("trl.trainer.model_config", "ModelConfig")
        | fields_of("transformers.training_args", "TrainingArguments")
    )
    assert set(SftConfig.model_fields) - theirs == OURS_ALONE
