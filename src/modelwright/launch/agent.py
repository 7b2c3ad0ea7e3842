"""Run torch's elastic agent for one node; its ranks are forked from an interpreter that has everything loaded.

`python -m modelwright.launch.agent WISH FOLDER PARENT`, started by the supervisor. The agent meets the other nodes,
starts the ranks and starts them again; this file decides what is worth a restart, and says so once.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from modelwright.errors import Interrupted, ModelwrightError, first_line
from modelwright.launch import rank as ranks
from modelwright.launch.causes import LETTERS, Cause, find_cause
from modelwright.launch.muster import Muster
from modelwright.launch.rendezvous import meet
from modelwright.launch.signs import Signs
from modelwright.launch.wish import Wish
from modelwright.runs.beat import die_with_parent, is_gone, read_beats

FINAL = {*LETTERS, Interrupted.exit_code}
"""What a rank leaves with when starting it again would change nothing."""
GRACE_SECONDS = 600
"""How long ranks that are asked to stop may save; the supervisor sees to those that hang."""
LONGEST_FOLDER = 107 - len("/pymp-12345678/listener-12345678")
"""Characters of a temporary folder in which a socket can have its name; the folders of batch jobs may have more."""
SHORT_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")


def main() -> None:
    """Be one node of a launch."""
    wish, signs = Wish.from_text(sys.argv[1]), Signs(Path(sys.argv[2]))
    die_with_parent(int(sys.argv[3]))
    if wish.preload:
        multiprocessing.set_forkserver_preload(["modelwright.launch.mortal", *wish.preload])
        with short_names():
            forkserver.ensure_running()  # it imports while this process does
    logging.disable(logging.CRITICAL)  # the child's error is told, not the launcher's
    code, letter = _run(wish, signs)
    signs.end(code, letter)
    sys.exit(code)


@contextmanager
def short_names() -> Iterator[None]:
    """Put sockets elsewhere where the temporary folder's name is too long for them; all else stays in it."""
    usual = tempfile.gettempdir()
    if len(os.fsencode(usual)) > LONGEST_FOLDER:
        tempfile.tempdir = next((folder for folder in SHORT_FOLDERS if os.access(folder, os.W_OK | os.X_OK)), usual)
    try:
        yield
    finally:
        tempfile.tempdir = usual


def _run(wish: Wish, signs: Signs) -> tuple[int, str | None]:
    """Run the agent to its end: exit code, and a letter where no rank has written one."""
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousError

    try:
        muster = _muster(wish, signs)
        agent = _build(wish, signs, muster)
    except ModelwrightError as error:
        return error.exit_code, str(error)
    except (RendezvousError, RuntimeError) as error:
        where = f"{wish.address}:{wish.port}"
        reason = first_line(error.__cause__ or error)
        if wish.node == 0:
            return 2, f"port {wish.port} cannot be opened here ({reason}); choose another with --port"
        return 2, f"the main node does not answer at {where} ({reason}); is it started, and does the port get through?"
    closes = True
    try:
        result = agent.run()
    except SignalException:
        closes = not wish.nodes.elastic
        return Interrupted.exit_code, None
    except ModelwrightError as error:
        closes = not wish.nodes.elastic
        return error.exit_code, str(error)
    except RendezvousClosedError:
        return (
            Interrupted.exit_code,
            "another node has ended the run; its output says why",
        )
    except RendezvousError as error:
        return Interrupted.exit_code, f"the nodes did not meet again ({error}); the same command continues"
    except RuntimeError as error:  # the store went away while something was asked of it
        reason = first_line(error)
        who = "another node" if wish.node == 0 else "the main node"
        return Interrupted.exit_code, f"{who} has gone ({reason}); its output says why"
    else:
        if not result.is_failed():
            return 0, None
        closes = not (wish.nodes.elastic and signs.asked_to_stop)
        code = agent.cause.exit_code
        stopped = signs.asked_to_stop and code not in FINAL  # it was stopped, however its ranks took it
        return Interrupted.exit_code if stopped else code, agent.cause.letter(Path(wish.logs))
    finally:
        if closes:
            agent.get_worker_group().spec.rdzv_handler.shutdown()


def _muster(wish: Wish, signs: Signs) -> Muster | None:
    """Meet the main node, where there are several."""
    if wish.nodes.most == 1:
        return None
    muster = Muster(wish, signs)
    muster.join()
    return muster


