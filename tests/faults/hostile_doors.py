"""Carry every hostile file through every door that would read it, and look whether anything of it has run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from tests.faults.hostile_files import Hostile, Place

Runner = Callable[[Sequence[str], Path], tuple[int, str]]
"""Runs `modelwright WORDS` in a folder: exit code and everything printed."""
CODES = (0, 2, 3, 75, 76, 77, 78)
"""How our own commands end; 1 means that nobody foresaw it."""
UNFORESEEN = ("This was not foreseen", "Traceback (most recent call last)")


@dataclass
class Findings:
    """What came of carrying them in."""

    tried: int = 0
    """Commands that met a hostile file."""
    refused: int = 0
    """Commands that ended with a letter."""
    executed: list[str] = field(default_factory=list)
    """File and door where code ran."""
    unforeseen: list[str] = field(default_factory=list)
    """File and door where the command ended without a letter of ours."""


def carry(hostile: Hostile, place: Place, run: Runner, found: Findings, most_doors: int = 99) -> None:
    """Make the file, carry it through its doors, and look for the canary after each."""
    place.folder.mkdir(parents=True, exist_ok=True)
    made = hostile.make(place)
    for words in islice(DOORS[hostile.kind](made, place), most_doors):
        code, printed = run(words, place.folder)
        found.tried += 1
        found.refused += code != 0
        where = f"{hostile.name}, by {words[0]}"
        if place.canary.exists():
            found.executed.append(where)
            place.canary.unlink()
        if code not in CODES or any(word in printed for word in UNFORESEEN):
            found.unforeseen.append(f"{where}: exit {code}: {printed.strip()[-300:]}")


def write_recipe(path: Path, model: Path | str, data: dict[str, object], **stage: object) -> Path:
    """A recipe that tunes a model for one step, beside it rows to learn from."""
    rows = [{"prompt": f"What is {number}?", "completion": f"It is {number}."} for number in range(8)]
    (path.parent / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    sft = {"max_steps": 1, "per_device_train_batch_size": 2, "max_length": 64, "precision": "fp32", **stage}
    said = {"name": "hostile", "output_dir": str(path.parent / "run"), "model": {"model_name_or_path": str(model)},
            "data": {"test_size": 1, **data}, "sft": sft, "compare": {"max_new_tokens": 1}}  # fmt: skip
    path.write_text(json.dumps(said), encoding="utf-8")
    return path


def _models(made: Path, place: Place) -> Iterator[Sequence[str]]:
    recipe = write_recipe(place.folder / "recipe.yaml", made, {"train_file": "rows.jsonl"})
    yield "run", str(recipe)
    kept = _as_run(place.folder / "kept", made, recipe)
    yield "chat", str(kept)
    yield "ask", str(kept), "Why?", "--base"
    yield "export", str(kept), "--format", "merged" if (made / "adapter_config.json").exists() else "gguf"
    yield "eval", str(made), "--prompt", "Why?"


def _as_run(folder: Path, model: Path, recipe: Path) -> Path:
    """A run folder from elsewhere, whose model is the hostile one."""
    stage = folder / "stages" / "sft"
    shutil.copytree(model, stage / "model")
    (stage / "result.json").write_text(json.dumps({"files": {}, "metrics": {}, "resume_config": {}}), encoding="utf-8")
    (folder / "journal.jsonl").write_text("", encoding="utf-8")
    shutil.copy(recipe, folder / "recipe.yaml")
    return folder


def _data(made: Path, place: Place) -> Iterator[Sequence[str]]:
    recipe = write_recipe(place.folder / "recipe.json", place.model, {"dataset_name": str(made)})
    yield "run", str(recipe)
    yield "data", "audit", str(recipe)
    yield "data", "audit", str(made)
    yield "data", "show", str(recipe)


def _images(made: Path, place: Place) -> Iterator[Sequence[str]]:
    said = {"name": "hostile", "output_dir": str(place.folder / "run"), "data": {"dataset_name": str(made)},
            "model": {"model_name_or_path": "resnet18", "resnet_width": 8}, "classify": {"max_steps": 1}}  # fmt: skip
    path = place.folder / "recipe.yaml"
    path.write_text(json.dumps(said), encoding="utf-8")
    yield "run", str(path)


def _recipes(made: Path, place: Place) -> Iterator[Sequence[str]]:
    for verb in ("check", "explain", "plan", "run"):
        yield verb, str(made)
    yield "launch", str(made), "--on", "openshift", "--render"


def _checkpoints(made: Path, place: Place) -> Iterator[Sequence[str]]:
    """The file in the newest checkpoint of a run that is to go on: as it is, and with hashes that fit it."""
    from modelwright.engine.checkpoint import MANIFEST, with_checksum
    from modelwright.runs.folder import hash_file

    recipe = write_recipe(place.folder / "recipe.yaml", place.model, {"train_file": "rows.jsonl"}, save_steps=1)
    yield "run", str(recipe)
    run = place.folder / "run"
    for fits in (False, True):
        (run / "stages/sft/result.json").unlink(missing_ok=True)
        shutil.rmtree(run / "stages/sft/checkpoints/corrupt", ignore_errors=True)
        newest = max((run / "stages/sft/checkpoints").glob("step-*"), default=None)
        if newest is None:
            return
        shutil.copy(made, newest / made.name)
        if fits:
            files = {path.name: {"size": path.stat().st_size, "xxh3": hash_file(path)}
                     for path in newest.iterdir() if path.name != MANIFEST}  # fmt: skip
            (newest / MANIFEST).write_bytes(with_checksum({"step": 1, "modelwright": "0", "files": files}))
        yield "run", str(recipe)


DOORS: dict[str, Callable[[Path, Place], Iterator[Sequence[str]]]] = {
    "model": _models, "data": _data, "images": _images, "recipe": _recipes, "checkpoint": _checkpoints,
}  # fmt: skip
"""By the kind of file, the commands that meet it."""
