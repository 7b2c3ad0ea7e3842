"""A run in a pod answers OpenShift AI while it trains."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

from tests.faults.fork_server import ForkServer, free_port, hold_after, wait_for_step
from tiny import tiny_recipe


def test_a_run_publishes_its_step_and_loss_while_it_trains(
    fork_server: ForkServer, model_folder: Path, tmp_path: Path
) -> None:
    port = free_port()
    recipe = tiny_recipe(tmp_path, model_folder)
    trial = fork_server.start(
        ["run", str(recipe)], tmp_path, {"MODELWRIGHT_METRICS_PORT": str(port)}, first=hold_after(2)
    )
    wait_for_step(tmp_path / "run", 2)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        metrics = json.loads(answer.read())
    assert metrics["currentStep"] in (1, 2) and metrics["totalSteps"] == 12
    assert metrics["trainMetrics"]["loss"] > 0 and metrics["evalMetrics"]["eval_loss"] > 0
    (tmp_path / "go").touch()
    assert trial.wait() == 0, trial.output
