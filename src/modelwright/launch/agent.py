"""Run torch's elastic agent for one node: rendezvous by --node-rank, rank entry point, restart policy, root cause.

`python -m modelwright.launch.agent CONFIG_JSON IPC_DIR PARENT_PID`, started by the supervisor."""

from __future__ import annotations

import logging
import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from modelwright.errors import NON_RETRYABLE_EXIT_CODES, Interrupted, ModelwrightError, UsageError, first_line
from modelwright.launch.admission import NodeAdmission
from modelwright.launch.config import JOIN_TIMEOUT, LaunchConfig
from modelwright.launch.supervisor import IpcDir, exit_status
from modelwright.runs.heartbeat import RankStatus, has_exited, read_rank_statuses, set_pdeathsig

LOG_START_MARKER = "--- start of rank"
"""The line that opens each start in a rank's log."""


def run_rank(args: tuple[str, ...], log_dir: str, environ: dict[str, str]) -> None:
    """Run the command as the rank that the standard variables describe; leaves with its exit code."""
    set_pdeathsig()
    os.environ.update(environ)
    rank = os.environ["RANK"]
    _redirect_stderr(rank_log_path(Path(log_dir), int(rank)), rank)
    if rank != "0":
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.argv = ["modelwright", *args]
    try:
        runpy.run_module("modelwright", run_name="__main__", alter_sys=True)
    except SystemExit as stop:
        sys.stdout.flush()
        if stop.code not in (0, None):
            sys.stderr.flush()
            os._exit(stop.code if isinstance(stop.code, int) else 1)  # the code is ours, not the fork server's


def rank_log_path(log_dir: Path, rank: int) -> Path:
    """Log file of a rank's stderr."""
    return log_dir / f"rank-{rank}.log"


def last_start_output(log_dir: Path, rank: int) -> str:
    """What a rank printed on stderr since its last start."""
    try:
        text = rank_log_path(log_dir, rank).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return text.rpartition(LOG_START_MARKER)[2].partition("\n")[2].strip()


def _redirect_stderr(path: Path, rank: str) -> None:
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    start = f"{LOG_START_MARKER} {rank}, process {os.getpid()}, {time.strftime('%Y-%m-%d %H:%M:%S')} ---\n"
    os.write(log, start.encode())
    os.dup2(log, 2)


LAST_CALL_TIMEOUT, KEEP_ALIVE_INTERVAL, KEEP_ALIVE_MAX_ATTEMPT = 5, 3, 4
"""When a node is lost: 12 s until it counts as lost, 5 s for late ones; torch's own are 15 and 30."""


class OrderedRendezvousHandler:
    """torch's rendezvous handler, with node ranks in the order of --node-rank."""

    use_agent_store = True
    """Ranks take the store that this opens for them."""

    def __init__(self, handler: Any, node_rank: int, local_addr: str) -> None:
        self._handler, self._node_rank, self._local_addr = handler, node_rank, local_addr
        self._store: Any = None
        self.node_ranks: tuple[int, ...] = ()
        """--node-rank of the nodes in the last rendezvous, in order."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handler, name)

    def next_rendezvous(self) -> Any:
        """Run torch's rendezvous; returns its result in our order, with a store on the first node."""
        from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
        from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo

        info = self._handler.next_rendezvous()
        prefix_store = PrefixStore("modelwright", info.store)  # each rendezvous has its own prefix in torch's store
        prefix_store.set(f"node/{info.rank}", str(self._node_rank))
        node_ranks = [int(prefix_store.get(f"node/{position}")) for position in range(info.world_size)]
        if duplicates := [node_rank for node_rank in node_ranks if node_ranks.count(node_rank) > 1]:
            if self.node_ranks:  # the later one is refused, and the others rendezvous again
                return self.next_rendezvous()
            count = node_ranks.count(duplicates[0])
            raise UsageError(f"{count} nodes have --node-rank {duplicates[0]}; each wants its own number, from 0")
        order = sorted(range(info.world_size), key=node_ranks.__getitem__)
        rank, self.node_ranks = order.index(info.rank), tuple(sorted(node_ranks))
        self._store = TCPStore(self._local_addr, 0, is_master=True, multi_tenant=True) if rank == 0 else None
        port = self._store.port if self._store else None
        store_info = RendezvousStoreInfo.build(rank, prefix_store, self._local_addr, server_port=port)
        return RendezvousInfo(info.store, rank, info.world_size, store_info)


