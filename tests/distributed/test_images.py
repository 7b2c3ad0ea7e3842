"""Images go through the same engine: killed, resumed, on two ranks, with the same promises."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.faults.fork_server import ForkServer, events_of

CLASSES = ("dark", "light", "striped")
DIES = """
import os, signal
from modelwright.engine.trainer import Engine
step = Engine._step
def dying(self, stop_asked):
    if self.cursor.step == 7:
        os.kill(os.getpid(), signal.SIGKILL)
    return step(self, stop_asked)
Engine._step = dying
"""


def picture(kind: str, draw: np.random.Generator) -> Image.Image:
    """A noisy 32 × 32 image that is dark, light or striped."""
    pixels = draw.integers(0, 90, (32, 32, 3))
    if kind == "light":
        pixels = pixels + 150
    if kind == "striped":
        pixels[::4] += 150
    return Image.fromarray(pixels.astype(np.uint8))


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of images with train and test sides, a folder for each class."""
    folder, draw = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for side, count in (("train", 16), ("test", 6)):
        for kind in CLASSES:
            (folder / side / kind).mkdir(parents=True)
            for number in range(count):
                picture(kind, draw).save(folder / side / kind / f"{number}.png")
    return folder


def recipe(folder: Path, images: Path, **settings: Any) -> Path:
    """A recipe for a narrow ResNet on those images."""
    folder.mkdir(parents=True, exist_ok=True)
    stage = {"max_steps": 12, "per_device_train_batch_size": 8, "learning_rate": 0.05, "optim": "sgd",
             "lr_scheduler_type": "one_cycle", "warmup_steps": 3, "save_steps": 3, "precision": "fp32",
             "weight_decay": 5e-4, **settings}  # fmt: skip
    sections = {
        "name": "pictures",
        "output_dir": str(folder / "run"),
        "model": {"model_name_or_path": "resnet18", "resnet_width": 4},
        "data": {"dataset_name": str(images)},
        "classify": stage,
    }
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(sections), encoding="utf-8")
    return path


def curve(run: Path) -> dict[int, tuple[float, str]]:
    return {record["step"]: (record["loss"], record["batch_hash"]) for record in events_of(run, "step")}


def files(run: Path) -> Any:
    return json.loads((run / "stages/classify/result.json").read_text())["files"]


@pytest.mark.parametrize("optim", ["sgd", "adamw_torch", "lion"])
def test_a_killed_image_run_goes_on_bit_for_bit(
    fork_server: ForkServer, images: Path, tmp_path: Path, optim: str
) -> None:
    # fused optimizers walk memory: a moment restored in another layout than its channels-last weight would show here
    uninterrupted, killed = (
        recipe(tmp_path / "whole", images, optim=optim),
        recipe(tmp_path / "killed", images, optim=optim),
    )
    code, output = fork_server.run(["run", str(uninterrupted)], uninterrupted.parent)
    assert code == 0, output
    assert fork_server.run(["run", str(killed)], killed.parent, first=DIES)[0] == -9
    code, output = fork_server.run(["run", str(killed)], killed.parent)
    assert code == 0, output
    assert "classify resumed from step 6 of 12" in output
    assert curve(killed.parent / "run") == curve(uninterrupted.parent / "run")
    assert files(killed.parent / "run") == files(uninterrupted.parent / "run")


def test_two_ranks_learn_images_as_one_does(fork_server: ForkServer, images: Path, tmp_path: Path) -> None:
    one = recipe(tmp_path / "one", images, per_device_train_batch_size=4, gradient_accumulation_steps=2)
    two = recipe(tmp_path / "two", images, per_device_train_batch_size=4)
    assert fork_server.run(["run", str(one)], one.parent)[0] == 0
    ranks = fork_server.run_ranks(["run", str(two)], two.parent, 2)
    assert [code for code, _ in ranks] == [0, 0], ranks
    alone, shared = curve(one.parent / "run"), curve(two.parent / "run")
    assert [batch for _, batch in alone.values()] == [batch for _, batch in shared.values()]
    assert [loss for loss, _ in shared.values()] == pytest.approx([loss for loss, _ in alone.values()], abs=1e-4)


def test_the_classifier_learns_and_leaves_its_mistakes(fork_server: ForkServer, images: Path, tmp_path: Path) -> None:
    path = recipe(tmp_path, images, max_steps=30, horizontal_flip=False, random_crop_padding=0, save_steps=30)
    code, output = fork_server.run(
        ["run", str(path), "--set", "gates={classify: {eval_accuracy: {at_least: 0.9}}}"], tmp_path
    )
    assert code == 0, output
    shown = json.loads((tmp_path / "run/demo_outputs/mistakes.json").read_text())
    assert shown["accuracy"] >= 0.9
    assert sum(map(sum, shown["confusion"])) == 18
    assert "accuracy" in output and shown["source"] in output
