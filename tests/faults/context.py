"""One row of the scorecard: the fault that is injected, what is counted, and the goal; and what each row works with."""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from tests.faults.fork_server import ForkedProcess, ForkServer, RemoteCall, run_fingerprint

Value = TypeVar("Value")


class FaultSkipped(Exception):
    """This machine cannot inject the fault; the message says what it lacks."""


@dataclass(frozen=True)
class FaultResult:
    """The result of one fault."""

    figure: str
    """The result, for people."""
    met: bool
    """Whether the goal is reached."""
    numbers: dict[str, Any] = field(default_factory=dict)
    """The result, as numbers."""
    baseline: str | None = None
    """What a peer did in this very run, instead of published figures."""
    notes: tuple[str, ...] = ()
    """What went wrong, a line each, with what is needed to repeat it."""


@dataclass(frozen=True)
class FaultRow:
    """A fault that is injected into runs."""

    id: str
    """Its name in the table: R for reliability, S for security, and a number."""
    name: str
    """The fault."""
    injected: str
    """How it is injected on one machine."""
    goal: str
    """The result that is required."""
    baseline: str
    """What peers do, with the source of that."""
    run: Callable[[FaultContext], FaultResult]
    """Injects it and counts."""
    seconds: int
    """About how long that takes on two idle cores."""


class FaultContext:
    """What every fault gets: the fork server, folders, a tiny model, and one seed for all random numbers."""

    def __init__(self, folder: Path, seed: int, smoke: bool = False, fork_server: ForkServer | None = None) -> None:
        """Work in a folder; `smoke`: few trials; `extra_injections` (set later) go into every run of ours."""
        self.folder, self.seed, self.smoke = folder, seed, smoke
        self.run_peers = not smoke
        self.extra_injections: tuple[RemoteCall, ...] = ()
        self.cleanups: list[Callable[[], None]] = []
        self._fork_server, self._owns_server = fork_server, fork_server is None
        self._cache: dict[str, Any] = {}

    @property
    def fork_server(self) -> ForkServer:
        """The preloaded interpreter, started when it is first needed."""
        if self._fork_server is None:
            self._fork_server = ForkServer()
        return self._fork_server

    @property
    def model(self) -> Path:
        """A tiny Llama with a tokenizer; nobody writes into it."""
        return self.cached("model", self._make_model)

    def fresh_folder(self, name: str) -> Path:
        """An empty folder."""
        folder = self.folder / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder

    def rng(self, name: str) -> random.Random:
        """Random numbers of one fault: a function of the seed and its name, whatever else is run."""
        return random.Random(f"{self.seed}:{name}")

    def num_trials(self, full: int, smoke: int) -> int:
        """How often something is tried."""
        return smoke if self.smoke else full

    def time_limit(self, seconds: float) -> float:
        """How long something may take: the goal, or in a smoke test long enough for any machine."""
        return 120.0 if self.smoke else seconds

    def log(self, line: str) -> None:
        """Print progress."""
        print(line, file=sys.stderr, flush=True)

    def cached(self, name: str, make: Callable[[], Value]) -> Value:
        """Make something that several faults need, the first time it is needed."""
        if name not in self._cache:
            self._cache[name] = make()
        value: Value = self._cache[name]
        return value

    def new_recipe(self, name: str, **settings: Any) -> Path:
        """A recipe in a fresh folder; its run is FOLDER/run."""
        return self.recipe(self.fresh_folder(name), **settings)

    def recipe(self, folder: Path, held_out: int = 4, **settings: Any) -> Path:
        """A recipe in the folder that tunes the model; its run is folder/run."""
        folder.mkdir(parents=True, exist_ok=True)
        write_jsonl(folder / "rows.jsonl", questions(40))
        sections = {
            "name": "trial",
            "output_dir": str(folder / "run"),
            "model": {"model_name_or_path": str(self.model)},
            "data": {"train_file": "rows.jsonl", "test_size": held_out},
            "sft": {**SFT, **settings},
            "compare": {"prompts": ["What is 3 and 4, in tents?"], "max_new_tokens": 2},
        }
        return write_sections(folder / "recipe.yaml", sections)

    def start(
        self, recipe: Path, *options: str, first: Sequence[RemoteCall] = (), environ: Mapping[str, str] | None = None
    ) -> ForkedProcess:
        """Start `modelwright run` of a recipe."""
        calls = (*self.extra_injections, *first)
        return self.fork_server.start(["run", str(recipe), *options], recipe.parent, environ, calls)

    def run(self, recipe: Path, *options: str, first: Sequence[RemoteCall] = ()) -> tuple[int, str]:
        """Run a recipe to its end: exit code and output."""
        process = self.start(recipe, *options, first=first)
        return process.wait(), process.output

    def reference(self, **settings: Any) -> dict[str, Any]:
        """The fingerprint of a run with these settings into which no fault is injected."""
        return self.cached(f"reference {settings}", lambda: self._reference_run(settings))

    def close(self) -> None:
        """End the interpreters."""
        for cleanup in self.cleanups:
            cleanup()
        if self._fork_server is not None and self._owns_server:
            self._fork_server.close()

    def _reference_run(self, settings: dict[str, Any]) -> dict[str, Any]:
        recipe = self.new_recipe(f"reference-{len(self._cache)}", **settings)
        code, output = self.run(recipe)
        if code:
            raise RuntimeError(f"a run without any fault ends with {code}:\n{output}")
        return run_fingerprint(recipe.parent / "run")

    def _make_model(self) -> Path:
        """Made in a process of its own, so that this one stays without torch."""
        folder = self.fresh_folder("model")
        process = self.fork_server.fork(
            RemoteCall("tests.faults.context", "make_tiny_model", (str(folder),)), self.folder
        )
        if process.wait():
            raise RuntimeError(process.output)
        return folder


