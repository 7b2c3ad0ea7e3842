"""Commands for many processes, nodes and clusters: launch, job, doctor."""

from __future__ import annotations

import inspect
import json
import re
import shlex
import sys
from collections.abc import Set
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from modelwright.cli.options import (
    AcceptGateOption,
    AllowChangedOption,
    ContextOption,
    Fp8Option,
    FromStageOption,
    JobKindOption,
    JsonOption,
    LogFormatOption,
    MasterAddrOption,
    MasterPortOption,
    NodeRankOption,
    ReasonOption,
    RecipeArgument,
    SetOption,
    StringList,
    TrustFileOption,
    UntilStageOption,
    add_commands,
    print_json,
)
from modelwright.cli.run import run

if TYPE_CHECKING:
    from modelwright.cluster.client import KubectlClient
    from modelwright.cluster.lint import LintFinding
    from modelwright.cluster.manifests import ClusterJob
    from modelwright.cluster.simulator import InjectedFault
    from modelwright.launch.config import LaunchConfig, NodeOptions
    from modelwright.recipe.load import LoadedRecipe

NprocPerNodeOption = Annotated[
    str | None,
    typer.Option("--nproc-per-node", help="Processes per node, or of each node (4,2); default: one per GPU, or one."),
]
MaxRestartsOption = Annotated[
    int, typer.Option("--max-restarts", help="Restarts allowed without a completed step in between.")
]
NnodesOption = Annotated[
    str | None,
    typer.Option("--nnodes", help="Number of nodes; MIN:MAX is elastic. Without --node-rank: print their commands."),
]
WorkDirOption = Annotated[
    Path | None, typer.Option("--work-dir", help="openshift: working directory of the simulation.")
]
InjectFaultOption = Annotated[
    StringList,
    typer.Option("--inject-fault", metavar="KIND:POD@STEP", help="openshift: fault in the simulation: kill, evict or "
                 "node-lost, such as kill:1@5."),
]  # fmt: skip
GitRepoOption = Annotated[
    str | None,
    typer.Option("--git-repo", metavar="PATH", help="openshift: local repository that the simulation clones."),
]
RUN_OPTIONS = frozenset(inspect.signature(run).parameters) - {"recipe", "overrides"}
CLUSTER_ACTIONS = ("render", "check", "simulate", "submit")
MODES = {
    ("local", "nodes"): RUN_OPTIONS | {"nproc_per_node", "max_restarts"},
    ("nodes",): {"nnodes", "node_rank", "master_addr", "master_port"},
    ("nodes", "openshift"): {"as_json"},
    ("openshift",): {*CLUSTER_ACTIONS, "job_kind", "work_dir", "faults", "git_repo", "context"},
}
"""Options that have an effect only with these values of --on."""


def register(app: typer.Typer) -> None:
    """Add these commands to the application."""
    add_commands(app, {"launch": launch, "doctor": doctor})
    job = typer.Typer(help="Manage a job on the cluster, and check manifests.", no_args_is_help=True)
    add_commands(job, {"check": check_files, "status": status, "logs": logs, "cancel": cancel, "pull": pull})
    app.add_typer(job, name="job")


