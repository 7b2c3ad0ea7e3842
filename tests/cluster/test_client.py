"""Sending, following and fetching a job: the commands that are run, and what comes back from a small API server.

`kubectl` here is a script of ours that turns each command into the HTTP calls of the real one, against a server that
keeps what it is given and checks what it is asked to create.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from cluster_jobs import cluster_job
from modelwright.cluster import client
from modelwright.cluster.client import ClusterError, KubectlClient
from modelwright.cluster.documents import parse_manifests
from modelwright.cluster.lint import lint
from modelwright.cluster.manifests import ClusterJob, render
from modelwright.errors import UsageError

APPLY = "apply --server-side --field-manager=modelwright"
KUBECTL = """#!{python}
import json, sys, urllib.error, urllib.request
words = sys.argv[1:]
with open({log!r}, "a") as log:
    log.write(" ".join(words) + "\\n")
namespace, words = words[1], words[2:]
def call(method, path, body=None):
    data = body.encode() if body is not None else None
    request = urllib.request.Request("{server}/" + namespace + path, data, method=method)
    try:
        return urllib.request.urlopen(request).read().decode()
    except urllib.error.HTTPError as error:
        sys.exit(error.read().decode())
verb = words[0]
if verb == "apply":
    print(call("POST", "/apply" + ("?dry-run" if "--dry-run=server" in words else ""), sys.stdin.read()), end="")
elif verb == "get":
    name = words[2] if not words[2].startswith("-") else ""
    print(call("GET", "/" + words[1] + "/" + name), end="")
elif verb == "delete":
    print(call("DELETE", "/" + words[1] + "/" + words[2]), end="")
elif verb == "logs":
    print(call("GET", "/logs/" + words[-1]), end="")
"""


class Server(ThreadingHTTPServer):
    """A cluster's API in small."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.objects: dict[str, dict[str, Any]] = {}
        self.manifests: dict[str, str] = {}
        self.events: list[dict[str, Any]] = []

    def refusal(self, key: str, body: dict[str, Any], manifest: str) -> str:
        """What the real server and the operators' webhooks refuse, in their words."""
        self.manifests[key] = manifest
        kind, old = body["kind"], self.objects.get(key)
        if kind == "TrainJob" and f"trainingruntime/{body['spec']['runtimeRef']['name']}" not in self.objects:
            return (
                'Error from server (Forbidden): admission webhook "validator.trainjob.trainer.kubeflow.org" denied the '
                "request: spec.runtimeRef: Invalid value: specified trainingRuntime must be created before the TrainJob"
            )
        if old and kind in ("TrainJob", "PyTorchJob", "TrainingRuntime") and old["spec"] != body["spec"]:
            return f'The {kind} "{body["metadata"]["name"]}" is invalid: \n* spec: Invalid value: field is immutable'
        if kind in ("TrainJob", "PyTorchJob"):
            everything = "---\n".join(self.manifests.values())
            if any(finding.is_error for finding in lint(parse_manifests(everything, "sent"))):
                return "Error from server (Forbidden): admission webhook denied the request"
        return ""


