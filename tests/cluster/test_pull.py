"""A pulled run is complete: `oc` here is a program that runs commands of the pod, cuts their output and exits 0."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from cluster_jobs import cluster_job
from modelwright.cluster import client, pull
from modelwright.cluster.client import ClusterError, KubectlClient
from modelwright.cluster.manifests import ClusterJob
from modelwright.errors import UsageError
from tests.faults.leaks import PathTraversalCase, TraversalFindings, remote_files, try_pull

NIGHTLY = bool(os.environ.get("NIGHTLY"))
MODEL_BYTES = 5_000_000_000 if NIGHTLY else 1_000_000
PULLS = int(os.environ.get("PULLS", "20"))
OC = """#!{python} -IS
import json, os, pathlib, random, subprocess, sys
folder, words = pathlib.Path({folder!r}), sys.argv[1:]
settings = json.loads((folder / "settings.json").read_text())
with (folder / "commands").open("a") as log:
    log.write(" ".join(words)[:300].replace(chr(10), " ") + chr(10))
verb = next(word for word in words if word in ("apply", "get", "exec", "delete"))
if verb == "apply":
    (folder / "pod.yaml").write_text(sys.stdin.read())
elif verb == "get":
    print(json.dumps({"metadata": {"name": words[-3]}, "status": settings["pod"]}))
elif verb == "exec":
    command = [word.replace("/shared/models", str(folder)) for word in words[words.index("--") + 1 :]]
    command[0] = sys.executable
    child = subprocess.Popen([command[0], "-IS", *command[1:]], stdout=subprocess.PIPE)
    left = random.randrange(settings["cut"]) if settings["cut"] and random.random() < 0.8 else 1 << 62
    budget = folder / "budget"
    if budget.exists() and "def send_ranges" in command[2]:
        left = int(budget.read_text())
    while left and (piece := os.read(child.stdout.fileno(), min(left, 1 << 20))):
        sys.stdout.buffer.write(piece)
        left -= len(piece)
    if budget.exists() and "def send_ranges" in command[2]:
        budget.write_text(str(left))
    sys.stdout.buffer.flush()
    if left:
        sys.exit(child.wait())
    child.kill()  # the stream is cut, and this exits 0
"""


class Cluster:
    """A volume with a run, and the program that reaches it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run = folder, folder / "quickstart"
        self.settings: dict[str, Any] = {"cut": 0, "pod": {"phase": "Running"}}
        (folder / "bin").mkdir(parents=True)
        program = folder / "bin" / "oc"
        program.write_text(OC.replace("{python}", sys.executable).replace("{folder!r}", repr(str(folder))))
        program.chmod(0o755)
        self.set()

    def set(self, **settings: Any) -> None:
        self.settings |= settings
        (self.folder / "settings.json").write_text(json.dumps(self.settings))

    def write_run(self, model_bytes: int) -> None:
        (self.run / "stages" / "sft").mkdir(parents=True)
        (self.run / "empty").mkdir()
        with (self.run / "stages" / "sft" / "model.safetensors").open("wb") as file:
            for start in range(0, model_bytes, 10_000_000):
                file.write(random.Random(start).randbytes(min(10_000_000, model_bytes - start)))
        for number in range(8):
            (self.run / f"rank {number}: log.txt").write_text(f"{number}\n" * number)
        (self.run / "journal.jsonl").write_text("{}\n")
        (self.run / "copy.jsonl").write_text("{}\n")
        (self.run / "best_model").symlink_to("stages/sft")

    def commands(self, verb: str) -> list[str]:
        return [line for line in (self.folder / "commands").read_text().splitlines() if f" {verb} " in line]


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    cluster = Cluster(tmp_path / "cluster")
    monkeypatch.setenv("PATH", f"{cluster.folder / 'bin'}:{os.defpath}")
    return cluster


@pytest.fixture
def oc(cluster: Cluster) -> KubectlClient:
    return client.find_client("modelwright")


@pytest.fixture(scope="module")
def survival() -> ClusterJob:
    return cluster_job("survival", "trainjob")


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def contents(folder: Path) -> dict[str, str]:
    """Every file, folder and link, with the hash of its content."""
    result = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            result[name] = f"link to {path.readlink()}"
        else:
            result[name] = "folder" if path.is_dir() else digest(path)
    return result


