"""Stages in a row: each starts from the verified model of its parent stage, behind that stage's gate."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from modelwright.errors import GateClosed, Refused, UsageError
from modelwright.recipe.load import load
from modelwright.runs.folder import RunFolder, read_json, write_json
from modelwright.stages import gate, pipeline
from modelwright.stages.context import RunOptions
from tests.faults.fork_server import events_of
from tiny import SFT, tiny_recipe

QUICK = {**SFT, "max_steps": 4, "save_steps": 2, "eval_steps": 2}
CLOSED = "gates={sft: {eval_loss: {at_most: 0.1}}}"


def chain(folder: Path, model: Path, *lines: str) -> Path:
    """A recipe of two stages, sft then lora, the second with data of its own."""
    path = tiny_recipe(
        folder, model, **{key: value for key, value in QUICK.items() if key not in SFT or SFT[key] != value}
    )
    other = [json.dumps({"prompt": f"Say {n}.", "completion": f"{n}, said."}) for n in range(12)]
    (folder / "other.jsonl").write_text("\n".join(other) + "\n", encoding="utf-8")
    lora = [f"  {key}: {json.dumps(value)}" for key, value in QUICK.items()]
    text = [path.read_text(encoding="utf-8"), "lora:", *lora, "  lora_r: 4"]
    text += ["  data:", "    train_file: other.jsonl", "    test_size: 2", *lines]
    path.write_text("\n".join(text) + "\n", encoding="utf-8")
    return path


def run(recipe: Path, *sets: str, **options: object) -> RunFolder:
    return pipeline.run(load(recipe, sets, {}), None, RunOptions(**options))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Path:
    """A finished chain; nobody writes into it."""
    recipe = chain(tmp_path_factory.mktemp("chain"), model_folder)
    run(recipe)
    return recipe.parent / "run"


def test_a_stage_starts_from_the_model_of_the_stage_before_it(done: Path) -> None:
    lineage, folder = read_json(done / "lineage.json")["stages"], RunFolder(done)
    assert [lineage[stage]["parent"] for stage in ("sft", "lora")] == [None, "sft"]
    assert lineage["lora"]["parent_model"] == lineage["sft"]["model"]
    adapter = read_json(folder.model("lora") / "adapter_config.json")
    assert Path(adapter["base_model_name_or_path"]) == folder.model("sft").resolve()
    before, after = read_json(folder.result("sft"))["metrics"], read_json(folder.gate("lora"))["metrics"]
    assert after["parent_eval_loss"] == before["eval_loss"]


def test_a_gate_may_use_the_answers_of_the_stage_before(model_folder: Path, tmp_path: Path) -> None:
    gate = "gates={lora: {answer_words: {at_least: 0, times: parent_answer_words}}}"
    folder = run(chain(tmp_path, model_folder), gate)
    assert json.loads(folder.gate("lora").read_text())["metrics"]["parent_answer_words"] is not None


def test_a_stage_has_data_of_its_own_or_the_recipes(done: Path) -> None:
    sources = [Path(read_json(RunFolder(done).data_manifest(stage))["source"]).name for stage in ("sft", "lora")]
    assert sources == ["rows.jsonl", "other.jsonl"]


def test_the_flow_shows_what_is_done_running_and_to_come(done: Path) -> None:
    flows = [[each["state"] for each in event["stages"]] for event in events_of(done, "stage_status")]
    assert flows == [["running", "pending"], ["done", "pending"], ["done", "running"], ["done", "done"]]
    assert (done / "best_model").resolve() == RunFolder(done).model("lora").resolve()


def test_what_is_finished_is_verified_and_what_is_damaged_is_made_again(model_folder: Path, tmp_path: Path) -> None:
    recipe = chain(tmp_path, model_folder)
    folder = run(recipe)
    before = read_json(folder.result("sft"))["files"]
    weights = folder.model("sft") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\0")
    with pytest.raises(Refused, match=r"model\.safetensors of the sft model is damaged"):
        run(recipe, from_stage="lora")
    run(recipe)
    assert read_json(folder.result("sft"))["files"] == before
    assert "lora already complete and verified; skipped" in events_of(folder.path, "note")[-1]["message"]
    flipped = folder.result("sft").read_bytes().replace(b'"checksum"', b'"checksux"')
    folder.result("sft").write_bytes(flipped)
    run(recipe, until_stage="sft")
    assert (folder.stage("sft") / "result.damaged.json").read_bytes() == flipped


def test_from_and_until_run_a_part(model_folder: Path, tmp_path: Path) -> None:
    recipe = chain(tmp_path, model_folder)
    with pytest.raises(Refused, match="stage sft was not judged yet; begin with it"):
        run(recipe, from_stage="lora")
    folder = run(recipe, until_stage="sft")
    assert folder.result("sft").exists() and not folder.result("lora").exists()
    run(recipe, from_stage="lora")
    assert folder.result("lora").exists()
    assert len([event for event in events_of(folder.path, "stage_started") if event["stage"] == "sft"]) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"from_stage": "dpo"}, "--from-stage dpo: the stages of this recipe are sft, lora"),
        ({"from_stage": "lora", "until_stage": "sft"}, "--from-stage lora comes after --until-stage sft"),
        ({"accepted_gates": frozenset({"sft"})}, "--accept-gate wants a reason"),
        ({"accepted_gates": frozenset({"sft"}), "accept_reason": " "}, "--accept-gate wants a reason"),
        ({"overrides": frozenset({"lora.lora_x"})}, r"did you mean lora\.lora_r"),
    ],
)
def test_orders_that_cannot_be_followed_are_answered(
    model_folder: Path, tmp_path: Path, options: dict[str, object], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        run(chain(tmp_path, model_folder), **options)


def test_nothing_is_trained_beyond_a_closed_gate_until_a_person_accepts_it_for_ever(
    model_folder: Path, tmp_path: Path
) -> None:
    recipe = chain(tmp_path, model_folder)
    with pytest.raises(GateClosed):
        run(recipe, CLOSED)
    folder = RunFolder(tmp_path / "run")
    assert not folder.stage("lora").exists()
    assert not folder.best_model.exists() and folder.last_model.resolve() == folder.model("sft").resolve()
    notes = [event["message"] for event in events_of(folder.path, "note")]
    assert f"the gate is closed, so best_model is not this model; {folder.last_model} is" in notes
    assert events_of(folder.path, "stage_status")[-1]["stages"][0] == {"stage": "sft", "state": "closed"}
    with pytest.raises(GateClosed):
        run(recipe, CLOSED, from_stage="lora")
    run(recipe, CLOSED, accepted_gates=frozenset({"sft"}), accept_reason="a trial of the flow")
    assert folder.result("lora").exists()
    run(recipe, CLOSED)  # it was accepted for this model and these limits
    lineage = read_json(folder.lineage)
    assert [entry["reason"] for entry in lineage["accepted"]] == ["a trial of the flow"]
    assert lineage["stages"]["sft"]["gate"] == "accepted"
    assert read_json(folder.gate("sft"))["open"] is False
    for stage in ("sft", "lora"):
        assert "Accepted manually: a trial of the flow." in (folder.model(stage) / "README.md").read_text()
    with pytest.raises(GateClosed):
        run(recipe, CLOSED.replace("0.1", "0.2"))  # other limits are another question


def test_a_changed_setting_of_any_finished_stage_is_refused_before_anything_is_touched(
    done: Path, tmp_path: Path
) -> None:
    before = (done / "recipe.yaml").read_text()
    with pytest.raises(Refused, match=r"lora\.learning_rate was 0\.001, now 0\.002"):
        run(done / "recipe.yaml", "lora.learning_rate=0.002")
    assert (done / "recipe.yaml").read_text() == before


def test_another_recipe_does_not_replace_a_run_in_silence(done: Path, tmp_path: Path, model_folder: Path) -> None:
    """All documents write to /shared/models: a second system there replaced the summary and best_model of the first."""
    before = {name: (done / name).read_bytes() for name in ("recipe.yaml", "training_summary.json")}
    dpo = {"name": "other", "model": {"model_name_or_path": str(model_folder)}, "output_dir": str(done),
           "data": {"train_file": "pairs.jsonl"}, "dpo": {"max_steps": 1}}  # fmt: skip
    pairs = [{"prompt": f"Gate {n}?", "chosen": f"Path {n}.", "rejected": "No."} for n in range(20)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    (tmp_path / "recipe.yaml").write_text(json.dumps(dpo))
    with pytest.raises(Refused, match=r"holds the run of tiny \(sft, lora\), and this is other \(dpo\)"):
        run(tmp_path / "recipe.yaml")
    assert before == {name: (done / name).read_bytes() for name in before}


def test_a_damaged_recipe_in_a_run_folder_is_written_again(model_folder: Path, tmp_path: Path) -> None:
    recipe = chain(tmp_path, model_folder)
    folder = run(recipe, "model.revision=main", until_stage="sft")
    saved = folder.recipe.read_text()
    folder.recipe.write_text(saved + "unknown_old: 1\n")
    run(recipe, "model.revision=main", until_stage="sft")
    assert folder.recipe.read_text() == saved


def test_missing_data_of_a_later_stage_is_refused_before_the_first_one_trains(
    model_folder: Path, tmp_path: Path
) -> None:
    recipe = chain(tmp_path, model_folder)
    (tmp_path / "other.jsonl").unlink()
    with pytest.raises(UsageError, match=r"^lora: data: there is no file.*other\.jsonl.*; --until-stage sft trains"):
        run(recipe)
    assert not RunFolder(tmp_path / "run").stage("sft").exists()
    assert run(recipe, until_stage="sft").result("sft").exists()


def test_the_verdict_on_a_model_of_an_earlier_start_says_so(done: Path, tmp_path: Path) -> None:
    folder = RunFolder(shutil.copytree(done, tmp_path / "run", symlinks=True))
    assert not any("earlier" in verdict.message for verdict in gate.rejudge_run(str(folder.path), None))
    result = read_json(folder.result("sft"))
    write_json(folder.result("sft"), {**result, "files": {**result["files"], "model.safetensors": "another"}})
    sft, lora = gate.rejudge_run(str(folder.path), None)
    remedy = "(run with --allow-changed model.fingerprint trains it again)"
    assert f"; its model started from an earlier sft model {remedy}" in lora.message and "earlier" not in sft.message


def test_the_history_is_by_epoch_and_by_step(done: Path) -> None:
    history = read_json(RunFolder(done).history)
    assert {"epochs", "steps"} == history.keys()
    assert [entry["step"] for entry in history["steps"] if entry["stage"] == "sft"] == [0, 1, 2, 3, 4]
    epochs = [entry for entry in history["epochs"] if entry["stage"] == "sft"]
    assert [entry["epoch"] for entry in epochs] == sorted({entry["epoch"] for entry in epochs})
    assert epochs[0]["epoch"] == 0 and "eval_loss" in epochs[0] and "loss" in epochs[1]


def test_an_epoch_of_images_has_training_and_held_out_accuracy() -> None:
    steps = [{"stage": "classify", "step": 0, "eval_accuracy": 0.1},
             {"stage": "classify", "step": 1, "epoch": 0.5, "loss": 2.0, "train_accuracy": 0.2},
             {"stage": "classify", "step": 2, "epoch": 1.0, "loss": 1.0, "train_accuracy": 0.4, "images": 32},
             {"stage": "classify", "step": 3, "epoch": 1.5, "loss": 0.5, "train_accuracy": 0.6},
             {"stage": "classify", "step": 4, "eval_accuracy": 0.7, "eval_loss": 0.4, "seconds": 2.0},
             {"stage": "classify", "step": 5, "epoch": 2.0, "loss": 0.5, "train_accuracy": 0.6}]  # fmt: skip
    before, first, second = pipeline.epoch_history(steps)
    assert before == {"stage": "classify", "epoch": 0, "step": 0, "eval_step": 0, "eval_accuracy": 0.1}
    assert first == {"stage": "classify", "epoch": 1, "step": 2, "loss": 1.5, "train_accuracy": pytest.approx(0.3)}
    assert (second["epoch"], second["loss"], second["train_accuracy"], second["eval_accuracy"]) == (2, 0.5, 0.6, 0.7)
    assert (second["step"], second["eval_step"]) == (5, 4) and "seconds" not in second