class Answer(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        """kubectl sends one object after the other, and goes on where one is refused."""
        text = self.rfile.read(int(self.headers["Content-Length"])).decode()
        dry_run = self.path.endswith("?dry-run")
        output, errors = "", []
        for manifest in text.split("---\n"):
            body = YAML(typ="safe", pure=True).load(manifest)
            if body is None:
                continue
            key = f"{body['kind'].lower()}/{body['metadata']['name']}"
            if error := self.server.refusal(key, body, manifest):
                errors.append(error)
                continue
            if not dry_run:
                state = {"status": {"phase": "Running"}} if body["kind"] == "Pod" else {}
                self.server.objects[key] = {**body, **state}
            output += f"{key} created (server dry run)\n" if dry_run else f"{key} created\n"
        self._say(422 if errors else 200, "\n".join(errors) or output)

    def do_GET(self) -> None:
        _, _, kind, name = self.path.split("/", 3)
        if kind == "events":
            self._say(200, json.dumps({"items": self.server.events}))
            return
        if kind == "logs":
            self._say(200, f"log of {name}\n")
        elif kind in ("pods", "persistentvolumeclaims"):
            items = [body for key, body in self.server.objects.items() if key.startswith(f"{kind[:-1]}/")]
            self._say(200, json.dumps({"items": items}))
        else:
            stored = self.server.objects.get(f"{kind.split('.')[0].rstrip('s')}/{name}")
            self._say(200, json.dumps(stored) if stored else "")

    def do_DELETE(self) -> None:
        _, _, kind, name = self.path.split("/", 3)
        gone = self.server.objects.pop(f"{kind.split('.')[0].rstrip('s')}/{name}", None)
        self._say(200, f'{kind} "{name}" deleted\n' if gone else "")

    def _say(self, code: int, text: str) -> None:
        self.send_response(code)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    fake_server = Server()
    threading.Thread(target=fake_server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    yield fake_server
    fake_server.shutdown()
    fake_server.server_close()


@pytest.fixture
def oc(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KubectlClient:
    """A client whose program is our script."""
    script = tmp_path / "bin" / "kubectl"
    script.parent.mkdir()
    values = {"python": sys.executable, "log": str(tmp_path / "commands")}
    text = KUBECTL.replace("{server}", f"http://127.0.0.1:{server.server_port}")
    for name, value in values.items():
        text = text.replace(f"{{{name}!r}}", repr(value)).replace(f"{{{name}}}", value)
    script.write_text(text)
    script.chmod(script.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", f"{script.parent}:{os.defpath}")
    return client.find_client("modelwright")


def commands(folder: Path) -> list[str]:
    return (folder / "commands").read_text().splitlines()


@pytest.fixture
def survival() -> ClusterJob:
    return cluster_job("survival", "trainjob")


def test_the_runtime_is_created_before_the_server_tries_the_job(
    oc: KubectlClient, survival: ClusterJob, server: Server, tmp_path: Path
) -> None:
    output = client.submit(oc, render(survival), survival)
    assert output.index("trainingruntime/quickstart created") < output.index(
        "trainjob/quickstart created (server dry run)"
    )
    assert output[-1] == "trainjob/quickstart created"
    verbs = [line.split(" ", 2)[2].split(" -f ")[0] for line in commands(tmp_path)]
    assert [verb for verb in verbs if verb.startswith("apply")] == [f"{APPLY} --dry-run=server", APPLY] * 2
    assert "trainingruntime/quickstart" in server.objects


def test_a_pytorchjob_is_tried_before_anything_is_sent(oc: KubectlClient, server: Server, tmp_path: Path) -> None:
    job = cluster_job("survival", "pytorchjob")
    assert client.submit(oc, render(job), job)[-1] == "pytorchjob/quickstart created"
    applied = [line for line in commands(tmp_path) if APPLY in line]
    assert ["--dry-run=server" in line for line in applied] == [True, True, False]


def test_what_the_server_refuses_is_reported_and_nothing_is_sent(
    oc: KubectlClient, survival: ClusterJob, server: Server
) -> None:
    with pytest.raises(ClusterError, match="admission webhook denied"):
        client.submit(oc, render(survival).replace("numProcPerNode: 1", "numProcPerNode: 2"), survival)
    assert server.objects == {}


def test_a_job_that_runs_is_not_replaced_and_one_that_is_over_is(
    oc: KubectlClient, survival: ClusterJob, server: Server
) -> None:
    client.submit(oc, render(survival), survival)
    with pytest.raises(UsageError, match="quickstart is Pending on the cluster; cancel it first"):
        client.submit(oc, render(survival), survival)
    condition = {"type": "Failed", "status": "True", "message": "gate closed"}
    server.objects["trainjob/quickstart"]["status"] = {"conditions": [condition]}
    changed = cluster_job("survival", "trainjob", "cluster.cpu=5", "cluster.env={NCCL_DEBUG: WARN}")
    client.submit(oc, render(changed), changed)
    assert "status" not in server.objects["trainjob/quickstart"]
    assert server.objects["trainjob/quickstart"]["spec"]["trainer"]["resourcesPerNode"]["requests"]["cpu"] == "5"


def test_a_runtime_left_by_a_deleted_job_does_not_stop_the_next(
    oc: KubectlClient, survival: ClusterJob, server: Server
) -> None:
    client.submit(oc, render(survival), survival)
    del server.objects["trainjob/quickstart"]
    changed = cluster_job("survival", "trainjob", "cluster.env={NCCL_DEBUG: WARN}")
    client.submit(oc, render(changed), changed)
    assert "trainjob/quickstart" in server.objects


def test_a_claim_that_cannot_become_the_rendered_one_is_reported_before_anything_is_sent(
    oc: KubectlClient, survival: ClusterJob, server: Server, tmp_path: Path
) -> None:
    single = cluster_job("lyrics", "trainjob")
    client.submit(oc, render(single), single)
    cancelled = client.cancel(oc, single)
    assert cancelled is not None
    before = len(commands(tmp_path))
    with pytest.raises(UsageError, match="claim trained-models is ReadWriteOnce in the namespace, and the job wants "
                       "ReadWriteMany, which cannot be changed; name another claim") as error:  # fmt: skip
        client.submit(oc, render(survival), survival)
    assert "{trained-models: null, trained-models-shared: {mount: PATH}}" in str(error.value)
    assert not [line for line in commands(tmp_path)[before:] if "apply" in line or "delete" in line]


def test_status_shows_phase_pods_and_progress(oc: KubectlClient, survival: ClusterJob, server: Server) -> None:
    with pytest.raises(UsageError, match="there is no trainjob quickstart in modelwright"):
        client.status(oc, survival)
    client.submit(oc, render(survival), survival)
    assert client.status(oc, survival).phase == "Pending"
    container = {"restartCount": 1, "state": {"running": {}}, "lastState": {"terminated": {"exitCode": 137}}}
    state = {"phase": "Running", "containerStatuses": [container]}
    server.objects["pod/one"] = {"metadata": {"name": "quickstart-node-0-0-x"}, "status": state}
    annotations = {"trainer.opendatahub.io/trainerStatus": json.dumps({"progressPercentage": 40})}
    server.objects["trainjob/quickstart"]["metadata"]["annotations"] |= annotations
    status = client.status(oc, survival)
    assert (status.phase, status.progress) == ("Running", {"progressPercentage": 40})
    assert status.pods == {"quickstart-node-0-0-x": "Running, exited with 137, 1 restarts"}
    server.objects["trainjob/quickstart"]["status"] = {"conditions": [{"type": "Complete", "status": "True"}]}
    assert client.status(oc, survival).phase == "Succeeded"
    server.objects["trainjob/quickstart"] |= {"spec": {"suspend": True}, "status": {}}
    server.objects.pop("pod/one")
    assert client.status(oc, survival).phase == "Suspended"


def test_logs_are_those_of_the_first_pod(
    oc: KubectlClient, survival: ClusterJob, server: Server, capfd: Any, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="has no pod yet"):
        client.logs(oc, survival)
    for name in ("quickstart-node-0-1-b", "quickstart-node-0-0-a"):
        server.objects[f"pod/{name}"] = {"metadata": {"name": name}, "status": {"phase": "Running"}}
    client.logs(oc, survival, follow=True)
    assert capfd.readouterr().out == "log of quickstart-node-0-0-a\n"
    assert commands(tmp_path)[-1] == "--namespace modelwright logs -f quickstart-node-0-0-a"
    client.logs(oc, survival, previous=True)
    assert commands(tmp_path)[-1] == "--namespace modelwright logs --previous quickstart-node-0-0-a"
    server.objects["pod/master"] = {"metadata": {"name": "quickstart-master-0"}, "status": {"phase": "Running"}}
    assert client.rank0_pod(oc, cluster_job("survival", "pytorchjob")) == "quickstart-master-0"


def test_cancel_leaves_the_volumes(oc: KubectlClient, survival: ClusterJob, server: Server) -> None:
    client.submit(oc, render(survival), survival)
    assert "trainjobs" in client.cancel(oc, survival)
    assert sorted(key.split("/")[0] for key in server.objects) == [
        "configmap",
        "persistentvolumeclaim",
        "persistentvolumeclaim",
    ]


def test_without_oc_and_kubectl_the_message_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="neither oc nor kubectl is on the PATH"):
        client.find_client("x")


def test_oc_goes_before_kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("kubectl", "oc"):
        shutil.copy("/bin/true", tmp_path / name)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert Path(client.find_client("x").executable).name == "oc"


def write_oc(folder: Path, text: str) -> KubectlClient:
    """A client whose program is a script with this text."""
    folder.mkdir(exist_ok=True)
    program = folder / "oc"
    program.write_text(f"#!{sys.executable} -IS\n{text}")
    program.chmod(0o755)
    return KubectlClient(str(program), "modelwright")


LOG_LINE = (
    'E1117 15:08:35.0{} 6386 memcache.go:265] "Unhandled Error" err="couldn\'t get current server API group list"'
)
EXPIRED = "error: You must be logged in to the server (the server has asked for the client to provide credentials)"
REFUSED = "The connection to the server 127.0.0.1:18444 was refused - did you specify the right host or port?"
INVALID = 'The TrainJob "x" is invalid: \n* spec.trainer: Invalid value: 3\n* spec.runtimeRef: field is immutable'


@pytest.mark.parametrize(
    ("stderr", "expected"),
    [
        (EXPIRED, f"{EXPIRED}; your login has expired or is missing: oc login, then the same command again"),
        (REFUSED, REFUSED),
        (
            INVALID,
            'The TrainJob "x" is invalid: * spec.trainer: Invalid value: 3; * spec.runtimeRef: field is immutable',
        ),
    ],
)
def test_an_error_gives_the_cause_and_none_of_the_clients_log_lines(
    stderr: str, expected: str, tmp_path: Path, survival: ClusterJob
) -> None:
    lines = [*(LOG_LINE.format(number) for number in range(4)), *stderr.splitlines()]
    oc = write_oc(tmp_path, f"import sys\nsys.exit({chr(10).join(lines)!r})")
    with pytest.raises(ClusterError) as caught:
        client.status(oc, survival)
    assert str(caught.value) == f"oc get trainjobs.trainer.kubeflow.org quickstart: {expected}"


def test_logs_without_a_cluster_print_one_line(tmp_path: Path) -> None:
    lines = "\n".join([*(LOG_LINE.format(number) for number in range(4)), REFUSED])
    write_oc(tmp_path / "bin", f"import sys\nsys.exit({lines!r})")
    command = [sys.executable, "-m", "modelwright", "job", "logs", "quickstart", "-f", "--context", "there"]
    env = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.defpath}"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and REFUSED in done.stderr, done.stderr


def test_a_silent_host_is_reported_within_the_limit(
    tmp_path: Path, survival: ClusterJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert client.ANSWER_TIMEOUT < 20
    monkeypatch.setattr(client, "ANSWER_TIMEOUT", 1.0)
    with socket.socket() as listener:  # it takes connections and says nothing
        listener.bind(("127.0.0.1", 0))
        listener.listen(16)
        connect = f"s = socket.create_connection(('127.0.0.1', {listener.getsockname()[1]}))"
        oc = write_oc(tmp_path, f"import socket\nfor _ in range(5):\n    {connect}; s.settimeout(60); s.recv(1)")
        started = time.monotonic()
        with pytest.raises(ClusterError, match=r"did not answer within 1 s; check the network .*--context"):
            client.status(oc, survival)
    assert time.monotonic() - started < 60, "the host itself would take five minutes"


def test_the_context_and_a_time_limit_are_given_to_every_request(tmp_path: Path) -> None:
    oc = write_oc(tmp_path, "import sys\nprint(*sys.argv[1:])")
    oc = KubectlClient(oc.executable, "modelwright", "there")
    assert oc.run("get", "pods") == "--namespace modelwright --context there get pods --request-timeout=15s\n"


WAITING = [
    ("ErrImagePull", "pull access denied"),
    ("ImagePullBackOff", "Back-off pulling image"),
    ("CreateContainerConfigError", 'secret "hub-token" not found'),
]


@pytest.mark.parametrize(("reason", "message"), WAITING)
def test_status_says_why_a_container_does_not_start(
    oc: KubectlClient, survival: ClusterJob, server: Server, reason: str, message: str
) -> None:
    server.objects["trainjob/quickstart"] = {"metadata": {"name": "quickstart"}, "spec": {}}
    container = {"state": {"waiting": {"reason": reason, "message": message}}}
    state = {"phase": "Pending", "containerStatuses": [container]}
    server.objects["pod/a"] = {"metadata": {"name": "quickstart-node-0-0-a"}, "status": state}
    status = client.status(oc, survival)
    assert (status.phase, status.reason) == ("Pending", f"{reason}: {message}")
    assert status.pods == {"quickstart-node-0-0-a": f"Pending, {reason}: {message}"}


def test_status_says_what_was_not_scheduled_created_or_started(
    oc: KubectlClient, survival: ClusterJob, server: Server
) -> None:
    job = server.objects["trainjob/quickstart"] = {"metadata": {"name": "quickstart"}, "spec": {}}
    for name, message in (("quickstart-node-0", "exceeded quota: gpu"), ("quickstart-2-node-0", "of another job")):
        event = {"reason": "FailedCreatePod", "message": message, "lastTimestamp": "2026-11-17T15:00:00Z"}
        server.events.append({**event, "involvedObject": {"name": name}})
    assert client.status(oc, survival).reason == "no pod runs yet; FailedCreatePod: exceeded quota: gpu"
    server.events.clear()
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes available"}
    server.objects["pod/a"] = {
        "metadata": {"name": "quickstart-node-0-0-a"},
        "status": {"phase": "Pending", "conditions": [condition]},
    }
    assert client.status(oc, survival).reason == "FailedScheduling: 0/3 nodes available"
    server.objects["pod/b"] = {"metadata": {"name": "quickstart-node-0-1-b"}, "status": {"phase": "Running"}}
    status = client.status(oc, survival)
    assert (status.phase, status.reason) == (
        "Running",
        "1 of 4 pods running; FailedScheduling: 0/3 nodes available",
    )
    job["spec"] = {"suspend": True}
    assert client.status(oc, survival).phase == "Suspended"


@pytest.mark.parametrize("text", ["{broken", "[1]", '"text"'])
def test_a_malformed_annotation_is_shown_and_is_no_traceback(
    oc: KubectlClient, survival: ClusterJob, server: Server, text: str
) -> None:
    annotations = {"trainer.opendatahub.io/trainerStatus": text}
    server.objects["trainjob/quickstart"] = {"metadata": {"name": "quickstart", "annotations": annotations}}
    assert client.status(oc, survival).progress == {"malformed annotation": text}


def test_the_hint_after_submit_finds_the_job_again(oc: KubectlClient, tmp_path: Path) -> None:
    recipe = tmp_path / "my recipe.yaml"
    recipe.write_text("base: quickstart\nname: mine\n")
    arguments = [str(recipe), "--job-kind", "pytorchjob", "--set", "cluster.cpu=5"]
    command = [sys.executable, "-m", "modelwright"]
    done = subprocess.run(
        [*command, "launch", *arguments, "--on", "openshift", "--submit"], capture_output=True, text=True, check=False
    )
    hint = done.stdout.splitlines()[-1].partition("check with: ")[2]
    assert shlex.split(hint)[:4] == ["modelwright", "job", "status", str(recipe)], done.stderr
    status_output = subprocess.run([*command, *shlex.split(hint)[1:]], capture_output=True, text=True, check=False)
    assert status_output.stdout.startswith("mine: Pending"), status_output.stderr