def launch(
    ctx: typer.Context,
    recipe: RecipeArgument,
    on: Annotated[str, typer.Option("--on", help="local (this machine), nodes (several), or openshift.")] = "local",
    overrides: SetOption = None,
    allow_changed: AllowChangedOption = None,
    from_stage: FromStageOption = None,
    until_stage: UntilStageOption = None,
    accept_gate: AcceptGateOption = None,
    reason: ReasonOption = None,
    trust_file: TrustFileOption = None,
    fp8: Fp8Option = None,
    log_format: LogFormatOption = "auto",
    nproc_per_node: NprocPerNodeOption = None,
    max_restarts: MaxRestartsOption = 3,
    nnodes: NnodesOption = None,
    node_rank: NodeRankOption = None,
    master_addr: MasterAddrOption = None,
    master_port: MasterPortOption = None,
    render: Annotated[bool, typer.Option("--render", help="openshift: print the manifests.")] = False,
    check: Annotated[bool, typer.Option("--check", help="openshift: check the manifests.")] = False,
    simulate: Annotated[bool, typer.Option("--simulate", help="openshift: simulate the job on this machine.")] = False,
    submit: Annotated[bool, typer.Option("--submit", help="openshift: submit the job.")] = False,
    job_kind: JobKindOption = None,
    work_dir: WorkDirOption = None,
    faults: InjectFaultOption = None,
    git_repo: GitRepoOption = None,
    context: ContextOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run a recipe on all local GPUs, several nodes or a cluster. A failed run restarts from the last checkpoint."""
    from modelwright.launch.config import NodeOptions, build_launch_config
    from modelwright.recipe.load import load

    _reject_unused(ctx, on)
    loaded = load(recipe, overrides or ())
    if on == "openshift":
        actions = tuple(name for name in CLUSTER_ACTIONS if ctx.params[name])
        job_args = (recipe, *_typed_args(ctx, {"overrides", "job_kind", "context"}))
        action = ClusterAction(actions, job_kind, work_dir, tuple(faults or ()), git_repo, as_json, context, job_args)
        launch_on_openshift(loaded, action)
        return
    options = NodeOptions(nnodes, node_rank, master_addr, master_port, nproc_per_node)
    options = options.with_pet_defaults() if on == "nodes" else replace(options, node_rank=0)
    run_args = _typed_args(ctx, RUN_OPTIONS | {"overrides"})
    if options.node_rank is None:
        _print_node_commands(recipe, run_args, options, _typed_args(ctx, {"max_restarts"}), as_json)
    else:
        _start_node(build_launch_config(loaded, ("run", recipe, *run_args), options, max_restarts))


def _reject_unused(ctx: typer.Context, on: str) -> None:
    """Refuse options without effect where the recipe runs: `--nnodes 2` without `--on nodes` would be one node."""
    from modelwright.errors import UsageError

    if on not in ("local", "nodes", "openshift"):
        raise UsageError(f"--on is {on!r}; it wants local, nodes or openshift")
    for modes, names in MODES.items():
        unused = [arg for arg in _typed_args(ctx, names) if arg.startswith("--")]
        if unused and on not in modes:
            unused_text = ", ".join(dict.fromkeys(unused))
            raise UsageError(f"{unused_text} with --on {on} has no effect; use --on {' or '.join(modes)} or drop it")


def _typed_args(ctx: typer.Context, names: Set[str]) -> tuple[str, ...]:
    """Those of these options that were given on the command line, as its arguments."""
    args: list[str] = []
    for option in ctx.command.params:
        source = ctx.get_parameter_source(option.name or "")
        if option.name in names and source is not None and source.name == "COMMANDLINE":
            value = ctx.params[option.name]
            if isinstance(value, bool):
                args.append((option.opts if value else option.secondary_opts)[0])
            else:
                items = value if isinstance(value, list | tuple) else [value]
                args += [arg for item in items for arg in (option.opts[0], str(item))]
    return tuple(args)


def _start_node(config: LaunchConfig) -> None:
    """Run this node's ranks, and exit with their code."""
    from modelwright.launch.supervisor import supervise
    from modelwright.runs.caches import prepare_environment

    prepare_environment()
    code, message = supervise(config)
    if message:
        print(message, file=sys.stderr)
    if code:
        raise typer.Exit(code)


def _print_node_commands(
    recipe: str, run_args: tuple[str, ...], options: NodeOptions, launch_args: tuple[str, ...], as_json: bool
) -> None:
    """Print the command of each node."""
    from modelwright.launch.config import node_commands

    entries = node_commands(recipe, run_args, options, launch_args=launch_args)
    if as_json:
        print_json({"nodes": entries})
        return
    if options.master_addr is None:
        print("# MASTER_ADDR: the address of node 0, as the other nodes reach it (see hostname -I there)")
    for node in entries:
        print(f"# node {node['node']}\n{node['command']}")
    print(f"# the same with torchrun, for example on node 0\n{entries[0]['torchrun']}")


@dataclass(frozen=True)
class ClusterAction:
    """What launch --on openshift is asked to do."""

    actions: tuple[str, ...]
    """Of CLUSTER_ACTIONS; exactly one is allowed."""
    job_kind: str | None
    """Kind of job, if not the recipe's."""
    work_dir: Path | None
    """Working directory of the simulation."""
    faults: tuple[str, ...]
    """Faults to inject in the simulation."""
    git_repo: str | None
    """Local repository that the simulation clones."""
    as_json: bool
    """One JSON object on stdout."""
    context: str | None = None
    """Context of the kubeconfig, to submit."""
    job_args: tuple[str, ...] = ()
    """Arguments with which the job commands find this job."""


def launch_on_openshift(loaded: LoadedRecipe, action: ClusterAction) -> None:
    """Render, check, simulate or submit a recipe as a cluster job; manifests with errors go no further."""
    from modelwright.cluster.documents import parse_manifests
    from modelwright.cluster.lint import lint
    from modelwright.cluster.manifests import documents, render
    from modelwright.errors import ProblemsError, UsageError

    if len(action.actions) != 1:
        raise UsageError("--on openshift wants one of --render, --check, --simulate, --submit")
    cluster_job = _build_job(loaded, action.job_kind)
    text = render(cluster_job)
    if "render" in action.actions:
        if action.as_json:
            print_json({"apiVersion": "v1", "kind": "List", "items": documents(cluster_job)})
        else:
            print(text, end="")
        return
    findings = lint(parse_manifests(text, f"{cluster_job.name}.yaml"))
    errors = [finding for finding in findings if finding.is_error]
    if "check" in action.actions:
        _print_findings(findings, f"{cluster_job.name}: {cluster_job.job_kind}", action.as_json)
    elif errors:
        raise ProblemsError(errors)
    elif "simulate" in action.actions:
        _simulate(cluster_job, text, action)
    else:
        _submit(cluster_job, text, action)


def check_files(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Manifests, yours or rendered.")],
    as_json: JsonOption = False,
) -> None:
    """Report every error in manifests by file and line. Also: what would fail only on the cluster."""
    from modelwright.cluster.documents import load_manifests
    from modelwright.cluster.lint import lint

    manifests = [manifest for file in files for manifest in load_manifests(file)]
    _print_findings(lint(manifests), ", ".join(map(str, files)), as_json)


def status(
    recipe: RecipeArgument,
    overrides: SetOption = None,
    job_kind: JobKindOption = None,
    context: ContextOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the status of a job: phase, pods, progress."""
    from modelwright.cluster import client as cluster_client

    client, cluster_job = _client_and_job(recipe, overrides, job_kind, context)
    job_status = cluster_client.status(client, cluster_job)
    if as_json:
        print_json(asdict(job_status))
        return
    print(f"{job_status.name}: {job_status.phase}" + (f" ({job_status.reason})" if job_status.reason else ""))
    for name, phase in job_status.pods.items():
        print(f"  {name}  {phase}")
    if job_status.progress:
        print(f"  progress  {json.dumps(job_status.progress)}")


def logs(
    recipe: RecipeArgument,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow the log.")] = False,
    previous: Annotated[bool, typer.Option("--previous", help="The log before the last restart.")] = False,
    overrides: SetOption = None,
    job_kind: JobKindOption = None,
    context: ContextOption = None,
) -> None:
    """Show the log of the first pod."""
    from modelwright.cluster import client as cluster_client

    client, cluster_job = _client_and_job(recipe, overrides, job_kind, context)
    cluster_client.logs(client, cluster_job, follow, previous)


def cancel(
    recipe: RecipeArgument, overrides: SetOption = None, job_kind: JobKindOption = None, context: ContextOption = None
) -> None:
    """Delete a job; its volumes and the run on them are kept."""
    from modelwright.cluster import client as cluster_client

    client, cluster_job = _client_and_job(recipe, overrides, job_kind, context)
    print(cluster_client.cancel(client, cluster_job) or f"there was no {cluster_job.job_kind} {cluster_job.name}")


def pull(
    recipe: RecipeArgument,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Folder; default: runs/NAME.")] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace local files that are newer than the job's.")
    ] = False,
    overrides: SetOption = None,
    job_kind: JobKindOption = None,
    context: ContextOption = None,
) -> None:
    """Download the run folder of a job. Every file is verified; run it again to continue."""
    from modelwright.cluster.pull import pull as pull_run

    client, cluster_job = _client_and_job(recipe, overrides, job_kind, context)
    folder = output or Path("runs") / cluster_job.payload.recipe.name
    files = pull_run(client, cluster_job, folder, overwrite, lambda line: print(line, file=sys.stderr, flush=True))
    size = sum(file.size for file in files) / 1e6
    print(f"{cluster_job.run_dir} is now {folder}: {len(files)} files, {size:,.1f} MB, each verified by SHA-256")


def _build_job(loaded: LoadedRecipe, job_kind: str | None) -> ClusterJob:
    """The recipe as a cluster job; its grace period follows the longest checkpoint of the last run."""
    from modelwright.cluster.manifests import build_job, longest_save_seconds
    from modelwright.errors import UsageError

    if job_kind not in (None, "trainjob", "pytorchjob"):
        raise UsageError(f"--job-kind is {job_kind!r}; it wants trainjob or pytorchjob")
    save = longest_save_seconds(Path(loaded.recipe.run_dir))
    return build_job(loaded.recipe, loaded.path.parent, job_kind, save)  # type: ignore[arg-type]


def _client_and_job(
    recipe: str, overrides: list[str] | None, job_kind: str | None, context: str | None
) -> tuple[KubectlClient, ClusterJob]:
    from modelwright.cluster.client import find_client
    from modelwright.recipe.load import load

    cluster_job = _build_job(load(recipe, overrides or ()), job_kind)
    return find_client(cluster_job.cluster.namespace, context), cluster_job


def _print_findings(findings: list[LintFinding], subject: str, as_json: bool) -> None:
    """Print findings as JSON on stdout or as lines on stderr; only errors fail the check."""
    errors = [finding for finding in findings if finding.is_error]
    if as_json:
        rows = [
            {"where": finding.where, "field": finding.field, "message": finding.message,
             "severity": "error" if finding.is_error else "note"}
            for finding in findings
        ]  # fmt: skip
        print_json({"ok": not errors, "problems": rows})
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
        payload["logs"] = {name: str(path) for name, path in result.logs.items()}
        print_json({**payload, "not_simulated": result.not_simulated, "work_dir": str(work_dir)})
    else:
        print(f"{'Succeeded' if result.succeeded else 'Failed'}: {result.reason}; logs are in {work_dir / 'logs'}")
        for line in result.not_simulated:
            print(f"not simulated: {line}")
    if not result.succeeded:
        raise typer.Exit(1)


def _parse_fault(text: str) -> InjectedFault:
    """`kill:1@5`: kill pod 1 when it reports step 5."""
    from modelwright.cluster.simulator import InjectedFault
    from modelwright.errors import UsageError

    match = re.fullmatch(r"(kill|evict|node-lost|lose):(\d+)@(\d+)", text)
    if match is None:
        raise UsageError(
            f"--inject-fault is {text!r}; it wants kill, evict or node-lost, a pod and a step, such as kill:1@5"
        )
    kind = "node-lost" if match[1] == "lose" else match[1]  # lose: the word of version 0.1
    return InjectedFault(kind, int(match[2]), int(match[3]))  # type: ignore[arg-type]


def _submit(cluster_job: ClusterJob, text: str, action: ClusterAction) -> None:
    from modelwright.cluster import client as cluster_client

    client = cluster_client.find_client(cluster_job.cluster.namespace, action.context)
    output = cluster_client.submit(client, text, cluster_job)
    if action.as_json:
        print_json({"job": cluster_job.name, "job_kind": cluster_job.job_kind,
                    "namespace": cluster_job.cluster.namespace, "output": output})  # fmt: skip
        return
    print("\n".join(output))
    print(f"submitted; check with: modelwright job status {shlex.join(action.job_args)}")


def doctor(
    recipe: Annotated[
        str | None, typer.Argument(metavar="[RECIPE]", help="Also check whether this recipe can run here.")
    ] = None,
    overrides: SetOption = None,
    nnodes: Annotated[
        str | None, typer.Option("--nnodes", help="Check this many nodes together; start it on all of them at once.")
    ] = None,
    node_rank: NodeRankOption = None,
    master_addr: MasterAddrOption = None,
    master_port: MasterPortOption = None,
    reproducible: Annotated[
        bool, typer.Option("--reproducible", help="Train a few steps of the recipe twice, with a kill, and compare.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Check this machine (and a recipe on it) and suggest fixes. Exit 0 only if every check passed."""
    from modelwright.errors import UsageError
    from modelwright.launch.config import NodeOptions
    from modelwright.launch.doctor import run_checks
    from modelwright.launch.preflight import PREFLIGHT_TIMEOUT, check_nodes, check_reproducible, recipe_checks
    from modelwright.recipe.load import load
    from modelwright.runs.caches import prepare_environment

    options = NodeOptions(nnodes, node_rank, master_addr, master_port)
    if not nnodes and options != NodeOptions():
        raise UsageError(
            "--node-rank, --master-addr and --master-port need --nnodes too: the number of nodes to check together"
        )
    if reproducible and (recipe is None or nnodes):
        raise UsageError("--reproducible wants a recipe, and one node: modelwright doctor --reproducible RECIPE")
    loaded = load(recipe, overrides or ()) if recipe else None
    prepare_environment()
    if nnodes and node_rank is not None:
        typer.echo(f"node {node_rank} of {nnodes}: waiting up to {PREFLIGHT_TIMEOUT:g} s for the other nodes", err=True)
    if reproducible and recipe and loaded:
        results = check_reproducible(recipe, overrides or (), loaded)
    else:
        results = check_nodes(options, loaded) if nnodes else run_checks(recipe_checks(loaded))
    failed = [check.name for check in results if check.status == "fail"]
    if as_json:
        name = loaded.recipe.name if loaded else None
        print_json({"ok": not failed, "recipe": name, "checks": [check.as_json() for check in results]})
    else:
        width = max(len(check.name) for check in results)
        for check in results:
            typer.echo(f"{check.status:<4}  {check.name:<{width}}  {check.detail}")
            if check.fix:
                typer.echo(f"{'':<4}  {'':<{width}}  → {check.fix}")
        subject = loaded.recipe.name if loaded else "these nodes" if nnodes else "this machine"
        typer.echo(f"\n{subject}: {'failed: ' + ', '.join(failed) if failed else 'all checks passed'}")
    if failed:
        raise typer.Exit(UsageError.exit_code)
