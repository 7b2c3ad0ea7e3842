"""Each node gets its command; an operator's variables stand in for options; nothing here asks torch."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import typer
from typer.main import get_command

from modelwright.cli.main import command
from modelwright.errors import UsageError
from modelwright.launch.nodes import Asked, commands, count_gpus, ranks_here
from modelwright.launch.wish import Nodes, Wish, parse_nodes


def test_every_node_gets_a_command_that_this_program_takes() -> None:
    told = commands("lyrics.yaml", ("--set", "sft.max_steps=3"), Asked("2", None, "10.0.0.1", None, "4,2"), {})
    assert [node["node"] for node in told] == [0, 1]
    for node in told:
        words = shlex.split(str(node["command"]))
        verb = get_command(command()).commands[words[1]]  # type: ignore[attr-defined]
        verb.make_context("modelwright", words[2:])
    assert "--node-rank 1 --main-address 10.0.0.1 --port 29500 --per-node 2" in str(told[1]["command"])
    assert "--nnodes 2 --node-rank 1 --nproc-per-node 2" in str(told[1]["torchrun"])
    assert "accelerate" not in told[0], "it would start three ranks on each"
    assert "--num_processes 8" in str(
        commands("a.yaml", (), Asked("2", None, "10.0.0.1", None, "4"), {})[1]["accelerate"]
    )


def test_each_node_counts_its_own_gpus_where_nobody_has_said_how_many() -> None:
    (main, _) = commands("lyrics.yaml", (), Asked("2", None, "10.0.0.1"), {})
    assert "--per-node" not in str(main["command"]) and "--nproc-per-node gpu" in str(main["torchrun"])


def test_elastic_nodes_are_elastic_with_torchrun_too() -> None:
    (main, other) = commands("lyrics.yaml", (), Asked("1:2", None, "10.0.0.1", None, "1"), {})
    assert "--nnodes 1:2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint 10.0.0.1:29500" in str(main["torchrun"])
    assert main["torchrun"] == other["torchrun"] and "accelerate" not in main


def test_chosen_gpus_are_counted_and_handed_on() -> None:
    environ = {"CUDA_VISIBLE_DEVICES": "2,3"}
    told = commands("lyrics.yaml", (), Asked("2", None, "10.0.0.1"), environ)
    assert str(told[0]["command"]).startswith("CUDA_VISIBLE_DEVICES=2,3 modelwright launch")
    assert str(told[0]["command"]).endswith("--per-node 2")
    assert count_gpus({"CUDA_VISIBLE_DEVICES": ""}) == 0
    assert ranks_here(None, environ={"CUDA_VISIBLE_DEVICES": ""}) == 1
    assert ranks_here("4", environ={"CUDA_VISIBLE_DEVICES": ""}) == 4
    with pytest.raises(UsageError, match="--per-node is 4, but CUDA_VISIBLE_DEVICES=2,3"):
        ranks_here("4", environ=environ)


def test_an_operators_variables_stand_in_for_options_and_options_go_before() -> None:
    environ = {
        "PET_NNODES": "3", "PET_NODE_RANK": "2", "PET_MASTER_ADDR": "job-node-0-0.job", "PET_MASTER_PORT": "23456",
        "PET_NPROC_PER_NODE": "4",
    }  # fmt: skip
    assert Asked().or_operator(environ) == Asked("3", 2, "job-node-0-0.job", 23456, "4")
    assert Asked(nodes="2", node=0).or_operator(environ).node == 0
    assert Asked().or_operator({"PET_NPROC_PER_NODE": "auto"}) == Asked()


def test_nodes_are_a_number_or_a_range() -> None:
    assert (parse_nodes("2"), parse_nodes("1:4")) == (Nodes(2, 2), Nodes(1, 4))
    for wrong in ("0", "two", "3:2", ""):
        with pytest.raises(UsageError, match="--nodes"):
            parse_nodes(wrong)


def test_a_wish_travels_as_one_word() -> None:
    wish = Wish(("run", "a b.yaml"), 2, "logs", Nodes(1, 2), preload=("json",))
    assert Wish.from_text(wish.as_text()) == wish


@pytest.mark.parametrize(
    ("words", "letter"),
    [
        (["--on", "moon"], "--on is 'moon'"),
        (["--on", "nodes", "--node-rank", "1", "--nodes", "2"], "--main-address is missing"),
        (["--per-node", "none"], "--per-node is 'none'"),
        (["--on", "nodes", "--nodes", "3", "--per-node", "4,2"], "says nothing of node 2"),
        (["--nodes", "2", "--node-rank", "0"], "--nodes, --node-rank with --on local .* say --on nodes"),
        (["--on", "nodes", "--render"], "--render with --on nodes .* say --on openshift"),
        (["--on", "nodes", "--nodes", "2", "--node-rank", "2", "--main-address", "127.0.0.1"], "the last of 2 is 1"),
    ],
)
def test_a_mistake_is_a_letter(words: list[str], letter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=letter):
        command()(["launch", "quickstart", *words], standalone_mode=False)


def test_the_doctor_looks_at_several_nodes_or_says_what_is_missing() -> None:
    with pytest.raises(UsageError, match="want --nodes too"):
        command()(["doctor", "--node-rank", "0", "--main-address", "127.0.0.1"], standalone_mode=False)


def test_without_a_node_rank_the_commands_are_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.MonkeyPatch.context() as clean:
        clean.delenv("PET_NODE_RANK", raising=False)
        try:
            command()(["launch", "quickstart", "--on", "nodes", "--main-address", "10.0.0.1"], standalone_mode=False)
        except typer.Exit as stop:
            assert stop.exit_code == 0
    said = capsys.readouterr().out
    assert said.count("modelwright launch quickstart --on nodes") == 2
    assert list(tmp_path.iterdir()) == []
