"""Commands for many processes, nodes and clusters: launch, job, doctor."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from modelwright.cli.recipe import JsonOption, SetOption

if TYPE_CHECKING:
    from modelwright.cluster.client import KubectlClient
    from modelwright.cluster.lint import LintFinding
    from modelwright.cluster.manifests import ClusterJob
    from modelwright.cluster.simulator import InjectedFault
    from modelwright.launch.config import NodeOptions
    from modelwright.recipe.load import LoadedRecipe


def register(app: typer.Typer) -> None:
    """Add the verb, and those that look after what it sent to a cluster."""
    app.command("launch")(launch)
    app.command("doctor")(doctor)
    app.add_typer(job, name="job")


def launch(
    recipe: Annotated[str, typer.Argument(help="A recipe file, or the name of a built-in recipe.")],
    more: Annotated[list[str] | None, typer.Argument(help="After --, further options of run.")] = None,
    on: Annotated[str, typer.Option("--on", help="local (this machine), nodes (several), or openshift.")] = "local",
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set KEY=VALUE; repeatable.")
    ] = None,
    override: Annotated[
        list[str] | None, typer.Option("--override", metavar="KEY", help="Resume although this setting changed.")
    ] = None,
    per_node: Annotated[
        str | None, typer.Option(help="Processes per node, or of each node (4,2); default: one per GPU, or one.")
    ] = None,
    nodes: Annotated[str | None, typer.Option(help="nodes: number of nodes; MIN:MAX is elastic.")] = None,
    node_rank: Annotated[
        int | None,
        typer.Option(help="nodes: rank of this node, from 0; default: print the command of each node."),
    ] = None,
    main_address: Annotated[
        str | None, typer.Option(help="nodes: address at which the other nodes reach node 0.")
    ] = None,
    port: Annotated[int | None, typer.Option(help="nodes: a free port there; default: 29500.")] = None,
    max_restarts: Annotated[int, typer.Option(help="Restarts allowed without a completed step in between.")] = 3,
    log_format: Annotated[
        str, typer.Option("--log-format", help="auto (a live panel on a terminal), plain, or json.")
    ] = "auto",
    render: Annotated[bool, typer.Option("--render", help="openshift: print the manifests.")] = False,
    check: Annotated[bool, typer.Option("--check", help="openshift: check the manifests.")] = False,
    simulate: Annotated[bool, typer.Option("--rehearse", help="openshift: simulate the job on this machine.")] = False,
    submit: Annotated[bool, typer.Option("--submit", help="openshift: submit the job.")] = False,
    job_kind: JobKindOption = None,
    work_dir: Annotated[
        Path | None, typer.Option("--place", help="openshift: working directory of the simulation.")
    ] = None,
    faults: Annotated[
        list[str] | None,
        typer.Option(
            "--disturb", metavar="KIND:POD@STEP", help="openshift: fault to inject in the simulation, such as kill:1@5."
        ),
    ] = None,
    clone_from: Annotated[
        str | None, typer.Option(metavar="PATH", help="openshift: local repository that the simulation clones.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Run a recipe on all local GPUs, on several nodes or on a cluster; restarts from the last checkpoint after a failure."""
    from modelwright.launch.config import NodeOptions, process_environment
    from modelwright.recipe.load import load

    node_options = NodeOptions(nodes, node_rank, main_address, port, per_node)
    action = ClusterAction(
        render, check, simulate, submit, job_kind, work_dir, tuple(faults or ()), clone_from, as_json
    )
    _reject_unused_options(on, node_options, action)
    loaded = load(recipe, overrides or ())
    if on == "openshift":
        launch_on_openshift(loaded, action)
        return
    options = NodeOptions(nproc_per_node=per_node) if on == "local" else node_options
    set_args = [arg for setting in overrides or () for arg in ("--set", setting)]
    override_args = [arg for key in override or () for arg in ("--override", key)]
    run_args = (*set_args, *override_args, *(more or ()))
    if on == "nodes":
        env = process_environment()
        options = options.with_pet_defaults(env)
        if options.node_rank is None:
            _print_node_commands(recipe, run_args, options, as_json)
            return
    rank_args = ("run", recipe, *run_args, "--log-format", log_format)
    _start_node(loaded, rank_args, options, max_restarts)


