"""A stage trains in fp8 where it is faster and its loss agrees; otherwise in bf16, with the reason."""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fake_torchao import use_fake_torchao
from modelwright.engine.trainer import Engine
from modelwright.errors import Interrupted
from modelwright.plan import choose, stage
from modelwright.plan.hardware import GPUS, Hardware
from modelwright.recipe.load import load
from modelwright.stages import pipeline, planning
from modelwright.stages.context import RunOptions
from modelwright.stages.planning import TimedPass, decide
from tests.faults.fork_server import events_of, run_fingerprint
from tests.stages.test_pretrain import recipe_of
from tiny import tiny_dpo_recipe, tiny_recipe

BRIEF = {"max_steps": 4, "save_steps": 2, "eval_steps": 4, "per_device_train_batch_size": 4}
SLOW, FAST = (
    {"bf16": TimedPass(1.0, 100.0), "fp8": TimedPass(0.99, 100.1)},
    {"bf16": TimedPass(1.0, 100.0), "fp8": TimedPass(0.8, 100.1)},
)
Tried = list[tuple[dict[str, TimedPass], str]]


@pytest.fixture
def tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tried]:
    """Both ways are really gone through; what they are said to have taken is the first of what stands here."""
    monkeypatch.setenv("MODELWRIGHT_CACHE", str(tmp_path / "cache"))
    use_fake_torchao(monkeypatch)
    really, calls = planning.time_precision, []

    def measured(engine: Engine, precision: str, scaling: str) -> TimedPass:
        assert math.isfinite(really(engine, precision, scaling).loss)
        name = f"{precision} {scaling}" if (precision, scaling) == ("fp8", "rowwise") else precision
        calls.append((FIGURES[0], name))
        return FIGURES[0][name]

    monkeypatch.setattr(planning, "time_precision", measured)
    yield calls
    FIGURES[:] = [FAST]


FIGURES = [FAST]


def run(folder: Path, model: Path, stop_after: int | None = None, make: Any = tiny_recipe, **settings: Any) -> Path:
    recipe = folder / "recipe.yaml"
    if not recipe.exists():
        make(folder, model, **{**BRIEF, "precision": "fp8", **settings})

    def watch(event: dict[str, Any]) -> None:
        if event["event"] == "step" and event["step"] == stop_after:
            os.kill(os.getpid(), signal.SIGTERM)

    pipeline.run(load(recipe, environ={}), watch)
    return folder / "run"


@pytest.mark.parametrize(
    ("seconds", "loss", "use_fp8", "why"),
    [
        (0.8, 100.4, True, "fp8 is kept: fp8 is 1.25 × as fast as bf16 here (needs 1.05), its loss 0.40% off"),
        (0.96, 100.0, False, "bf16 instead of fp8: fp8 is 1.04 × as fast"),
        (0.5, 100.6, False, "its loss 0.60% off (at most 0.5%)"),
        (0.5, math.nan, False, "its loss is not finite"),
    ],
)
def test_it_must_be_faster_and_say_the_same(seconds: float, loss: float, use_fp8: bool, why: str) -> None:
    decision = decide(TimedPass(1.0, 100.0), TimedPass(seconds, loss), "tensorwise")
    assert decision.use_fp8 is use_fp8
    assert why in decision.reason


def test_what_is_kept_trains_as_if_it_had_been_forced_and_is_not_tried_again(
    tried: Tried, model_folder: Path, tmp_path: Path
) -> None:
    validated = run(tmp_path / "kept", model_folder)
    assert [precision for _, precision in tried] == ["bf16", "fp8"]
    again = run(tmp_path / "again", model_folder)
    forced = run(tmp_path / "forced", model_folder, fp8_validation="off")
    assert len(tried) == 2
    assert (
        events_of(validated, "fp8_trial")[0] | {"cached": False, "use_fp8": True, "speedup": 1.25}
        == events_of(validated, "fp8_trial")[0]
    )
    (revised,) = events_of(validated, "plan_revised")
    assert revised["changes"] == {} and revised["reason"] == events_of(validated, "fp8_trial")[0]["reason"]
    assert [event["cached"] for event in events_of(again, "fp8_trial")] == [True]
    assert not events_of(again, "plan_revised"), "the plan had the result from the beginning"
    assert events_of(forced, "fp8_trial") == []
    assert run_fingerprint(validated) == run_fingerprint(again) == run_fingerprint(forced)
    assert "fp8 is kept: fp8 is 1.25 × as fast" in (validated / "stages/sft/model/README.md").read_text(
        encoding="utf-8"
    )


