"""launch --on openshift and job: what they print, how they end, and that the guide's commands work."""

from __future__ import annotations

import contextlib
import inspect
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from modelwright.cli.launch import launch
from modelwright.cli.main import main
from modelwright.cli.run import run as run_command

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "openshift.md"
JOB = ["launch", "quickstart", "--on", "openshift"]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(list(words))
    return int(stop.value.code or 0)


def guide_commands() -> list[list[str]]:
    blocks = re.findall(r"```bash\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    return [shlex.split(line, comments=True)[1:] for block in blocks for line in block.splitlines() if line.strip()]


@pytest.mark.parametrize(
    "words", [each for each in guide_commands() if {"--render", "--check"} & set(each)], ids=" ".join
)
def test_the_guides_commands_work(words: list[str]) -> None:
    assert run(*words) == 0


def test_render_prints_yaml_or_a_list_for_machines(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*JOB, "--render") == 0
    documents = list(YAML(typ="safe", pure=True).load_all(capsys.readouterr().out))
    assert run(*JOB, "--render", "--json") == 0
    assert json.loads(capsys.readouterr().out)["items"] == documents
    assert [each["kind"] for each in documents][-2:] == ["TrainingRuntime", "TrainJob"]


def test_check_prints_notes_and_exits_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*JOB, "--check", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["ok"] and not [each for each in result["problems"] if each["severity"] == "error"]


def test_a_broken_file_ends_with_2_and_its_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*JOB, "--render", "--job-kind", "pytorchjob") == 0
    (tmp_path / "job.yaml").write_text(capsys.readouterr().out.replace("replicas: 1", "replica: 1"))
    assert run("job", "check", "job.yaml") == 2
    assert re.search(r"job\.yaml:\d+: spec\.pytorchReplicaSpecs\.Master\.replica is unknown", capsys.readouterr().err)
    assert run("job", "check", "job.yaml", "--json") == 2
    assert json.loads(capsys.readouterr().out)["ok"] is False


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (JOB, "wants one of --render, --check, --simulate, --submit"),
        ([*JOB, "--render", "--submit"], "wants one of"),
        ([*JOB, "--render", "--job-kind", "job"], "--job-kind is 'job'; it wants trainjob or pytorchjob"),
        ([*JOB, "--simulate", "--inject-fault", "kill"], "such as kill:1@5"),
        ([*JOB, "--submit"], "neither oc nor kubectl is on the PATH"),
        (["job", "status", "quickstart"], "neither oc nor kubectl is on the PATH"),
        (
            [*JOB, "--render", "--set", "cluster.code_source=ftp"],
            "cluster.code_source is 'ftp'; it wants image, configmap, or git+https",
        ),
        (
            [*JOB, "--render", "--set", "cluster.memory=16GB"],
            "cluster.memory is '16GB'; it wants an amount such as 16Gi",
        ),
        ([*JOB, "--render", "--set", "cluster.shm_size=99Gi"], "less than memory"),
    ],
)
def test_a_usage_mistake_is_one_message(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*words) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("--on openshift --render --no-fp8 --allow-changed seed", "--allow-changed, --no-fp8 with --on openshift"),
        ("--on openshift --render --nproc-per-node 2 --max-restarts 1", "--nproc-per-node, --max-restarts with"),
        ("--inject-fault kill:1@5 --job-kind trainjob", "use --on openshift"),
        ("--json", "--json with --on local has no effect; use --on nodes or openshift or drop it"),
    ],
)
def test_an_option_without_effect_is_refused(args: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("launch", "quickstart", *args.split()) == 2
    assert message in capsys.readouterr().err


def test_the_commands_of_the_nodes_carry_every_option_of_run(capsys: pytest.CaptureFixture[str]) -> None:
    options = "--set seed=3 --until-stage sft --no-fp8 --log-format plain"
    assert run("launch", "quickstart", "--on", "nodes", "--max-restarts", "5", *options.split(), "--json") == 0
    for node in json.loads(capsys.readouterr().out)["nodes"]:
        assert f"modelwright launch quickstart {options} --max-restarts 5 --on nodes" in node["command"]
        assert node["torchrun"].endswith(f"modelwright run quickstart {options}")


def test_launch_takes_every_option_of_run() -> None:
    assert inspect.signature(run_command).parameters.keys() <= inspect.signature(launch).parameters.keys()


def test_the_measured_save_of_the_last_run_decides_the_grace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_folder = tmp_path / "runs" / "quickstart"
    run_folder.mkdir(parents=True)
    event: dict[str, Any] = {"event": "checkpoint_saved", "seconds": 30}
    (run_folder / "journal.jsonl").write_text(json.dumps(event) + "\n")
    with contextlib.suppress(SystemExit):
        main([*JOB, "--render"])
    assert "terminationGracePeriodSeconds: 120" in capsys.readouterr().out