def _reject_unused_options(on: str, node_options: NodeOptions, action: ClusterAction) -> None:
    """Words that mean nothing where the recipe is to run: `--nodes 2` without `--on nodes` would be one node."""
    from modelwright.errors import UsageError

    if on not in ("local", "nodes", "openshift"):
        raise UsageError(f"--on is {on!r}; it wants local, nodes or openshift")
    node_flags = {
        "--nodes": node_options.nnodes,
        "--node-rank": node_options.node_rank,
        "--main-address": node_options.master_addr,
        "--port": node_options.master_port,
    }
    cluster_flags = {"--render": action.render, "--check": action.check, "--rehearse": action.simulate,
               "--submit": action.submit}  # fmt: skip
    for mode, flags in (("nodes", node_flags), ("openshift", cluster_flags)):
        unused = [name for name, value in flags.items() if value is not None and value is not False]
        if unused and on != mode:
            raise UsageError(f"{', '.join(unused)} with --on {on} has no effect; use --on {mode} or drop it")


def _print_node_commands(recipe: str, run_args: tuple[str, ...], options: NodeOptions, as_json: bool) -> None:
    """One command for each node."""
    import json

    from modelwright.launch.config import node_commands, process_environment

    entries = node_commands(recipe, run_args, options, process_environment())
    if as_json:
        print(json.dumps({"nodes": entries}))
        return
    if options.master_addr is None:
        print("# MAIN_ADDRESS: the address of node 0, as the other nodes reach it (see hostname -I there)")
    for node in entries:
        print(f"# node {node['node']}\n{node['command']}")
    print(f"# the same with torchrun, for example on node 0\n{entries[0]['torchrun']}")


def _start_node(loaded: LoadedRecipe, rank_args: tuple[str, ...], options: NodeOptions, max_restarts: int) -> None:
    """Run this node's part, and leave with its ranks' exit code."""
    import sys

    from modelwright.launch.config import build_launch_config
    from modelwright.launch.supervisor import supervise
    from modelwright.runs.caches import prepare_environment

    prepare_environment()
    code, message = supervise(build_launch_config(loaded, rank_args, options, max_restarts))
    if message:
        print(message, file=sys.stderr)
    if code:
        raise typer.Exit(code)


JobRecipeArgument = Annotated[
    str, typer.Argument(metavar="RECIPE", help="A recipe file, or the name of a built-in recipe.")
]
JobSetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set KEY=VALUE; repeatable.")
]
JobKindOption = Annotated[
    str | None, typer.Option("--target", help="trainjob or pytorchjob; default: as in the recipe.")
]
JobJsonOption = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]
job = typer.Typer(help="Manage a job on the cluster, and check manifests.", no_args_is_help=True)


@dataclass(frozen=True)
class ClusterAction:
    """What launch --on openshift is asked to do."""

    render: bool = False
    """Print the manifests."""
    check: bool = False
    """Check them."""
    simulate: bool = False
    """Run them on this machine."""
    submit: bool = False
    """Send them."""
    job_kind: str | None = None
    """Kind of job, where it is not the recipe's."""
    work_dir: Path | None = None
    """Folder of a simulation."""
    faults: tuple[str, ...] = ()
    """What happens on the way of a simulation."""
    git_repo: str | None = None
    """Repository of this machine that a simulation clones."""
    as_json: bool = False
    """One JSON object on stdout."""


def launch_on_openshift(loaded: LoadedRecipe, action: ClusterAction) -> None:
    """Render, check, rehearse or send a recipe as a cluster job; the check comes before everything else."""
    from modelwright.cluster.documents import parse_manifests
    from modelwright.cluster.lint import lint
    from modelwright.cluster.manifests import documents, render
    from modelwright.errors import ProblemsError, UsageError

    if sum((action.render, action.check, action.simulate, action.submit)) != 1:
        raise UsageError("--on openshift wants one of --render, --check, --rehearse, --submit")
    cluster_job = _build_job(loaded, action.job_kind)
    text = render(cluster_job)
    if action.render:
        print(
            json.dumps({"apiVersion": "v1", "kind": "List", "items": documents(cluster_job)})
            if action.as_json
            else text,
            end="",
        )
        return
    findings = lint(parse_manifests(text, f"{cluster_job.name}.yaml"))
    errors = [finding for finding in findings if finding.is_error]
    if action.check:
        _print_findings(findings, f"{cluster_job.name}: {cluster_job.job_kind}", action.as_json)
    elif errors:
        raise ProblemsError(errors)
    elif action.simulate:
        _simulate(cluster_job, text, action)
    else:
        _submit(cluster_job, text, action.as_json)


@job.command("check")
def check_files(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Manifests, yours or rendered.")],
    as_json: JobJsonOption = False,
) -> None:
    """Report every error in manifests by file and line: unknown fields, wrong types, and what would fail only later."""
    from modelwright.cluster.documents import load_manifests
    from modelwright.cluster.lint import lint

    manifests = [manifest for file in files for manifest in load_manifests(file)]
    _print_findings(lint(manifests), ", ".join(map(str, files)), as_json)