CLOSER = {"bf16": TimedPass(1.0, 100.0), "fp8": TimedPass(0.7, 102.0), "fp8 rowwise": TimedPass(0.8, 100.1)}


@pytest.mark.parametrize(
    ("figures", "why"),
    [
        (CLOSER, "fp8 is kept: fp8 rowwise is 1.25 × as fast as bf16 here (needs 1.05), its loss "
                 "0.10% off (at most 0.5%); with tensorwise scaling its loss was too far off"),
        (CLOSER | {"fp8 rowwise": TimedPass(0.99, 100.1)}, "bf16 instead of fp8: fp8 rowwise is 1.01 ×"),
    ],
)  # fmt: skip
def test_a_scale_for_each_row_is_tried_where_one_for_each_matrix_is_fast_and_not_close(
    tried: Tried, model_folder: Path, tmp_path: Path, figures: dict[str, TimedPass], why: str
) -> None:
    FIGURES[:] = [figures]
    auto = run(tmp_path / "auto", model_folder)
    assert [name for _, name in tried] == ["bf16", "fp8", "fp8 rowwise"]
    plan = json.loads((auto / "plan.json").read_text(encoding="utf-8"))["sft"]
    assert plan["reasons"][-1].startswith(why)
    accepted = (
        {"precision": "fp8", "fp8_scaling": "rowwise", "fp8_validation": "off"}
        if "is kept" in why
        else {"precision": "bf16"}
    )
    same = run(tmp_path / "same", model_folder, **accepted)
    assert plan["precision"] == accepted["precision"]
    again = run(tmp_path / "again", model_folder)
    assert len(tried) == 3
    for step, (loss, *_) in run_fingerprint(same)["steps"].items():  # in bf16 rows are padded otherwise
        assert (
            run_fingerprint(auto)["steps"][step][0]
            == run_fingerprint(again)["steps"][step][0]
            == pytest.approx(loss, rel=1e-5)
        )
    matrices = run(tmp_path / "matrices", model_folder, fp8_scaling="tensorwise", fp8_validation="off")
    assert run_fingerprint(matrices)["steps"] != run_fingerprint(auto)["steps"]


def test_what_is_not_worth_it_trains_in_bf16_and_the_run_keeps_to_that(
    tried: Tried, model_folder: Path, tmp_path: Path
) -> None:
    FIGURES[:] = [SLOW]
    with pytest.raises(Interrupted):
        run(tmp_path / "halved", model_folder, stop_after=2)
    cache_file = tmp_path / "cache/fp8.json"
    cache_file.write_text(cache_file.read_text().replace('"use_fp8": false', '"use_fp8": true'), encoding="utf-8")
    FIGURES[:] = [FAST]
    halved = run(tmp_path / "halved", model_folder)
    assert len(tried) == 2
    plain = run(tmp_path / "plain", model_folder, precision="bf16")
    for step, (loss, *_, rate) in run_fingerprint(plain)["steps"].items():  # in rows that are padded otherwise
        assert run_fingerprint(halved)["steps"][step][0] == pytest.approx(loss, rel=1e-5)
        assert run_fingerprint(halved)["steps"][step][-1] == rate
    (revised,) = events_of(halved, "plan_revised")
    assert revised["changes"] == {"precision": {"from": "fp8", "to": "bf16"}}
    plan = json.loads((halved / "plan.json").read_text(encoding="utf-8"))["sft"]
    assert plan["precision"] == "bf16"
    assert plan["reasons"][-1].startswith("bf16 instead of fp8: fp8 is 1.01 × as fast as bf16 here (needs 1.05)")
    assert "bf16 instead of fp8" in (halved / "report.html").read_text(encoding="utf-8")