def create_rdzv_handler(config: LaunchConfig) -> OrderedRendezvousHandler:
    """torch's c10d rendezvous at node 0's port, ordered by --node-rank."""
    from torch.distributed.elastic.rendezvous import RendezvousParameters, registry

    single_node = config.nnodes.max_nodes == 1
    parameters = RendezvousParameters(
        backend="c10d",
        endpoint="127.0.0.1:0" if single_node else f"{config.master_addr}:{config.master_port}",
        run_id="modelwright",
        min_nodes=config.nnodes.min_nodes,
        max_nodes=config.nnodes.max_nodes,
        local_addr=config.local_addr,
        is_host=config.node_rank == 0,
        join_timeout=JOIN_TIMEOUT,
        last_call_timeout=LAST_CALL_TIMEOUT,
        keep_alive_interval=KEEP_ALIVE_INTERVAL,
        keep_alive_max_attempt=KEEP_ALIVE_MAX_ATTEMPT,
        timeout=JOIN_TIMEOUT,
    )
    # its own store for the ranks is opened once, on the node that it counts first; a later one would wait forever
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    return OrderedRendezvousHandler(registry.get_rendezvous_handler(parameters), config.node_rank, config.local_addr)


UNEXPECTED_ERROR = 1
REPORTED, RELAYED, KILLED, CRASHED, FOLLOWED, KILLED_BY_SUPERVISOR = range(6)
"""Priority of root causes: reported errors first, ranks that only followed late, ranks that we killed last."""


@dataclass(frozen=True)
class FailureCause:
    """Why the ranks of this node exited."""

    rank: int = -1
    """The rank that exited first."""
    reason: str = ""
    """What happened to it, as the rest of a sentence that begins with the rank."""
    exit_code: int = UNEXPECTED_ERROR
    """What it left with; a signal's negative number where it was killed."""
    step: int = 0
    """Steps that were done by then."""
    has_stderr: bool = False
    """Whether it printed the error itself."""
    relayed_message: str = ""
    """The error message of another rank, as this one received it."""
    lost_peers: bool = False
    """Whether it exited because its peers were gone."""

    @property
    def killed(self) -> bool:
        """Whether it was killed by a signal."""
        return self.exit_code < 0

    @property
    def summary(self) -> str:
        """The cause as part of a sentence."""
        return f"rank {self.rank} {self.reason} after step {self.step}"

    def repeats(self, previous: FailureCause) -> bool:
        """Whether the same failure happened before at the same step."""
        by_itself = not self.killed and not self.lost_peers
        return by_itself and (self.rank, self.reason, self.step) == (previous.rank, previous.reason, previous.step)

    def message(self, log_dir: Path) -> str:
        """The final error message: the rank's own output where there is any."""
        output = last_start_output(log_dir, self.rank) if self.has_stderr else self.relayed_message
        return output or f"{self.summary}; rerun the same command to resume"


