"""A fork server for tests: one interpreter loads the libraries once and forks a real modelwright process per test.

    server = ForkServer()
    process = server.start(["run", "recipe.yaml"], folder)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL

`python -m tests.faults.fork_server` is that interpreter.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common import environment, free_port
from modelwright.runs.heartbeat import set_pdeathsig

TIMEOUT_SECONDS = 280.0
"""How long a forked process may take before it counts as hanging."""
PRELOAD = (
    *("peft", "transformers.models.llama.modeling_llama", "transformers.tokenization_utils_tokenizers"),
    "modelwright.stages.pipeline",
)
"""Modules imported before forking."""
GPU_DEVICES = "nvidia[0-9]*"
"""GPUs in /dev. Libraries initialise CUDA as they are imported, and a fork could not use it afterwards."""
POD_PYTHON = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
import pod_python
pod_python.serve(Path({folder!r}), {first!r})
"""
SLOW_STEPS = "from tests.faults.injections import slow_steps\nslow_steps(0.08)\n"
"""As `first` of a process: makes steps slow enough to be interrupted."""


def slow_after(step: int, before: float = 0.02, after: float = 3.0) -> str:
    """As `first` of a process: slow once a step is done, so that even a busy machine can interrupt it there."""
    return f"from tests.faults.injections import slow_steps\nslow_steps({after}, after={step}, before={before})\n"


def hold_after(step: int, path: str = "go") -> str:
    """As `first` of a process: holds it once a step is done until there is a file in its folder."""
    return f"from tests.faults.injections import hold_after_step\nhold_after_step({step}, {path!r})\n"


@dataclass(frozen=True)
class RemoteCall:
    """A function that a forked process calls, by name."""

    module: str
    """Where it is."""
    function: str
    """Its name."""
    args: tuple[Any, ...] = ()
    """Positional arguments."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments."""

    def __call__(self) -> object:
        """Call it here."""
        return getattr(importlib.import_module(self.module), self.function)(*self.args, **self.kwargs)


@dataclass
class ForkedProcess:
    """One process that was started."""

    server: ForkServer
    """Who started it."""
    pid: int
    """Its number."""
    log: Path
    """The file its output goes to."""

    def wait(self, seconds: float = TIMEOUT_SECONDS) -> int:
        """Its exit code, or the negative number of the signal that ended it; one that hangs is killed and reported."""
        answer = self.server.request({"wait": self.pid, "seconds": seconds})
        if answer["hung"]:
            raise TimeoutError(f"process {self.pid} did not end within {seconds:.0f} s:\n{self.output[-2000:]}")
        return int(answer["code"])

    def kill(self) -> bool:
        """SIGKILL; whether it was still running."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        return self.wait() == -signal.SIGKILL

    @property
    def output(self) -> str:
        """Everything it printed, on both streams."""
        return self.log.read_text(encoding="utf-8", errors="replace")


class ForkServer:
    """The preloaded interpreter."""

    def __init__(self, preload: Sequence[str] = PRELOAD) -> None:
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.fork_server", *preload],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=environment({"TOKENIZERS_PARALLELISM": "false"}),
        )  # fmt: skip
        self._count = 0
        assert self._server.stdout is not None
        assert json.loads(self._server.stdout.readline() or '{"ready": false}')["ready"]

    def request(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request to the preloaded interpreter and wait for its answer."""
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.write(json.dumps(message) + "\n")
        self._server.stdin.flush()
        answer: dict[str, Any] = json.loads(self._server.stdout.readline())
        return answer

    def fork(
        self,
        call: RemoteCall,
        folder: Path,
        environ: Mapping[str, str] | None = None,
        first: str | Sequence[RemoteCall] = (),
    ) -> ForkedProcess:
        """Start a process that calls a function; `first` (calls or Python source) runs before it, to inject faults."""
        self._count += 1
        log = folder / f"trial-{self._count}.log"
        if isinstance(first, str) and first:
            code = folder / f"first-{self._count}.py"
            code.write_text(first, encoding="utf-8")
            first = [RemoteCall("runpy", "run_path", (str(code),))]
        calls = [asdict(each) for each in (*first, call)]
        message = {"calls": calls, "environ": dict(environ or {}), "log": str(log), "folder": str(folder)}
        return ForkedProcess(self, int(self.request(message)["pid"]), log)

    def start(
        self, arguments: Sequence[str], folder: Path, environ: Mapping[str, str] | None = None, first: Any = ()
    ) -> ForkedProcess:
        """Start `modelwright ARGUMENTS`."""
        call = RemoteCall("modelwright.cli.main", "main", ([str(each) for each in arguments],))
        return self.fork(call, folder, environ, first)

    def run(
        self, arguments: Sequence[str], folder: Path, environ: Mapping[str, str] | None = None, first: Any = ()
    ) -> tuple[int, str]:
        """Start and wait: exit code and output."""
        process = self.start(arguments, folder, environ, first)
        return process.wait(), process.output

    def run_ranks(self, arguments: Sequence[str], folder: Path, size: int, first: Any = ()) -> list[tuple[int, str]]:
        """Start one process per rank, as torchrun would, and wait for all."""
        ranks = self.start_ranks(arguments, folder, size, first)
        return [(process.wait(), process.output) for process in ranks]

    def start_ranks(self, arguments: Sequence[str], folder: Path, size: int, first: Any = ()) -> list[ForkedProcess]:
        """Start one process per rank with the standard variables."""
        common = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        return [
            self.start(arguments, folder, {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}, first)
            for rank in range(size)
        ]

    def serve_pods(self, folder: Path, first: str = "") -> None:
        """Have the `python` of the pods that mount this folder fork from here; see tests/pod_python.py."""
        code = folder / "pod_python.py"
        tests = str(Path(__file__).parents[1])
        code.write_text(POD_PYTHON.format(tests=tests, folder=str(folder), first=first), encoding="utf-8")
        process = self.fork(RemoteCall("runpy", "run_path", (str(code),)), folder)
        deadline = time.monotonic() + 120
        while not process.log.exists() or "open" not in process.output:
            assert time.monotonic() < deadline, process.output
            time.sleep(0.05)

    def close(self) -> None:
        """End the preloaded interpreter."""
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait()


