"""The spellings of version 0.1 still work, and --help shows only today's."""

from __future__ import annotations

import ast
import inspect
import json
import re
import textwrap
from contextlib import suppress
from typing import Any

import pytest
from typer.main import get_command

from modelwright.cli import launch
from modelwright.cli.main import build_app, main
from modelwright.cli.options import OLD_SPELLINGS, SETTING_FLAGS, SWITCHES
from modelwright.errors import UsageError
from modelwright.recipe.load import load

OLD_AND_NEW = [
    ("run R --override a --from sft --until=dpo", "run R --allow-changed a --from-stage sft --until-stage dpo"),
    (
        "launch R --on nodes --nodes 2 --per-node 4 --main-address h --port 1 --override a -- --until sft --from sft",
        "launch R --on nodes --nnodes 2 --nproc-per-node 4 --master-addr h --master-port 1 --allow-changed a "
        "--until-stage sft --from-stage sft",
    ),
    (
        "launch R --on openshift --rehearse --disturb kill:1@5 --place p --clone-from g --target trainjob",
        "launch R --on openshift --simulate --inject-fault kill:1@5 --work-dir p --git-repo g --job-kind trainjob",
    ),
    (
        "launch R --on nodes --num_machines 2 --nproc_per_node 2 --machine_rank 0 --main_process_ip h "
        "--main_process_port 1",
        "launch R --on nodes --nnodes 2 --nproc-per-node 2 --node-rank 0 --master-addr h --master-port 1",
    ),
    ("doctor R --nodes 2 --main-address h --port=1", "doctor R --nnodes 2 --master-addr h --master-port 1"),
    ("plan R --on 1xH200", "plan R --gpus 1xH200"),
    ("serve R --key k --port 1", "serve R --api-key k --port 1"),
    ("export R --kind q8_0 --to folder", "export R --outtype q8_0 --output folder"),
    ("job status R --target trainjob", "job status R --job-kind trainjob"),
    ("job pull R --into folder", "job pull R -o folder"),
    ("data show R --count 2", "data show R --num-samples 2"),
    ("data audit R --max-bad-share 0.5", "data audit R --max-invalid-fraction 0.5"),
    ("data convert a.csv --full-question q", "data convert a.csv --prompt-template q"),
    ("board R --port 1", "dashboard R --port 1"),
    ("convert f.yaml --from trl", "convert f.yaml --from trl"),
]


def parse(line: str) -> tuple[Any, dict[str, Any]]:
    """The command of a line and the values of its parameters; nothing runs."""
    command, args = get_command(build_app()), line.split()
    while subcommands := getattr(command, "commands", None):
        command = subcommands[args.pop(0)]
    return command, command.make_context(command.name, args).params


@pytest.mark.parametrize(("old", "new"), OLD_AND_NEW)
def test_an_old_spelling_means_what_the_new_one_does(old: str, new: str) -> None:
    assert parse(old)[1] == parse(new)[1]


ACCELERATE = [
    ("--num_processes 2", "--nproc-per-node 2"),
    ("--num_processes=2 --multi_gpu --mixed_precision bf16", "--nproc-per-node 2 --set precision=bf16"),
    ("--num-processes 4 --num_machines 2 --multi_gpu", "--on nodes --nnodes 2 --nproc-per-node 2"),
    (
        "--num_machines 2 --num_processes 4 --machine_rank 1 --main_process_ip 10.0.0.1 --main_process_port 29501",
        "--on nodes --nnodes 2 --nproc-per-node 2 --node-rank 1 --master-addr 10.0.0.1 --master-port 29501",
    ),
    ("--on nodes --nnodes 2 --num_processes 4", "--on nodes --nnodes 2 --nproc-per-node 2"),
    ("--num_processes 2 --main_process_port 1", "--on nodes --node-rank 0 --nproc-per-node 2 --master-port 1"),
    ("--on openshift --num_machines 2", "--on openshift --nnodes 2"),
]


@pytest.mark.parametrize(("theirs", "ours"), ACCELERATE)
def test_launch_takes_the_options_of_accelerate_launch(theirs: str, ours: str) -> None:
    assert parse(f"launch {theirs} R --seed 3")[1] == parse(f"launch {ours} R --seed 3")[1]


def test_the_precision_of_the_script_takes_precedence_over_that_of_accelerate() -> None:
    overrides = parse("launch gemma-270m --bf16 --mixed_precision no")[1]["overrides"]
    assert load("gemma-270m", overrides, environ={}).recipe.stages["pretrain"].precision == "bf16"


@pytest.mark.parametrize("machines", ["2", "1:2", "0"])
def test_processes_that_the_machines_cannot_share_are_refused(machines: str) -> None:
    with pytest.raises(UsageError, match=f"--num_processes is 3; it wants a multiple of the number .*, {machines}$"):
        parse(f"launch R --num_machines {machines} --num_processes 3")


