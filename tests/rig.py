"""Real modelwright processes in a second each: one interpreter loads the libraries once and forks for every trial.

rig = Rig()
trial = rig.start(["run", "recipe.yaml"], folder)
os.kill(trial.pid, signal.SIGKILL)
assert trial.wait() == -signal.SIGKILL
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SLOW = """
import time
from modelwright.engine.loop import Engine
quick = Engine._step
def slow(self, stop_asked):
    time.sleep(0.08)
    return quick(self, stop_asked)
Engine._step = slow
"""
"""Put first in a trial, this makes steps slow enough to be met on the way."""
SINGLE_THREAD = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}


@dataclass
class Trial:
    """One process that was started."""

    rig: Rig
    pid: int
    log: Path

    def wait(self) -> int:
        """Its exit code, or the negative number of the signal that ended it."""
        return int(self.rig.ask({"wait": self.pid})["code"])

    @property
    def output(self) -> str:
        """Everything it printed, on both streams."""
        return self.log.read_text(encoding="utf-8", errors="replace")


class Rig:
    """The preloaded interpreter."""

    def __init__(self) -> None:
        self._server = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **SINGLE_THREAD},
            text=True,
        )
        self._trials = 0
        assert self._server.stdout is not None
        assert json.loads(self._server.stdout.readline())["ready"]

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request to the preloaded interpreter and wait for its answer."""
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        answer: dict[str, Any] = json.loads(self._server.stdout.readline())
        return answer

    def start(
        self, arguments: Sequence[str], folder: Path, environ: Mapping[str, str] | None = None, first: str = ""
    ) -> Trial:
        """Start `modelwright ARGUMENTS`; `first` is Python that the process runs before, to inject a fault."""
        self._trials += 1
        log = folder / f"trial-{self._trials}.log"
        request = {
            "start": [str(a) for a in arguments],
            "environ": dict(environ or {}),
            "first": first,
            "log": str(log),
        }
        return Trial(self, int(self.ask({**request, "folder": str(folder)})["pid"]), log)

    def run(
        self, arguments: Sequence[str], folder: Path, environ: Mapping[str, str] | None = None, first: str = ""
    ) -> tuple[int, str]:
        """Start and wait: exit code and output."""
        trial = self.start(arguments, folder, environ, first)
        return trial.wait(), trial.output

    def run_ranks(
        self,
        arguments: Sequence[str],
        folder: Path,
        size: int,
        first: str = "",
    ) -> list[tuple[int, str]]:
        """Start one process per rank, as torchrun would, and wait for all."""
        ranks = self.start_ranks(arguments, folder, size, first)
        return [(trial.wait(), trial.output) for trial in ranks]

    def start_ranks(
        self,
        arguments: Sequence[str],
        folder: Path,
        size: int,
        first: str = "",
    ) -> list[Trial]:
        """Start one process per rank with the standard variables."""
        common = {
            "WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
        }
        return [
            self.start(arguments, folder, {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}, first)
            for rank in range(size)
        ]

    def close(self) -> None:
        """Let the preloaded interpreter go."""
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait()


def free_port() -> int:
    """A port nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def steps_of(run: Path, stage: str | None = None) -> dict[int, dict[str, Any]]:
    """The last record of each step in a run's journal: what was redone counts in its last form."""
    return {record["step"]: record for record in told(run, "step") if stage in (None, record["stage"])}


def told(run: Path, event: str) -> list[dict[str, Any]]:
    """All journal records of one kind."""
    records = [json.loads(line) for line in (run / "journal.jsonl").read_text().splitlines() if line.strip()]
    return [record for record in records if record["event"] == event]


def trace(run: Path, stage: str = "sft") -> dict[str, Any]:
    """What two runs must have in common to be the same run: loss, data and gradient of each step, and the weights."""
    result = json.loads((run / "stages" / stage / "result.json").read_text())
    done = steps_of(run, stage).items()
    steps = {step: (r["loss"], r["batch"], r["grad_norm"], r["learning_rate"]) for step, r in done}
    metrics = {key: value for key, value in result["metrics"].items() if key != "seconds"}
    return {"steps": steps, "files": result["files"], "metrics": metrics}


def wait_for_step(run: Path, step: int) -> None:
    """Wait until a run has told of a step."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if (run / "journal.jsonl").exists() and max(steps_of(run), default=0) >= step:
            return
        time.sleep(0.01)
    raise AssertionError(f"{run} never reached step {step}")


def _serve() -> None:
    import peft  # noqa: F401
    import torch
    import transformers.models.llama.modeling_llama
    import transformers.tokenization_utils_tokenizers  # noqa: F401

    import modelwright.stages.pipeline  # noqa: F401

    assert torch.get_num_threads() == 1, "a pool of threads does not survive a fork"
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            _, status = os.waitpid(request["wait"], 0)
            print(json.dumps({"code": os.waitstatus_to_exitcode(status)}), flush=True)
            continue
        pid = os.fork()
        if pid == 0:
            _become(request)
        print(json.dumps({"pid": pid}), flush=True)


def _become(request: dict[str, Any]) -> None:
    """In the child: be `modelwright ARGUMENTS` in its folder, and never come back."""
    code: object = 1
    try:
        os.setsid()
        out = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.chdir(request["folder"])
        os.environ.update(request["environ"])
        exec(request["first"], {"__name__": "first"})
        from modelwright.cli.main import main

        main([*request["start"], *(["--debug"] if os.environ.get("RIG_DEBUG") else [])])
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
    _serve()
