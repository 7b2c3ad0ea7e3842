"""End to end: the tiny survival recipe as a job of two pods trains as a random user, loses a pod, and ends the same.

The pods' `python` forks from one preloaded interpreter (tests/pod_python.py), so that a pod costs a second or two.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from modelwright.cluster.documents import parse_manifests
from modelwright.cluster.manifests import JobKind, build_job, render
from modelwright.cluster.sandbox import USER_ID, can_use_namespaces
from modelwright.cluster.simulator import InjectedFault, SimulationConfig, SimulationResult, simulate
from modelwright.recipe.load import load
from other_user import as_user, unavailable
from tests.faults.fork_server import ForkServer, events_of, run_fingerprint
from tiny import tiny_model

pytestmark = [
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.skipif(not can_use_namespaces(), reason="needs root and network namespaces"),
]
RECIPE = "survival-smollm3-tiny"
SETS = [
    *("output_dir=null", "model.model_name_or_path=/workspace/model", "data.max_rows=24", "data.test_size=4"),
    *("cluster.nodes=2", "cluster.gpus_per_node=0", "cluster.hf_token_secret=hub-token", "cluster.local_queue=null"),
    *("sft.precision=fp32", "sft.max_length=512", "sft.max_steps=9", "sft.save_steps=2", "sft.eval_steps=9"),
    *("sft.per_device_train_batch_size=2", "gates={}"),
    "data.system_prompt=You are a survival and practical-skills expert, asked where there is no network.",
    *("compare.max_new_tokens=3", "compare.num_held_out_prompts=1"),
]
CANARY = "hf_canary4711canary4711"
PRELOADED = {
    **{"PATH": "/workspace:/usr/local/bin:/usr/bin:/bin", "PYTHON_EXEC": "/workspace/python"},
    **{"POD_PYTHON_SOCKET": "/workspace/python.sock", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
}
STRANGER = 54321
"""A user who is not root, has no right and owns nothing here."""
HOLD = """
import os, pathlib, time
from modelwright.engine.trainer import Engine
quick, taken, hold = Engine._step, [], []
trained = pathlib.Path(os.environ["POD_PYTHON_SOCKET"]).with_name("trained")
def step(self, stop_asked):
    if os.environ.get("RANK") == "1":
        if not taken:  # killed in its sixth step or before: the next attempt is not held
            hold.append(not trained.exists())
            trained.touch()
        taken.append(1)
        time.sleep(300 if hold[0] and len(taken) == 6 else 0)
    return quick(self, stop_asked)
Engine._step = step
"""
"""The second rank waits in its sixth step of the first attempt, so that it is met there by what happens to it."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers, of which the recipe freezes two."""
    return tiny_model(tmp_path_factory.mktemp("deep"), layers=4)


@contextmanager
def make_work_dir(model: Path) -> Iterator[Path]:
    """A folder for a simulation that any user may reach, with the model on its volume."""
    folder = Path(tempfile.mkdtemp(prefix="simulation-"))
    shutil.copytree(model, folder / "volumes/workspace/model")
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o777 if path.is_dir() else 0o664)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


@pytest.fixture
def work_dir(model: Path) -> Iterator[Path]:
    with make_work_dir(model) as folder:
        yield folder


def stream(target: JobKind) -> str:
    return render(build_job(load(RECIPE, SETS, {}).recipe, Path.cwd(), target))


def play(work_dir: Path, text: str, *faults: InjectedFault) -> SimulationResult:
    config = SimulationConfig(work_dir, {"HF_TOKEN": CANARY}, faults, time_scale=0.01, extra_env=PRELOADED)
    return simulate(parse_manifests(text, "job.yaml"), config)


def run_of(work_dir: Path) -> Path:
    return work_dir / "volumes/trained-models" / RECIPE


def logs_of(outcome: SimulationResult) -> str:
    return "\n".join(f"== {name}\n{path.read_text(errors='replace')}" for name, path in outcome.logs.items())


@pytest.fixture(scope="module")
def undisturbed(fork_server: ForkServer, model: Path) -> dict[str, Any]:
    """What an undisturbed simulation of 1 Master + 1 Worker leaves: losses, batches, weights."""
    with make_work_dir(model) as folder:
        fork_server.serve_pods(folder / "volumes/workspace")
        outcome = play(folder, stream("pytorchjob"))
        assert outcome.succeeded, logs_of(outcome)
        assert outcome.events[:2] == (f"{RECIPE}-master-0: started", f"{RECIPE}-worker-0: started")
        assert len(outcome.logs) == 2, "nothing began again"
        assert "2 of 4 layers frozen" in logs_of(outcome)
        return run_fingerprint(run_of(folder))


