"""The image recipe is measured by its journal and compared with a script that does the same work."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from benchmarks import vision


@pytest.mark.slow
def test_a_run_and_the_plain_script_are_timed_on_the_same_pictures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draw = np.random.default_rng(0)
    for side, count in (("train", 40), ("test", 6)):
        for kind, base in (("dark", 0), ("light", 150)):
            (tmp_path / "pictures" / side / kind).mkdir(parents=True)
            for number in range(count):
                pixels = (draw.integers(0, 90, (32, 32, 3)) + base).astype(np.uint8)
                Image.fromarray(pixels).save(tmp_path / "pictures" / side / kind / f"{number}.png")
    recipe = tmp_path / "recipe.yaml"
    sections = {
        "name": "pictures",
        "model": {"model_name_or_path": "resnet18", "resnet_width": 4},
        "data": {"dataset_name": str(tmp_path / "pictures")},
        "classify": {"max_steps": 8, "per_device_train_batch_size": 8, "learning_rate": 0.05, "optim": "sgd"},
        "gates": {"classify": {"seconds": {"at_most": 0}}},
    }
    recipe.write_text(json.dumps(sections), encoding="utf-8")
    figures = vision.measure(str(recipe), seeds=1, batches=2)
    run = figures["runs"][0]
    assert run["steps"] == 8 and 0 <= run["accuracy"] <= 1
    assert run["epoch_seconds"] > 0 and run["first_seconds"] <= run["seconds"]
    assert figures["script"]["batches"] == 2 and figures["ratio"] > 0
    parts = [json.loads(line)["figures"] for line in capsys.readouterr().err.splitlines() if line.startswith("{")]
    assert [("script" in part, len(part["runs"])) for part in parts] == [(False, 1), (True, 1)]
    assert parts[-1] == figures
    assert "times as long" in "\n".join(vision.lines(figures))
