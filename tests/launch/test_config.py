"""Each node gets its command; an operator's variables stand in for options; nothing here asks torch."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import typer
from typer.main import get_command

from modelwright.cli.main import build_app
from modelwright.errors import UsageError
from modelwright.launch.config import (
    LaunchConfig,
    NodeOptions,
    NodeRange,
    count_visible_gpus,
    node_commands,
    parse_nnodes,
    resolve_nproc_per_node,
)


def test_every_node_gets_a_command_that_this_program_takes() -> None:
    commands = node_commands(
        "lyrics.yaml", ("--set", "sft.max_steps=3"), NodeOptions("2", None, "10.0.0.1", None, "4,2"), {}
    )
    assert [node["node"] for node in commands] == [0, 1]
    for node in commands:
        words = shlex.split(str(node["command"]))
        verb = get_command(build_app()).commands[words[1]]  # type: ignore[attr-defined]
        verb.make_context("modelwright", words[2:])
    assert "--node-rank 1 --master-addr 10.0.0.1 --master-port 29500 --nproc-per-node 2" in str(commands[1]["command"])
    assert "--nnodes 2 --node-rank 1 --nproc-per-node 2" in str(commands[1]["torchrun"])
    assert "accelerate" not in commands[0], "it would start three ranks on each"
    assert "--num_processes 8" in str(
        node_commands("a.yaml", (), NodeOptions("2", None, "10.0.0.1", None, "4"), {})[1]["accelerate"]
    )


def test_each_node_counts_its_own_gpus_where_nobody_has_said_how_many() -> None:
    (main, _) = node_commands("lyrics.yaml", (), NodeOptions("2", None, "10.0.0.1"), {})
    assert "--nproc-per-node" not in str(main["command"]) and "--nproc-per-node gpu" in str(main["torchrun"])


def test_elastic_nodes_are_elastic_with_torchrun_too() -> None:
    (main, other) = node_commands("lyrics.yaml", (), NodeOptions("1:2", None, "10.0.0.1", None, "1"), {})
    assert "--nnodes 1:2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint 10.0.0.1:29500" in str(main["torchrun"])
    assert main["torchrun"] == other["torchrun"] and "accelerate" not in main


def test_chosen_gpus_are_counted_and_handed_on() -> None:
    environ = {"CUDA_VISIBLE_DEVICES": "2,3"}
    commands = node_commands("lyrics.yaml", (), NodeOptions("2", None, "10.0.0.1"), environ)
    assert str(commands[0]["command"]).startswith("CUDA_VISIBLE_DEVICES=2,3 modelwright launch")
    assert str(commands[0]["command"]).endswith("--nproc-per-node 2")
    assert count_visible_gpus({"CUDA_VISIBLE_DEVICES": ""}) == 0
    assert resolve_nproc_per_node(None, environ={"CUDA_VISIBLE_DEVICES": ""}) == 1
    assert resolve_nproc_per_node("4", environ={"CUDA_VISIBLE_DEVICES": ""}) == 4
    with pytest.raises(UsageError, match="--nproc-per-node is 4, but CUDA_VISIBLE_DEVICES=2,3"):
        resolve_nproc_per_node("4", environ=environ)


def test_an_operators_variables_stand_in_for_options_and_options_go_before() -> None:
    environ = {
        "PET_NNODES": "3", "PET_NODE_RANK": "2", "PET_MASTER_ADDR": "job-node-0-0.job", "PET_MASTER_PORT": "23456",
        "PET_NPROC_PER_NODE": "4",
    }  # fmt: skip
    assert NodeOptions().with_pet_defaults(environ) == NodeOptions("3", 2, "job-node-0-0.job", 23456, "4")
    assert NodeOptions(nnodes="2", node_rank=0).with_pet_defaults(environ).node_rank == 0
    assert NodeOptions().with_pet_defaults({"PET_NPROC_PER_NODE": "auto"}) == NodeOptions()


def test_nodes_are_a_number_or_a_range() -> None:
    assert (parse_nnodes("2"), parse_nnodes("1:4")) == (NodeRange(2, 2), NodeRange(1, 4))
    for wrong in ("0", "two", "3:2", ""):
        with pytest.raises(UsageError, match="--nnodes"):
            parse_nnodes(wrong)


def test_a_launch_config_is_passed_as_one_argument() -> None:
    config = LaunchConfig(("run", "a b.yaml"), 2, "logs", NodeRange(1, 2), forkserver_preload=("json",))
    assert LaunchConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--on", "moon"], "--on is 'moon'"),
        (["--on", "nodes", "--node-rank", "1", "--nnodes", "2"], "--master-addr is missing"),
        (["--nproc-per-node", "none"], "--nproc-per-node is 'none'"),
        (["--on", "nodes", "--nnodes", "3", "--nproc-per-node", "4,2"], "has no value for node 2"),
        (["--nnodes", "2", "--node-rank", "0"], "--nnodes, --node-rank with --on local .* use --on nodes"),
        (["--on", "nodes", "--render"], "--render with --on nodes .* use --on openshift"),
        (["--on", "nodes", "--nnodes", "2", "--node-rank", "2", "--master-addr", "127.0.0.1"], "the last of 2 is 1"),
    ],
)
def test_a_wrong_option_is_one_message(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=message):
        build_app()(["launch", "quickstart", *words], standalone_mode=False)


def test_the_doctor_checks_several_nodes_or_says_what_is_missing() -> None:
    with pytest.raises(UsageError, match="need --nnodes too"):
        build_app()(["doctor", "--node-rank", "0", "--master-addr", "127.0.0.1"], standalone_mode=False)


def test_without_a_node_rank_the_commands_are_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.MonkeyPatch.context() as clean:
        clean.delenv("PET_NODE_RANK", raising=False)
        try:
            build_app()(["launch", "quickstart", "--on", "nodes", "--master-addr", "10.0.0.1"], standalone_mode=False)
        except typer.Exit as stop:
            assert stop.exit_code == 0
    output = capsys.readouterr().out
    assert output.count("modelwright launch quickstart --on nodes") == 2
    assert list(tmp_path.iterdir()) == []