@job.command("status")
def status(
    recipe: JobRecipeArgument,
    overrides: JobSetOption = None,
    job_kind: JobKindOption = None,
    as_json: JobJsonOption = False,
) -> None:
    """Show the status of a job: phase, pods, progress."""
    from dataclasses import asdict

    from modelwright.cluster import client as cluster_client

    client, cluster_job = _client_and_job(recipe, overrides, job_kind)
    job_status = cluster_client.status(client, cluster_job)
    if as_json:
        print(json.dumps(asdict(job_status)))
        return
    print(f"{job_status.name}: {job_status.phase}" + (f" ({job_status.reason})" if job_status.reason else ""))
    for name, phase in job_status.pods.items():
        print(f"  {name}  {phase}")
    if job_status.progress:
        print(f"  progress  {json.dumps(job_status.progress)}")


@job.command("logs")
def logs(
    recipe: JobRecipeArgument,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow the log.")] = False,
    overrides: JobSetOption = None,
    job_kind: JobKindOption = None,
) -> None:
    """Show the log of the first pod."""
    from modelwright.cluster import client as cluster_client

    client, cluster_job = _client_and_job(recipe, overrides, job_kind)
    if code := cluster_client.logs(client, cluster_job, follow):
        raise typer.Exit(code)


@job.command("cancel")
def cancel(recipe: JobRecipeArgument, overrides: JobSetOption = None, job_kind: JobKindOption = None) -> None:
    """Delete a job; its volumes and the run on them are kept."""
    from modelwright.cluster import client as cluster_client

    client, cluster_job = _client_and_job(recipe, overrides, job_kind)
    print(cluster_client.cancel(client, cluster_job) or f"there was no {cluster_job.job_kind} {cluster_job.name}")


@job.command("pull")
def pull(
    recipe: JobRecipeArgument,
    output: Annotated[Path | None, typer.Option("--into", help="Folder; default: runs/NAME.")] = None,
    overrides: JobSetOption = None,
    job_kind: JobKindOption = None,
) -> None:
    """Download the run folder of a job."""
    from modelwright.cluster import client as cluster_client

    client, cluster_job = _client_and_job(recipe, overrides, job_kind)
    folder = cluster_client.pull(client, cluster_job, output or Path("runs") / cluster_job.payload.recipe.name)
    print(f"downloaded {cluster_job.run_dir} to {folder}")


def _build_job(loaded: LoadedRecipe, job_kind: str | None) -> ClusterJob:
    """The recipe as a cluster job, with the grace that its last run's saves ask for."""
    from modelwright.cluster.manifests import build_job, longest_save_seconds
    from modelwright.errors import UsageError

    if job_kind not in (None, "trainjob", "pytorchjob"):
        raise UsageError(f"--target is {job_kind!r}; it wants trainjob or pytorchjob")
    save = longest_save_seconds(Path(loaded.recipe.run_dir))
    return build_job(loaded.recipe, loaded.path.parent, job_kind, save)  # type: ignore[arg-type]


def _client_and_job(recipe: str, overrides: list[str] | None, job_kind: str | None) -> tuple[KubectlClient, ClusterJob]:
    from modelwright.cluster.client import find_client
    from modelwright.recipe.load import load

    cluster_job = _build_job(load(recipe, overrides or ()), job_kind)
    return find_client(cluster_job.cluster.namespace), cluster_job


def _print_findings(findings: list[LintFinding], subject: str, as_json: bool) -> None:
    """Problems on stdout's object or on stderr; notes never fail the check."""
    errors = [finding for finding in findings if finding.is_error]
    if as_json:
        rows = [
            {"where": finding.where, "field": finding.field, "message": finding.message, "is_error": finding.is_error}
            for finding in findings
        ]
        print(json.dumps({"ok": not errors, "problems": rows}, ensure_ascii=False))
    else:
        for finding in findings:
            print(finding if finding.is_error else f"{finding.where}: note: {finding.message}", file=sys.stderr)
        if not errors:
            print(f"ok  {subject}: no errors")
    if errors:
        raise typer.Exit(2)


