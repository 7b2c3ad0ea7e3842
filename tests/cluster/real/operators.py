"""Run two tiny recipes on a real control plane with the real operators, as TrainJob and as PyTorchJob.

    ETCD=… KUBE_APISERVER=… … python -m tests.cluster.real.operators

Needs root and no network: programs are named by the variables in BINARIES, the operators' install manifests and the
image by those in FILES. What is not there is listed, and the exit code is 69.

**This script has not been run**; tests/cluster/test_real.py tests what needs no binary. It repeats a trial by hand
(version 692a1a9; JobSet 0.12, Trainer 2.3, training-operator 1.9.4) with the same stand-ins: a policy gives the user
id, dnsmasq the names, folders of the host the volumes. No GPU, no Kueue, no console.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from string import Template
from tempfile import mkdtemp
from typing import Any, NamedTuple

from modelwright.cluster.client import RESOURCE_NAMES, KubectlClient
from modelwright.cluster.documents import Document, dump_documents, load_manifests
from modelwright.errors import ModelwrightError

ABSENT_EXIT_CODE = 69
"""EX_UNAVAILABLE: nothing was tried."""
BINARIES = ("ETCD", "KUBE_APISERVER", "KUBE_CONTROLLER_MANAGER", "KUBE_SCHEDULER", "KUBELET", "CONTAINERD", "CTR",
            "KUBECTL", "DNSMASQ", "JOBSET_MANAGER", "TRAINER_MANAGER", "TRAINING_OPERATOR")  # fmt: skip
FILES = {
    "JOBSET_MANIFESTS": "the install manifests of JobSet, one YAML file",
    "TRAINER_MANIFESTS": "those of Kubeflow Trainer",
    "TRAINING_OPERATOR_MANIFESTS": "those of training-operator",
    "CNI_BIN": "a folder with the CNI plugins bridge, host-local and loopback",
    "MODELWRIGHT_IMAGE": "the image of the Containerfile as an archive (buildah push IMAGE oci-archive:FILE)",
}
CONFIG = Path(__file__).parent / "config"
NAMESPACE, IMAGE, PORT = "modelwright", "localhost/modelwright:latest", 16443
TINY_RECIPES = (
    ("quickstart", ["sft.max_steps=40", "sft.save_steps=5", "gates={}"]),
    (
        "resnet18-cifar10-tiny",
        ["data.dataset_name=shapes", "classify.max_steps=60", "classify.save_steps=5", "gates={}"],
    ),
)
CLUSTER_SETTINGS = (f"cluster.namespace={NAMESPACE}", f"cluster.image={IMAGE}", "cluster.nodes=2", "cluster.cpu=1",
                    "cluster.gpus_per_node=0", "cluster.gpu_product=null", "cluster.memory=3Gi",
                    "cluster.local_queue=null", "cluster.shm_size=256Mi")  # fmt: skip


class Operator(NamedTuple):
    """An operator that runs as a process of the host, and the Service of its webhooks."""

    binary: str
    manifests: str
    namespace: str
    service: str
    secret: str  # where it writes its certificate; in a cluster this is mounted into its pod
    port: int  # of the webhooks
    args: tuple[str, ...]


OPERATORS = (
    Operator("JOBSET_MANAGER", "JOBSET_MANIFESTS", "jobset-system", "jobset-webhook-service",
             "jobset-webhook-server-cert", 19443, ("--config=jobset.yaml",)),
    Operator("TRAINER_MANAGER", "TRAINER_MANIFESTS", "kubeflow-system", "kubeflow-trainer-controller-manager",
             "kubeflow-trainer-webhook-cert", 19453, ("--config=trainer.yaml",)),
    Operator("TRAINING_OPERATOR", "TRAINING_OPERATOR_MANIFESTS", "kubeflow", "training-operator",
             "training-operator-webhook-cert", 19463,
             ("--enable-scheme=pytorchjob", "--webhook-server-port=19463", "--metrics-bind-address=:19464",
              "--health-probe-bind-address=:19465", f"--pytorch-init-container-image={IMAGE}",
              "--pytorch-init-container-template-file=init-container.yaml")),
)  # fmt: skip


def absent(environ: Mapping[str, str]) -> list[str]:
    """What the environment does not name, or names wrongly."""
    missing = []
    for name, what in {**dict.fromkeys(BINARIES, "a program"), **FILES}.items():
        path = environ.get(name, "")
        if not path:
            missing.append(f"{name} is not set: {what}")
        elif not Path(path).exists() or (name in BINARIES and not os.access(path, os.X_OK)):
            missing.append(f"{name} is {path}, which is not {what}")
    return missing


def commands(work: Path, environ: Mapping[str, str], host: str) -> dict[str, list[str]]:
    """The command line of each part of the control plane, in the order of their start."""
    config = f"--kubeconfig={work}/kubeconfig"
    key = f"{work}/service-account.key"
    return {
        "etcd": [environ["ETCD"], f"--data-dir={work}/etcd", "--listen-client-urls=http://127.0.0.1:12379",
                 "--advertise-client-urls=http://127.0.0.1:12379", "--listen-peer-urls=http://127.0.0.1:12380"],
        "kube-apiserver": [environ["KUBE_APISERVER"], "--etcd-servers=http://127.0.0.1:12379",
                           f"--secure-port={PORT}", f"--cert-dir={work}/apiserver", f"--advertise-address={host}",
                           "--service-cluster-ip-range=10.96.0.0/16", f"--token-auth-file={work}/tokens.csv",
                           "--feature-gates=MutatingAdmissionPolicy=true",
                           "--runtime-config=admissionregistration.k8s.io/v1beta1=true",
                           "--authorization-mode=RBAC", "--enable-aggregator-routing=true", "--allow-privileged=true",
                           "--service-account-issuer=https://kubernetes.default.svc",
                           f"--service-account-key-file={key}", f"--service-account-signing-key-file={key}"],
        "kube-controller-manager": [environ["KUBE_CONTROLLER_MANAGER"], config, "--use-service-account-credentials",
                                    f"--service-account-private-key-file={key}"],
        "kube-scheduler": [environ["KUBE_SCHEDULER"], config],
        "containerd": [environ["CONTAINERD"], f"--config={work}/containerd.toml"],
        "dnsmasq": [environ["DNSMASQ"], "--keep-in-foreground", f"--listen-address={host}", "--bind-interfaces",
                    "--no-resolv", "--no-hosts", f"--hostsdir={work}/hosts"],
        "kubelet": [environ["KUBELET"], config, f"--config={work}/kubelet.yaml", f"--root-dir={work}/kubelet",
                    f"--hostname-override={socket.gethostname().lower()}"],
    }  # fmt: skip


def configuration_files(work: Path, environ: Mapping[str, str], host: str) -> dict[str, str]:
    """Name and content of every file that the parts read: those of config/ with this machine's values."""
    values = {"WORK": str(work), "HOST": host, "PORT": str(PORT), "CNI_BIN": environ["CNI_BIN"]}
    paths = [path for path in CONFIG.rglob("*") if path.is_file()]
    return {str(path.relative_to(CONFIG)): Template(path.read_text()).substitute(values) for path in paths}


