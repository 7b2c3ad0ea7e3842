"""A simulation follows the operators' rules: names, variables, restarts, limits, signals, and what a pod may do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from cluster_jobs import cluster_job
from modelwright.cluster.documents import Manifest, parse_manifests
from modelwright.cluster.manifests import JobKind, documents, render
from modelwright.cluster.sandbox import USER_ID, can_use_namespaces
from modelwright.cluster.simulator import InjectedFault, SimulationConfig, SimulationResult, expand_job, simulate
from modelwright.errors import NON_RETRYABLE_EXIT_CODES, Diverged, GateClosed, Refused, StorageError, UsageError

isolated = pytest.mark.skipif(not can_use_namespaces(), reason="needs root and network namespaces")
NETWORKS = Path("/run/netns")
SLEEP = f"4711.{os.getpid()}"
"""A time that no other process sleeps."""
STEP = """echo '{"event": "step", "step": 5}' >> /shared/models/run/journal.jsonl"""
"""What a run writes; an injected fault waits for it."""


def job(target: JobKind, script: str, nodes: int = 1, **settings: Any) -> list[Manifest]:
    """The rendered job of a system, with a small script in place of the training."""
    sets = [f"cluster.{key}={value}" for key, value in settings.items()]
    bodies = documents(cluster_job("vision", target, f"cluster.nodes={nodes}", "cluster.gpus_per_node=0", *sets))
    for body in bodies:
        for container in containers(body):
            container["command"], container["args"] = ["sh", "-c", f"mkdir -p /shared/models/run; {script}"], []
    return [Manifest("job.yaml", body, 1) for body in bodies]


def containers(node: Any) -> list[dict[str, Any]]:
    if isinstance(node, list):
        return [container for item in node for container in containers(item)]
    if not isinstance(node, dict):
        return []
    own = [each for each in node.get("containers", []) if "command" in each]
    return own + [container for key, item in node.items() if key != "containers" for container in containers(item)]


def play(work_dir: Path, manifests: list[Manifest], *faults: InjectedFault, root: bool = False) -> SimulationResult:
    config = SimulationConfig(work_dir, {"HF_TOKEN": "canary-4711"}, faults, use_namespaces=root, time_scale=0.001)
    return simulate(manifests, config)


ONCE = "test -e /shared/models/seen && exit 0; touch /shared/models/seen; exit"
"""Fails the first time with the code that follows."""


def test_a_failed_container_starts_again_in_its_pod_and_keeps_its_scratch(tmp_path: Path) -> None:
    script = f"echo $$ >> /scratch/starts; {ONCE} 1"
    outcome = play(tmp_path, job("pytorchjob", script))
    assert outcome.succeeded, outcome.events
    starts = next(tmp_path.glob("pods/*/scratch/starts")).read_text().split()
    assert len(starts) == 2
    assert list(outcome.logs) == ["resnet18-cifar10-master-0-1", "resnet18-cifar10-master-0-2"]


def test_a_job_that_always_fails_ends_at_its_backoff_limit(tmp_path: Path) -> None:
    outcome = play(tmp_path, job("pytorchjob", "exit 1", max_restarts=1))
    assert not outcome.succeeded
    assert outcome.reason == "2 restarts reach backoffLimit 2; the last exit code was 1"


def test_without_restarts_the_first_failure_is_the_last(tmp_path: Path) -> None:
    outcome = play(tmp_path, job("pytorchjob", "exit 1", max_restarts=0))
    assert outcome.reason == "resnet18-cifar10-master-0 exited with 1, and restartPolicy is Never"


@pytest.mark.parametrize(("code", "succeeds"), [(1, False), (137, True)])
def test_the_exit_code_policy_tries_again_from_128_on(tmp_path: Path, code: int, succeeds: bool) -> None:
    manifests = job("pytorchjob", f"{ONCE} {code}")
    for spec in manifests[-1].body["spec"]["pytorchReplicaSpecs"].values():
        spec["restartPolicy"] = "ExitCode"
    assert play(tmp_path, manifests).succeeded is succeeds


def test_a_pytorchjob_succeeds_with_its_master_and_its_workers_wait_for_it(tmp_path: Path) -> None:
    outcome = play(tmp_path, job("pytorchjob", 'test "$RANK" = 0 || exit 0', nodes=2))
    assert outcome.succeeded
    assert outcome.events[0] == "resnet18-cifar10-master-0: started"


def test_the_final_exit_codes_are_those_of_our_errors() -> None:
    final = (UsageError, GateClosed, Diverged, Refused, StorageError)
    assert [error.exit_code for error in final] == list(NON_RETRYABLE_EXIT_CODES)


@pytest.mark.parametrize("code", NON_RETRYABLE_EXIT_CODES)
def test_our_final_exit_codes_end_a_trainjob_at_once(tmp_path: Path, code: int) -> None:
    outcome = play(tmp_path, job("trainjob", f"exit {code}"))
    assert outcome.reason == f"resnet18-cifar10-node-0-0 exited with {code}, which podFailurePolicy says is final"


def test_a_lost_pod_of_a_trainjob_restarts_all_of_them(tmp_path: Path) -> None:
    script = f'echo x >> /scratch/kept; test "$PET_NODE_RANK" = 1 || exec sleep 0.3; {ONCE} 1'
    outcome = play(tmp_path, job("trainjob", script, nodes=2))
    assert outcome.succeeded, outcome.events
    assert "restarting all pods, 1 of 3 times" in outcome.events
    assert {path.read_text() for path in tmp_path.glob("pods/*/scratch/kept")} == {"x\n"}, "a new pod has a new scratch"


def test_a_trainjob_fails_after_its_last_restart(tmp_path: Path) -> None:
    outcome = play(tmp_path, job("trainjob", "exit 1", max_restarts=1))
    assert outcome.reason == "1 restarts are maxRestarts; the last exit code was 1"


def test_an_evicted_pod_has_its_grace_and_its_signal(tmp_path: Path) -> None:
    script = f'trap "echo saved > /shared/models/saved; exit 75" TERM; {STEP}; ' + "while :; do sleep 0.05; done"
    script = f"test -e /shared/models/saved && exit 0; {script}"
    outcome = play(tmp_path, job("trainjob", script), InjectedFault("evict", 0, 5))
    assert outcome.succeeded, outcome.events
    assert "resnet18-cifar10-node-0-0: exited with 75" in outcome.events


def test_the_operators_give_the_variables_that_are_documented() -> None:
    _, pods = expand_job(job("pytorchjob", "true", nodes=3))
    master, first, second = pods
    assert [pod.name for pod in pods] == [f"resnet18-cifar10-{each}" for each in ("master-0", "worker-0", "worker-1")]
    assert master.operator_env["RANK"] == master.operator_env["PET_NODE_RANK"] == "0"
    assert second.operator_env == {
        "PYTHONUNBUFFERED": "1", "PET_NPROC_PER_NODE": "1", "PET_NNODES": "3", "WORLD_SIZE": "3", "RANK": "2",
        "MASTER_ADDR": "resnet18-cifar10-master-0", "MASTER_PORT": "23456", "PET_NODE_RANK": "2",
        "PET_MASTER_ADDR": "resnet18-cifar10-master-0", "PET_MASTER_PORT": "23456",
    }  # fmt: skip
    assert "LOCAL_RANK" not in first.operator_env
    _, pods = expand_job(job("trainjob", "true", nodes=2))
    assert pods[1].name == "resnet18-cifar10-node-0-1"
    assert pods[1].operator_env == {
        "PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": "1",
        "PET_MASTER_ADDR": "resnet18-cifar10-node-0-0.resnet18-cifar10", "PET_MASTER_PORT": "29500",
    }  # fmt: skip


def test_a_stream_without_one_job_cannot_be_simulated(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="0 jobs are in this stream"):
        play(tmp_path, job("trainjob", "true")[:3])


def test_the_program_in_a_map_is_unpacked_before_it_is_needed(tmp_path: Path) -> None:
    manifests = job("trainjob", "test -e /code/modelwright/cluster/simulator.py", code_source="configmap")
    assert play(tmp_path, manifests).succeeded


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A bare repository with a module that this machine does not have."""
    tree = tmp_path / "tree"
    (tree / "src").mkdir(parents=True)
    (tree / "src/only_in_the_clone.py").write_text("WORD = 'cloned'\n")
    git = ["git", "-c", "user.name=Nobody", "-c", "user.email=nobody@example.com", "-C", str(tree)]
    for words in (["init", "-q", "-b", "trunk"], ["add", "."], ["commit", "-q", "-m", "A module"]):
        subprocess.run([*git, *words], check=True)
    subprocess.run(["git", "clone", "-q", "--bare", str(tree), str(tmp_path / "bare.git")], check=True)
    return tmp_path / "bare.git"