def test_every_old_spelling_is_tried() -> None:
    assert OLD_SPELLINGS.keys() <= {word.partition("=")[0] for old, _ in OLD_AND_NEW for word in old.split()}


@pytest.mark.parametrize("new", [new for _, new in OLD_AND_NEW])
def test_help_shows_no_old_spelling(new: str) -> None:
    command, _ = parse(new)
    options = {name for parameter in command.params for name in parameter.opts}
    shown = set(
        re.findall(
            r"--[\w-]+", command.get_help(command.make_context(command.name, ["--help"], resilient_parsing=True))
        )
    )
    assert not shown & (OLD_SPELLINGS.keys() - options)
    assert "board" not in re.findall(r"^  (\w+)", get_help(), re.MULTILINE)


def get_help() -> str:
    """What `modelwright --help` prints."""
    command = get_command(build_app())
    return str(command.get_help(command.make_context("modelwright", [], resilient_parsing=True)))


def test_what_follows_two_dashes_is_left_alone() -> None:
    assert parse("ask R -- --from")[1]["question"] == "--from"


def test_every_flag_of_the_usual_script_is_a_flag_of_run() -> None:
    switches = SWITCHES & SETTING_FLAGS - {"fp16"}
    flags = dict.fromkeys(sorted(SETTING_FLAGS - SWITCHES - {"train_file"}), "7")
    line = " ".join(["run R", *(f"--{name} {value}" for name, value in flags.items()), *(f"--{n}" for n in switches)])
    _, values = parse(line)
    assert len(SETTING_FLAGS) == 26
    assert values["recipe"] == "R"
    assert set(values["overrides"]) == {f"{name}=7" for name in flags} | {f"{name}=true" for name in switches}


def test_a_flag_takes_its_value_after_an_equals_sign_and_a_switch_may_have_one() -> None:
    _, values = parse("run --bf16 R --seed=7 --gradient_checkpointing false --set a=b")
    assert values["recipe"] == "R"
    assert values["overrides"] == ["a=b", "bf16=true", "seed=7", "gradient_checkpointing=false"]


@pytest.mark.parametrize("flag", sorted(SWITCHES - {"multi_gpu"}))
@pytest.mark.parametrize(
    ("words", "value"),
    [(["True", "TRUE", "t", "yes", "Y", "1"], "true"), (["False", "FALSE", "f", "no", "N", "0"], "false")],
)
def test_a_switch_may_be_followed_by_what_transformers_reads_as_true_or_false(
    flag: str, words: list[str], value: str
) -> None:
    for word in words:
        for line in (f"run --{flag} {word} R", f"run --{flag}={word} R"):
            _, values = parse(line)
            assert (values["recipe"], values["overrides"]) == ("R", [f"{flag}={value}"])


@pytest.mark.parametrize("flags", ["--bf16 True --fp16 False", "--fp16 False --bf16 True"])
def test_the_precision_that_is_off_does_not_undo_the_one_that_is_on(flags: str) -> None:
    overrides = parse(f"run gemma-270m {flags}")[1]["overrides"]
    assert load("gemma-270m", overrides, environ={}).recipe.stages["pretrain"].precision == "bf16"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--resume_from_checkpoint --bf16",
            "--resume_from_checkpoint wants a value, true or false or text: A checkpoint",
        ),
        ("--train_file", "--train_file wants a value, text: A JSONL, JSON, CSV"),
        ("--num_train_epochs -o x", "--num_train_epochs wants a value, a number above 0: Number of training epochs."),
        ("--num_processes --multi_gpu", "--num_processes wants a value"),
        ("--bf16 --fp16", "--bf16 and --fp16 are both given; give one of them"),
        ("--dataset_name x --train_file y", "--dataset_name and --train_file are both given; give one of them"),
    ],
)
def test_flags_that_lack_a_value_or_exclude_each_other_are_refused_in_one_line(
    flags: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["launch", "gemma-270m", *flags.split()])
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(message)


def test_a_value_may_be_a_negative_number_and_resuming_may_be_true() -> None:
    overrides = parse("run R --weight_decay -1 --resume_from_checkpoint true")[1]["overrides"]
    assert overrides == ["weight_decay=-1", "resume_from_checkpoint=true"]


