"""Every key of the installed TRL, set to something else than its default, is carried into the recipe or named."""

from __future__ import annotations

import ast
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from modelwright.errors import UsageError
from modelwright.recipe.convert import ConvertedRecipe, convert_config
from modelwright.recipe.fields import canonical_key, known_names

UNSET = object()
BASE = {"model_name_or_path": "m", "dataset_name": "d", "output_dir": "out"}
METHOD_FILES = {"SFTConfig": "sft_config.py", "DPOConfig": "dpo_config.py"}
WORDS = {
    "lr_scheduler_type": "cosine", "optim": "sgd", "loss_type": "hinge", "packing_strategy": "bfd_split",
    "report_to": "wandb", "eval_strategy": "epoch", "save_strategy": "epoch", "dtype": "bfloat16",
    "attn_implementation": "sdpa", "metric_for_best_model": "accuracy", "bnb_4bit_quant_type": "fp4",
    "torch_compile_backend": "inductor", "neftune_noise_alpha": 5.0, "warmup_ratio": 0.1, "fsdp": "full_shard",
    "lr_scheduler_kwargs": {"num_cycles": 2}, "truncation_mode": "keep_end", "test_split_size": 0.1,
    "datasets": [{"path": "d2"}], "label_smoothing": 0.1, "save_total_limit": 5, "save_steps": 50, "warmup_steps": 7,
    "data_seed": 7, "logging_strategy": "epoch", "lora_target_modules": ["q_proj"],
}  # fmt: skip
"""Values that are valid where a guess by the type is not."""


def source_of(package: str, *names: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        pytest.skip(f"{package} is not installed")
    return Path(spec.origin).parent.joinpath(*names)


def fields_of(file: Path, *classes: str) -> dict[str, tuple[str, Any]]:
    """Annotation and default of the fields of dataclasses, read without importing torch."""
    fields: dict[str, tuple[str, Any]] = {}
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef) and (not classes or node.name in classes):
            for each in node.body:
                if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
                    fields[each.target.id] = (ast.unparse(each.annotation), default_of(each.value))
    return {name: field for name, field in fields.items() if not name.startswith("_") and "ClassVar" not in field[0]}


def default_of(value: ast.expr | None) -> Any:
    if isinstance(value, ast.Call):
        value = next((each.value for each in value.keywords if each.arg == "default"), None)
    try:
        return ast.literal_eval(value) if value is not None else UNSET
    except ValueError:
        return UNSET


def other_value(name: str, annotation: str, default: Any) -> Any:
    """A value of the type that is not the default."""
    if name in WORDS:
        return WORDS[name]
    if "bool" in annotation and "str" not in annotation:
        return default is not True
    if "int" in annotation:
        return 5 if default != 5 else 6
    if "float" in annotation:
        return 0.25 if default != 0.25 else 0.5
    if "dict" in annotation:
        return {"some": "value"}
    return ["word"] if "list" in annotation else "word"


def trl_fields(method: str) -> dict[str, tuple[str, Any]]:
    trainer = source_of("trl", "trainer")
    base = next(file for file in (trainer / "base_config.py", trainer / "utils.py") if file.exists())
    fields = {
        **fields_of(source_of("transformers", "training_args.py"), "TrainingArguments"),
        **fields_of(base, "_BaseConfig", "BaseConfig"),
        **fields_of(trainer / METHOD_FILES[method], method),
        **fields_of(trainer / "model_config.py", "ModelConfig"),
        **fields_of(source_of("trl", "scripts", "utils.py"), "ScriptArguments", "DatasetMixtureConfig"),
    }
    return {name: field for name, field in fields.items() if name not in ("framework", "default_optim")}


def convert_settings(tmp_path: Path, settings: dict[str, Any], stage: str | None) -> ConvertedRecipe:
    file = tmp_path / "some.yaml"
    file.write_text(json.dumps(settings), encoding="utf-8")
    return convert_config(file, "trl", stage)


def settings_in(text: str) -> list[str]:
    return [line.partition("#")[0].strip() for line in text.splitlines()]


@pytest.mark.parametrize("method", METHOD_FILES)
def test_every_key_of_the_installed_trl_is_carried_or_named(method: str, tmp_path: Path) -> None:
    stage, fields = method.removesuffix("Config").lower(), trl_fields(method)
    assert len(fields) > 120
    lost = []
    for lora in (False, True):
        base = {**BASE, **({"use_peft": True} if lora else {})}
        plain = convert_settings(tmp_path, base, stage)
        assert plain.recipe is not None
        for name, (annotation, default) in fields.items():
            value = other_value(name, annotation, default)
            value = "chunked_nll" if name == "loss_type" and stage == "sft" else value
            if (
                value == base.get(name)
                or (lora and not name.startswith(("lora", "use_", "load", "bnb")))
                or (name == "datasets" and base.pop("dataset_name", None) is None)
            ):
                continue
            converted = convert_settings(tmp_path, {**base, name: value}, stage)
            named = [each for each in converted.unconverted if each.key.split(".")[0].split("[")[0] == name]
            carried = settings_in(converted.text) != settings_in(plain.text)
            key = next((f"{s}.{name}" for s in ("model", "data", stage) if name in known_names(s)), "")
            if carried and not named and key and isinstance(value, int | float):
                section, _, ours = canonical_key(key).partition(".")
                written = getattr(getattr(converted.recipe, section), ours)
                assert written == value or getattr(written, "raw", None) == value or ours != name, (name, written)
            if not carried and not named:
                lost.append(f"{name}: {value} (default {default})")
    assert not lost


def test_no_other_method_of_the_installed_trl_becomes_ours(tmp_path: Path) -> None:
    ours = {**trl_fields("SFTConfig"), **trl_fields("DPOConfig")}
    files = [*source_of("trl", "trainer").glob("*_config.py"), *source_of("trl", "experimental").glob("*/*_config.py")]
    refused = []
    for file in files:
        method = file.name.removesuffix("_config.py")
        own = {name: field for name, field in fields_of(file).items() if name not in ours and "config" not in name}
        if method in ("sft", "dpo", "model", "base", "orpo") or not own:
            continue
        settings = {**BASE, **{name: other_value(name, *field) for name, field in own.items()}}
        with pytest.raises(UsageError, match=r"not offered|--stage dpo"):
            convert_settings(tmp_path, settings, None)
        refused.append(method)
    assert {"kto", "grpo", "rloo", "reward"} <= {*refused}