def webhook_service(operator: Operator, host: str) -> list[Document]:
    """The Service that the webhook configurations name, and its endpoint: the operator's process on the host."""
    metadata = {"name": operator.service, "namespace": operator.namespace}
    service = {"apiVersion": "v1", "kind": "Service", "metadata": metadata,
               "spec": {"ports": [{"name": "webhook", "port": 443, "targetPort": operator.port}]}}  # fmt: skip
    labels = {"kubernetes.io/service-name": operator.service}
    endpoints = {"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
                 "metadata": {**metadata, "labels": labels}, "endpoints": [{"addresses": [host]}],
                 "ports": [{"name": "webhook", "port": operator.port}]}  # fmt: skip
    return [service, endpoints]


class ControlPlane:
    """Everything that was started, and the client that reaches it."""

    def __init__(self, work: Path, environ: Mapping[str, str]) -> None:
        self.work, self.environ = work, environ
        self.processes: list[subprocess.Popen[bytes]] = []
        self.client = KubectlClient(environ["KUBECTL"], NAMESPACE)
        self.host = subprocess.check_output(["hostname", "-I"], text=True).split()[0]

    def start(self) -> None:
        """Bring up the control plane, the node and the operators."""
        for name, content in configuration_files(self.work, self.environ, self.host).items():
            path = self.work / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
        for name in ("hosts", "volumes/training-data", "volumes/trained-models", "volumes/workspace"):
            (self.work / name).mkdir(parents=True)
            (self.work / name).chmod(0o2775)  # group 0 writes, as on a volume under restricted-v2
        key = self.work / "service-account.key"
        subprocess.run(["openssl", "genrsa", "-out", str(key), "2048"], check=True, capture_output=True)
        os.environ["KUBECONFIG"] = str(self.work / "kubeconfig")
        for name, command in commands(self.work, self.environ, self.host).items():
            self.spawn(name, command)
            if name == "kube-apiserver":
                wait_for("the API server", lambda: self.client.run("get", "--raw=/readyz") == "ok")
        wait_for("containerd", (self.work / "containerd.sock").exists)
        ctr = [self.environ["CTR"], f"--address={self.work}/containerd.sock", "--namespace=k8s.io"]
        subprocess.run([*ctr, "images", "import", "--index-name", IMAGE, self.environ["MODELWRIGHT_IMAGE"]], check=True)
        for operator in OPERATORS:
            self.start_operator(operator)

    def start_operator(self, operator: Operator) -> None:
        """Apply its manifests without the Deployment, and run it with a certificate folder of its own."""
        manifests = load_manifests(Path(self.environ[operator.manifests]))
        replaced = {("Deployment", None), ("Service", operator.service)}
        bodies = [each.body for each in manifests if not {(each.kind, None), (each.kind, each.name)} & replaced]
        self.apply([*bodies, *webhook_service(operator, self.host)])
        certificates = self.work / operator.binary / "serving-certs"
        certificates.mkdir(parents=True)
        command = f"cd {self.work} && exec {shlex.join([self.environ[operator.binary], *operator.args])}"
        # all three read /tmp/k8s-webhook-server, so each gets a mount namespace in which that folder is its own
        mount = f"mkdir -p /tmp/k8s-webhook-server && mount --bind {certificates.parent} /tmp/k8s-webhook-server"
        self.spawn(operator.binary, ["unshare", "--mount", "sh", "-c", f"{mount} && {command}"])

        def copy_certificate() -> bool:
            get = ("get", "secret", operator.secret, f"--namespace={operator.namespace}", "-o", "json")
            data = json.loads(self.client.run(*get)).get("data") or {}
            for name, value in data.items():
                (certificates / name).write_bytes(base64.b64decode(value))
            return "tls.crt" in data

        wait_for(f"the certificate of {operator.binary}", copy_certificate)

    def apply(self, documents: Sequence[Document]) -> None:
        self.client.run("apply", "--server-side", "--force-conflicts", "-f", "-", stdin_text=dump_documents(documents))

    def spawn(self, name: str, command: Sequence[str]) -> None:
        with (self.work / f"{name}.log").open("wb") as log:
            self.processes.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT))

    def pods(self, job: str) -> dict[str, Any]:
        """The pods of a job by name; the names that other pods look for go to the name server on the way."""
        listed = json.loads(self.client.run("get", "pods", "-l", f"app.kubernetes.io/instance={job}", "-o", "json"))
        pods, lines = {str(pod["metadata"]["name"]): pod for pod in listed["items"]}, []
        for name, pod in pods.items():
            spec, address = pod["spec"], pod["status"].get("podIP")
            host = f"{spec['hostname']}.{spec['subdomain']}" if spec.get("subdomain") else name
            lines += [f"{address} {host} {host}.{NAMESPACE}.svc.cluster.local"] if address else []
        (self.work / "hosts" / "pods").write_text("\n".join([*lines, ""]))
        return pods

    def stop(self) -> None:
        for process in reversed(self.processes):
            process.terminate()
        for process in self.processes:
            process.wait(timeout=60)


