"""Images: a run of the recipe, seed by seed, beside the plain script that people begin with.

Each run is a process of its own with nothing compiled before, so that every one of them counts its own compiling.

The script reads and distorts each picture with Pillow in loader workers, 32 at a time, and trains the same model in
fp32 with Adam, layer by layer as written. Its epoch is measured on so many batches and counted up to the whole set.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks import common
from modelwright.recipe.load import load
from modelwright.runs import journal

WARM_UP = 5
"""Batches of the script before the clock counts."""
PLAIN_BATCH, PLAIN_RATE, PLAIN_WORKERS = 32, 1e-3, 4


def measure(recipe: str, seeds: int, batches: int, sets: Sequence[str] = ()) -> dict[str, Any]:
    """The recipe with so many seeds, and after the first of them the script for so many batches (0: none).

    What is known so far is told on stderr after each part, as it would be kept: who is cut short has that.
    """
    runs: list[dict[str, Any]] = []
    script: dict[str, Any] | None = None
    with tempfile.TemporaryDirectory() as place:
        for seed in range(1, seeds + 1):
            runs.append(_run(recipe, Path(place) / str(seed), seed, sets))
            _tell(_figures(recipe, sets, runs, script))
            if batches and seed == 1:
                script = _script(recipe, sets, batches)
                _tell(_figures(recipe, sets, runs, script))
    return _figures(recipe, sets, runs, script)


def _figures(
    recipe: str, sets: Sequence[str], runs: list[dict[str, Any]], script: dict[str, Any] | None
) -> dict[str, Any]:
    """All that has been measured."""
    figures: dict[str, Any] = {
        "recipe": recipe,
        "sets": list(sets),
        "source": runs[0]["source"],
        "device": {"name": runs[0]["device"]},
        "runs": list(runs),
        "accuracy": round(mean(run["accuracy"] for run in runs), 5),
        "seconds": round(mean(run["seconds"] for run in runs), 2),
        "epoch_seconds": median(run["epoch_seconds"] for run in runs),
    }
    if script:
        figures |= {"script": script, "ratio": round(script["epoch_seconds"] / figures["epoch_seconds"], 2)}
    return figures


def _tell(figures: dict[str, Any]) -> None:
    print(json.dumps(common.result("vision", figures), ensure_ascii=False), file=sys.stderr, flush=True)


def lines(figures: dict[str, Any]) -> list[str]:
    """The figures as sentences."""
    runs = figures["runs"]
    spread = ", ".join(f"{run['accuracy']:.2%}" for run in runs)
    told = [
        f"{figures['recipe']} on {figures['source']}: {figures['accuracy']:.2%} ({spread}) in {figures['seconds']:.1f} "
        f"seconds from the first step, compiling, measuring and saving counted",
        f"an epoch takes {figures['epoch_seconds']:.3f} s after the first one began",
    ]
    if script := figures.get("script"):
        told.append(
            f"the plain script ({PLAIN_WORKERS} loader workers, batch {PLAIN_BATCH}, Adam, fp32): "
            f"{script['epoch_seconds']:.1f} s an epoch by {script['batches']} batches, "
            f"{figures['ratio']:.1f} times as long"
        )
    return told


def _run(recipe: str, place: Path, seed: int, sets: Sequence[str]) -> dict[str, Any]:
    """One run in a process of its own, judged by its journal; a closed gate is a figure here, not a failure."""
    wishes = [*sets, f"seed={seed}", f"output_dir={place}"]
    compiled = place.with_name(f"{place.name}-compiled")
    compiled.mkdir()
    caches = [f"{name}={compiled}" for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")]
    command = ["env", *caches, sys.executable, "-m", "modelwright", "run", recipe]
    command += [word for wish in wishes for word in ("--set", wish)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 3):
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-2000:]}")
    events = list(journal.read(place / "journal.jsonl"))
    steps = [event for event in events if event["event"] == "step"]
    measured = [event for event in events if event["event"] == "evaluation"]
    data, plan = (next(event for event in events if event["event"] == name) for name in ("data", "plan"))
    paces = [
        (after["time"] - before["time"]) / (after["step"] - before["step"]) for before, after in pairwise(steps[1:])
    ] or [steps[-1]["step_seconds"]]  # from step to step, so that what is told and written between them counts
    began = steps[0]["time"] - steps[0]["step_seconds"]
    return {
        "seed": seed,
        "accuracy": measured[-1]["eval_accuracy"],
        "seconds": round(measured[-1]["time"] - began, 2),
        "first_seconds": steps[0]["step_seconds"],
        "epochs": round(steps[-1]["epoch"], 2),
        "epoch_seconds": round(median(paces[len(paces) // 3 :]) * data["train_rows"] / steps[0]["tokens"], 4),
        "steps": steps[-1]["step"],
        "source": data["source"],
        "device": plan["device"],
    }


class _Pictures:
    """The training set as a loader's workers see it: one picture at a time, padded, cropped, flipped, normalised."""

    def __init__(self, images: Any, labels: Any, mean_and_std: tuple[Any, Any]) -> None:
        self._images, self._labels = images, labels
        self._mean, self._std = (np.asarray(part, np.float32)[:, None, None] for part in mean_and_std)

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, row: int) -> tuple[Any, int]:
        import torch
        from PIL import Image, ImageOps

        picture = ImageOps.expand(Image.fromarray(self._images[row]), 4)
        left, top, flips = torch.randint(0, 9, (3,)).tolist()
        side = self._images.shape[1]
        picture = picture.crop((left, top, left + side, top + side))
        picture = ImageOps.mirror(picture) if flips % 2 else picture
        pixels = np.asarray(picture, np.float32).transpose(2, 0, 1) / 255
        return torch.from_numpy((pixels - self._mean) / self._std), int(self._labels[row])


