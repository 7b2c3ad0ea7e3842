"""The whole of it: a rendered job of two pods trains as a random user, loses a pod, and ends with the same weights."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from modelwright.launch.host import USER_ID, can_isolate
from modelwright.launch.manifests import Target, job_of, render
from modelwright.launch.rehearsal import Disturbance, Outcome, Wish, rehearse
from modelwright.launch.stream import read_text
from modelwright.recipe.load import load
from rig import SINGLE_THREAD, Rig, told, trace
from tiny import tiny_recipe

pytestmark = [
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.skipif(not can_isolate(), reason="needs root and network namespaces"),
]
SETS = [
    *("output_dir=null", "cluster.nodes=2", "cluster.gpus_per_node=0", "cluster.token_secret=hub-token"),
    *("sft.gradient_accumulation_steps=1", "cluster.variables={NCCL_DEBUG: INFO}"),
]
CANARY = "hf_canary4711canary4711"


def stream(folder: Path, target: Target) -> str:
    """The tiny recipe as a job of two pods, its model on a volume."""
    recipe = tiny_recipe(folder / "recipe", Path("/workspace/model"))
    return render(job_of(load(recipe, SETS, {}).recipe, recipe.parent, target))


def play(folder: Path, model: Path, text: str, *disturbances: Disturbance) -> tuple[Outcome, Path]:
    """Rehearse; returns the run as it lies on its volume, too."""
    place = folder / "place"
    shutil.copytree(model, place / "volumes/workspace/model")
    for path in (place / "volumes").rglob("*"):  # a volume's files belong to the group that all pods have
        path.chmod(0o775 if path.is_dir() else 0o664)
    wish = Wish(place, {"HF_TOKEN": CANARY}, disturbances, hurry=0.01, variables=SINGLE_THREAD)
    return rehearse(read_text(text, "job.yaml"), wish), place / "volumes/trained-models/tiny"


def logs_of(outcome: Outcome) -> str:
    return "\n".join(f"== {name}\n{path.read_text(errors='replace')}" for name, path in outcome.logs.items())


def test_a_job_whose_worker_is_killed_ends_with_the_weights_of_an_undisturbed_one(
    rig: Rig, model_folder: Path, tmp_path: Path
) -> None:
    text = stream(tmp_path, "trainjob")
    # /root and pytest's folders are closed to others, and the pods' user is another
    for folder in (tmp_path, *tmp_path.parents):
        if str(folder).startswith("/tmp/"):
            folder.chmod(folder.stat().st_mode | 0o011)
    outcome, run = play(tmp_path, model_folder, text, Disturbance("kill", 1, 5))
    assert outcome.succeeded, logs_of(outcome)
    assert "tiny-node-0-1: ended with 137" in outcome.events
    assert "all pods begin anew, 1 of 3 times" in outcome.events
    assert told(run, "resumed"), "it went on from its last checkpoint"
    assert (run / "stages/sft/result.json").stat().st_uid == USER_ID
    whole = tiny_recipe(tmp_path / "whole", model_folder)
    ranks = rig.run_ranks(["run", str(whole), "--set", "sft.gradient_accumulation_steps=1"], whole.parent, 2)
    assert [code for code, _ in ranks] == [0, 0]
    assert trace(run)["steps"] == trace(whole.parent / "run")["steps"]
    assert trace(run)["files"] == trace(whole.parent / "run")["files"]
    assert not leaks(tmp_path, text)


def leaks(folder: Path, text: str) -> list[str]:
    """Files of the rehearsal that hold the token."""
    found = ["the stream"] if CANARY in text else []
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            found += [str(path)] if CANARY.encode() in path.read_bytes() else []
    return found


def test_python_in_place_of_torchrun_fails_here_as_it_would_there(model_folder: Path, tmp_path: Path) -> None:
    text = stream(tmp_path, "trainjob").replace("maxRestarts: 3", "maxRestarts: 0")
    script = "\"import torch.distributed as d; d.init_process_group('gloo')\""
    command = "command: [python, -m, modelwright.launch.torchrun, -m, modelwright]"
    assert command in text
    text = text.replace(command, f"command: [python, -c, {script}]")
    outcome, _ = play(tmp_path, model_folder, text)
    assert not outcome.succeeded
    assert "environment variable RANK expected, but not set" in logs_of(outcome)
