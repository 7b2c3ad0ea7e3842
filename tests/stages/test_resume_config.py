"""Resuming with changed settings is refused with the name of each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from modelwright.errors import Refused, UsageError
from modelwright.recipe.load import load
from modelwright.stages.context import (
    CHANGEABLE_ON_RESUME,
    build_resume_config,
    check_resume_config,
    validate_overrides,
)
from tiny import tiny_recipe


def config(folder: Path, data: str = "d1", model: str = "m1", **settings: Any) -> dict[str, Any]:
    recipe = load(tiny_recipe(folder, folder / "model", **settings), environ={}).recipe
    return build_resume_config(recipe, "sft", data, model)


def test_the_same_config_resumes_without_a_note(tmp_path: Path) -> None:
    assert check_resume_config(config(tmp_path), config(tmp_path), ()) == []


def test_a_changed_setting_is_refused_by_name_with_both_values_and_the_ways_out(tmp_path: Path) -> None:
    with pytest.raises(Refused) as caught:
        check_resume_config(config(tmp_path), config(tmp_path, learning_rate=2e-3), ())
    assert str(caught.value) == (
        "settings changed since this run started: sft.learning_rate was 0.001, now 0.002. "
        "Choose another output_dir, put it back, or add --allow-changed sft.learning_rate"
    )
    assert caught.value.exit_code == 77


def test_every_change_is_named_at_once(tmp_path: Path) -> None:
    changed = config(tmp_path, data="d2", model="m2", trainable={"last_layers": 1})
    with pytest.raises(Refused) as caught:
        check_resume_config(config(tmp_path), changed, ())
    message = str(caught.value)
    for part in ("sft.trainable.last_layers was None, now 1", "data.fingerprint changed", "model.fingerprint changed"):
        assert part in message
    assert message.endswith(
        "--allow-changed sft.trainable.last_layers --allow-changed data.fingerprint --allow-changed model.fingerprint"
    )


def test_a_change_that_is_allowed_is_recorded(tmp_path: Path) -> None:
    changes = check_resume_config(config(tmp_path), config(tmp_path, learning_rate=2e-3), ["sft.learning_rate"])
    assert changes == ["sft.learning_rate was 0.001, now 0.002"]


def test_what_does_not_decide_the_weights_may_change(tmp_path: Path) -> None:
    free = config(
        tmp_path, save_steps=1, eval_steps=1, logging_steps=5, save_total_limit=9, gradient_checkpointing=True
    )
    assert check_resume_config(config(tmp_path), free, ()) == []
    assert {"save_steps", "eval_steps", "logging_steps"} <= CHANGEABLE_ON_RESUME


@pytest.mark.parametrize("setting", [{"max_steps": 13}, {"packing": True}, {"max_length": 128}, {"adam_beta1": 0.8}])
def test_what_decides_the_weights_may_not(tmp_path: Path, setting: dict[str, Any]) -> None:
    with pytest.raises(Refused, match=next(iter(setting))):
        check_resume_config(config(tmp_path), config(tmp_path, **setting), ())


def test_another_seed_is_another_run(tmp_path: Path) -> None:
    now = {**config(tmp_path), "seed": 43}
    with pytest.raises(Refused, match="seed was 42, now 43"):
        check_resume_config(config(tmp_path), now, ())


def test_a_setting_that_an_earlier_version_did_not_know_is_reported_as_such(tmp_path: Path) -> None:
    before = config(tmp_path)
    del before["sft.weight_decay"]
    with pytest.raises(Refused, match="put it back, continue with the earlier modelwright that started it, or add"):
        check_resume_config(before, config(tmp_path), ())


def test_an_override_that_names_nothing_is_a_mistake(tmp_path: Path) -> None:
    recipe = load(tiny_recipe(tmp_path, tmp_path / "model"), environ={}).recipe
    validate_overrides(recipe, ["sft.learning_rate", "data.fingerprint", "sft.trainable.entry_of_old"])
    with pytest.raises(UsageError, match=r"did you mean sft\.learning_rate"):
        validate_overrides(recipe, ["sft.learnig_rate"])