def _script(recipe: str, sets: Sequence[str], batches: int) -> dict[str, Any]:
    """The plain script for so many batches."""
    import torch
    import torch.nn.functional as F
    from torch.utils.data import DataLoader

    from modelwright.data.images import read_images
    from modelwright.models.vision import resnet18

    asked = load(recipe, sets).recipe
    assert asked.data is not None
    split = read_images(str(asked.data.dataset_name), Path.cwd()).train
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = resnet18(len(split.classes), asked.model.resnet_width).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=PLAIN_RATE)
    pictures: Any = _Pictures(split.images, split.labels, split.mean_and_std())
    loader = DataLoader(pictures, PLAIN_BATCH, shuffle=True, num_workers=PLAIN_WORKERS, drop_last=True)
    began, done = time.perf_counter(), 0
    for turn, (images, labels) in enumerate(loader):
        if turn == WARM_UP:
            began = time.perf_counter()
        loss = F.cross_entropy(model(images.to(device)), labels.to(device))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        loss.item()  # as scripts do, for their running mean
        done = turn + 1
        if done == batches:
            break
    seconds = (time.perf_counter() - began) / max(1, done - WARM_UP)
    return {"batches": done, "epoch_seconds": round(seconds * len(split) / PLAIN_BATCH, 3)}


def main(
    recipe: Annotated[str, typer.Argument(help="A recipe that classifies images.")] = "resnet18-cifar10",
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Runs, each with a seed of its own.")] = 3,
    batches: Annotated[int, typer.Option("--batches", min=0, help="Batches of the plain script; 0: without it.")] = 400,
    sets: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set KEY=VALUE; repeatable.")
    ] = None,
    save: common.Save = False,
    as_json: common.Json = False,
) -> None:
    """Accuracy, seconds and seconds an epoch of an image recipe, beside the plain script."""
    common.report("vision", lambda: measure(recipe, seeds, batches, sets or ()), lines, save, as_json)


if __name__ == "__main__":
    common.run(main)