SFT = {
    "max_steps": 12, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "learning_rate": 1e-3,
    "max_length": 64, "precision": "fp32", "save_steps": 3, "eval_steps": 6,
}  # fmt: skip
"""The recipe's sft section by default."""


def write_sections(path: Path, sections: dict[str, Any]) -> Path:
    """Write a recipe, a section per line."""
    path.write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in sections.items()), encoding="utf-8")
    return path


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write rows as JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def questions(count: int) -> list[dict[str, str]]:
    """Rows with answers of many lengths, no two alike."""
    kinds = ("rope", "tent", "map", "fire", "knot", "boot", "stove")
    return [
        {
            "prompt": f"What is {number} and {number % 7}, in {kinds[number % 7]}s?",
            "completion": f"Sum: {number + number % 7}." + " Count again." * (number % 3),
        }
        for number in range(count)
    ]


def make_tiny_model(folder: str) -> None:
    """A Llama of two layers and width 64, with a tokenizer trained on the rows."""
    from benchmarks.workloads import save_small_model

    texts = [text for row in questions(200) for text in row.values()]
    save_small_model(Path(folder), texts, layers=2, width=64, vocab_size=400)


def inject(function: str, **kwargs: Any) -> RemoteCall:
    """A function of injections.py, called in the forked process before it starts."""
    return RemoteCall("tests.faults.injections", function, kwargs=kwargs)


def require_root(what: str) -> None:
    """Skip where this process is not root."""
    if os.geteuid() != 0:
        raise FaultSkipped(f"needs root: {what}")


def require_command(name: str) -> str:
    """The path of a command; skip where it is not installed."""
    path = shutil.which(name)
    if path is None:
        raise FaultSkipped(f"needs the command {name}")
    return path


def count_text(good: int, of: int, what: str) -> str:
    """`3 of 4 resumed`."""
    return f"{good} of {of} {what}"


def exit_codes(codes: Iterable[int]) -> str:
    """The different exit codes, in order."""
    return ", ".join(str(code) for code in sorted(set(codes))) or "none"
