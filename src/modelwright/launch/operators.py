"""What the operators make of a job: its pods by name, the variables they are given, and when they begin again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from modelwright.errors import UsageError
from modelwright.launch.stream import Manifest
from modelwright.launch.views import PodView, Stream, entries, get

MASTER_PORT = {"PyTorchJob": 23456, "TrainJob": 29500}


@dataclass(frozen=True)
class PodPlan:
    """One pod as its operator makes it."""

    name: str
    """Its name, which is its host's name too."""
    names: tuple[str, ...]
    """Names under which the others reach it."""
    variables: dict[str, str]
    """What the operator adds to its container's variables, or writes over them."""
    view: PodView
    """The template it is made from."""


@dataclass(frozen=True)
class Policy:
    """When a job's pods begin again, and when it has failed."""

    kind: Literal["PyTorchJob", "TrainJob"]
    """Whose rules these are."""
    restart: str
    """What becomes of a container that failed: OnFailure, Always, Never or ExitCode."""
    backoff_limit: int | None
    """Failures that are too many; None is without limit (PyTorchJob)."""
    restarts: int = 0
    """Times that all pods begin anew together (TrainJob)."""
    final_codes: frozenset[int] = frozenset()
    """Exit codes that end the job at once (TrainJob)."""


def plan(manifests: list[Manifest]) -> tuple[Policy, list[PodPlan]]:
    """The pods of the one job in a stream, and its rules."""
    stream = Stream(tuple(manifests))
    jobs = [each for each in manifests if each.kind in MASTER_PORT]
    if len(jobs) != 1:
        raise UsageError(f"{len(jobs)} jobs are in this stream; a rehearsal wants one PyTorchJob or TrainJob")
    job = jobs[0]
    views = [view for view in stream.pods if view.job is job]
    if not views or any(view.main is None for view in views):
        raise UsageError(f"{job.kind} {job.name} has no pod that could start; the check tells why")
    if job.kind == "PyTorchJob":
        return _pytorch_policy(job, views), list(_pytorch_pods(job, views))
    return _train_policy(views[0]), list(_train_pods(job, views[0]))


def _pytorch_pods(job: Manifest, views: list[PodView]) -> Iterator[PodPlan]:
    """Master first; RANK is the node's, and the user's own RANK is written over."""
    per_node = str(get(job.body, "spec", "nprocPerNode") or "auto")
    processes = int(per_node) if per_node.isdigit() else 1
    nodes = sum(view.replicas for view in views)
    has_master = any("Master" in view.path for view in views)
    port = str(_master_port(views[0]))
    rank = 0
    for view in sorted(views, key=lambda each: "Master" not in each.path):
        role = "master" if "Master" in view.path else "worker"
        for number in range(view.replicas):
            name = f"{job.name}-{role}-{number}"
            variables = {"PYTHONUNBUFFERED": "1", "PET_NPROC_PER_NODE": per_node, "PET_NNODES": str(nodes)}
            if has_master:
                master = f"{job.name}-master-0"
                variables |= {"MASTER_ADDR": master, "MASTER_PORT": port, "RANK": str(rank)}
                variables |= {"PET_MASTER_ADDR": master, "PET_MASTER_PORT": port, "PET_NODE_RANK": str(rank)}
                variables["WORLD_SIZE"] = str(nodes * processes)
            yield PodPlan(name, (name,), variables, view)
            rank += 1


def _master_port(view: PodView) -> int:
    ports = {each.get("name"): each.get("containerPort") for each in entries(view.main, "ports")}
    return int(ports.get("pytorchjob-port") or MASTER_PORT["PyTorchJob"])


def _pytorch_policy(job: Manifest, views: list[PodView]) -> Policy:
    restart = get(views[0].manifest.body, *views[0].path[:3], "restartPolicy") or "OnFailure"
    return Policy("PyTorchJob", str(restart), get(job.body, "spec", "runPolicy", "backoffLimit"))


def _train_pods(job: Manifest, view: PodView) -> Iterator[PodPlan]:
    """Only PET_ variables are given: no RANK, no WORLD_SIZE, no MASTER_ADDR."""
    per_node = get(job.body, "spec", "trainer", "numProcPerNode") or "auto"
    if per_node == "auto":
        per_node = view.gpus or max(1, int(str(get(view.resources[2], "requests", "cpu") or "1")))
    for number in range(view.nodes):
        name = f"{job.name}-node-0-{number}"
        variables = {
            "PET_NNODES": str(view.nodes),
            "PET_NPROC_PER_NODE": str(per_node),
            "PET_NODE_RANK": str(number),
            "PET_MASTER_ADDR": f"{job.name}-node-0-0.{job.name}",
            "PET_MASTER_PORT": str(MASTER_PORT["TrainJob"]),
        }
        yield PodPlan(name, (f"{name}.{job.name}", name), variables, view)


def _train_policy(view: PodView) -> Policy:
    jobset = get(view.manifest.body, "spec", "template", "spec")
    batch = get(view.manifest.body, *view.path[:-2])
    codes: set[int] = set()
    for rule in entries(batch, "podFailurePolicy", "rules"):
        if rule.get("action") == "FailJob" and get(rule, "onExitCodes", "operator") == "In":
            codes |= {int(code) for code in get(rule, "onExitCodes", "values") or []}
    ends = any(
        rule.get("action") == "FailJobSet" and "PodFailurePolicy" in (rule.get("onJobFailureReasons") or [])
        for rule in entries(jobset, "failurePolicy", "rules")
    )
    limit = get(batch, "backoffLimit")
    return Policy(
        "TrainJob",
        str(get(view.spec, "restartPolicy") or "OnFailure"),
        6 if limit is None else int(limit),
        int(get(jobset, "failurePolicy", "maxRestarts") or 0),
        frozenset(codes) if ends else frozenset(),
    )


def container_variables(pod: PodPlan, secrets: Mapping[str, str]) -> dict[str, str]:
    """The container's variables as it would see them: its own, the job's, then the operator's over both."""
    values: dict[str, str] = {}
    for _, _, variable in pod.view.variables:
        name = str(variable.get("name"))
        key = get(variable, "valueFrom", "secretKeyRef", "key")
        if key is not None:
            if key not in secrets:
                secret = get(variable, "valueFrom", "secretKeyRef", "name")
                raise UsageError(
                    f"variable {name} comes from the Secret {secret}, which the rehearsal has no value for"
                )
            values[name] = secrets[key]
        else:
            values[name] = str(variable.get("value") or "")
    return {**values, **pod.variables}
