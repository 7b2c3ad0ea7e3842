"""Simulate a rendered job on this machine: pods start, fail and restart by the operator's own rules."""

from __future__ import annotations

import base64
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, Literal

from modelwright.cluster.documents import Manifest, ManifestSet, PodTemplate, get_field, get_items
from modelwright.cluster.sandbox import (
    SOURCE_ROOT,
    Container,
    ContainerSpec,
    GitClone,
    Mount,
    NamespaceSandbox,
    ProcessSandbox,
    Sandbox,
    can_use_namespaces,
    find_git_clone,
    kill_all,
)
from modelwright.errors import UsageError
from modelwright.runs import journal

POLL_INTERVAL = 0.1
CONTAINER_BACKOFF = 10.0
"""The kubelet's first wait before it restarts a container; it doubles up to five minutes."""
NODE_UNREACHABLE_TIMEOUT = 300.0
"""Time after which the pods of an unreachable node are evicted."""


@dataclass(frozen=True)
class InjectedFault:
    """A fault injected into a pod."""

    kind: Literal["kill", "evict", "node-lost"]
    """kill: SIGKILL to its container. evict: SIGTERM, and SIGKILL after the grace period. node-lost: no network."""
    pod: int
    """Its number."""
    step: int
    """Step of the run at which it happens."""


@dataclass(frozen=True)
class SimulationConfig:
    """How to simulate a job."""

    work_dir: Path
    """Folder for volumes, logs and roots; volumes that are there are used as they are."""
    secrets: Mapping[str, str] = field(default_factory=dict)
    """Values of secrets by key; dummies are enough."""
    faults: tuple[InjectedFault, ...] = ()
    """What happens on the way."""
    use_namespaces: bool | None = None
    """With namespaces, or as plain processes; None: as this machine allows."""
    time_scale: float = 0.05
    """Factor for the cluster's waits: 10 s of back-off are half a second."""
    extra_env: Mapping[str, str] = field(default_factory=dict)
    """Further variables of this machine, such as OMP_NUM_THREADS."""
    git_repo: str | None = None
    """A git repository of this machine that an init container clones instead of its URL."""


@dataclass(frozen=True)
class SimulationResult:
    """Result of a simulation."""

    succeeded: bool
    """What the job's last condition would say."""
    reason: str
    """Why, for the user."""
    events: tuple[str, ...]
    """What happened, in order."""
    logs: dict[str, Path]
    """Logs by pod and attempt."""
    not_simulated: tuple[str, ...]
    """What the simulation does not cover."""


def simulate(
    manifests: list[Manifest], config: SimulationConfig, log: Callable[[str], None] = lambda line: None
) -> SimulationResult:
    """Run the one job of a stream to its end."""
    policy, pods = expand_job(manifests)
    use_namespaces = can_use_namespaces() if config.use_namespaces is None else config.use_namespaces
    SimulatedVolumes(config.work_dir).prepare(manifests)
    roots = (config.work_dir / "roots").resolve()
    sandbox: Sandbox = NamespaceSandbox(roots, len(pods)) if use_namespaces else ProcessSandbox(roots)
    controller = _JobController(policy, pods, config, sandbox, log)
    try:
        return controller.run()
    finally:
        kill_all([pod.container for pod in controller.pods if pod.container])
        sandbox.close()


@dataclass(frozen=True)
class PodInstance:
    """One pod as its operator creates it."""

    name: str
    """Its name, which is its host's name too."""
    dns_names: tuple[str, ...]
    """DNS names of the pod."""
    operator_env: dict[str, str]
    """What the operator adds to its container's variables, or writes over them."""
    template: PodTemplate
    """The template it is made from."""


@dataclass
class _Pod:
    """A pod while it lives."""

    instance: PodInstance
    index: int
    container: Container | None = None
    attempt: int = 0
    restarts: int = 0
    initialized: bool = False
    start_at: float = 0.0
    kill_at: float | None = None
    phase: Literal["Pending", "Running", "Succeeded", "Failed"] = "Pending"