def find_root_cause(
    ipc: IpcDir, statuses: Mapping[int, RankStatus], exit_codes: Mapping[int, int], exited_first: Set[int]
) -> FailureCause:
    """The root cause; `exited_first` are the ranks that had exited before the agent stopped the others."""
    step = max((status.step for status in statuses.values()), default=0)
    ends = []
    for rank, pid in ipc.rank_pids.items():
        status = statuses.get(rank)
        if status is None or status.exit_message is None:
            code = exit_codes.get(rank, -signal.SIGKILL)
            weight, cause = _cause_if_killed(rank, ipc.kill_reason(pid), code, rank in exited_first)
        else:
            weight, cause = _cause_if_reported(status, ipc.stop_requested)
        ends.append((weight, rank not in exited_first, status.exit_time if status else 0.0, rank, cause))
    if not ends:
        return FailureCause(0, "exited without a message", step=step)
    root_cause: FailureCause = min(ends, key=lambda end: end[:4])[-1]
    return replace(root_cause, step=step)


def _cause_if_killed(rank: int, kill_reason: str | None, code: int, on_its_own: bool) -> tuple[int, FailureCause]:
    """A rank without an exit message: killed, or exited before it could report."""
    blocked = kill_reason is not None and "is blocked" in kill_reason
    weight = KILLED if (on_its_own or kill_reason) and not blocked else KILLED_BY_SUPERVISOR
    return weight, FailureCause(rank, kill_reason or describe_exit(code), code or UNEXPECTED_ERROR, has_stderr=code > 0)


def _cause_if_reported(status: RankStatus, stop_requested: bool) -> tuple[int, FailureCause]:
    """A rank that reported why it exits; one that was stopped or relays another's error has low priority."""
    text = status.exit_message or ""
    lost = status.lost_peers and status.exit_code == UNEXPECTED_ERROR
    relayed = status.lost_peers and not lost
    cause = FailureCause(status.rank, f"ended ({text.splitlines()[0]})", status.exit_code, has_stderr=not relayed,
                         relayed_message=text, lost_peers=lost)  # fmt: skip
    if status.exit_code in NON_RETRYABLE_EXIT_CODES:
        return (RELAYED if relayed else REPORTED), cause
    if lost or (status.exit_code == Interrupted.exit_code and not stop_requested):
        return FOLLOWED, cause
    return CRASHED, cause


def describe_exit(code: int) -> str:
    """How a rank without an exit message ended."""
    if code >= 0:
        return f"exited with code {code} during start-up"
    hint = " (manually or by the kernel OOM killer)" if -code == signal.SIGKILL else ""
    return f"was killed by {exit_status(code)}{hint}"


FINAL_EXIT_CODES = {*NON_RETRYABLE_EXIT_CODES, Interrupted.exit_code}
"""Exit codes of a rank after which a restart would not help."""
SHUTDOWN_TIMEOUT = 600
"""Time for ranks to save after SIGTERM; the supervisor kills those that hang."""
MAX_SOCKET_DIR_LENGTH = 107 - len("/pymp-12345678/listener-12345678")
"""Longest temporary folder in which a socket's path stays within AF_UNIX's limit; batch jobs may have longer ones."""
SOCKET_DIR_FALLBACKS = ("/tmp", "/var/tmp", "/dev/shm")


def main() -> None:
    """Run one node of a launch."""
    config, ipc = LaunchConfig.from_json(sys.argv[1]), IpcDir(Path(sys.argv[2]))
    set_pdeathsig(int(sys.argv[3]))
    if config.forkserver_preload:
        multiprocessing.set_forkserver_preload(["modelwright.launch.pdeathsig", *config.forkserver_preload])
        with short_socket_dir():
            forkserver.ensure_running()  # it imports while this process does
    logging.disable(logging.CRITICAL)  # the rank's error is printed, not the launcher's
    code, message = _run(config, ipc)
    ipc.set_result(code, message)
    sys.exit(code)


@contextmanager
def short_socket_dir() -> Iterator[None]:
    """Put sockets into a folder with a short name if that of the temporary folder is too long for them."""
    default_dir = tempfile.gettempdir()
    if len(os.fsencode(default_dir)) > MAX_SOCKET_DIR_LENGTH:
        writable = (folder for folder in SOCKET_DIR_FALLBACKS if os.access(folder, os.W_OK | os.X_OK))
        tempfile.tempdir = next(writable, default_dir)
    try:
        yield
    finally:
        tempfile.tempdir = default_dir