def _build(wish: Wish, signs: Signs, muster: Muster | None) -> Any:
    """The agent, joined to the meeting point; an elastic agent of torch's own with a say about restarts."""
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

    variables = {"MODELWRIGHT_BEATS": str(signs.folder), "MODELWRIGHT_NODES": str(wish.nodes)}
    spec = WorkerSpec(
        role="rank",
        local_world_size=wish.per_node,
        rdzv_handler=meet(wish),  # type: ignore[arg-type]
        entrypoint=ranks.be_rank,
        args=(wish.command, wish.logs, variables),
        max_restarts=wish.max_restarts,
        monitor_interval=0.2,
        local_addr=wish.local_address,
    )
    agent: Any = type("Agent", (Ours, LocalElasticAgent), {})
    duties = Duties(wish, signs, variables, muster)
    start = "forkserver" if wish.preload else "spawn"
    return agent(spec, duties, logs_specs=DefaultLogsSpecs(), start_method=start)


@dataclass(frozen=True)
class Duties:
    """What our agent has to do besides torch's."""

    wish: Wish
    """What it was started for."""
    signs: Signs
    """How it talks to the supervisor."""
    variables: dict[str, str]
    """What its ranks find in their environment."""
    muster: Muster | None
    """How it talks to the other nodes."""


Base: Any = object
"""Stands for torch's LocalElasticAgent, which `_build` puts in its place: this module loads without torch."""


class Ours(Base):  # type: ignore[misc]
    """What torch's agent does otherwise here: names each attempt, judges what is worth a restart, and how ranks go."""

    def __init__(self, spec: Any, duties: Duties, **options: Any) -> None:
        super().__init__(spec, **options)
        self.wish, self.signs, self.variables, self.muster = (
            duties.wish, duties.signs, duties.variables, duties.muster,
        )  # fmt: skip
        self.cause = Cause()

    def _rendezvous(self, worker_group: Any) -> None:
        super()._rendezvous(worker_group)
        store = worker_group.store
        if worker_group.group_rank == 0:
            store.set("modelwright/attempt", uuid.uuid4().hex)
        self.variables["MODELWRIGHT_ATTEMPT"] = store.get("modelwright/attempt").decode()
        if self.muster:
            self.muster.watch(worker_group.spec.rdzv_handler.members)

    def _initialize_workers(self, worker_group: Any) -> None:
        from torch.distributed.elastic.multiprocessing import SignalException

        if self.signs.asked_to_stop:
            raise SignalException("asked to stop between two starts", signal.SIGTERM)
        super()._initialize_workers(worker_group)

    def _start_workers(self, worker_group: Any) -> dict[int, Any]:
        self.signs.clear()
        pids: dict[int, Any] = super()._start_workers(worker_group)
        self.signs.started({worker.global_rank: pids[worker.local_rank] for worker in worker_group.workers})
        return pids

    def _stop_workers(self, worker_group: Any, **_: Any) -> None:
        self.signs.stopping()
        self._shutdown()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, **_: Any) -> None:
        if self._pcontext:  # torch gives ranks 30 s, one version by an argument, another by none
            self._pcontext.close(death_sig, GRACE_SECONDS)

    def _monitor_workers(self, worker_group: Any) -> Any:
        gone = {worker.global_rank for worker in worker_group.workers if is_gone(worker.id)}
        result = super()._monitor_workers(worker_group)  # where one has failed, this asks the rest to go
        if result.state.name == "SUCCEEDED":
            self.signs.finished()
        elif result.is_failed():
            told = {number: failure.exitcode for number, failure in result.failures.items()}
            codes, beats = self._exit_codes(worker_group) | told, read_beats(self.signs.folder)
            self._decide(find_cause(self.signs, beats, codes, gone | told.keys()))
        return result

    def _exit_codes(self, worker_group: Any) -> dict[int, int]:
        """What every rank left with; the library tells one of them."""
        processes = getattr(getattr(self._pcontext, "_pc", None), "processes", ())
        pairs = zip(worker_group.workers, processes, strict=False)
        return {worker.global_rank: each.exitcode for worker, each in pairs if each.exitcode is not None}

    def _decide(self, cause: Cause) -> None:
        """Start again, or not: not after a letter, not when the same thing happens twice in the same place."""
        before, self.cause = self.cause, cause
        budget = self._worker_group.spec.max_restarts
        leaves_others = self.wish.nodes.elastic and not self.signs.asked_to_stop
        final = cause.exit_code in FINAL and not (cause.exit_code == Interrupted.exit_code and leaves_others)
        if final or self.signs.asked_to_stop or cause.repeats(before):
            self._remaining_restarts = 0
        elif cause.step > before.step:
            self._remaining_restarts = budget
        if self._remaining_restarts > 0:
            turn = budget - self._remaining_restarts + 1
            self.signs.tell(f"{cause.told}; starting again from the last checkpoint ({turn} of {budget})")


if __name__ == "__main__":
    main()