@pytest.mark.parametrize(
    ("flags", "config_name"),
    [
        ("--dataset_name roneneldan/TinyStories", None),
        ("--dataset_name ./rows.jsonl", None),
        ("--set data.dataset_name=roneneldan/TinyStories", None),
        ("--dataset_name c4 --dataset_config_name en", "en"),
        ("--dataset_name wikitext", "wikitext-2-raw-v1"),
        ("--dataset_name Salesforce/wikitext", "wikitext-2-raw-v1"),
        ("--seed 3", "wikitext-2-raw-v1"),
    ],
)
def test_another_data_set_does_not_keep_the_config_name_of_the_recipes(flags: str, config_name: str | None) -> None:
    for command in ("run", "launch", "plan", "explain", "check", "data show"):
        overrides = parse(f"{command} gemma-270m {flags}")[1]["overrides"]
        data = load("gemma-270m", overrides, environ={}).recipe.data
        assert data is not None and data.dataset_config_name == config_name


def test_a_recipe_that_is_not_there_is_reported_when_another_data_set_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["check", "no-such-recipe", "--dataset_name", "x"])
    assert stop.value.code == 2
    assert "no-such-recipe" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        main(["plan", "--set", "dataset_name=x/y"])
    assert stop.value.code == 2
    assert "plan wants a RECIPE" in capsys.readouterr().err


def test_a_train_file_replaces_the_data_set_of_the_recipe() -> None:
    overrides = parse("plan gemma-270m --train_file data/train.jsonl --text_column body")[1]["overrides"]
    data = load("gemma-270m", overrides, environ={}).recipe.data
    assert data is not None
    assert (data.dataset_name, data.train_file, data.text_column) == (None, "data/train.jsonl", "body")


@pytest.mark.parametrize("name", ["data.columns", "columns"])
def test_a_setting_is_explained_without_a_recipe(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["explain", name])
    output = capsys.readouterr()
    assert stop.value.code == 0 and output.err == "values are those of quickstart\n"
    assert "a mapping to messages, prompt, completion, system, context, history, tools, chosen" in output.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("trian quickstart", "there is no command 'trian'; did you mean: modelwright train"),
        ("finetune quickstart", "there is no command 'finetune'; did you mean: modelwright run RECIPE"),
        ("merge runs/x", "there is no command 'merge'; did you mean: modelwright export RUN --format merged"),
        ("zzzz", "there is no command 'zzzz'; modelwright --help lists the commands"),
        ("run quickstart --lr 3", "run has no option --lr; it is a setting: --set learning_rate=VALUE"),
        ("run quickstart --epochs 3", "run has no option --epochs; did you mean --set num_train_epochs=N?"),
        (
            "run quickstart --num_processes 2",
            "run has no option --num_processes; did you mean launch RECIPE --num_processes N?",
        ),
        ("run quickstart --outpt x", "run has no option --outpt; did you mean --output?"),
        ("train --config quickstart", "train has no option --config; did you mean RECIPE, the first argument?"),
        ("export runs/x --frmat gguf", "export has no option --frmat; did you mean --format?"),
        ("data audti quickstart", "data has no command 'audti'; did you mean: modelwright data audit"),
        ("job zzzz", "job has no command 'zzzz'; it has check, status, logs, cancel, pull"),
        ("run", "run wants RECIPE: a recipe file or a name that modelwright recipes lists, such as quickstart"),
        ("chat", "chat wants RUN: a run folder, such as runs/quickstart"),
        ("ask runs/x", "ask wants QUESTION: modelwright ask --help shows how it is called"),
    ],
)
def test_a_word_of_another_tool_is_answered_with_ours(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments.split())
    assert stop.value.code == 2
    assert capsys.readouterr().err == f"{message}\n"


@pytest.mark.parametrize("arguments", [["--output", "here/run"], ["-o", "here/run"], ["--output=here/run"]])
def test_output_is_the_run_folder(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with suppress(SystemExit):
        main(["check", "quickstart", *arguments, "--json"])
    assert json.loads(capsys.readouterr().out)["run_dir"] == "here/run"


def every_command(command: Any, name: str = "modelwright") -> list[tuple[str, Any]]:
    children = getattr(command, "commands", {})
    return [pair for word, child in children.items() for pair in every_command(child, f"{name} {word}")] or [
        (name, command)
    ]


def test_every_option_of_a_command_is_read_by_its_function() -> None:
    commands = every_command(get_command(build_app()))
    assert len(commands) > 25
    for name, command in commands:
        function = inspect.unwrap(command.callback)
        [node] = ast.parse(textwrap.dedent(inspect.getsource(function))).body
        assert isinstance(node, ast.FunctionDef)
        read = {each.id for part in node.body for each in ast.walk(part) if isinstance(each, ast.Name)}
        tables = {*launch.RUN_OPTIONS, *launch.CLUSTER_ACTIONS} if name == "modelwright launch" else set()
        unread = {each.name for each in command.params} - read - tables - {"help"}
        assert not unread, f"{name} does not read {unread}"
