"""Checks of a recipe on this machine, of several nodes together before they train, and of its repeatability."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from modelwright.data.row_formats import estimate_row_stats
from modelwright.data.sources import is_hub_name
from modelwright.errors import UsageError, first_line
from modelwright.launch import doctor
from modelwright.launch.admission import (
    check_node_devices,
    connect_store,
    measure_clock_skew,
    node_info,
    node_mismatches,
    send_clock,
)
from modelwright.launch.config import (
    DEFAULT_MASTER_PORT,
    LaunchConfig,
    NodeOptions,
    NodeRange,
    check_node_rank,
    parse_nnodes,
    recipe_hash,
    resolve_master_addr,
    uses_auto_precision,
)
from modelwright.launch.doctor import CheckResult
from modelwright.plan.choose import choose_plan, num_cached_layers, trainable_of
from modelwright.plan.hardware import Hardware, gpu_spec_of, probe_device
from modelwright.plan.model_shape import is_downloaded, shape_of_recipe
from modelwright.plan.stage import plan_stage
from modelwright.recipe.load import LoadedRecipe
from modelwright.recipe.stage_specs import throughput_unit
from modelwright.runs import journal
from modelwright.runs.folder import RunFolder, read_json

PREFLIGHT_TIMEOUT = 120.0
ALL_REDUCE_MB, ALL_REDUCE_REPEATS = 16, 5
SLOW_BYTES_PER_SECOND = 50e6
"""Below this, in bytes a second, exchanging gradients takes longer than most steps."""


def check_nodes(options: NodeOptions, loaded: LoadedRecipe | None) -> list[CheckResult]:
    """Every node runs this at the same time; each reports on itself and node 0."""
    config, shared = _build_config(options, loaded), Path(loaded.recipe.run_dir) if loaded else None
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # what it would print is reported as a result
    try:
        store = connect_store(config, is_master=config.node_rank == 0, timeout=PREFLIGHT_TIMEOUT)
        store.set(f"node_info/{config.node_rank}", json.dumps(node_info(config)))
    except RuntimeError as error:
        return [_unreachable(config, first_line(error))]
    if missing := _missing_nodes(config, store):
        return missing
    endpoint = f"{config.master_addr}:{config.master_port}"
    detail = f"node {config.node_rank} reaches {endpoint} by {config.socket_ifname}"
    results = [CheckResult("rendezvous", "ok", detail)]
    try:
        results += [*_check_mismatches(config, store), _check_shared_folder(config, store, shared)]
        results += check_node_devices(config, store, shared or Path())
        results.append(_check_all_reduce(config, store))
    except RuntimeError as error:
        fix = "see its output; then start doctor on every node again"
        results.append(CheckResult("other nodes", "fail", f"another node disconnected ({first_line(error)})", fix))
    return results


def _build_config(options: NodeOptions, loaded: LoadedRecipe | None) -> LaunchConfig:
    nodes = parse_nnodes(options.nnodes or "2")
    if options.node_rank is None or options.master_addr is None:
        raise UsageError("doctor --nnodes wants --node-rank and --master-addr; start it on every node at the same time")
    node, port = check_node_rank(nodes, options.node_rank), options.master_port or DEFAULT_MASTER_PORT
    address, local, interface = resolve_master_addr(options.master_addr, port)
    return LaunchConfig(
        rank_args=(), nproc_per_node=1, log_dir="", nnodes=NodeRange(nodes.max_nodes, nodes.max_nodes), node_rank=node,
        master_addr=address, master_port=port, local_addr=local, socket_ifname=interface,
        recipe_hash=recipe_hash(loaded) if loaded else "",
        auto_precision=uses_auto_precision(loaded) if loaded else True,
    )  # fmt: skip


def _unreachable(config: LaunchConfig, reason: str) -> CheckResult:
    if config.node_rank == 0:
        problem = f"port {config.master_port} cannot be bound: {reason}"
        return CheckResult("rendezvous", "fail", problem, "choose another with --master-port")
    fix = "start node 0 too; open the port in its firewall; --master-addr must be one that this node reaches"
    problem = f"{config.master_addr}:{config.master_port} does not answer: {reason}"
    return CheckResult("rendezvous", "fail", problem, fix)


def _missing_nodes(config: LaunchConfig, store: Any) -> list[CheckResult]:
    """On node 0: nodes that did not join."""
    results, deadline = [], time.monotonic() + PREFLIGHT_TIMEOUT
    for node in range(1, config.nnodes.max_nodes) if config.node_rank == 0 else ():
        try:
            store.wait([f"node_info/{node}"], timedelta(seconds=max(1.0, deadline - time.monotonic())))
        except RuntimeError:
            detail = f"node {node} did not join within {PREFLIGHT_TIMEOUT:.0f} s"
            reachable = f"{config.master_addr}:{config.master_port} must be reachable from there"
            fix = f"start doctor there too, with --node-rank {node}; {reachable}"
            results.append(CheckResult("rendezvous", "fail", detail, fix))
    return results


def _check_mismatches(config: LaunchConfig, store: Any) -> list[CheckResult]:
    """Exchange clocks and compare versions; node 0 compares all nodes."""
    if config.node_rank:
        send_clock(store, f"clocks/{config.node_rank}", PREFLIGHT_TIMEOUT)
        comparison = json.loads(store.get(f"mismatches/{config.node_rank}"))
        return [_mismatch_result(config.node_rank, comparison["skew"], comparison["mismatches"])]
    checks = []
    for node in range(1, config.nnodes.max_nodes):
        other = json.loads(store.get(f"node_info/{node}"))
        skew = measure_clock_skew(store, f"clocks/{node}", PREFLIGHT_TIMEOUT)
        mismatches = node_mismatches(node_info(config), other, skew)
        store.set(f"mismatches/{node}", json.dumps({"skew": skew, "mismatches": mismatches}))
        checks.append(_mismatch_result(node, skew, mismatches))
    return checks


def _mismatch_result(node: int, skew: float, mismatches: list[str]) -> CheckResult:
    detail = f"node {node}: clock {skew:+.3f} s, same versions" if not mismatches else "; ".join(mismatches)
    data = {"node": node, "clock_skew_seconds": skew}
    return CheckResult("clock and versions", "fail" if mismatches else "ok", detail, data=data)


def _check_shared_folder(config: LaunchConfig, store: Any, shared: Path | None) -> CheckResult:
    """Whether all nodes see the folder where the run will be."""
    if shared is None:
        return CheckResult("shared folder", "skip", "no recipe was named, so there is no run folder to check")
    token = shared / ".modelwright-preflight"
    if config.node_rank == 0:
        shared.mkdir(parents=True, exist_ok=True)
        token.write_text("here", encoding="utf-8")
        store.set("token", "written")
    store.get("token")
    visible = token.exists()
    store.add("checked", 1)
    while config.node_rank == 0 and store.add("checked", 0) < config.nnodes.max_nodes:
        time.sleep(0.05)
    if config.node_rank == 0:
        token.unlink(missing_ok=True)
    if visible:
        return CheckResult("shared folder", "ok", str(shared))
    fix = "mount the same folder on every node: a stopped run resumes from the checkpoints in it"
    return CheckResult("shared folder", "fail", f"{shared} is not the same here", fix)


def _check_all_reduce(config: LaunchConfig, store: Any) -> CheckResult:
    """How many bytes of gradients a second the nodes can add up, over gloo."""
    try:
        rate = _all_reduce_rate(config, store)
    except RuntimeError as error:
        detail = f"nodes connect, but all-reduce fails ({first_line(error)})"
        ports = f"open all ports between the nodes, not only {config.master_port}"
        return CheckResult("all-reduce", "fail", detail, f"{ports}; GLOO_SOCKET_IFNAME names the network to take")
    detail, data = f"{rate / 1e6:,.0f} MB/s", {"bytes_per_second": rate}
    if rate < SLOW_BYTES_PER_SECOND:
        fix = "see that traffic goes by the fast network: GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME"
        return CheckResult("all-reduce", "warn", detail, fix, data)
    return CheckResult("all-reduce", "ok", detail, data=data)


def _all_reduce_rate(config: LaunchConfig, store: Any) -> float:
    """Bytes a second."""
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore

    if config.socket_ifname:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", config.socket_ifname)
    store, timeout = PrefixStore("bandwidth", store), timedelta(seconds=PREFLIGHT_TIMEOUT)
    rank, world_size = config.node_rank, config.nnodes.max_nodes
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    tensor = torch.ones(ALL_REDUCE_MB * 250_000)
    dist.all_reduce(tensor)
    began = time.perf_counter()
    for _ in range(ALL_REDUCE_REPEATS):
        dist.all_reduce(tensor)
    rate = ALL_REDUCE_REPEATS * tensor.numel() * 4 / (time.perf_counter() - began)
    dist.barrier()
    dist.destroy_process_group()
    return rate


CheckList = list[Callable[[], CheckResult | list[CheckResult]]]


def recipe_checks(loaded: LoadedRecipe | None) -> CheckList:
    """All checks: of the machine, and of the recipe where there is one."""
    settings = loaded.recipe.stages.values() if loaded else ()
    compile_requested = any(stage.torch_compile is True for stage in settings)
    hub_input = hub_only_input(loaded) if loaded else None
    hub_model = hub_input if loaded and hub_input == loaded.recipe.model.model_name_or_path else None
    folder = Path(loaded.recipe.run_dir) if loaded else Path()
    stages: CheckList = []
    if loaded:
        stages = [_with_name(f"stage {name}", partial(check_stage_fits, loaded, name)) for name in loaded.recipe.stages]
    return [
        *(doctor.check_python, doctor.check_packages, doctor.check_torch, doctor.check_devices),
        *(doctor.check_matmul_speed, doctor.check_attention),
        _with_name("compile", partial(doctor.check_torch_compile, compile_requested)),
        _with_name("disk", partial(_check_recipe_disk, loaded, folder)),
        *(doctor.check_shared_memory, doctor.check_caches),
        _with_name("hub", partial(doctor.check_hub, hub_input, hub_model)),
        *(doctor.check_ports, doctor.check_clock),
        *stages,
    ]


def hub_only_input(loaded: LoadedRecipe) -> str | None:
    """First model or data set of the recipe that is only on the hub."""
    recipe, recipe_dir = loaded.recipe, loaded.path.parent
    model = recipe.model.model_name_or_path
    if model and model.count("/") == 1 and not is_downloaded(model, recipe_dir):
        return model
    names = [part.dataset_name for stage in recipe.stages for part in recipe.data_for(stage).parts.values()]
    return next((name for name in names if name and is_hub_name(name, recipe_dir)), None)


def check_stage_fits(loaded: LoadedRecipe, stage: str) -> CheckResult:
    """Whether a stage fits the memory of this machine."""
    recipe, recipe_dir = loaded.recipe, loaded.path.parent
    settings, machine = recipe.stages[stage], probe_device()
    rows, shape = estimate_row_stats(recipe, stage, recipe_dir), shape_of_recipe(recipe, recipe_dir)
    plan = plan_stage(settings, rows.count or 1, 1, machine, caches_layers=num_cached_layers(shape, settings) > 0)
    prediction = choose_plan(plan, settings, shape, rows, Hardware(1, 1, gpu_spec_of(machine)))
    memory = f"{prediction.memory.required / 2**30:.1f} GiB of {prediction.hardware.gpu.memory / 2**30:.1f}"
    speed = f"{prediction.time.tokens_per_second:,.0f} {throughput_unit(stage)}/s"
    detail = f"predicted {memory}, {speed} ± {prediction.relative_error:.0%}"
    name, data = f"stage {stage}", prediction.as_json()
    if not prediction.fits:
        return CheckResult(name, "fail", f"does not fit: {memory}", " | ".join(prediction.alternatives), data)
    reasons = prediction.plan.reasons
    changes = [line for line in reasons if "instead of" in line or "gradient checkpointing:" in line]
    return CheckResult(name, "ok", "; ".join([detail, *changes]), data=data)


def _check_recipe_disk(loaded: LoadedRecipe | None, folder: Path) -> CheckResult:
    """Disk space for every retained checkpoint, one being written, and the model."""
    needed = 0.0
    if loaded:
        shape = shape_of_recipe(loaded.recipe, loaded.path.parent)
        for settings in loaded.recipe.stages.values():
            parameters = trainable_of(shape, settings)
            checkpoint = parameters.trained * (4.0 + settings.optimizer_bytes("fp32")[0])
            needed += checkpoint * (settings.save_total_limit + 2) + 4.0 * parameters.total
    return doctor.check_disk(folder, needed)


def _with_name(name: str, check: Any) -> Any:
    """A check with the name that is shown where it raises."""

    def run() -> Any:
        return check()

    run.__name__ = name
    return run


SHORT_RUN_STEPS, KILLED_AFTER_STEP = 6, 3
SHORT_RUN = ("gates={}", "gates_file=null", "compare={}", "evaluate=null", "report_to=none")
"""Overrides of a run that only trains."""


def check_reproducible(name: str, overrides: Sequence[str], loaded: LoadedRecipe) -> list[CheckResult]:
    """Train a few steps of each stage twice, the second time with a SIGKILL in each, and compare the two runs."""
    short = (f"max_steps={SHORT_RUN_STEPS}", f"eval_steps={SHORT_RUN_STEPS}", "save_steps=2", "logging_steps=1")
    short_stages = (f"{stage}.{setting}" for stage in loaded.recipe.stages for setting in short)
    settings = [arg for override in (*overrides, *SHORT_RUN, *short_stages) for arg in ("--set", override)]

    def start(run: RunFolder) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "modelwright", "run", name, *settings, "--set", f"output_dir={run.path}"]
        command += ["--log-format", "plain"]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    with tempfile.TemporaryDirectory(prefix="reproducible-") as folder:
        runs = [RunFolder(Path(folder) / each) for each in ("uninterrupted", "killed")]
        kills = [_kill_in_stage(start(runs[1]), runs[1], stage) for stage in loaded.recipe.stages]
        for run in runs:
            process = start(run)
            output, _ = process.communicate()
            if process.returncode:
                last_line = next(iter(output.strip().splitlines()[-1:]), f"exit {process.returncode}")
                return [CheckResult("reproducible", "fail", f"the run failed: {last_line}")]
        return [_compare_stage(stage, runs, killed) for stage, killed in zip(loaded.recipe.stages, kills, strict=True)]


def _kill_in_stage(process: subprocess.Popen[str], run: RunFolder, stage: str) -> bool:
    """Kill a run after a few steps of a stage; False if it ended before."""
    assert process.stdout is not None
    for _ in process.stdout:  # a line for each step
        if any(event["step"] == KILLED_AFTER_STEP for event in _events_of(run, stage, "step")):
            break
    process.kill()
    process.communicate()
    return process.returncode == -signal.SIGKILL


def _events_of(run: RunFolder, stage: str, kind: str) -> list[journal.Event]:
    events = journal.read(run.journal) if run.journal.exists() else ()
    return [event for event in events if event["event"] == kind and event["stage"] == stage]


def _compare_stage(stage: str, runs: Sequence[RunFolder], killed: bool) -> CheckResult:
    """Compare batches, losses and gradient norms of each step, and the files of the model."""
    name = f"reproducible {stage}"
    revisions = [event["reason"] for event in _events_of(runs[0], stage, "plan_revised")]
    fix = "; ".join(["set deterministic: true, if it is off", *revisions])
    expected = {event["step"]: event for event in _events_of(runs[0], stage, "step")}
    for actual in _events_of(runs[1], stage, "step"):  # those before the kill, too
        step = actual["step"]
        for key in ("batch_hash", "loss", "grad_norm"):
            if expected[step][key] != actual[key]:
                values = f"{expected[step][key]} and {actual[key]}"
                return CheckResult(name, "fail", f"two runs differ from step {step} on: {key} {values}", fix)
    files = [read_json(run.result(stage))["files"] for run in runs]
    if files[0] != files[1]:
        return CheckResult(name, "fail", "equal losses, but other weights at the end", fix)
    how = f"the second killed after step {KILLED_AFTER_STEP} and resumed" if killed else "neither was killed in time"
    return CheckResult(name, "ok", f"{len(expected)} steps twice, {how}: losses and weights are equal, bit for bit")