class _JobController:
    """The job's controller and the kubelets, in one loop."""

    def __init__(
        self,
        policy: JobRestartPolicy,
        instances: Sequence[PodInstance],
        config: SimulationConfig,
        sandbox: Sandbox,
        log: Callable[[str], None],
    ) -> None:
        self.policy, self.config, self.sandbox, self._print = policy, config, sandbox, log
        self.pods = [_Pod(instance, index) for index, instance in enumerate(instances)]
        self.pending_faults = list(config.faults)
        self.volumes = SimulatedVolumes(config.work_dir)
        self.events: list[str] = []
        self.not_simulated = list(sandbox.not_simulated)
        self.repositories: dict[Path, Mount] = {}
        self.logs: dict[str, Path] = {}
        self.jobset_restarts = 0
        self.failures = 0

    def run(self) -> SimulationResult:
        """Run the controller loop until the job has its final condition."""
        while True:
            now = time.monotonic()
            for pod in self.pods:
                if pod.phase == "Pending" and now >= pod.start_at and self._may_start(pod):
                    self._start(pod)
                if pod.kill_at is not None and now >= pod.kill_at and pod.container:
                    pod.container.signal(signal.SIGKILL)
            self._inject_faults()
            for pod in self.pods:
                code = pod.container.exit_code() if pod.container and pod.phase == "Running" else None
                if code is not None and (end := self._on_exit(pod, code)):
                    return end
            if end := self._succeeded():
                return end
            time.sleep(POLL_INTERVAL)

    def _may_start(self, pod: _Pod) -> bool:
        """A PyTorchJob's workers wait for the name of their master."""
        return self.policy.kind == "TrainJob" or pod.index == 0 or self.pods[0].phase != "Pending"

    def _start(self, pod: _Pod) -> None:
        pod.attempt += 1
        log = self.config.work_dir / "logs" / f"{pod.instance.name}-{pod.attempt}.log"
        self.logs[f"{pod.instance.name}-{pod.attempt}"] = log
        self._log(f"{pod.instance.name}: started" + (f", attempt {pod.attempt}" if pod.attempt > 1 else ""))
        with log.open("wb") as out:
            pod.container = self._initialize(pod, out)
            if pod.container is None:
                pod.container = self.sandbox.start(self._main_spec(pod), out)
        pod.phase, pod.kill_at = "Running", None

    def _initialize(self, pod: _Pod, out: IO[bytes]) -> Container | None:
        """Run a new pod's init containers one after the other; one that failed is returned, and the pod with it."""
        if pod.initialized:
            return None
        self.volumes.clear_scratch(pod.instance)
        for init in get_items(pod.instance.template.spec, "initContainers"):
            clone = find_git_clone(init, self.config.git_repo)
            if clone and clone.local_repo is None:
                self._skip_clone(init, clone)
                continue
            container = self.sandbox.start(self._init_spec(pod, init, clone), out)
            if code := container.process.wait():
                self._log(f"{pod.instance.name}: init container {init.get('name')} exited with {code}")
                return container
            if clone:
                self._log(f"{pod.instance.name}: init container {init.get('name')} cloned {clone.local_repo}")
        pod.initialized = True
        return None

    def _skip_clone(self, init: dict[str, Any], clone: GitClone) -> None:
        """A clone needs an external network; this machine's own package is used instead."""
        what = f"the clone of {clone.redacted_url} by init container {init.get('name')}"
        note = f"{what}: no network, so this machine's package is used instead (--git-repo REPOSITORY simulates it)"
        if note not in self.not_simulated:
            self.not_simulated.append(note)
            self._log(f"not simulated: {note}")

    def _init_spec(self, pod: _Pod, init: dict[str, Any], clone: GitClone | None) -> ContainerSpec:
        values = {str(variable.get("name")): str(variable.get("value") or "") for variable in get_items(init, "env")}
        args = [str(arg) for key in ("command", "args") for arg in init.get(key) or []]
        if clone is None or clone.local_repo is None:
            return self._container_spec(pod, init, args, values)
        if clone.local_repo not in self.repositories:
            use_namespaces = isinstance(self.sandbox, NamespaceSandbox)
            self.repositories[clone.local_repo] = clone.mount(self.config.work_dir.resolve(), use_namespaces)
        spec = self._container_spec(pod, init, clone.rewrite_args(args), values)
        return replace(spec, mounts=(*spec.mounts, self.repositories[clone.local_repo]))

    def _main_spec(self, pod: _Pod) -> ContainerSpec:
        values, template = container_env(pod.instance, self.config.secrets), pod.instance.template
        assert template.training_container is not None
        if any(note.startswith("the clone of") for note in self.not_simulated):
            values.pop("PYTHONPATH", None)
        return self._container_spec(pod, template.training_container, template.command[2], values)

    def _container_spec(
        self, pod: _Pod, container: dict[str, Any], args: list[str], values: dict[str, str]
    ) -> ContainerSpec:
        image = {"PYTHONPATH": str(SOURCE_ROOT), "HF_HUB_OFFLINE": "1"}
        return ContainerSpec(
            pod.instance.name,
            pod.index,
            args,
            {**image, **self.config.extra_env, **values},
            str(container.get("workingDir") or "/"),
            tuple(self.volumes.mounts(pod.instance, container)),
            {name: other.index for other in self.pods for name in other.instance.dns_names},
        )

    def _inject_faults(self) -> None:
        """Inject the faults that are due."""
        step = self._newest_step() if self.pending_faults else 0
        for fault in [fault for fault in self.pending_faults if fault.step <= step]:
            pod = self.pods[fault.pod]
            if pod.phase != "Running" or pod.container is None:
                continue
            self.pending_faults.remove(fault)
            if fault.kind == "kill":
                self._log(f"{pod.instance.name}: killed at step {step}")
                pod.container.signal(signal.SIGKILL)
            elif fault.kind == "evict":
                grace = float(get_field(pod.instance.template.spec, "terminationGracePeriodSeconds") or 30)
                self._log(f"{pod.instance.name}: evicted at step {step}, {grace:.0f} s of grace")
                pod.container.signal(signal.SIGTERM)
                pod.kill_at = time.monotonic() + grace
            else:
                self._log(f"{pod.instance.name}: its node is lost at step {step}")
                self.sandbox.disconnect(pod.index)
                pod.kill_at = time.monotonic() + NODE_UNREACHABLE_TIMEOUT * self.config.time_scale

    def _newest_step(self) -> int:
        newest = 0
        for path in (self.config.work_dir / "volumes").glob("*/*/journal.jsonl"):
            steps = [int(event["step"]) for event in journal.read(path) if event.get("event") == "step"]
            newest = max([newest, *steps])
        return newest

    def _on_exit(self, pod: _Pod, code: int) -> SimulationResult | None:
        """A container has exited: restart it, or end the job."""
        self._log(f"{pod.instance.name}: exited with {code}")
        self.sandbox.reconnect(pod.index)
        pod.kill_at = None
        if code == 0 and self.policy.restart_policy != "Always":
            pod.phase = "Succeeded"
            return None
        pod.phase = "Failed"
        return self._pytorch_failure(pod, code) if self.policy.kind == "PyTorchJob" else self._train_failure(pod, code)

    def _pytorch_failure(self, pod: _Pod, code: int) -> SimulationResult | None:
        policy, limit = self.policy.restart_policy, self.policy.backoff_limit
        if policy == "Never" or (policy == "ExitCode" and code < 128):
            return self._end(False, f"{pod.instance.name} exited with {code}, and restartPolicy is {policy}")
        pod.restarts += 1
        total = sum(each.restarts for each in self.pods)
        if policy != "ExitCode" and limit is not None and (total >= limit if limit else total > 0):
            return self._end(False, f"{total} restarts reach backoffLimit {limit}; the last exit code was {code}")
        self._schedule_restart(pod, new_pod=policy == "ExitCode")
        return None

    def _train_failure(self, pod: _Pod, code: int) -> SimulationResult | None:
        if code in self.policy.fail_job_exit_codes:
            return self._end(False, f"{pod.instance.name} exited with {code}, which podFailurePolicy says is final")
        self.failures += 1
        if self.failures <= (self.policy.backoff_limit or 0):
            pod.restarts += 1
            self._schedule_restart(pod, new_pod=self.policy.restart_policy == "Never")
            return None
        if self.jobset_restarts >= self.policy.max_restarts:
            return self._end(False, f"{self.jobset_restarts} restarts are maxRestarts; the last exit code was {code}")
        self.jobset_restarts, self.failures = self.jobset_restarts + 1, 0
        self._log(f"restarting all pods, {self.jobset_restarts} of {self.policy.max_restarts} times")
        self._stop_pods()
        for each in self.pods:
            self._schedule_restart(each, new_pod=True)
        return None

    def _schedule_restart(self, pod: _Pod, new_pod: bool) -> None:
        """Restart a container in its pod, or replace the pod."""
        pod.initialized = pod.initialized and not new_pod
        wait = min(300.0, CONTAINER_BACKOFF * 2 ** min(5, max(0, pod.restarts - 1)))
        pod.phase, pod.start_at = "Pending", time.monotonic() + wait * self.config.time_scale

    def _stop_pods(self) -> None:
        """SIGTERM to all that run, SIGKILL after the grace period."""
        running = [pod.container for pod in self.pods if pod.container and pod.phase == "Running"]
        for container in running:
            container.signal(signal.SIGTERM)
        grace = float(get_field(self.pods[0].instance.template.spec, "terminationGracePeriodSeconds") or 30)
        deadline = time.monotonic() + grace
        while time.monotonic() < deadline and any(container.exit_code() is None for container in running):
            time.sleep(POLL_INTERVAL)
        kill_all(running)

    def _succeeded(self) -> SimulationResult | None:
        """A PyTorchJob succeeds with its master, a TrainJob with all its pods."""
        if self.policy.kind == "PyTorchJob" and self.pods[0].phase == "Succeeded":
            self._wait_for_workers()
            return self._end(True, f"{self.pods[0].instance.name} exited with 0")
        if self.policy.kind == "TrainJob" and all(pod.phase == "Succeeded" for pod in self.pods):
            return self._end(True, f"all {len(self.pods)} pods exited with 0")
        return None

    def _wait_for_workers(self, seconds: float = 30.0) -> None:
        """With cleanPodPolicy None workers are left to end by themselves."""
        deadline = time.monotonic() + seconds
        others = [pod.container for pod in self.pods if pod.container and pod.phase == "Running"]
        while time.monotonic() < deadline and any(container.exit_code() is None for container in others):
            time.sleep(POLL_INTERVAL)

    def _end(self, succeeded: bool, reason: str) -> SimulationResult:
        self._stop_pods() if not succeeded else None
        phase = "Succeeded" if succeeded else "Failed"
        self._log(f"{self.policy.kind} {phase}: {reason}")
        return SimulationResult(succeeded, reason, tuple(self.events), dict(self.logs), tuple(self.not_simulated))

    def _log(self, line: str) -> None:
        self.events.append(line)
        self._print(line)


