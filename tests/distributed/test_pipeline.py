"""The whole pipeline, from raw text to the adapter: every stage happens, and kills anywhere in it leave no trace.

More kills by hand: PIPELINE_KILLS=15 python -m pytest tests/distributed/test_pipeline.py -k kills
"""

from __future__ import annotations

import os
import random
import signal
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from modelwright.data.shards import PackedDataset
from modelwright.runs.folder import RunFolder, read_json
from modelwright.runs.journal import read
from tests.faults.fork_server import SLOW_STEPS, ForkedProcess, ForkServer, events_of, run_fingerprint

KILLS = int(os.environ.get("PIPELINE_KILLS", "3"))
SEED = 20261115
STAGES = ("pretrain", "sft", "dpo", "lora")
FLOW = ("prepare", "init", *STAGES, "evaluate")
MET = ("dpo", "pretrain", "lora", "prepare", "sft")
"""Where kills land, the first ones first."""
CUT = [
    *("gates_file=null", "pretrain.data.max_rows=30", "pretrain.data.test_size=4", "evaluate.max_rows=2"),
    *("model.architecture.hidden_size=32", "model.architecture.intermediate_size=64", "prepare.vocab_size=512"),
    *("pretrain.max_steps=10", "sft.max_steps=4", "dpo.max_steps=4", "lora.max_steps=4"),
    *(f"{stage}.save_steps=2" for stage in STAGES),
    *(f"{stage}.data.max_rows=12" for stage in STAGES[1:]),
    *(f"{stage}.data.test_size=2" for stage in STAGES[1:]),
    *("prepare.num_proc=1", "prepare.max_dropped_token_fraction=1", "compare.max_new_tokens=4"),
]
"""The tiny recipe with fewer steps, rows and weights: the same stages in seconds."""


def command(folder: Path, *more: str) -> list[str]:
    sets = [f"output_dir={folder / 'run'}", *CUT]
    return ["run", "llama-tiny", *(word for each in sets for word in ("--set", each)), *more]


def everything(run: Path) -> dict[str, Any]:
    """What two runs of the pipeline must have in common."""
    folder = RunFolder(run)
    traces = {stage: run_fingerprint(run, stage) for stage in STAGES}
    del traces["lora"]["files"]["adapter_config.json"]  # it names the folder of the model that it adapts
    adapter = read_json(folder.model("lora") / "adapter_config.json")
    return {
        "shards": PackedDataset.open(folder.packed).fingerprint,
        "init": read_json(folder.result("init"))["files"],
        **traces,
        "adapter": {**adapter, "base_model_name_or_path": None},
        "evaluations": read_json(folder.evaluation("comparison")),
    }


@pytest.fixture(scope="module")
def uninterrupted_pipeline(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """A run that nothing happened to, and how long it took."""
    folder, began = tmp_path_factory.mktemp("whole"), time.monotonic()
    code, output = fork_server.run(command(folder), folder, first=SLOW_STEPS)
    assert code == 0, output
    return folder / "run", time.monotonic() - began


@pytest.mark.slow
def test_every_stage_happens_in_its_order_each_from_the_one_before(uninterrupted_pipeline: tuple[Path, float]) -> None:
    run, _ = uninterrupted_pipeline
    assert events_of(run, "stage_status")[-1]["stages"] == [{"stage": stage, "state": "done"} for stage in FLOW]
    lineage = read_json(RunFolder(run).lineage)["stages"]
    for parent, stage in pairwise(STAGES):
        assert lineage[stage]["parent_model"] == lineage[parent]["model"]
    assert set(read_json(RunFolder(run).evaluation("comparison"))) == {"base", *STAGES}


@pytest.mark.slow
def test_random_kills_over_the_whole_pipeline_leave_no_trace(
    fork_server: ForkServer, uninterrupted_pipeline: tuple[Path, float], tmp_path: Path
) -> None:
    """Which stages are met is decided, when in them is not: prepare alone takes as long as all others together."""
    run, seconds = uninterrupted_pipeline
    draw, landed = random.Random(SEED), []
    for stage in sorted((MET[number % len(MET)] for number in range(KILLS)), key=FLOW.index):
        trial = fork_server.start(command(tmp_path), tmp_path, first=SLOW_STEPS)
        wait_until_in(tmp_path / "run", stage, steps=draw.randrange(3), trial=trial)
        time.sleep(draw.uniform(0.0, seconds / 8 if stage == "prepare" else 0.3))
        os.kill(trial.pid, signal.SIGKILL)  # one that has ended waits for us as a zombie, and takes no harm
        if trial.wait() == -signal.SIGKILL:
            landed.append(position(tmp_path / "run"))
    code, output = fork_server.run(command(tmp_path), tmp_path)
    assert code == 0, output
    assert everything(tmp_path / "run") == everything(run), f"seed {SEED}, kills {landed}"
    print(f"{len(landed)} of {KILLS} kills landed: {landed}")
    assert len(landed) >= KILLS // 2
    assert {"dpo", "lora"} & {stage for stage, _ in landed}, landed


def wait_until_in(run: Path, stage: str, steps: int, trial: ForkedProcess) -> None:
    """Wait until a process has come to a stage, or beyond, and logged so many more steps in it; or has exited."""
    num_events = len(journal(run))
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not ended(trial.pid):
        new = journal(run)[num_events:]
        reached = [each["stage"] for each in new if each["event"] == "stage_status" and each["state"] == "running"]
        beyond = [each for each in reached if FLOW.index(each) > FLOW.index(stage)]
        done = sum(each["event"] == "step" and each["stage"] == stage for each in new)
        if beyond or (stage in reached and done >= (steps if stage in STAGES else 0)):
            return
        time.sleep(0.01)


def ended(process: int) -> bool:
    """Whether a process has come to its end, and nobody has waited for it yet."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def journal(run: Path) -> list[dict[str, Any]]:
    """Every whole line of a run's journal."""
    path = run / "journal.jsonl"
    return list(read(path)) if path.exists() else []


def position(run: Path) -> tuple[str, int]:
    """Where a run stands: the stage, and its last step."""
    events = journal(run)
    stage = next((each["stage"] for each in reversed(events) if each["event"] == "stage_status"), "start")
    steps = [each["step"] for each in events if each["event"] == "step" and each["stage"] == stage]
    return stage, steps[-1] if steps else 0


@pytest.mark.slow
def test_a_gate_that_cannot_be_met_stops_the_line_with_3_until_it_is_accepted_with_a_reason(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    strict = ("--set", "gates={sft: {eval_loss: {at_most: 0.01}}}", "--until-stage", "dpo")
    code, output = fork_server.run(command(tmp_path, *strict), tmp_path)
    folder = RunFolder(tmp_path / "run")
    assert code == 3, output
    assert "sft ✘ → dpo ·" in output
    assert not folder.stage("dpo").exists()
    assert read_json(folder.gate("sft"))["open"] is False
    code, output = fork_server.run(command(tmp_path, *strict, "--from-stage", "dpo"), tmp_path)
    assert (code, folder.stage("dpo").exists()) == (3, False), output
    code, output = fork_server.run(command(tmp_path, *strict, "--accept-gate", "sft", "--reason", "a trial"), tmp_path)
    assert code == 0, output
    assert "accepted: a trial" in output
    assert "sft ✔ (accepted) → dpo ✔" in output
    assert "Accepted manually: a trial." in (folder.model("dpo") / "README.md").read_text(encoding="utf-8")