def _run(config: LaunchConfig, ipc: IpcDir) -> tuple[int, str | None]:
    """Run the agent to completion: exit code, and an error message where no rank has written one."""
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousError

    try:
        admission = _join_nodes(config, ipc)
        agent = _create_agent(config, ipc, admission)
    except ModelwrightError as error:
        return error.exit_code, str(error)
    except (RendezvousError, RuntimeError) as error:
        endpoint = f"{config.master_addr}:{config.master_port}"
        reason = first_line(error.__cause__ or error)
        if config.node_rank == 0:
            return 2, f"port {config.master_port} cannot be bound here ({reason}); choose another with --master-port"
        return 2, f"cannot connect to node 0 at {endpoint} ({reason}); check that it is running and the port is open"
    closes = True
    try:
        result = agent.run()
    except SignalException:
        closes = not config.nnodes.elastic
        return Interrupted.exit_code, None
    except ModelwrightError as error:
        closes = not config.nnodes.elastic
        return error.exit_code, str(error)
    except RendezvousClosedError:
        return Interrupted.exit_code, "another node shut down the run; see its output"
    except RendezvousError as error:
        return Interrupted.exit_code, f"rendezvous failed after a restart ({error}); rerun the same command to resume"
    except RuntimeError as error:  # the store closed during a request
        reason = first_line(error)
        who = "another node" if config.node_rank == 0 else "node 0"
        return Interrupted.exit_code, f"{who} disconnected ({reason}); see its output"
    else:
        if not result.is_failed():
            return 0, None
        closes = not (config.nnodes.elastic and ipc.stop_requested)
        code = agent.cause.exit_code
        stopped = ipc.stop_requested and code not in FINAL_EXIT_CODES  # stopped, whatever its ranks exited with
        return Interrupted.exit_code if stopped else code, agent.cause.message(Path(config.log_dir))
    finally:
        if closes:
            agent.get_worker_group().spec.rdzv_handler.shutdown()


def _join_nodes(config: LaunchConfig, ipc: IpcDir) -> NodeAdmission | None:
    """Be admitted by node 0, if there are several nodes."""
    if config.nnodes.max_nodes == 1:
        return None
    admission = NodeAdmission(config, ipc)
    admission.join()
    return admission


def _create_agent(config: LaunchConfig, ipc: IpcDir, admission: NodeAdmission | None) -> Any:
    """The agent with its rendezvous handler: torch's LocalElasticAgent with our restart policy."""
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

    from modelwright.launch.agent import run_rank  # ranks unpickle it: this module runs as __main__

    env = {"MODELWRIGHT_HEARTBEAT_DIR": str(ipc.folder), "MODELWRIGHT_NNODES": str(config.nnodes)}
    spec = WorkerSpec(
        role="rank",
        local_world_size=config.nproc_per_node,
        rdzv_handler=create_rdzv_handler(config),  # type: ignore[arg-type]
        entrypoint=run_rank,
        args=(config.rank_args, config.log_dir, env),
        max_restarts=config.max_restarts,
        monitor_interval=0.2,
        local_addr=config.local_addr,
    )
    agent: Any = type("Agent", (RestartPolicyAgent, LocalElasticAgent), {})
    context = AgentContext(config, ipc, env, admission)
    start_method = "forkserver" if config.forkserver_preload else "spawn"
    return agent(spec, context, logs_specs=DefaultLogsSpecs(), start_method=start_method)


@dataclass(frozen=True)
class AgentContext:
    """What our agent needs besides torch's arguments."""

    config: LaunchConfig
    """The launch of this node."""
    ipc: IpcDir
    """Files shared with the supervisor."""
    env: dict[str, str]
    """Environment variables of its ranks."""
    admission: NodeAdmission | None
    """Connection to the other nodes."""