MASTER_PORT = {"PyTorchJob": 23456, "TrainJob": 29500}


@dataclass(frozen=True)
class JobRestartPolicy:
    """When a job's pods restart, and when the job has failed."""

    kind: Literal["PyTorchJob", "TrainJob"]
    """Whose rules these are."""
    restart_policy: str
    """restartPolicy of its containers: OnFailure, Always, Never or ExitCode."""
    backoff_limit: int | None
    """Failures that are too many; None is without limit (PyTorchJob)."""
    max_restarts: int = 0
    """Restarts of all pods together (TrainJob)."""
    fail_job_exit_codes: frozenset[int] = frozenset()
    """Exit codes that end the job at once (TrainJob)."""


def expand_job(manifests: list[Manifest]) -> tuple[JobRestartPolicy, list[PodInstance]]:
    """The pods of the one job in a stream, and its rules."""
    manifest_set = ManifestSet(tuple(manifests))
    jobs = [manifest for manifest in manifests if manifest.kind in MASTER_PORT]
    if len(jobs) != 1:
        raise UsageError(f"{len(jobs)} jobs are in this stream; a simulation wants one PyTorchJob or TrainJob")
    job = jobs[0]
    templates = [template for template in manifest_set.pod_templates if template.job is job]
    if not templates or any(template.training_container is None for template in templates):
        raise UsageError(f"{job.kind} {job.name} has no pod that could start; see the check")
    if job.kind == "PyTorchJob":
        return _pytorch_policy(job, templates), list(_pytorch_pods(job, templates))
    return _train_policy(templates[0]), list(_train_pods(job, templates[0]))