def steps_of(run: Path, stage: str | None = None) -> dict[int, dict[str, Any]]:
    """The last record of each step in a run's journal: a step that was repeated counts in its last form."""
    return {record["step"]: record for record in events_of(run, "step") if stage in (None, record["stage"])}


def events_of(run: Path, event: str) -> list[dict[str, Any]]:
    """All journal records of one kind; none where there is no journal yet."""
    from modelwright.runs import journal

    path = run / "journal.jsonl"
    return [record for record in journal.read(path) if record["event"] == event] if path.exists() else []


def run_fingerprint(run: Path, stage: str = "sft") -> dict[str, Any]:
    """What two runs must have in common to be the same run: loss, data and gradient of each step, and the weights."""
    result = json.loads((run / "stages" / stage / "result.json").read_text(encoding="utf-8"))
    done = steps_of(run, stage).items()
    steps = {step: (r["loss"], r["batch_hash"], r["grad_norm"], r["learning_rate"]) for step, r in done}
    metrics = {key: value for key, value in result["metrics"].items() if key != "seconds"}
    return {"steps": steps, "files": result["files"], "metrics": metrics}


def wait_for_step(run: Path, step: int) -> None:
    """Wait until the journal of a run has a step."""
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        if max(steps_of(run), default=0) >= step:
            return
        time.sleep(0.01)
    raise AssertionError(f"{run} never reached step {step}")


def _serve(preload: Sequence[str]) -> None:
    set_pdeathsig()
    for name in () if any(Path("/dev").glob(GPU_DEVICES)) else preload:
        importlib.import_module(name)
    torch = sys.modules.get("torch")
    assert torch is None or torch.get_num_threads() == 1, "a pool of threads does not survive a fork"
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        message = json.loads(line)
        if "wait" in message:
            print(json.dumps(_wait(message["wait"], message["seconds"])), flush=True)
            continue
        pid = os.fork()
        if pid == 0:
            _run_child(message)
        print(json.dumps({"pid": pid}), flush=True)


def _wait(pid: int, seconds: float) -> dict[str, Any]:
    """Wait for a child; one that takes too long is killed."""
    deadline = time.monotonic() + seconds
    hung = False
    while True:
        child, status = os.waitpid(pid, 0 if hung else os.WNOHANG)
        if child:
            return {"code": os.waitstatus_to_exitcode(status), "hung": hung}
        if time.monotonic() > deadline:
            hung = True
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)


def _run_child(message: dict[str, Any]) -> None:
    """In the child: do the calls in its folder, then exit."""
    with exit_after():
        set_pdeathsig()
        os.setsid()
        out = os.open(message["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.chdir(message["folder"])
        os.environ.update(message["environ"])
        for call in message["calls"]:
            RemoteCall(**call)()


@contextmanager
def exit_after() -> Iterator[None]:
    """Exit the forked process after the block, with the exit code an interpreter would have."""
    code: object = 1
    try:
        yield
        code = 0
    except SystemExit as stop:
        code = stop.code
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 0 if code is None else 1)


if __name__ == "__main__":
    _serve(sys.argv[1:])