def test_another_shape_is_tried_again_and_a_damaged_cache_is_ignored(
    tried: Tried, model_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache/fp8.json").write_text("[1]", encoding="utf-8")
    run(tmp_path / "one", model_folder, max_steps=1)
    run(tmp_path / "other", model_folder, max_steps=1, per_device_train_batch_size=2)
    assert len(tried) == 4


def test_pairs_are_tried_before_their_reference_is_measured_in_what_is_kept(
    tried: Tried, model_folder: Path, tmp_path: Path
) -> None:
    for name, figures in (("fp8", FAST), ("bf16", SLOW)):  # with a scale for each row: others do not touch it
        FIGURES[:] = [{"bf16": figures["bf16"], "fp8 rowwise": figures["fp8"]}]
        (tmp_path / "cache/fp8.json").unlink(missing_ok=True)
        done = run(tmp_path / name, model_folder, make=tiny_dpo_recipe, max_steps=1)
        assert run_fingerprint(done, "dpo")["steps"][1][0] == pytest.approx(math.log(2), abs=1e-5)
        assert json.loads((done / "plan.json").read_text(encoding="utf-8"))["dpo"]["precision"] == name


def test_another_scaling_is_tried_again_by_a_resumed_run(tried: Tried, model_folder: Path, tmp_path: Path) -> None:
    FIGURES[:] = [CLOSER | {"fp8": TimedPass(0.7, 100.1)}]
    with pytest.raises(Interrupted):
        run(tmp_path / "one", model_folder, stop_after=2)
    recipe = load(tmp_path / "one/recipe.yaml", ["sft.fp8_scaling=rowwise"], environ={})
    pipeline.run(recipe, options=RunOptions(overrides=frozenset({"sft.fp8_scaling"})))
    assert [name for _, name in tried] == ["bf16", "fp8", "bf16", "fp8 rowwise"]
    plan = json.loads((tmp_path / "one/run/plan.json").read_text(encoding="utf-8"))["sft"]
    assert (plan["precision"], plan["fp8_scaling"]) == ("fp8", "rowwise")


def test_fp8_that_fails_here_leaves_bf16(tried: Tried, model_folder: Path, tmp_path: Path) -> None:
    FIGURES[:] = [{"bf16": TimedPass(1.0, 100.0)}]  # and nothing for fp8
    done = run(tmp_path / "failed", model_folder, max_steps=1)
    assert events_of(done, "fp8_trial")[0]["reason"] == "bf16 instead of fp8: fp8 failed here (KeyError: 'fp8')"
    assert not (tmp_path / "cache/fp8.json").exists()


def test_pretraining_with_precision_auto_is_compared_too_and_a_run_keeps_what_it_began_with(
    tried: Tried, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choose, "MIN_FP8_SPEEDUP", 0.0)  # a tiny model gains nothing
    monkeypatch.setattr(choose, "MIN_FP8_WIDTH", 0)
    monkeypatch.setattr(choose, "COMPARE_SECONDS", -1e9)
    monkeypatch.setattr(stage, "choose_precision", lambda _: ("bf16", "bf16: fast here"))
    monkeypatch.setattr(planning, "_hardware", lambda _: Hardware(1, 1, GPUS["H200"]))
    monkeypatch.setattr(planning, "gpu_spec_of", lambda _: GPUS["H200"])

    def pretrain(name: str, torchao: str | None, stop_after: int | None = None) -> dict[str, Any]:
        monkeypatch.setattr(planning, "installed_version", lambda _: torchao)
        brief: Any = {"max_steps": 4, "sequence_length_curriculum": {}, "param_dtype": "fp32", "precision": "auto"}
        recipe_of(tmp_path / name, model_folder, **brief)
        run(tmp_path / name, model_folder, stop_after)
        plan = json.loads((tmp_path / name / "run/plan.json").read_text(encoding="utf-8"))["pretrain"]
        return {
            "precision": plan["precision"],
            "why": [line for line in plan["reasons"] if "fp8" in line or "as at" in line],
        }

    fp8 = pretrain("kept", "0.14")
    assert fp8["precision"] == "fp8" and len(tried) == 2
    assert "the run compares both before its first step" in fp8["why"][0]
    assert fp8["why"][1].startswith("fp8 is kept: fp8 is 1.25 × as fast as bf16 here")
    with pytest.raises(Interrupted):
        pretrain("without", None, stop_after=2)
    resumed = pretrain("without", "0.14")
    assert resumed == {"precision": "bf16", "why": ["bf16, as at this run's earlier start (precision)"]}
    assert "torchao is not installed" in pretrain("missing", None)["why"][0]
    assert len(tried) == 2