def _pytorch_pods(job: Manifest, templates: list[PodTemplate]) -> Iterator[PodInstance]:
    """Master first; RANK is the node's, and the user's own RANK is written over."""
    nproc_per_node = str(get_field(job.body, "spec", "nprocPerNode") or "auto")
    processes = int(nproc_per_node) if nproc_per_node.isdigit() else 1
    nodes = sum(template.replicas for template in templates)
    has_master = any("Master" in template.path for template in templates)
    ports = {
        item.get("name"): item.get("containerPort") for item in get_items(templates[0].training_container, "ports")
    }
    port = str(int(ports.get("pytorchjob-port") or MASTER_PORT["PyTorchJob"]))
    rank = 0
    for template in sorted(templates, key=lambda pod_template: "Master" not in pod_template.path):
        role = "master" if "Master" in template.path else "worker"
        for index in range(template.replicas):
            name = f"{job.name}-{role}-{index}"
            env = {"PYTHONUNBUFFERED": "1", "PET_NPROC_PER_NODE": nproc_per_node, "PET_NNODES": str(nodes)}
            if has_master:
                master = f"{job.name}-master-0"
                env |= {"MASTER_ADDR": master, "MASTER_PORT": port, "RANK": str(rank)}
                env |= {"PET_MASTER_ADDR": master, "PET_MASTER_PORT": port, "PET_NODE_RANK": str(rank)}
                env["WORLD_SIZE"] = str(nodes * processes)
            yield PodInstance(name, (name,), env, template)
            rank += 1


