"""Real modelwright processes in a second each: one interpreter loads the libraries once and forks for every trial.

    rig = Rig()
    trial = rig.start(["run", "recipe.yaml"], folder)
    os.kill(trial.pid, signal.SIGKILL)
    assert trial.wait() == -signal.SIGKILL

`python -m tests.faults.rig` is that interpreter.
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

PATIENCE_SECONDS = 280.0
"""How long a trial may take before it counts as hanging."""
TRAINER = (
    *("peft", "transformers.models.llama.modeling_llama", "transformers.tokenization_utils_tokenizers"),
    "modelwright.stages.pipeline",
)
"""What is loaded before trials are forked."""
CARDS = "nvidia[0-9]*"
"""What GPUs are called in /dev. Libraries look at them as they are loaded, and then a fork could not use them."""


@dataclass(frozen=True)
class Call:
    """A function that a trial calls, by name, since it lives in another process."""

    module: str
    """Where it is."""
    function: str
    """Its name."""
    words: tuple[Any, ...] = ()
    """What it is handed by place."""
    named: dict[str, Any] = field(default_factory=dict)
    """What it is handed by name."""

    def __call__(self) -> object:
        """Call it here."""
        return getattr(importlib.import_module(self.module), self.function)(*self.words, **self.named)


@dataclass
class Trial:
    """One process that was started."""

    rig: Rig
    """Who started it."""
    pid: int
    """Its number."""
    log: Path
    """What it prints goes here."""

    def wait(self, seconds: float = PATIENCE_SECONDS) -> int:
        """Its exit code, or the negative number of the signal that ended it; one that hangs is ended and told."""
        answer = self.rig.ask({"wait": self.pid, "seconds": seconds})
        if answer["hung"]:
            raise TimeoutError(f"process {self.pid} did not end within {seconds:.0f} s:\n{self.output[-2000:]}")
        return int(answer["code"])

    def kill(self) -> bool:
        """End it at once; whether it was still there to be ended."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        return self.wait() == -signal.SIGKILL

    @property
    def output(self) -> str:
        """Everything it printed, on both streams."""
        return self.log.read_text(encoding="utf-8", errors="replace")


class Rig:
    """The preloaded interpreter."""

    def __init__(self, preload: Sequence[str] = TRAINER) -> None:
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.rig", *preload],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment({"TOKENIZERS_PARALLELISM": "false"}),
            text=True,
        )
        self._trials = 0
        assert self._server.stdout is not None
        assert json.loads(self._server.stdout.readline() or '{"ready": false}')["ready"]

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request to the preloaded interpreter and wait for its answer."""
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        answer: dict[str, Any] = json.loads(self._server.stdout.readline())
        return answer

    def fork(
        self, call: Call, folder: Path, environ: Mapping[str, str] | None = None, first: Sequence[Call] = ()
    ) -> Trial:
        """Start a process that calls a function; `first` is called before it, to inject a fault."""
        self._trials += 1
        log = folder / f"trial-{self._trials}.log"
        request = {
            "calls": [asdict(each) for each in (*first, call)],
            "environ": dict(environ or {}),
            "log": str(log),
            "folder": str(folder),
        }
        return Trial(self, int(self.ask(request)["pid"]), log)

    def start(
        self, arguments: Sequence[str], folder: Path, environ: Mapping[str, str] | None = None, first: Any = ()
    ) -> Trial:
        """Start `modelwright ARGUMENTS`."""
        words = [str(each) for each in arguments]
        return self.fork(Call("modelwright.cli.main", "main", (words,)), folder, environ, first)

    def run(
        self, arguments: Sequence[str], folder: Path, environ: Mapping[str, str] | None = None, first: Any = ()
    ) -> tuple[int, str]:
        """Start and wait: exit code and output."""
        trial = self.start(arguments, folder, environ, first)
        return trial.wait(), trial.output

    def run_ranks(self, arguments: Sequence[str], folder: Path, size: int, first: Any = ()) -> list[tuple[int, str]]:
        """Start one process per rank, as torchrun would, and wait for all."""
        ranks = self.start_ranks(arguments, folder, size, first)
        return [(trial.wait(), trial.output) for trial in ranks]

    def start_ranks(self, arguments: Sequence[str], folder: Path, size: int, first: Any = ()) -> list[Trial]:
        """Start one process per rank with the standard variables."""
        common = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        return [
            self.start(arguments, folder, {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}, first)
            for rank in range(size)
        ]

    def close(self) -> None:
        """Let the preloaded interpreter go."""
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait()


def steps_of(run: Path, stage: str | None = None) -> dict[int, dict[str, Any]]:
    """The last record of each step in a run's journal: what was redone counts in its last form."""
    return {record["step"]: record for record in told(run, "step") if stage in (None, record["stage"])}


def told(run: Path, event: str) -> list[dict[str, Any]]:
    """All journal records of one kind; none where there is no journal yet."""
    from modelwright.runs import journal

    path = run / "journal.jsonl"
    return [record for record in journal.read(path) if record["event"] == event] if path.exists() else []


def trace(run: Path, stage: str = "sft") -> dict[str, Any]:
    """What two runs must have in common to be the same run: loss, data and gradient of each step, and the weights."""
    result = json.loads((run / "stages" / stage / "result.json").read_text(encoding="utf-8"))
    done = steps_of(run, stage).items()
    steps = {step: (r["loss"], r["batch_hash"], r["grad_norm"], r["learning_rate"]) for step, r in done}
    metrics = {key: value for key, value in result["metrics"].items() if key != "seconds"}
    return {"steps": steps, "files": result["files"], "metrics": metrics}


def wait_for_step(run: Path, step: int) -> None:
    """Wait until a run has told of a step."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if max(steps_of(run), default=0) >= step:
            return
        time.sleep(0.01)
    raise AssertionError(f"{run} never reached step {step}")


def _serve(preload: Sequence[str]) -> None:
    set_pdeathsig()
    for name in () if any(Path("/dev").glob(CARDS)) else preload:
        importlib.import_module(name)
    torch = sys.modules.get("torch")
    assert torch is None or torch.get_num_threads() == 1, "a pool of threads does not survive a fork"
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            print(json.dumps(_ended(request["wait"], request["seconds"])), flush=True)
            continue
        pid = os.fork()
        if pid == 0:
            _become(request)
        print(json.dumps({"pid": pid}), flush=True)


def _ended(pid: int, seconds: float) -> dict[str, Any]:
    """Wait for a child; one that takes too long is ended."""
    deadline = time.monotonic() + seconds
    hung = False
    while True:
        found, status = os.waitpid(pid, 0 if hung else os.WNOHANG)
        if found:
            return {"code": os.waitstatus_to_exitcode(status), "hung": hung}
        if time.monotonic() > deadline:
            hung = True
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)


def _become(request: dict[str, Any]) -> None:
    """In the child: do the calls in its folder, and never come back."""
    with ending():
        set_pdeathsig()
        os.setsid()
        out = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.chdir(request["folder"])
        os.environ.update(request["environ"])
        for call in request["calls"]:
            Call(**call)()


@contextmanager
def ending() -> Iterator[None]:
    """What is done here is the last of a fork: it ends as an interpreter would, and never comes back."""
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