@pytest.mark.parametrize("target", ["trainjob", "pytorchjob"])
def test_a_job_whose_worker_is_killed_ends_with_the_weights_of_an_undisturbed_one(
    fork_server: ForkServer, work_dir: Path, undisturbed: dict[str, Any], target: JobKind
) -> None:
    fork_server.serve_pods(work_dir / "volumes/workspace", first=HOLD)
    text = stream(target)
    outcome = play(work_dir, text, InjectedFault("kill", 1, 4))
    assert outcome.succeeded, logs_of(outcome)
    assert_it_went_on(outcome.events, work_dir, target)
    assert (run_of(work_dir) / "stages/sft/result.json").stat().st_uid == USER_ID
    assert run_fingerprint(run_of(work_dir)) == undisturbed
    assert not leaks(work_dir, text)


def assert_it_went_on(events: tuple[str, ...], work_dir: Path, target: JobKind) -> None:
    """A killed pod began again by the job's own rules, and the run went on from its last checkpoint."""
    if target == "trainjob":
        assert f"{RECIPE}-node-0-1: exited with 137" in events
        assert "restarting all pods, 1 of 3 times" in events
    else:
        assert f"{RECIPE}-worker-0: exited with 137" in events
        assert f"{RECIPE}-worker-0: started, attempt 2" in events
    assert events_of(run_of(work_dir), "resumed"), "it went on from its last checkpoint"


def leaks(folder: Path, text: str) -> list[str]:
    """Files of the simulation that hold the token."""
    leaked = ["the stream"] if CANARY in text else []
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            leaked += [str(path)] if CANARY.encode() in path.read_bytes() else []
    return leaked


@pytest.mark.parametrize("target", ["trainjob", "pytorchjob"])
def test_without_root_the_same_rules_hold_for_plain_processes_and_it_says_what_is_not_shown(
    fork_server: ForkServer, work_dir: Path, undisturbed: dict[str, Any], target: JobKind
) -> None:
    if why := unavailable():
        pytest.skip(why)
    volume = work_dir / "volumes/workspace"
    fork_server.serve_pods(volume, first=HOLD)
    words = ["launch", RECIPE, "--on", "openshift", "--simulate", "--job-kind", target, "--json"]
    words += ["--work-dir", str(work_dir), "--inject-fault", "kill:1@4"]
    words += [word for setting in [*SETS, f"cluster.env={json.dumps(PRELOADED)}"] for word in ("--set", setting)]
    command = [*as_user(STRANGER, STRANGER), str(volume / "python"), "-m", "modelwright", *words]
    environ = {
        "POD_PYTHON_SOCKET": str(volume / "python.sock"),
        "HOME": "/nonexistent",
        "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
    }
    done = subprocess.run(command, env=environ, cwd=work_dir, capture_output=True, text=True, check=False)
    logs = "\n".join(path.read_text(errors="replace") for path in sorted((work_dir / "logs").glob("*.log")))
    assert done.returncode == 0, done.stderr + logs
    result = json.loads(done.stdout)
    assert result["succeeded"]
    assert_it_went_on(result["events"], work_dir, target)
    assert (run_of(work_dir) / "stages/sft/result.json").stat().st_uid == STRANGER
    assert run_fingerprint(run_of(work_dir)) == undisturbed
    assert any("random user id, dropped capabilities" in line for line in result["not_simulated"])
    assert any("networks, names and mounts" in line for line in result["not_simulated"])


def test_python_in_place_of_torchrun_fails_here_as_it_would_there(fork_server: ForkServer, work_dir: Path) -> None:
    text = stream("trainjob").replace("maxRestarts: 3", "maxRestarts: 0")
    script = "\"import torch.distributed as d; d.init_process_group('gloo')\""
    command = "command: [python, -m, modelwright.launch.torchrun, -m, modelwright]"
    assert command in text
    fork_server.serve_pods(work_dir / "volumes/workspace")
    outcome = play(work_dir, text.replace(command, f"command: [python, -c, {script}]"))
    assert not outcome.succeeded
    assert "environment variable RANK expected, but not set" in logs_of(outcome)
