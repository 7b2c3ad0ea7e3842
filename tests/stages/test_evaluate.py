"""Every model of a run is evaluated in the same way, once, and gates can use the metrics."""

from __future__ import annotations

import json
import math
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from modelwright.cli.main import main
from modelwright.data.chat import load_conversations
from modelwright.data.multiple_choice import MultipleChoiceQuestion
from modelwright.data.tokenizer import DocumentTokenizer
from modelwright.errors import DataError, GateClosed, ModelError, Refused
from modelwright.models.pretrained import load_model, load_tokenizer
from modelwright.recipe.load import load
from modelwright.report.console import format_event, run_summary
from modelwright.runs.folder import RunFolder, read_json
from modelwright.stages import pipeline
from modelwright.stages.context import RunOptions
from modelwright.stages.evaluate import load_prompts
from modelwright.tasks.scoring import score_choices, score_texts, task_file
from modelwright.tasks.verifiers import wilson_interval
from tests.faults.fork_server import events_of
from tiny import tiny_dpo_recipe, tiny_recipe

TEXTS = ["The tent is dry.", "A map, a rope and a stove." * 6, "Boots."]
QUESTION = {"question": "What is dry?", "choices": ["the tent", "the sea"], "answer": 0}


def test_the_loss_of_texts_is_that_of_the_model_itself(model_folder: Path) -> None:
    model, encoder = load_model(model_folder).eval(), DocumentTokenizer.open(model_folder)
    scores = score_texts(model, encoder, TEXTS, max_length=512)
    summed, counted = 0.0, 0
    for text in TEXTS:
        tokens = torch.tensor(encoder.encode_batch([text]).tokens.astype("int64"))[None]
        with torch.no_grad():
            summed += float(model(input_ids=tokens, labels=tokens).loss) * (tokens.numel() - 1)
        counted += tokens.numel() - 1
    assert scores["text_loss"] == pytest.approx(summed / counted, rel=1e-5)
    assert scores["text_perplexity"] == pytest.approx(math.exp(summed / counted), rel=1e-4)
    # the first token of a text has no loss, and its bytes do not count
    first = [encoder.tokenizer.decode(encoder.encode_batch([text]).tokens[:1]) for text in TEXTS]
    assert all(text.startswith(token) for text, token in zip(TEXTS, first, strict=True))
    size = len("".join(TEXTS)) - len("".join(first))
    assert scores["text_bits_per_byte"] == pytest.approx(summed / math.log(2) / size, rel=1e-5)


def test_the_likeliest_option_is_that_of_the_model_itself(model_folder: Path) -> None:
    model, tokenizer = load_model(model_folder).eval(), load_tokenizer(model_folder)
    options = ("wet boots", "a rope", "the long way round the lake", "no")
    likely = []
    for option in options:
        before, after = tokenizer("Question: Why?\nAnswer:")["input_ids"], tokenizer(f" {option}")["input_ids"]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([before + after])).logits[0].log_softmax(-1)
        likely.append(sum(float(logits[len(before) + n - 1, token]) for n, token in enumerate(after)))
    by_byte = [value / len(option.encode()) for value, option in zip(likely, options, strict=True)]
    for scores, metric in ((likely, "choice_accuracy"), (by_byte, "choice_accuracy_norm")):
        best = scores.index(max(scores))
        for answer in range(len(options)):
            metrics = score_choices(
                model, tokenizer, [MultipleChoiceQuestion("Question: Why?\nAnswer:", options, answer)], 64
            )
            assert metrics[metric] == float(answer == best)