def _pytorch_policy(job: Manifest, templates: list[PodTemplate]) -> JobRestartPolicy:
    restart_policy = get_field(templates[0].manifest.body, *templates[0].path[:3], "restartPolicy") or "OnFailure"
    return JobRestartPolicy("PyTorchJob", str(restart_policy), get_field(job.body, "spec", "runPolicy", "backoffLimit"))


def _train_pods(job: Manifest, template: PodTemplate) -> Iterator[PodInstance]:
    """The operator sets only PET_ variables: no RANK, no WORLD_SIZE, no MASTER_ADDR."""
    nproc_per_node = get_field(job.body, "spec", "trainer", "numProcPerNode") or "auto"
    if nproc_per_node == "auto":
        nproc_per_node = template.gpus or max(1, int(str(get_field(template.resources[2], "requests", "cpu") or "1")))
    for index in range(template.num_nodes):
        name = f"{job.name}-node-0-{index}"
        env = {
            "PET_NNODES": str(template.num_nodes),
            "PET_NPROC_PER_NODE": str(nproc_per_node),
            "PET_NODE_RANK": str(index),
            "PET_MASTER_ADDR": f"{job.name}-node-0-0.{job.name}",
            "PET_MASTER_PORT": str(MASTER_PORT["TrainJob"]),
        }
        yield PodInstance(name, (f"{name}.{job.name}", name), env, template)


def _train_policy(template: PodTemplate) -> JobRestartPolicy:
    jobset = get_field(template.manifest.body, "spec", "template", "spec")
    batch = get_field(template.manifest.body, *template.path[:-2])
    codes: set[int] = set()
    for rule in get_items(batch, "podFailurePolicy", "rules"):
        if rule.get("action") == "FailJob" and get_field(rule, "onExitCodes", "operator") == "In":
            codes |= {int(code) for code in get_field(rule, "onExitCodes", "values") or []}
    ends = any(
        rule.get("action") == "FailJobSet" and "PodFailurePolicy" in (rule.get("onJobFailureReasons") or [])
        for rule in get_items(jobset, "failurePolicy", "rules")
    )
    limit = get_field(batch, "backoffLimit")
    return JobRestartPolicy(
        "TrainJob",
        str(get_field(template.spec, "restartPolicy") or "OnFailure"),
        6 if limit is None else int(limit),
        int(get_field(jobset, "failurePolicy", "maxRestarts") or 0),
        frozenset(codes) if ends else frozenset(),
    )