def _simulate(cluster_job: ClusterJob, text: str, action: ClusterAction) -> None:
    from modelwright.cluster.documents import parse_manifests
    from modelwright.cluster.simulator import SimulationConfig, simulate

    work_dir = action.work_dir or Path("runs") / f"{cluster_job.payload.recipe.name}-simulation"
    faults = tuple(_parse_fault(each) for each in action.faults)
    config = SimulationConfig(work_dir, {"HF_TOKEN": "no-token-in-a-simulation"}, faults, git_repo=action.git_repo)
    result = simulate(
        parse_manifests(text, f"{cluster_job.name}.yaml"), config, lambda line: print(line, file=sys.stderr, flush=True)
    )
    if action.as_json:
        payload: dict[str, Any] = {"succeeded": result.succeeded, "reason": result.reason, "events": result.events}
        paths = {name: str(path) for name, path in result.logs.items()}
        print(json.dumps({**payload, "logs": paths, "not_simulated": result.not_simulated, "work_dir": str(work_dir)}))
    else:
        print(f"{'Succeeded' if result.succeeded else 'Failed'}: {result.reason}; logs are in {work_dir / 'logs'}")
        for line in result.not_simulated:
            print(f"not simulated: {line}")
    if not result.succeeded:
        raise typer.Exit(1)


def _parse_fault(text: str) -> InjectedFault:
    """`kill:1@5` is: kill pod 1 once step 5 is told."""
    import re

    from modelwright.cluster.simulator import InjectedFault
    from modelwright.errors import UsageError

    match = re.fullmatch(r"(kill|evict|lose):(\d+)@(\d+)", text)
    if match is None:
        raise UsageError(f"--disturb is {text!r}; it wants kill, evict or lose, a pod and a step, such as kill:1@5")
    return InjectedFault(match[1], int(match[2]), int(match[3]))  # type: ignore[arg-type]


def _submit(cluster_job: ClusterJob, text: str, as_json: bool) -> None:
    from modelwright.cluster import client as cluster_client

    output = cluster_client.submit(cluster_client.find_client(cluster_job.cluster.namespace), text, cluster_job)
    if as_json:
        print(
            json.dumps(
                {
                    "job": cluster_job.name,
                    "target": cluster_job.job_kind,
                    "namespace": cluster_job.cluster.namespace,
                    "output": output,
                }
            )
        )
        return
    print("\n".join(output))
    print(f"submitted; check with: modelwright job status {cluster_job.payload.recipe.name}")


CHECKS_FAILED = 2
"""Exit code where something must be mended before the recipe can run."""


def doctor(
    recipe: Annotated[
        str | None, typer.Argument(metavar="[RECIPE]", help="Also check whether this recipe can run here.")
    ] = None,
    overrides: SetOption = None,
    nodes: Annotated[
        str | None, typer.Option(help="Check this many nodes together; start it on all of them at once.")
    ] = None,
    node_rank: Annotated[int | None, typer.Option(help="With --nodes: rank of this node, from 0.")] = None,
    main_address: Annotated[
        str | None, typer.Option(help="With --nodes: address at which the other nodes reach node 0.")
    ] = None,
    port: Annotated[int | None, typer.Option(help="With --nodes: a free port there; default: 29500.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Check this machine (and a recipe on it) and suggest fixes. Exit 0 only if every check passed."""
    from modelwright.errors import UsageError
    from modelwright.launch.config import NodeOptions
    from modelwright.launch.doctor import run_checks
    from modelwright.launch.preflight import PREFLIGHT_TIMEOUT, check_nodes, recipe_checks
    from modelwright.recipe.load import load
    from modelwright.runs.caches import prepare_environment

    options = NodeOptions(nodes, node_rank, main_address, port)
    if not nodes and options != NodeOptions():
        raise UsageError(
            "--node-rank, --main-address and --port need --nodes too: the number of nodes that are checked together"
        )
    loaded = load(recipe, overrides or ()) if recipe else None
    prepare_environment()
    if nodes and options.node_rank is not None:
        typer.echo(
            f"node {options.node_rank} of {nodes}: waiting up to {PREFLIGHT_TIMEOUT.total_seconds():.0f} s for the other nodes",
            err=True,
        )
    results = check_nodes(options, loaded) if nodes else run_checks(recipe_checks(loaded))
    failed = [check for check in results if check.status == "fail"]
    if as_json:
        payload = {"ok": not failed, "recipe": loaded.recipe.name if loaded else None,
                "checks": [check.as_json() for check in results]}  # fmt: skip
        typer.echo(json.dumps(payload, indent=2, ensure_ascii=False))
    else:
        width = max(len(check.name) for check in results)
        for check in results:
            typer.echo(f"{check.status:<4}  {check.name:<{width}}  {check.detail}")
            if check.fix:
                typer.echo(f"{'':<4}  {'':<{width}}  → {check.fix}")
        subject = f"{loaded.recipe.name}: " if loaded else "these nodes: " if nodes else "this machine: "
        typer.echo(f"\n{subject}{'failed: ' + ', '.join(c.name for c in failed) if failed else 'all checks passed'}")
    if failed:
        raise typer.Exit(CHECKS_FAILED)