def evaluated_recipe(folder: Path, model: Path, *lines: str) -> Path:
    recipe = tiny_recipe(folder, model, max_steps=2)
    (folder / "text.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in TEXTS) + "\n")
    (folder / "quiz.jsonl").write_text(json.dumps(QUESTION) + "\n")
    text = [
        "evaluate:",
        "  perplexity_text: text.jsonl",
        "  multiple_choice: quiz.jsonl",
        "  completion_prompts: [The tent]",
        "  max_new_tokens: 3",
    ]
    recipe.write_text("\n".join([recipe.read_text(), *text, *lines]) + "\n")
    return recipe


def test_base_and_stages_are_measured_alike_and_a_gate_may_compare_them(model_folder: Path, tmp_path: Path) -> None:
    gates = (
        "gates:",
        "  sft:",
        "    text_loss: {at_most: 0.5, plus: base_text_loss}",
        "    choice_accuracy: {at_least: 0}",
    )
    recipe = evaluated_recipe(tmp_path, model_folder, *gates)
    folder = pipeline.run(load(recipe, environ={}))
    metrics = read_json(folder.gate("sft"))["metrics"]
    assert metrics["text_loss"] != metrics["base_text_loss"]
    table = read_json(folder.evaluation("comparison"))
    assert table["base"]["text_loss"] == metrics["base_text_loss"]
    assert table["sft"]["text_loss"] == metrics["text_loss"]
    assert [event["model"] for event in events_of(folder.path, "evaluate_result")] == ["base", "sft"]
    assert events_of(folder.path, "stage_status")[-1]["stages"][-1] == {"stage": "evaluate", "state": "done"}
    with pytest.raises(GateClosed, match=r"text_loss .* \(needs at most .* = base_text_loss .* - 5"):
        pipeline.run(load(recipe, ["gates={sft: {text_loss: {at_most: -5, plus: base_text_loss}}}"], {}))
    assert len(events_of(folder.path, "evaluate_result")) == 2  # the measurements stood already


ANSWERS = """
evaluate:
  answers:
    verifiers: {exact_match: {}, short: {type: length, max_words: 6, weight: 3}, python: {file: mine.py, weight: 0}}
    max_prompts: 3
    max_new_tokens: 4
gates:
  sft:
    answers.short: {at_least: 0.8, plus: base_answers.exact_match}
"""


def test_answers_to_held_out_prompts_are_judged_and_a_gate_may_ask_for_them(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tiny_recipe(tmp_path, model_folder, max_steps=2)
    recipe.write_text(recipe.read_text() + ANSWERS, encoding="utf-8")
    verifier = tmp_path / "mine.py"
    verifier.write_text("def verify(prompt, answer, reference):\n    return 'and' in prompt\n", encoding="utf-8")
    with pytest.raises(Refused, match=r"--trust-file mine\.py"):
        pipeline.run(load(recipe, environ={}))
    trusted = RunOptions(trusted_files=frozenset({str(verifier)}))
    folder = pipeline.run(load(recipe, environ={}), options=trusted)
    metrics = read_json(folder.gate("sft"))["metrics"]
    answers = {name: metrics[f"answers.{name}"] for name in ("exact_match", "short", "python", "score")}
    assert answers == {"exact_match": 0.0, "short": 1.0, "python": 1.0, "score": 0.75}
    assert metrics["base_answers.score"] == 0.75
    stored = read_json(folder.evaluation("sft"))
    assert len(stored["answers"]) == stored["judged"] == 3
    held_out = load_conversations(load(recipe, environ={}).recipe.data_for("sft"), 42, tmp_path).held_out
    assert {row["prompt"] for row in stored["answers"]} < {item.last_user_message for item in held_out}
    assert stored["intervals"]["answers.short"] == list(wilson_interval(1.0, 3))
    [line] = [format_event(event) for event in events_of(folder.path, "evaluate_result") if event["model"] == "sft"]
    assert "answers.short 100.0% of 3 answers (95 % interval 43.8% to 100.0%)" in str(line)
    assert str(line).count("wrong: ") == 3
    assert "short            100.0% → 100.0%" in run_summary(folder)
    assert "answers          0 of 3 right → 0 of 3 right\n  a wrong answer   " in run_summary(folder)
    assert "✘ wrong" in folder.report.read_text(encoding="utf-8")
    with pytest.raises(GateClosed, match=r"answers.exact_match 0 \(needs at least 0.5"):
        pipeline.run(load(recipe, ["gates={sft: {answers.exact_match: {at_least: 0.5}}}"], {}), options=trusted)
    assert len(events_of(folder.path, "evaluate_result")) == 2
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        main(["eval", str(folder.path), "--json"])
    assert stop.value.code == Refused.exit_code
    capsys.readouterr()
    again = evaluated(["eval", str(folder.path), "--json", "--trust-file", str(verifier)], capsys)
    assert again["sft"]["answers"] == stored["answers"]


def test_answers_are_judged_on_pairs_and_on_a_data_set_of_their_own(model_folder: Path, tmp_path: Path) -> None:
    recipe = load(tiny_dpo_recipe(tmp_path, model_folder), ["evaluate={answers: {}}"], {}).recipe
    prompts = load_prompts(recipe, tmp_path)
    chosen = {json.loads(line)["chosen"] for line in (tmp_path / "pairs.jsonl").read_text().splitlines()}
    assert len(prompts) == 6 and {row.reference for row in prompts} < chosen
    (tmp_path / "quiz.jsonl").write_text('{"question": "2 + 2?", "answer": "4"}\n', encoding="utf-8")
    settings = ["evaluate={answers: {dataset_name: quiz.jsonl, verifiers: {number: {}}}}", "data.system_prompt=Add."]
    recipe = load(tiny_recipe(tmp_path, model_folder), settings, {}).recipe
    [row] = load_prompts(recipe, tmp_path)
    assert ([message["content"] for message in row.messages], row.reference) == (["Add.", "2 + 2?"], "4")
    (tmp_path / "quiz.jsonl").write_text('{"question": "2 + 2?", "answer": "four"}\n', encoding="utf-8")
    with pytest.raises(DataError, match=r"quiz.jsonl:1: the answer has no number, which number compares"):
        load_prompts(recipe, tmp_path)


def test_eval_measures_a_run_and_a_model_by_themselves(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = evaluated_recipe(tmp_path, model_folder)
    pipeline.run(load(recipe, ["evaluate=null"], {}))
    capsys.readouterr()
    monkeypatch.chdir(tmp_path)
    options = ["--text", "text.jsonl", "--multiple-choice", "quiz.jsonl", "--json"]
    run, model = (evaluated(["eval", target, *options], capsys) for target in ("run", str(model_folder)))
    assert run["base"]["metrics"] == model[str(model_folder)]["metrics"]
    assert set(run) == {"base", "sft"}
    with pytest.raises(SystemExit) as stop:
        main(["eval", str(model_folder)])
    assert stop.value.code == 2
    assert "add --text, --multiple-choice, --prompt or --task" in capsys.readouterr().err


def evaluated(words: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


@pytest.mark.skipif(find_spec("lm_eval") is not None, reason="lm-eval is installed here")
def test_tasks_without_lm_eval_are_one_error_before_anything_is_done(model_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"not installed: pip install 'modelwright\[eval\]'"):
        pipeline.run(load(evaluated_recipe(tmp_path, model_folder), ["evaluate.tasks=[arc_easy]"], {}))
    assert not RunFolder(tmp_path / "run").evaluation("base").exists()
    assert not RunFolder(tmp_path / "run").stage("sft").exists()


def test_a_question_with_an_unclear_answer_is_reported_before_anything_is_trained(
    model_folder: Path, tmp_path: Path
) -> None:
    recipe = evaluated_recipe(tmp_path, model_folder)
    (tmp_path / "quiz.jsonl").write_text('{"question": "How many?", "choices": ["1", "2", "3"], "answer": 2}\n')
    with pytest.raises(DataError, match="the answer can mean '3' by its number or '2' by its text"):
        pipeline.run(load(recipe, environ={}))
    assert not RunFolder(tmp_path / "run").stage("sft").exists()


TASK = """
task: sums
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: multiple_choice
doc_to_text: "Question: {{question}}\\nAnswer:"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}]
"""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("lm_eval") is None, reason="lm-eval is in the extra eval")
def test_a_task_of_lm_eval_is_measured_of_every_model_and_logged_in_the_journal(
    model_folder: Path, tmp_path: Path
) -> None:
    rows = [{"question": f"What is {n} and 1?", "choices": [f"{n + 1}.", "A rope."], "answer": 0} for n in range(6)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (tmp_path / "sums.yaml").write_text(TASK.replace("DATA", str(tmp_path / "sums.jsonl")), encoding="utf-8")
    recipe = evaluated_recipe(tmp_path, model_folder)
    pipeline.run(load(recipe, ["evaluate.tasks=[sums.yaml]", "evaluate.multiple_choice=sums.jsonl"], {}))
    [table] = events_of(tmp_path / "run", "evaluate_table")
    for name in ("base", "sft"):
        measured = table["models"][name]
        assert measured["sums_acc"] == pytest.approx(measured["choice_accuracy"]), "theirs and ours agree"


def test_a_missing_or_misnamed_task_file_is_reported(tmp_path: Path) -> None:
    (tmp_path / "products.yaml").write_text(TASK, encoding="utf-8")
    with pytest.raises(ModelError, match=r"products.yaml wants a line `task: products`, as the file is called"):
        task_file("products.yaml", tmp_path)
    with pytest.raises(ModelError, match=r"none.yaml is not there; it wants a task file of lm-eval"):
        task_file("none.yaml", tmp_path)


@pytest.mark.parametrize("settings", [{}, {"trainable": "lora"}, {"ema_decay": 0.5}, {"trainable": {"last_layers": 1}}])
def test_a_checkpoint_is_evaluated_as_the_model_that_was_written_from_it(
    settings: dict[str, Any], model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tiny_recipe(tmp_path, model_folder, max_steps=4, save_steps=2, eval_steps=4, **settings)
    pipeline.run(load(recipe, ["compare={}"], environ={}))
    (tmp_path / "text.txt").write_text(TEXTS[1], encoding="utf-8")
    results = {}
    for target in ("stages/sft/checkpoints/step-00000002", "stages/sft/checkpoints/step-00000004", ""):
        with pytest.raises(SystemExit):
            main(["eval", str(tmp_path / "run" / target), "--text", str(tmp_path / "text.txt"), "--json"])
        results |= json.loads(capsys.readouterr().out)
    for target in ("stages/sft/model", "best_model"):
        with pytest.raises(SystemExit):
            main(["eval", str(tmp_path / "run" / target), "--text", str(tmp_path / "text.txt"), "--json"])
        assert json.loads(capsys.readouterr().out) == {"sft": results["sft"]}
    losses = {name: result["metrics"]["text_loss"] for name, result in results.items()}
    assert list(losses) == ["sft step-00000002", "sft step-00000004", "base", "sft"]
    assert losses["sft step-00000004"] == pytest.approx(losses["sft"], rel=1e-6)
    assert len({round(loss, 5) for loss in losses.values()}) == 3