def wait_for(what: str, condition: Callable[[], bool], seconds: float = 300.0) -> None:
    """Ask until it holds; a question that fails counts as no."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with suppress(ModelwrightError, OSError, ValueError):
            if condition():
                return
        time.sleep(1.0)
    raise SystemExit(f"{what}: not there after {seconds:.0f} s")


def try_recipe(plane: ControlPlane, kind: str, recipe: str, settings: Sequence[str]) -> list[str]:
    """Submit, delete a pod, suspend, resume, pull: a row of the table."""
    job = f"{recipe}-{kind}"  # a run folder of its own: a finished run would be skipped
    options = [word for text in (*CLUSTER_SETTINGS, f"name={job}", *settings) for word in ("--set", text)]

    def modelwright(*words: str) -> str:
        command = [sys.executable, "-m", "modelwright", *words, "--job-kind", kind, *options]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(words)}: exit {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout

    def running() -> bool:
        return [pod["status"]["phase"] for pod in plane.pods(job).values()] == ["Running"] * 2

    def suspend(value: bool) -> None:
        spec = {"suspend": value} if kind == "trainjob" else {"runPolicy": {"suspend": value}}
        plane.client.run("patch", RESOURCE_NAMES[kind], job, "--type=merge", "-p", json.dumps({"spec": spec}))

    def finished() -> bool:
        plane.pods(job)
        return "Succeeded" in modelwright("job", "status", recipe)

    modelwright("launch", recipe, "--on", "openshift", "--submit")
    wait_for(f"{job}: two pods", running)
    time.sleep(30)
    victim = sorted(plane.pods(job))[-1]
    plane.client.run("delete", "pod", victim, "--wait=false")
    wait_for(f"{job}: {victim} replaced", lambda: victim not in plane.pods(job) or not running())
    wait_for(f"{job}: two pods again", running)
    suspend(True)
    wait_for(f"{job}: suspended", lambda: not plane.pods(job))
    suspend(False)
    wait_for(f"{job}: Succeeded", finished, 1800)
    target = plane.work / "pulled" / job
    pulled = modelwright("job", "pull", recipe, "--output", str(target)).strip().splitlines()[-1]
    events = [json.loads(line) for line in (target / "journal.jsonl").read_text().splitlines()]
    starts = sum(event.get("event") == "run" for event in events)
    return [kind, recipe, "Succeeded", f"{starts} starts", pulled.rpartition(": ")[2]]


def main(environ: Mapping[str, str]) -> int:
    if missing := absent(environ):
        print("nothing was tried; not here:", *missing, sep="\n  ", file=sys.stderr)
        return ABSENT_EXIT_CODE
    plane = ControlPlane(Path(mkdtemp(prefix="modelwright-real-")), environ)
    try:
        plane.start()
        plane.client.run("apply", "--server-side", "-f", str(plane.work / "project.yaml"))
        for kind, recipe in itertools.product(RESOURCE_NAMES, TINY_RECIPES):
            print("  ".join(word.ljust(24) for word in try_recipe(plane, kind, *recipe)), flush=True)
        return 0
    finally:
        print(f"logs: {plane.work}", file=sys.stderr)
        plane.stop()


if __name__ == "__main__":
    sys.exit(main(os.environ))