ElasticAgentBase: Any = object
"""Stand-in for torch's LocalElasticAgent, which `_create_agent` mixes in: this module loads without torch."""


class RestartPolicyAgent(ElasticAgentBase):  # type: ignore[misc]
    """Overrides of torch's agent: a restart id, the restart policy, and how ranks are stopped."""

    def __init__(self, spec: Any, context: AgentContext, **options: Any) -> None:
        super().__init__(spec, **options)
        self.config, self.ipc, self.env, self.admission = context.config, context.ipc, context.env, context.admission
        self.cause = FailureCause()

    def _rendezvous(self, worker_group: Any) -> None:
        super()._rendezvous(worker_group)
        store = worker_group.store
        if worker_group.group_rank == 0:
            store.set("modelwright/restart_id", uuid.uuid4().hex)
        self.env["MODELWRIGHT_RESTART_ID"] = store.get("modelwright/restart_id").decode()
        if self.admission:
            self.admission.set_members(worker_group.spec.rdzv_handler.node_ranks)

    def _initialize_workers(self, worker_group: Any) -> None:
        from torch.distributed.elastic.multiprocessing import SignalException

        if self.ipc.stop_requested:
            raise SignalException("stop requested between two starts", signal.SIGTERM)
        super()._initialize_workers(worker_group)

    def _start_workers(self, worker_group: Any) -> dict[int, Any]:
        self.ipc.clear()
        pids: dict[int, Any] = super()._start_workers(worker_group)
        self.ipc.set_rank_pids({worker.global_rank: pids[worker.local_rank] for worker in worker_group.workers})
        return pids

    def _stop_workers(self, worker_group: Any, **_: Any) -> None:
        self.ipc.mark_stopping()
        self._shutdown()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, **_: Any) -> None:
        if self._pcontext:  # torch's own timeout is 30 s, in some versions fixed
            self._pcontext.close(death_sig, SHUTDOWN_TIMEOUT)

    def _monitor_workers(self, worker_group: Any) -> Any:
        exited = {worker.global_rank for worker in worker_group.workers if has_exited(worker.id)}
        result = super()._monitor_workers(worker_group)  # where one has failed, this stops the others
        if result.state.name == "SUCCEEDED":
            self.ipc.mark_finished()
        elif result.is_failed():
            failed_codes = {rank: failure.exitcode for rank, failure in result.failures.items()}
            codes, statuses = self._exit_codes(worker_group) | failed_codes, read_rank_statuses(self.ipc.folder)
            self._apply_restart_policy(find_root_cause(self.ipc, statuses, codes, exited | failed_codes.keys()))
        return result

    def _exit_codes(self, worker_group: Any) -> dict[int, int]:
        """Exit code of every rank; the library reports one of them."""
        processes = getattr(getattr(self._pcontext, "_pc", None), "processes", ())
        pairs = zip(worker_group.workers, processes, strict=False)
        return {worker.global_rank: process.exitcode for worker, process in pairs if process.exitcode is not None}

    def _apply_restart_policy(self, cause: FailureCause) -> None:
        """Restart, unless the error is final or the same failure happened twice at the same step."""
        previous, self.cause = self.cause, cause
        budget = self._worker_group.spec.max_restarts
        leaves_others = self.config.nnodes.elastic and not self.ipc.stop_requested
        final = cause.exit_code in FINAL_EXIT_CODES and not (cause.exit_code == Interrupted.exit_code and leaves_others)
        if final or self.ipc.stop_requested or cause.repeats(previous):
            self._remaining_restarts = 0
        elif cause.step > previous.step:
            self._remaining_restarts = budget
        if self._remaining_restarts > 0:
            turn = budget - self._remaining_restarts + 1
            self.ipc.log(f"{cause.summary}; restarting from the last checkpoint ({turn} of {budget})")


if __name__ == "__main__":
    main()
