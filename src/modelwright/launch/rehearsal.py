"""Rehearse a rendered job on this machine: its pods start, fail and begin again by the operator's own rules."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, Literal

from modelwright.launch.clone import Clone, clone_of
from modelwright.launch.host import (
    PACKAGE,
    Container,
    Host,
    Mount,
    Namespaces,
    Order,
    PlainProcesses,
    can_isolate,
    stop_all,
)
from modelwright.launch.operators import PodPlan, Policy, container_variables, plan
from modelwright.launch.storage import Storage
from modelwright.launch.stream import Manifest
from modelwright.launch.views import entries, get
from modelwright.runs import journal

LOOK_SECONDS = 0.1
BACKOFF_SECONDS = 10.0
"""The kubelet's first wait before it restarts a container; it doubles up to five minutes."""
LOST_SECONDS = 300.0
"""How long a node may be silent before its pods are given up."""


@dataclass(frozen=True)
class Disturbance:
    """Something that happens to a pod on the way."""

    kind: Literal["kill", "evict", "lose"]
    """kill: its container dies at once. evict: SIGTERM, and SIGKILL after the grace period. lose: its node is gone."""
    pod: int
    """Its number."""
    step: int
    """Once the run has told of this step."""


@dataclass(frozen=True)
class Wish:
    """How to rehearse."""

    place: Path
    """Folder for volumes, logs and roots; volumes that are there are used as they are."""
    secrets: Mapping[str, str] = field(default_factory=dict)
    """Values of secrets by key; made up ones will do."""
    disturbances: tuple[Disturbance, ...] = ()
    """What happens on the way."""
    isolated: bool | None = None
    """With namespaces, or as plain processes; None: as this machine allows."""
    hurry: float = 0.05
    """Factor for the cluster's waits: 10 s of back-off are half a second."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Further variables of this machine, such as OMP_NUM_THREADS."""
    clone_from: str | None = None
    """A git repository of this machine that an init container clones in place of the address it names."""


@dataclass(frozen=True)
class Outcome:
    """How a rehearsal went."""

    succeeded: bool
    """What the job's last condition would say."""
    reason: str
    """Why, in words."""
    events: tuple[str, ...]
    """What happened, in order."""
    logs: dict[str, Path]
    """Logs by pod and attempt."""
    not_shown: tuple[str, ...]
    """What a rehearsal here cannot tell."""


def rehearse(manifests: list[Manifest], wish: Wish, tell: Callable[[str], None] = lambda line: None) -> Outcome:
    """Run the one job of a stream to its end."""
    policy, pods = plan(manifests)
    isolated = can_isolate() if wish.isolated is None else wish.isolated
    storage = Storage(wish.place)
    storage.prepare(manifests)
    roots = (wish.place / "roots").resolve()
    host: Host = Namespaces(roots, len(pods)) if isolated else PlainProcesses(roots)
    stage = _Stage(policy, pods, wish, host, tell)
    try:
        return stage.run()
    finally:
        stop_all([pod.container for pod in stage.pods if pod.container])
        host.close()


@dataclass
class _Pod:
    """A pod while it lives."""

    plan: PodPlan
    number: int
    container: Container | None = None
    attempt: int = 0
    restarts: int = 0
    initialized: bool = False
    due: float = 0.0
    kill_at: float | None = None
    phase: Literal["Pending", "Running", "Succeeded", "Failed"] = "Pending"