def container_env(pod: PodInstance, secrets: Mapping[str, str]) -> dict[str, str]:
    """The container's variables as it would see them: its own, the job's, then the operator's over both."""
    values: dict[str, str] = {}
    for _, _, variable in pod.template.env:
        name = str(variable.get("name"))
        key = get_field(variable, "valueFrom", "secretKeyRef", "key")
        if key is not None:
            if key not in secrets:
                secret = get_field(variable, "valueFrom", "secretKeyRef", "name")
                raise UsageError(f"variable {name} comes from the Secret {secret}, which has no simulated value")
            values[name] = secrets[key]
        else:
            values[name] = str(variable.get("value") or "")
    return {**values, **pod.operator_env}


@dataclass(frozen=True)
class SimulatedVolumes:
    """Volumes, ConfigMaps and scratch folders of a simulation."""

    work_dir: Path
    """Its folder; volumes that are there are used as they are."""

    def prepare(self, manifests: Sequence[Manifest]) -> None:
        """Make the folders, and the files of every ConfigMap in the stream."""
        try:
            for folder in ("roots", "logs", "volumes", "maps"):
                (self.work_dir / folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            problem = f"{self.work_dir} cannot be written ({error.strerror})"
            raise UsageError(f"{problem}; --work-dir names another folder") from None
        for manifest in manifests:
            if manifest.kind == "ConfigMap":
                _write_config_map(manifest, self.work_dir / "maps" / manifest.name)

    def scratch(self, pod: PodInstance) -> Path:
        """Folder that is deleted with the pod."""
        return self.work_dir.resolve() / "pods" / pod.name

    def clear_scratch(self, pod: PodInstance) -> None:
        """Delete the pod's scratch folder: a new pod starts empty."""
        shutil.rmtree(self.scratch(pod), ignore_errors=True)

    def mounts(self, pod: PodInstance, container: dict[str, Any]) -> list[Mount]:
        """The folders that a container of the pod sees."""
        work_dir, volumes = self.work_dir.resolve(), pod.template.volumes
        result = []
        for mount in get_items(container, "volumeMounts"):
            volume = volumes.get(str(mount.get("name")), {})
            claim = get_field(volume, "persistentVolumeClaim", "claimName")
            config = get_field(volume, "configMap", "name")
            if config:
                source = work_dir / "maps" / str(config)
                if not source.is_dir():
                    raise UsageError(f"{pod.name} waits for the ConfigMap {config}, which is not in this stream")
            else:
                source = work_dir / "volumes" / str(claim) if claim else self.scratch(pod) / str(mount.get("name"))
                _make_group_writable(source)
            result.append(Mount(source, str(mount.get("mountPath")), bool(config)))
        return result


def _make_group_writable(path: Path) -> None:
    """Make a folder like a volume: group 0 may write, and new files keep the group (setgid)."""
    path.mkdir(parents=True, exist_ok=True)
    if os.geteuid() == 0:
        os.chown(path, -1, 0)
    elif path.stat().st_uid != os.geteuid():  # somebody else's volume is used as it is, where it can be
        if not os.access(path, os.W_OK | os.X_OK):
            raise UsageError(f"{path} belongs to another user and cannot be written; --work-dir names another folder")
        return
    path.chmod(0o2775)


def _write_config_map(manifest: Manifest, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, text in (get_field(manifest.body, "data") or {}).items():
        (folder / str(name)).write_text(str(text), encoding="utf-8")
    for name, text in (get_field(manifest.body, "binaryData") or {}).items():
        (folder / str(name)).write_bytes(base64.b64decode(str(text)))
