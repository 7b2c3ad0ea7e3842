"""One line of the scorecard: what is done to a run, what is counted, and what would be good enough."""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from tests.faults.rig import Call, Rig, trace

Found = TypeVar("Found")
INJECTIONS = "tests.faults.injections"


class Skipped(Exception):
    """This machine cannot inject the fault; the letter says what it lacks."""


@dataclass(frozen=True)
class Outcome:
    """What became of a fault."""

    figure: str
    """What was found, for people."""
    met: bool
    """Whether the goal is reached."""
    numbers: dict[str, Any] = field(default_factory=dict)
    """What was found, as numbers."""
    baseline: str | None = None
    """What a peer did in this very run, in place of what was published of it."""
    notes: tuple[str, ...] = ()
    """What went wrong, a line each, with what is needed to repeat it."""


@dataclass(frozen=True)
class Fault:
    """Something that happens to runs."""

    id: str
    """Its name in the table: R for reliability, S for security, and a number."""
    name: str
    """What is done."""
    injected: str
    """How it is done on one machine."""
    goal: str
    """What would be good enough."""
    baseline: str
    """What peers do, with the source of that."""
    do: Callable[[Bench], Outcome]
    """Does it and counts."""
    seconds: int
    """About how long that takes on two quiet cores."""


class Bench:
    """What every fault is handed: the rig, a place to work, a tiny model, and one seed for everything drawn."""

    def __init__(self, folder: Path, seed: int, smoke: bool = False, rig: Rig | None = None) -> None:
        """Work in a folder; `smoke` asks for few trials, `worse` injections make every run of ours a bad example."""
        self.folder, self.seed, self.smoke = folder, seed, smoke
        self.peers = not smoke
        self.chosen: frozenset[str] = frozenset()
        self.worse: tuple[Call, ...] = ()
        self.at_end: list[Callable[[], None]] = []
        self._rig, self._owns_rig = rig, rig is None
        self._known: dict[str, Any] = {}

    @property
    def rig(self) -> Rig:
        """The preloaded interpreter, started when it is first needed."""
        if self._rig is None:
            self._rig = Rig()
        return self._rig

    @property
    def model(self) -> Path:
        """A tiny Llama with a tokenizer; nobody writes into it."""
        return self.once("model", self._make_model)

    def place(self, name: str) -> Path:
        """A fresh folder."""
        made = self.folder / name
        shutil.rmtree(made, ignore_errors=True)
        made.mkdir(parents=True)
        return made

    def draw(self, name: str) -> random.Random:
        """Random numbers of one fault: a function of the seed and its name, whatever else is run."""
        return random.Random(f"{self.seed}:{name}")

    def trials(self, full: int, smoke: int) -> int:
        """How often something is tried."""
        return smoke if self.smoke else full

    def limit(self, seconds: float) -> float:
        """How long something may take: as the goal says, or long enough for any machine where few trials are asked."""
        return 120.0 if self.smoke else seconds

    def say(self, line: str) -> None:
        """Tell how far it is."""
        print(line, file=sys.stderr, flush=True)

    def once(self, name: str, make: Callable[[], Found]) -> Found:
        """Make something that several faults need, the first time it is asked for."""
        if name not in self._known:
            self._known[name] = make()
        found: Found = self._known[name]
        return found

    def recipe(self, folder: Path, held_out: int = 4, **settings: Any) -> Path:
        """A recipe in the folder that tunes the model; its run is folder/run."""
        folder.mkdir(parents=True, exist_ok=True)
        rows = [json.dumps(row) for row in questions(40)]
        (folder / "rows.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
        sections: dict[str, Any] = {
            "name": "trial",
            "output_dir": str(folder / "run"),
            "model": {"model_name_or_path": str(self.model)},
            "data": {"train_file": "rows.jsonl", "test_size": held_out},
            "sft": {**SFT, **settings},
            "compare": {"prompts": ["What is 3 and 4, in tents?"], "max_new_tokens": 2},
        }
        path = folder / "recipe.yaml"
        path.write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in sections.items()), encoding="utf-8")
        return path

    def run(self, recipe: Path, *more: str, first: Sequence[Call] = ()) -> tuple[int, str]:
        """Run a recipe to its end: exit code and output."""
        return self.rig.run(["run", str(recipe), *more], recipe.parent, first=(*self.worse, *first))

    def reference(self, **settings: Any) -> dict[str, Any]:
        """What a run with these settings comes to when nothing happens to it."""
        return self.once(f"reference {settings}", lambda: self._undisturbed(settings))

    def close(self) -> None:
        """Let the interpreters go."""
        for end in self.at_end:
            end()
        if self._rig is not None and self._owns_rig:
            self._rig.close()

    def _undisturbed(self, settings: dict[str, Any]) -> dict[str, Any]:
        folder = self.place(f"reference-{len(self._known)}")
        code, output = self.run(self.recipe(folder, **settings))
        if code:
            raise RuntimeError(f"a run to which nothing happens ends with {code}:\n{output}")
        return trace(folder / "run")

    def _make_model(self) -> Path:
        """Made in a process of its own, so that this one stays without torch."""
        folder = self.place("model")
        made = self.rig.fork(Call("tests.faults.fault", "make_tiny_model", (str(folder),)), self.folder)
        if made.wait():
            raise RuntimeError(made.output)
        return folder


SFT = {
    "max_steps": 12, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "learning_rate": 1e-3,
    "max_length": 64, "precision": "fp32", "save_steps": 3, "eval_steps": 6,
}  # fmt: skip
"""What the recipe's sft section says unless told otherwise."""


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
    """A Llama of two layers and width 64, with a tokenizer learnt from the rows."""
    from benchmarks.workloads import make_model

    texts = [text for row in questions(200) for text in row.values()]
    make_model(Path(folder), texts, layers=2, width=64, words=400)


def inject(function: str, **named: Any) -> Call:
    """One of the faults that a trial carries in itself."""
    return Call(INJECTIONS, function, named=named)


def need_root(what: str) -> None:
    """Skip where this process is not root."""
    if os.geteuid() != 0:
        raise Skipped(f"needs root: {what}")


def need_command(name: str) -> str:
    """The path of a command; skip where it is not installed."""
    found = shutil.which(name)
    if found is None:
        raise Skipped(f"needs the command {name}")
    return found


def counted(good: int, of: int, what: str) -> str:
    """A share as people read it."""
    return f"{good} of {of} {what}"