class _Stage:
    """The job's controller and the kubelets, in one loop."""

    def __init__(
        self, policy: Policy, plans: Sequence[PodPlan], wish: Wish, host: Host, tell: Callable[[str], None]
    ) -> None:
        self.policy, self.wish, self.host, self._tell = policy, wish, host, tell
        self.pods = [_Pod(each, number) for number, each in enumerate(plans)]
        self.left = list(wish.disturbances)
        self.storage = Storage(wish.place)
        self.events: list[str] = []
        self.not_shown = list(host.not_shown)
        self.repositories: dict[Path, Mount] = {}
        self.logs: dict[str, Path] = {}
        self.rounds = 0
        self.failures = 0

    def run(self) -> Outcome:
        """Look after the pods until the job has a last condition."""
        while True:
            now = time.monotonic()
            for pod in self.pods:
                if pod.phase == "Pending" and now >= pod.due and self._may_start(pod):
                    self._start(pod)
                if pod.kill_at is not None and now >= pod.kill_at and pod.container:
                    pod.container.signal(signal.SIGKILL)
            self._disturb()
            for pod in self.pods:
                code = pod.container.ended() if pod.container and pod.phase == "Running" else None
                if code is not None and (end := self._ended(pod, code)):
                    return end
            if end := self._succeeded():
                return end
            time.sleep(LOOK_SECONDS)

    def _may_start(self, pod: _Pod) -> bool:
        """A PyTorchJob's workers wait for the name of their master."""
        return self.policy.kind == "TrainJob" or pod.number == 0 or self.pods[0].phase != "Pending"

    def _start(self, pod: _Pod) -> None:
        pod.attempt += 1
        log = self.wish.place / "logs" / f"{pod.plan.name}-{pod.attempt}.log"
        self.logs[f"{pod.plan.name}-{pod.attempt}"] = log
        self._say(f"{pod.plan.name}: started" + (f", attempt {pod.attempt}" if pod.attempt > 1 else ""))
        with log.open("wb") as out:
            pod.container = self._initialize(pod, out)
            if pod.container is None:
                pod.container = self.host.start(self._main_order(pod), out)
        pod.phase, pod.kill_at = "Running", None

    def _initialize(self, pod: _Pod, out: IO[bytes]) -> Container | None:
        """Run a new pod's init containers one after the other; one that failed is returned, and the pod with it."""
        if pod.initialized:
            return None
        self.storage.renew(pod.plan)
        for init in entries(pod.plan.view.spec, "initContainers"):
            clone = clone_of(init, self.wish.clone_from)
            if clone and clone.source is None:
                self._skip(init, clone)
                continue
            container = self.host.start(self._init_order(pod, init, clone), out)
            if code := container.process.wait():
                self._say(f"{pod.plan.name}: init container {init.get('name')} ended with {code}")
                return container
            if clone:
                self._say(f"{pod.plan.name}: init container {init.get('name')} cloned {clone.source}")
        pod.initialized = True
        return None

    def _skip(self, init: dict[str, Any], clone: Clone) -> None:
        """A clone needs a network that leads out; this machine's own program stands in for it."""
        told = (
            f"the clone of {clone.shown} by init container {init.get('name')}: no network leads "
            "out, so this machine's program stands in (--clone-from REPOSITORY shows it)"
        )
        if told not in self.not_shown:
            self.not_shown.append(told)
            self._say(f"not shown: {told}")

    def _init_order(self, pod: _Pod, init: dict[str, Any], clone: Clone | None) -> Order:
        values = {str(each.get("name")): str(each.get("value") or "") for each in entries(init, "env")}
        words = [str(word) for key in ("command", "args") for word in init.get(key) or []]
        if clone is None or clone.source is None:
            return self._order(pod, init, words, values)
        if clone.source not in self.repositories:
            isolated = isinstance(self.host, Namespaces)
            self.repositories[clone.source] = clone.mount(self.wish.place.resolve(), isolated)
        order = self._order(pod, init, clone.words(words), values)
        return replace(order, mounts=(*order.mounts, self.repositories[clone.source]))

    def _main_order(self, pod: _Pod) -> Order:
        values, view = container_variables(pod.plan, self.wish.secrets), pod.plan.view
        assert view.main is not None
        if any(told.startswith("the clone of") for told in self.not_shown):
            values.pop("PYTHONPATH", None)
        return self._order(pod, view.main, view.command[2], values)

    def _order(self, pod: _Pod, container: dict[str, Any], words: list[str], values: dict[str, str]) -> Order:
        image = {"PYTHONPATH": str(PACKAGE), "HF_HUB_OFFLINE": "1"}
        return Order(
            pod.plan.name,
            pod.number,
            words,
            {**image, **self.wish.variables, **values},
            str(container.get("workingDir") or "/"),
            tuple(self.storage.mounts(pod.plan, container)),
            {name: other.number for other in self.pods for name in other.plan.names},
        )

    def _disturb(self) -> None:
        """Let happen what is due."""
        step = self._newest_step() if self.left else 0
        for each in [each for each in self.left if each.step <= step]:
            pod = self.pods[each.pod]
            if pod.phase != "Running" or pod.container is None:
                continue
            self.left.remove(each)
            if each.kind == "kill":
                self._say(f"{pod.plan.name}: killed at step {step}")
                pod.container.signal(signal.SIGKILL)
            elif each.kind == "evict":
                grace = float(get(pod.plan.view.spec, "terminationGracePeriodSeconds") or 30)
                self._say(f"{pod.plan.name}: evicted at step {step}, {grace:.0f} s of grace")
                pod.container.signal(signal.SIGTERM)
                pod.kill_at = time.monotonic() + grace
            else:
                self._say(f"{pod.plan.name}: its node is lost at step {step}")
                self.host.cut(pod.number)
                pod.kill_at = time.monotonic() + LOST_SECONDS * self.wish.hurry

    def _newest_step(self) -> int:
        newest = 0
        for path in (self.wish.place / "volumes").glob("*/*/journal.jsonl"):
            steps = [int(event["step"]) for event in journal.read(path) if event.get("event") == "step"]
            newest = max([newest, *steps])
        return newest

    def _ended(self, pod: _Pod, code: int) -> Outcome | None:
        """A container has ended: begin again, or end the job."""
        self._say(f"{pod.plan.name}: ended with {code}")
        self.host.mend(pod.number)
        pod.kill_at = None
        if code == 0 and self.policy.restart != "Always":
            pod.phase = "Succeeded"
            return None
        pod.phase = "Failed"
        return self._pytorch_failure(pod, code) if self.policy.kind == "PyTorchJob" else self._train_failure(pod, code)

    def _pytorch_failure(self, pod: _Pod, code: int) -> Outcome | None:
        policy, limit = self.policy.restart, self.policy.backoff_limit
        if policy == "Never" or (policy == "ExitCode" and code < 128):
            return self._end(False, f"{pod.plan.name} ended with {code}, and restartPolicy is {policy}")
        pod.restarts += 1
        total = sum(each.restarts for each in self.pods)
        if policy != "ExitCode" and limit is not None and (total >= limit if limit else total > 0):
            return self._end(False, f"{total} restarts reach backoffLimit {limit}; the last exit code was {code}")
        self._again(pod, new_pod=policy == "ExitCode")
        return None

    def _train_failure(self, pod: _Pod, code: int) -> Outcome | None:
        if code in self.policy.final_codes:
            return self._end(False, f"{pod.plan.name} ended with {code}, which podFailurePolicy says is final")
        self.failures += 1
        if self.failures <= (self.policy.backoff_limit or 0):
            pod.restarts += 1
            self._again(pod, new_pod=self.policy.restart == "Never")
            return None
        if self.rounds >= self.policy.restarts:
            return self._end(False, f"{self.rounds} restarts are maxRestarts; the last exit code was {code}")
        self.rounds, self.failures = self.rounds + 1, 0
        self._say(f"all pods begin anew, {self.rounds} of {self.policy.restarts} times")
        self._stop_pods()
        for each in self.pods:
            self._again(each, new_pod=True)
        return None

    def _again(self, pod: _Pod, new_pod: bool) -> None:
        """Start a container again in its pod, or a new pod in place of the old one."""
        pod.initialized = pod.initialized and not new_pod
        wait = min(300.0, BACKOFF_SECONDS * 2 ** min(5, max(0, pod.restarts - 1)))
        pod.phase, pod.due = "Pending", time.monotonic() + wait * self.wish.hurry

    def _stop_pods(self) -> None:
        """SIGTERM to all that run, SIGKILL after the grace period."""
        running = [pod.container for pod in self.pods if pod.container and pod.phase == "Running"]
        for container in running:
            container.signal(signal.SIGTERM)
        grace = float(get(self.pods[0].plan.view.spec, "terminationGracePeriodSeconds") or 30)
        deadline = time.monotonic() + grace
        while time.monotonic() < deadline and any(container.ended() is None for container in running):
            time.sleep(LOOK_SECONDS)
        stop_all(running)

    def _succeeded(self) -> Outcome | None:
        """A PyTorchJob succeeds with its master, a TrainJob with all its pods."""
        if self.policy.kind == "PyTorchJob" and self.pods[0].phase == "Succeeded":
            self._let_finish()
            return self._end(True, f"{self.pods[0].plan.name} ended with 0")
        if self.policy.kind == "TrainJob" and all(pod.phase == "Succeeded" for pod in self.pods):
            return self._end(True, f"all {len(self.pods)} pods ended with 0")
        return None

    def _let_finish(self, seconds: float = 30.0) -> None:
        """With cleanPodPolicy None workers are left to end by themselves."""
        deadline = time.monotonic() + seconds
        others = [pod.container for pod in self.pods if pod.container and pod.phase == "Running"]
        while time.monotonic() < deadline and any(container.ended() is None for container in others):
            time.sleep(LOOK_SECONDS)

    def _end(self, succeeded: bool, reason: str) -> Outcome:
        self._stop_pods() if not succeeded else None
        word = "Succeeded" if succeeded else "Failed"
        self._say(f"{self.policy.kind} {word}: {reason}")
        return Outcome(succeeded, reason, tuple(self.events), dict(self.logs), tuple(self.not_shown))

    def _say(self, line: str) -> None:
        self.events.append(line)
        self._tell(line)
