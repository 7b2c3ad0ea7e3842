"""The commands that read recipes: messages on stderr, one JSON object on stdout, and the right exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from modelwright.cli.main import main

BROKEN = Path(__file__).parents[1] / "recipe" / "broken"


def run(*arguments: str) -> int:
    """Run a command in this process and return its exit code."""
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    return int(stop.value.code or 0)


def test_a_good_recipe_is_ok(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("check", "quickstart") == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("ok  quickstart: smollm2-135m-instruct on calendar, stages sft")
    assert printed.err == ""


@pytest.mark.parametrize("group", [(), ("data",), ("job",)])
def test_help_describes_each_command_in_a_full_sentence(
    group: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run(*group, "--help") == 0
    verbs = capsys.readouterr().out.partition("Commands:\n")[2].partition("\n\n")[0].splitlines()
    assert len(verbs) >= 4
    assert [verb for verb in verbs if not verb.endswith(".") or verb.endswith("...")] == []


def test_notes_go_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("check", "quickstart", "--set", "sft.lr=1e-4", "--json") == 0
    printed = capsys.readouterr()
    assert printed.err == "--set: sft.lr is read as learning_rate\n"
    assert json.loads(printed.out)["notes"] == ["--set: sft.lr is read as learning_rate"]


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        (["sft.learning_rate=3.0"], "sft.learning_rate is 3; adamw_torch usually diverges above 0.02; the default is"),
        (["sft.num_train_epochs=500", "sft.max_steps=null"], "sft.num_train_epochs is 500; every row is trained 500"),
        (["sft.max_length=40"], "sft.max_length is 40; it cuts about 100% of the rows, which lose "),
    ],
)
def test_check_advises_on_settings_that_are_nearly_always_mistakes(
    settings: list[str], advice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("check", "quickstart", *(word for each in settings for word in ("--set", each)), "--json") == 0
    [note] = json.loads(capsys.readouterr().out)["notes"]
    assert note.startswith(f"--set: {advice}")


def test_the_advice_on_max_length_gives_the_share_of_rows_and_what_would_hold_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"question": f"Which number {row}?", "answer": "words " * (10 if row < 3 else 60)} for row in range(10)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    recipe = tmp_path / "long.yaml"
    recipe.write_text(
        "name: long\nmodel: {model_name_or_path: some/model}\ndata: {train_file: rows.jsonl}\nsft:\n  max_length: 64\n",
        encoding="utf-8",
    )
    assert run("check", str(recipe)) == 0
    note = f"{recipe}:5: sft.max_length is 64; it cuts about 70% of the rows, which lose 31 tokens each"
    assert capsys.readouterr().err == f"{note}; raise it: the longest row has about 95 tokens\n"
    for enough in ("max_length: 100", "packing: true, packing_strategy: bfd_split"):
        assert run("check", str(recipe), "--set", f"sft={{{enough}}}") == 0
        assert capsys.readouterr().err == ""


def test_a_missing_path_is_reported_without_reading_anything(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("check", "quickstart", "--set", "model.model_name_or_path=./nowhere") == 2
    expected = "--set: model.model_name_or_path: there is no file or folder './nowhere'\n"
    assert capsys.readouterr().err == expected
    assert run("check", "resnet18-cifar10-tiny", "--set", "data.dataset_name=./nowhere") == 2
    expected = "--set: data: there is no file or folder './nowhere'; it wants cifar-10-binary.tar.gz, a folder"
    assert capsys.readouterr().err.startswith(expected)


@pytest.mark.parametrize("key", ["train_file", "validation_file"])
def test_a_missing_file_of_raw_text_is_reported(key: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("check", "gemma-270m-tiny", "--set", f"{key}=nowhere.txt") == 2
    message = "--set: data: there is no file, folder or embedded set 'nowhere.txt'\n"
    assert capsys.readouterr().err == message


def test_missing_files_are_refused_with_a_hub_dataset_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("check", "gemma-270m", "--validation_file", "nowhere.txt") == 2
    assert capsys.readouterr().err == "--set: pretrain: there is no file 'nowhere.txt'\n"
    assert run("check", "gemma-270m") == 0
    assert "wikitext: there is no such file here; a run reads it from the hub" in capsys.readouterr().out
    assert run("check", "gemma-270m", "--dataset_name", "nowhere/") == 2


def test_check_and_plan_refuse_missing_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "data_batch_1.bin").touch()
    for folder, message in (("nowhere", "there is no file or folder"), (str(tmp_path), "there is no data_batch_2.bin")):
        for command in ("check", "plan"):
            assert run(command, "resnet18-cifar10-tiny", "--set", f"data.data_dir={folder}") in (1, 2)
            assert message in capsys.readouterr().err


def test_raw_text_in_another_column_is_reported_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "songs.jsonl").write_text('{"lyrics": "la la"}\n' * 30, encoding="utf-8")
    override = ("--set", f"train_file={tmp_path / 'songs.jsonl'}")
    assert run("check", "gemma-270m-tiny", *override) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("songs.jsonl:1: there is no column 'text';") and "lyrics" in line
    assert "(30 rows like it, such as songs.jsonl:2" in line
    assert run("check", "gemma-270m-tiny", *override, "--set", "text_column=lyrics") == 0


def test_problems_are_printed_on_stderr_without_a_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(BROKEN)
    assert run("check", "many_at_once.yaml") == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == (BROKEN / "many_at_once.txt").read_text(encoding="utf-8")


def test_problems_as_json_have_file_line_key_and_message(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(BROKEN)
    assert run("check", "value_precision.yaml", "--json") == 2
    printed = capsys.readouterr()
    assert json.loads(printed.out) == {
        "ok": False,
        "problems": [
            {
                "where": "value_precision.yaml:7",
                "file": "value_precision.yaml",
                "line": 7,
                "key": "sft.precision",
                "message": "sft.precision is 'bf8'; it wants one of auto, fp32, bf16, fp16, fp8; did you mean 'fp8'?",
            }
        ],
    }
    assert printed.err == ""


def test_a_missing_recipe_as_json_is_a_problem_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("check", "quikstart", "--json") == 2
    [problem] = json.loads(capsys.readouterr().out)["problems"]
    assert problem["message"] == "no such recipe file; did you mean quickstart?"
    assert problem["line"] is None


def test_debug_shows_the_traceback_and_keeps_the_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_error:
        main(["check", "--debug", "nowhere.yaml"])
    assert exit_error.value.code == 2
    assert "Traceback" in capsys.readouterr().err


def test_shipped_recipes_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("recipes", "--json") == 0
    recipes = {each["name"]: each for each in json.loads(capsys.readouterr().out)["recipes"]}
    assert recipes["quickstart"]["description"]
    assert all(each["problem"] is None for each in recipes.values())
    assert run("recipes") == 0
    assert "quickstart" in capsys.readouterr().out


def test_explain_prints_one_line_for_each_setting_to_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("explain", "quickstart", "sft", "--set", "sft.seed_of_doubt=1") == 2
    capsys.readouterr()
    assert run("explain", "quickstart", "sft") == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(line.startswith("sft.") for line in lines)
    assert any("quickstart.yaml:" in line for line in lines)


def test_explain_one_setting_in_words_and_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("explain", "quickstart", "lr") == 0
    words = capsys.readouterr().out
    assert words.startswith("sft.learning_rate\n  Peak learning rate")
    assert "also called lr" in words
    assert run("explain", "quickstart", "lr", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert isinstance(result["value"], float)
    assert result["default"] == 2e-5


def test_an_unknown_key_verb_or_option_is_answered_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("explain", "quickstart", "sft.learning_rat") == 2
    assert capsys.readouterr().err == "sft.learning_rat is not a setting; did you mean sft.learning_rate?\n"
    assert run("chek", "quickstart") == 2
    assert "modelwright check" in capsys.readouterr().err
    assert run("check", "quickstart", "--jsn") == 2
    assert "--json" in capsys.readouterr().err


def test_the_schema_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("schema") == 0
    assert json.loads(capsys.readouterr().out)["title"] == "Recipe"


def test_control_c_leaves_with_the_code_of_what_can_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("modelwright.recipe.load.load", interrupt)
    assert run("check", "quickstart") == 75


def test_check_names_what_lora_adapts_and_refuses_what_it_cannot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A later stage would fail only after hours of the first."""
    from transformers import Qwen3MoeConfig

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    Qwen3MoeConfig(vocab_size=99, num_experts=4, num_experts_per_tok=2, **sizes).save_pretrained(tmp_path)
    lora = ["check", "quickstart", "--set", f"model.model_name_or_path={tmp_path}", "--set", "sft.trainable=lora"]
    named = [*lora, "--set", "sft.lora_target_modules=[q_proj, gate_up_proj]"]
    assert run(*named) == 0
    assert "sft: LoRA adapts 4 weights: self_attn.q_proj, mlp.experts.gate_up_proj" in capsys.readouterr().out
    assert run(*named, "--set", "sft.lora_dropout=0.1") == 2
    assert "experts want lora_dropout: 0" in capsys.readouterr().err
    assert run(*named, "--set", "sft.lora_dropout=0.1", "--json") == 2
    assert "experts want lora_dropout: 0" in json.loads(capsys.readouterr().out)["problems"][0]["message"]
    assert run(*lora, "--set", "model.model_name_or_path=someone/not-here") == 0, "a model on the hub is not downloaded"


TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
CALL = [{"type": "function", "function": {"name": "weather", "arguments": {}}}]


@pytest.mark.parametrize("stage", ["sft", "dpo"])
@pytest.mark.parametrize("command", [("check",), ("data", "audit"), ("data", "show"), ("run",)], ids=" ".join)
def test_every_command_refuses_tools_that_the_chat_template_does_not_render(
    command: tuple[str, ...], stage: str, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    question = [{"role": "user", "content": "Rain?"}]
    called = [{"role": "assistant", "content": "", "tool_calls": CALL}]
    answers = [{"role": "assistant", "content": "No."}]
    rows: list[dict[str, object]] = []
    for number in range(41):
        prompt = [{"role": "user", "content": f"Rain {number}?"}]
        answer = [{"role": "assistant", "content": f"No, {number}."}]
        pair = {"prompt": prompt, "chosen": answer, "rejected": answers}
        rows.append({"messages": [*prompt, *answer]} if stage == "sft" else pair)
    pair = {"prompt": question, "chosen": called, "rejected": answers}
    rows.append({**({"messages": [*question, *called]} if stage == "sft" else pair), "tools": [TOOL]})
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    Path("recipe.yaml").write_text(
        f"name: tools\noutput_dir: run\nmodel: {{model_name_or_path: {model_folder}}}\n"
        f"data: {{train_file: rows.jsonl, test_size: 4}}\n{stage}: {{max_steps: 1}}\n",
        encoding="utf-8",
    )
    assert run(*command, "recipe.yaml") == 2
    printed = capsys.readouterr()
    assert "rows.jsonl:42: the model's chat template does not render tools; use a model whose template does" in (
        printed.out + printed.err
    )


def test_check_refuses_a_model_that_a_run_would_refuse(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "num_hidden_layers": -3}', encoding="utf-8")
    assert run("check", "quickstart", "--set", f"model.model_name_or_path={tmp_path}") == 2
    message = f"model: {tmp_path}/config.json has num_hidden_layers -3; it wants a whole number from 1 to 1,000\n"
    assert capsys.readouterr().err == message
