"""An image recipe with several seeds, against a plain PyTorch script.

Each run is a process of its own with empty compile caches, so that its compile time counts. The script augments each
image with Pillow in loader workers, 32 at a time, and trains the same model in eager fp32 with Adam; its epoch is
extrapolated from some batches.
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
"""Batches of the script that are not timed."""
PLAIN_BATCH, PLAIN_RATE, PLAIN_WORKERS = 32, 1e-3, 4


def measure(recipe: str, seeds: int, batches: int, sets: Sequence[str] = ()) -> dict[str, Any]:
    """The recipe with so many seeds, and after the first of them the script for so many batches (0: none).

    The result so far is printed to stderr after each part.
    """
    runs: list[dict[str, Any]] = []
    script: dict[str, Any] | None = None
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(1, seeds + 1):
            runs.append(_run(recipe, Path(folder) / str(seed), seed, sets))
            _print_result(_figures(recipe, sets, runs, script))
            if batches and seed == 1:
                script = _script(recipe, sets, batches)
                _print_result(_figures(recipe, sets, runs, script))
    return _figures(recipe, sets, runs, script)


def _figures(
    recipe: str, sets: Sequence[str], runs: list[dict[str, Any]], script: dict[str, Any] | None
) -> dict[str, Any]:
    """The figures so far."""
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


def _print_result(figures: dict[str, Any]) -> None:
    print(json.dumps(common.result("vision", figures), ensure_ascii=False), file=sys.stderr, flush=True)


def lines(figures: dict[str, Any]) -> list[str]:
    """The figures as sentences."""
    runs = figures["runs"]
    spread = ", ".join(f"{run['accuracy']:.2%}" for run in runs)
    output = [
        f"{figures['recipe']} on {figures['source']}: {figures['accuracy']:.2%} ({spread}) in {figures['seconds']:.1f} "
        f"seconds from the first step, compiling, measuring and saving counted",
        f"an epoch takes {figures['epoch_seconds']:.3f} s after the first one began",
    ]
    if script := figures.get("script"):
        output.append(
            f"the plain script ({PLAIN_WORKERS} loader workers, batch {PLAIN_BATCH}, Adam, fp32): "
            f"{script['epoch_seconds']:.1f} s an epoch by {script['batches']} batches, "
            f"{figures['ratio']:.1f} times as long"
        )
    return output


def _run(recipe: str, folder: Path, seed: int, sets: Sequence[str]) -> dict[str, Any]:
    """One run in a process of its own, measured by its journal; a closed gate is no failure here."""
    settings = [*sets, f"seed={seed}", f"output_dir={folder}"]
    compiled = folder.with_name(f"{folder.name}-compiled")
    compiled.mkdir()
    caches = [f"{name}={compiled}" for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")]
    command = ["env", *caches, sys.executable, "-m", "modelwright", "run", recipe]
    command += [word for setting in settings for word in ("--set", setting)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 3):
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-2000:]}")
    events = list(journal.read(folder / "journal.jsonl"))
    steps = [event for event in events if event["event"] == "step"]
    measured = [event for event in events if event["event"] == "evaluation"]
    data, plan = (next(event for event in events if event["event"] == name) for name in ("data", "plan"))
    paces = [
        (after["time"] - before["time"]) / (after["step"] - before["step"]) for before, after in pairwise(steps[1:])
    ] or [steps[-1]["step_seconds"]]  # from step to step, so that logging and saving count
    began = steps[0]["time"] - steps[0]["step_seconds"]
    return {
        "seed": seed,
        "accuracy": measured[-1]["eval_accuracy"],
        "seconds": round(measured[-1]["time"] - began, 2),
        "first_seconds": steps[0]["step_seconds"],
        "epochs": round(steps[-1]["epoch"], 2),
        "epoch_seconds": round(median(paces[len(paces) // 3 :]) * data["train_rows"] / steps[0]["images"], 4),
        "steps": steps[-1]["step"],
        "source": data["source"],
        "device": plan["device"],
    }


class _ImageDataset:
    """The training set for DataLoader workers: one image at a time, padded, cropped, flipped, normalised."""

    def __init__(self, images: Any, labels: Any, mean_and_std: tuple[Any, Any]) -> None:
        self._images, self._labels = images, labels
        self._mean, self._std = (np.asarray(part, np.float32)[:, None, None] for part in mean_and_std)

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, row: int) -> tuple[Any, int]:
        import torch
        from PIL import Image, ImageOps

        image = ImageOps.expand(Image.fromarray(self._images[row]), 4)
        left, top, flips = torch.randint(0, 9, (3,)).tolist()
        side = self._images.shape[1]
        image = image.crop((left, top, left + side, top + side))
        image = ImageOps.mirror(image) if flips % 2 else image
        pixels = np.asarray(image, np.float32).transpose(2, 0, 1) / 255
        return torch.from_numpy((pixels - self._mean) / self._std), int(self._labels[row])


def _script(recipe: str, sets: Sequence[str], batches: int) -> dict[str, Any]:
    """The plain script for so many batches."""
    import torch
    import torch.nn.functional as F
    from torch.utils.data import DataLoader

    from modelwright.data.images import read_images
    from modelwright.models.vision import resnet18

    loaded_recipe = load(recipe, sets).recipe
    assert loaded_recipe.data is not None
    split = read_images(str(loaded_recipe.data.dataset_name), Path.cwd()).train
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = resnet18(len(split.classes), loaded_recipe.model.resnet_width).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=PLAIN_RATE)
    dataset: Any = _ImageDataset(split.images, split.labels, split.mean_and_std())
    loader = DataLoader(dataset, PLAIN_BATCH, shuffle=True, num_workers=PLAIN_WORKERS, drop_last=True)
    began, done = time.perf_counter(), 0
    for number, (images, labels) in enumerate(loader):
        if number == WARM_UP:
            began = time.perf_counter()
        loss = F.cross_entropy(model(images.to(device)), labels.to(device))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        loss.item()  # as scripts do for their running mean
        done = number + 1
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
    """Accuracy, seconds and seconds per epoch of an image recipe, compared with a plain script."""
    common.report("vision", lambda: measure(recipe, seeds, batches, sets or ()), lines, save, as_json)


if __name__ == "__main__":
    common.run(main)