def test_every_pull_is_complete_though_the_stream_is_cut_at_random(
    cluster: Cluster, oc: KubectlClient, survival: ClusterJob, tmp_path: Path
) -> None:
    cluster.write_run(MODEL_BYTES)
    cluster.set(cut=MODEL_BYTES // 10 if NIGHTLY else MODEL_BYTES)  # four of five streams
    expected, notices = contents(cluster.run), []

    def pull_once(number: int) -> None:
        started = time.monotonic()
        home = tmp_path / f"home-{number}"
        files = pull.pull(oc, survival, home, log=notices.append)
        assert len(files) == 11 and contents(home) == expected
        shutil.rmtree(home)
        if NIGHTLY:
            print(
                f"pull {number}: verified in {time.monotonic() - started:.0f} s; {len(notices)} cuts so far", flush=True
            )

    with ThreadPoolExecutor(2) as threads:
        assert len(list(threads.map(pull_once, range(PULLS)))) == PULLS
    assert len(notices) >= PULLS // 4 and "the stream ended early" in notices[0]


def test_a_pull_that_was_stopped_continues_with_what_is_missing(
    cluster: Cluster, oc: KubectlClient, survival: ClusterJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.write_run(400_000)
    monkeypatch.setattr(pull, "MAX_ATTEMPTS", 2)
    monkeypatch.setattr(pull, "MAX_READERS", 1)
    home, budget = tmp_path / "home", cluster.folder / "budget"
    budget.write_text("300000")
    with pytest.raises(ClusterError, match=r"home is not complete: the stream ended early; the same command continues"):
        pull.pull(oc, survival, home)
    assert not (home / "stages").exists()  # nothing has its name before it is verified
    budget.write_text("110000")
    pull.pull(oc, survival, home)
    assert contents(home) == contents(cluster.run)
    budget.unlink()
    before = len(cluster.commands("exec"))
    (home / "journal.jsonl").unlink()
    pull.pull(oc, survival, home)
    assert contents(home) == contents(cluster.run)
    assert len(cluster.commands("exec")) == before + 2  # the list and one file


def test_a_newer_local_file_is_not_replaced_without_a_word(
    cluster: Cluster, oc: KubectlClient, survival: ClusterJob, tmp_path: Path
) -> None:
    cluster.write_run(1000)
    home = tmp_path / "home"
    home.mkdir()
    (home / "journal.jsonl").write_text("mine\n")
    os.utime(home / "journal.jsonl", (time.time() + 60, time.time() + 60))
    with pytest.raises(UsageError, match=r"newer \(journal.jsonl\); pull into another folder with --output, or give"):
        pull.pull(oc, survival, home)
    assert (home / "journal.jsonl").read_text() == "mine\n" and len(list(home.iterdir())) == 1
    pull.pull(oc, survival, home, overwrite=True)
    assert (home / "journal.jsonl").read_text() == "{}\n"


def test_each_pull_has_its_own_reader_and_removes_it(
    cluster: Cluster, oc: KubectlClient, survival: ClusterJob, tmp_path: Path
) -> None:
    cluster.write_run(1000)
    for name in ("one", "two"):
        pull.pull(oc, survival, tmp_path / name)
    deleted = [line.split("delete pod ")[1].split()[0] for line in cluster.commands("delete")]
    assert len(set(deleted)) == 2 and all(name.startswith("quickstart-reader-") for name in deleted)


@pytest.mark.parametrize("reason", ["ImagePullBackOff", "CreateContainerConfigError"])
def test_an_image_that_cannot_be_pulled_is_reported_at_once(
    cluster: Cluster, oc: KubectlClient, survival: ClusterJob, tmp_path: Path, reason: str
) -> None:
    waiting = {"reason": reason, "message": 'Back-off pulling image "registry.example.com/modelwright:1"'}
    cluster.set(pod={"phase": "Pending", "containerStatuses": [{"state": {"waiting": waiting}}]})
    with pytest.raises(ClusterError, match=rf"cannot start: {reason}: Back-off pulling image"):
        pull.pull(oc, survival, tmp_path / "home")
    assert cluster.commands("delete")


def test_a_run_that_does_not_exist_is_reported(
    cluster: Cluster, oc: KubectlClient, survival: ClusterJob, tmp_path: Path
) -> None:
    with pytest.raises(ClusterError, match=r"there is no folder .*quickstart; the job has not written anything yet"):
        pull.pull(oc, survival, tmp_path / "home")


def test_files_that_a_pod_lists_stay_in_the_folder(tmp_path: Path) -> None:
    case = PathTraversalCase(tmp_path, lambda arguments, folder: (0, ""), TraversalFindings())
    case.desk.mkdir()
    case.victim.mkdir()
    (case.victim / "kept.txt").write_text("kept")
    for name, members in remote_files(case.victim).items():
        try_pull(case, name, members)
    findings = case.findings
    assert (findings.writes, findings.crashes) == ([], []) and findings.refused == 7
    assert (case.desk / "pulled" / "best_model" / "config.json").read_text() == "{}"
