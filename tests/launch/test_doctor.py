"""The doctor reports what is there, what is missing and what fixes it; its exit code is about the recipe."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
import torch

from modelwright.launch import doctor
from modelwright.launch.admission import compare_devices
from modelwright.launch.doctor import CheckResult, run_checks
from modelwright.launch.preflight import _compare_stage, check_stage_fits, hub_only_input
from modelwright.recipe.load import load
from modelwright.runs.folder import RunFolder
from modelwright.runs.journal import Journal
from tiny import tiny_recipe

RECIPE = """\
name: patient
output_dir: {out}
model: {{model_name_or_path: {model}}}
data: {{dataset_name: field-guide, columns: {{question: prompt, answer: completion}}}}
sft: {{max_steps: 2}}
"""


def recipe(folder: Path, model: str) -> Path:
    path = folder / "patient.yaml"
    path.write_text(RECIPE.format(out=folder / "run", model=model), encoding="utf-8")
    return path


def ask(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "modelwright", "doctor", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **environ})


def test_a_recipe_that_can_run_is_reported_as_json(tmp_path: Path, model_folder: Path) -> None:
    done = ask(str(recipe(tmp_path, str(model_folder))), "--json", HF_HUB_OFFLINE="1")
    report = json.loads(done.stdout)
    assert done.returncode == 0 and report["ok"], done.stdout + done.stderr
    names = [check["name"] for check in report["checks"]]
    assert {"python", "torch", "devices", "fp32 matmul", "attention", "disk", "clock", "stage sft"} <= set(names)
    assert next(check for check in report["checks"] if check["name"] == "fp32 matmul")["data"]["flops"] > 1e6


def test_a_model_that_is_only_on_a_hub_out_of_reach_is_a_failure_with_its_remedy(tmp_path: Path) -> None:
    loaded = load(recipe(tmp_path, "HuggingFaceTB/SmolLM3-3B"), ())
    assert hub_only_input(loaded) == "HuggingFaceTB/SmolLM3-3B"
    check = doctor.check_hub("HuggingFaceTB/SmolLM3-3B")[-1]
    assert check.status == "fail" and "put the files into a folder" in check.fix


def test_a_recipe_that_does_not_fit_is_reported_with_what_would(tmp_path: Path) -> None:
    if os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") > 48e9:
        pytest.skip("this machine holds what the test takes for too large")
    check = check_stage_fits(load(recipe(tmp_path, "some/smollm3-3b"), ()), "sft")
    assert check.status == "fail" and "trainable: lora" in check.fix


def test_a_full_disk_is_seen_before_the_run(tmp_path: Path) -> None:
    check = doctor.check_disk(tmp_path / "not" / "there", needed=1e18)
    assert check.status == "fail" and "save_total_limit" in check.fix


def test_a_taken_port_is_named() -> None:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", doctor.PORTS[0]))
        except OSError:
            pytest.skip("somebody else holds the port")
        listener.listen()
        check = doctor.check_ports()
        assert check.status == "warn" and doctor.PORTS[0] in check.data["in_use"]


@pytest.mark.parametrize("chosen", ["2,3", "GPU-a,GPU-b"])
def test_gpus_that_are_chosen_and_not_there_are_a_warning(chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has GPUs")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    [check] = doctor.check_devices()
    assert check.status == "warn" and check.detail.startswith("no GPU")
    assert check.fix.startswith(f"CUDA_VISIBLE_DEVICES={chosen} chooses 2 GPUs, 0 visible")


@pytest.mark.parametrize("chosen", [None, "", "-1"])
def test_a_machine_on_which_no_gpu_is_chosen_has_nothing_to_warn_of(
    chosen: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if chosen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    check = doctor.check_devices()[0]
    assert (check.name, check.status, check.fix) == ("devices", "ok", "")


def test_accelerate_is_listed_where_it_is_installed_and_not_missed_where_it_is_not() -> None:
    packages = doctor.check_packages()[0]
    installed = doctor.installed_version("accelerate")
    assert packages.status == "ok" and packages.data["accelerate"] == installed
    assert (f"accelerate {installed}" in packages.detail) == (installed is not None)


def test_a_check_that_breaks_is_a_finding_and_the_others_go_on() -> None:
    def broken() -> CheckResult:
        raise ImportError("libcudart.so.13: cannot open shared object file\nmore")

    checks = run_checks([broken, doctor.check_python])
    assert [check.status for check in checks] == ["fail", "ok"]
    assert checks[0].detail == "ImportError: libcudart.so.13: cannot open shared object file"


def test_the_kernel_is_asked_about_its_clock() -> None:
    assert doctor.is_clock_synchronized() in (True, False, None)


L40S = {"kind": "cuda", "device": "NVIDIA L40S", "precision": "bf16"}
OTHERS = [
    (L40S, "ok", ""),
    ({**L40S, "device": "NVIDIA A40"}, "warn", "waits for the slowest"),
    ({"kind": "cuda", "device": "Tesla T4", "precision": "fp16"}, "fail", "precision: fp16"),
    ({"kind": "cpu", "device": "8 CPU threads", "precision": "fp32"}, "fail", "CUDA_VISIBLE_DEVICES="),
]


@pytest.mark.parametrize(("other", "state", "fix"), OTHERS)
def test_a_node_that_would_compute_differently_from_the_main_one_is_reported(
    other: dict[str, str], state: str, fix: str
) -> None:
    checks = compare_devices(L40S, other, 1)
    assert checks.status == state and fix in checks.fix
    assert other["device"] in checks.detail


def test_bf16_is_tried_and_not_believed() -> None:
    check = doctor.check_bf16()
    assert check.status == "ok" and check.detail.startswith("works")


@pytest.mark.slow
def test_two_nodes_are_looked_at_together(tmp_path: Path, model_folder: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [str(recipe(tmp_path, str(model_folder))), "--nnodes", "2", "--master-addr", "127.0.0.1"]
    command = [
        sys.executable,
        "-m",
        "modelwright",
        "doctor",
        *words,
        "--master-port",
        str(port),
        "--json",
        "--node-rank",
    ]
    nodes = [subprocess.Popen([*command, str(node)], stdout=subprocess.PIPE, text=True) for node in (0, 1)]
    try:
        report = [json.loads(node.communicate(timeout=120)[0]) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    names = [[check["name"] for check in each["checks"]] for each in report]
    assert [node.returncode for node in nodes] == [0, 0], report
    assert {"rendezvous", "shared folder", "all-reduce", "node 0: bf16", "node 1: bf16", "node 1: disk"} <= set(
        names[0]
    )
    assert {"node 1: devices", "node 1: disk", "node 1: like node 0"} <= set(names[1])
    assert "node 0: disk" not in names[1]


@pytest.mark.slow
def test_reproducible_trains_twice_with_a_kill_and_finds_equal_bits(tmp_path: Path, model_folder: Path) -> None:
    result = ask("--reproducible", str(tiny_recipe(tmp_path, model_folder)))
    assert result.returncode == 0, result.stdout + result.stderr
    assert "6 steps twice, the second killed after step 3 and resumed" in result.stdout
    assert "losses and weights are equal, bit for bit" in result.stdout
    assert not (tmp_path / "run").exists()


def test_reproducible_says_where_two_runs_differ(tmp_path: Path) -> None:
    runs = [RunFolder(tmp_path / name) for name in ("uninterrupted", "killed")]
    for run, loss in zip(runs, (2.5, 2.25), strict=True):
        run.create()
        with closing(Journal(run.journal)) as journal:
            for step in (1, 2):
                losses = {"loss": loss if step == 2 else 3.0, "grad_norm": 1.0, "batch_hash": "a"}
                journal.add("step", stage="sft", step=step, **losses)
            journal.add("plan_revised", stage="sft", reason="put_ has no deterministic kernel")
    check = _compare_stage("sft", runs, killed=True)
    assert (check.status, check.detail) == ("fail", "two runs differ from step 2 on: loss 2.5 and 2.25")
    assert check.fix == "set deterministic: true, if it is off; put_ has no deterministic kernel"


def test_reproducible_wants_a_recipe() -> None:
    result = ask("--reproducible")
    assert result.returncode == 2
    assert "--reproducible wants a recipe" in result.stderr