CODE = "git+https://example.com/our/program.git"
TELL = "python -c 'import only_in_the_clone as found; print(found.WORD)'"


@pytest.mark.parametrize(
    ("root", "form"), [(False, "{}"), pytest.param(True, "file://{}", marks=[isolated, pytest.mark.root])]
)
def test_a_clone_is_simulated_from_a_local_repository(tmp_path: Path, repository: Path, root: bool, form: str) -> None:
    manifests = job("trainjob", TELL, code_source=f"{CODE}@trunk")
    config = SimulationConfig(
        tmp_path / "place", use_namespaces=root, time_scale=0.001, git_repo=form.format(repository)
    )
    outcome = simulate(manifests, config)
    logs = "\n".join(path.read_text() for path in outcome.logs.values())
    assert outcome.succeeded and "cloned" in logs, logs
    assert f"resnet18-cifar10-node-0-0: init container code cloned {repository}" in outcome.events
    assert not any("clone" in line for line in outcome.not_simulated)


def test_a_manifest_that_clones_from_this_machine_is_taken_at_its_word(tmp_path: Path, repository: Path) -> None:
    manifests = job("pytorchjob", TELL, code_source=f"{CODE}@trunk")
    template = manifests[-1].body["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]
    template["initContainers"][0]["command"] = ["sh", "-c", f"git clone -q file://{repository} /code/source"]
    outcome = play(tmp_path / "place", manifests)
    assert outcome.succeeded, "\n".join(path.read_text() for path in outcome.logs.values())


def test_a_remote_clone_is_listed_as_not_simulated_and_without_its_password(tmp_path: Path) -> None:
    manifests = job("trainjob", "test -z \"${PYTHONPATH##*$PWD*}\" || python -c 'import modelwright'", code_source=CODE)
    text = "https://example.com/our/program.git"
    template = manifests[-2].body["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
    command = template["spec"]["initContainers"][0]["command"]
    command[command.index(text)] = "https://me:canary-4711@example.com/our/program.git"
    outcome = play(tmp_path, manifests)
    assert outcome.succeeded, outcome.events
    notes = [line for line in outcome.not_simulated if "clone" in line]
    assert len(notes) == 1 and f"the clone of {text} by init container code" in notes[0]
    assert f"not simulated: {notes[0]}" in outcome.events


def test_a_clone_that_fails_fails_the_pod_and_a_new_try_begins_with_it(tmp_path: Path, repository: Path) -> None:
    manifests = job(
        "pytorchjob", f"touch /shared/models/ran; {TELL}", code_source=f"{CODE}@no-such-branch", max_restarts=1
    )
    outcome = simulate(
        manifests,
        SimulationConfig(tmp_path / "place", use_namespaces=False, time_scale=0.001, git_repo=str(repository)),
    )
    assert outcome.reason == "2 restarts reach backoffLimit 2; the last exit code was 128"
    assert outcome.events.count("resnet18-cifar10-master-0: init container code exited with 128") == 2
    assert not (tmp_path / "place/volumes/trained-models/ran").exists(), "the program never ran"


def test_what_is_no_repository_is_reported(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--git-repo wants a git repository"):
        simulate(
            job("trainjob", TELL, code_source=CODE),
            SimulationConfig(tmp_path, use_namespaces=False, git_repo=str(tmp_path)),
        )


def test_a_killed_plain_pod_takes_along_what_has_a_session_of_its_own(tmp_path: Path) -> None:
    up = "/shared/models/up"
    script = f"setsid sh -c 'touch {up}; exec sleep {SLEEP}' & while ! test -e {up}; do sleep 0.05; done; {STEP}; wait"
    outcome = play(tmp_path, job("trainjob", script, max_restarts=0), InjectedFault("kill", 0, 5))
    assert outcome.reason == "0 restarts are maxRestarts; the last exit code was 137"
    deadline = time.monotonic() + 120
    while sleepers() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not sleepers()


def test_plain_pods_meet_at_a_port_that_is_free(tmp_path: Path) -> None:
    script = "echo $PET_MASTER_PORT $PET_MASTER_ADDR > /shared/models/port$PET_NODE_RANK"
    assert play(tmp_path, job("trainjob", script, nodes=2)).succeeded
    first, second = ((tmp_path / f"volumes/trained-models/port{rank}").read_text().split() for rank in (0, 1))
    assert first == second and first[0] != "29500" and first[1] == "127.0.0.1"


PROBE = """
import json, os, pathlib, socket, sys
rank, name = os.environ["PET_NODE_RANK"], socket.gethostname()
def writes(place):
    try:
        (pathlib.Path(place) / f"probe{rank}").write_text("x")
        return True
    except OSError:
        return False
facts = {"uid": os.getuid(), "gid": os.getgid(), "groups": os.getgroups(), "home": os.environ["HOME"], "name": name,
         "caps": [line.split()[1] for line in open("/proc/self/status") if line.startswith("CapEff")][0],
         "writes": {place: writes(place) for place in ("/", "/etc", "/shared/models", "/scratch", "/dev/shm", "/root")}}
port, address = 29500, os.environ["PET_MASTER_ADDR"]
if rank == "0":
    with socket.create_server(("", port)) as server:
        facts["peer"] = server.accept()[1][0]
else:
    import time
    for _ in range(2000):
        try:
            socket.create_connection((address, port), timeout=1).close()
            break
        except OSError:
            time.sleep(0.05)
try:
    socket.create_connection(("192.0.2.1", 80), timeout=1)
    facts["leads out"] = True
except OSError:
    facts["leads out"] = False
pathlib.Path(f"/shared/models/facts{rank}.json").write_text(json.dumps(facts))
"""


@isolated
@pytest.mark.root
def test_a_pod_is_a_random_user_without_rights_on_a_network_of_its_own(tmp_path: Path) -> None:
    manifests = job("trainjob", "true", nodes=2, hf_token_secret="hub-token")
    for body in (manifest.body for manifest in manifests):
        for container in containers(body):
            container["command"] = ["python", "-c", PROBE]
            container["env"] = [each for each in container["env"] if each["name"] != "HOME"]
    outcome = play(tmp_path, manifests, root=True)
    assert outcome.succeeded, "\n".join(path.read_text() for path in outcome.logs.values())
    first, second = (json.loads((tmp_path / f"volumes/trained-models/facts{rank}.json").read_text()) for rank in (0, 1))
    assert (first["uid"], first["gid"], first["groups"], first["home"]) == (USER_ID, 0, [], "/")
    assert first["caps"] == "0000000000000000"
    writable = {"/shared/models": True, "/scratch": True, "/dev/shm": True}
    assert first["writes"] == {"/": False, "/etc": False, "/root": False, **writable}
    assert (first["name"], second["name"]) == ("resnet18-cifar10-node-0-0", "resnet18-cifar10-node-0-1")
    assert first["peer"] == "10.77.0.11"
    assert not first["leads out"] and not second["leads out"]
    assert (tmp_path / "volumes/trained-models/probe0").stat().st_uid == USER_ID
    assert not list(Path("/etc").glob("probe*")) and not Path("/probe0").exists()
    assert not Path("/scratch").exists(), "the pods' mounts must not appear on this machine"


@isolated
@pytest.mark.root
def test_a_simulation_leaves_nothing_running(tmp_path: Path) -> None:
    before = set(NETWORKS.iterdir()) if NETWORKS.is_dir() else set()
    outcome = play(
        tmp_path, job("trainjob", f"{STEP}; sleep 600", max_restarts=0), InjectedFault("node-lost", 0, 5), root=True
    )
    assert outcome.reason == "0 restarts are maxRestarts; the last exit code was 137"
    assert set(NETWORKS.iterdir()) <= before


@isolated
@pytest.mark.root
def test_a_killed_simulation_takes_its_pods_with_it(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        try:
            play(tmp_path, job("trainjob", f"{STEP}; exec sleep {SLEEP}"), root=True)
        finally:
            os._exit(1)
    deadline = time.monotonic() + 120
    while not sleepers() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert sleepers()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    deadline = time.monotonic() + 120
    while sleepers() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not sleepers()
    for left in NETWORKS.glob(f"mw{child:x}*"):
        subprocess.run(["ip", "netns", "del", left.name], check=True)


def sleepers() -> list[str]:
    """Pods of the test above."""
    command_lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # a process that has ended since it was listed
            command_lines.append(path.read_bytes())
    return [line.decode() for line in command_lines if line.split(b"\0")[:2] == [b"sleep", SLEEP.encode()]]


def test_the_stream_that_is_simulated_is_the_stream_that_is_sent() -> None:
    text = render(cluster_job("survival", "trainjob"))
    assert [pod.name for pod in expand_job(parse_manifests(text, "job.yaml"))[1]] == [
        f"quickstart-node-0-{n}" for n in range(4)
    ]
