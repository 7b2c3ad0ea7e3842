"""Seconds by arithmetic: more work takes longer, and measured runs come out as measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.plan import UNSEEN_MARK
from modelwright.plan.architecture import VisionShape, movement, shape_of
from modelwright.plan.calibration import OWN, SHIPPED, Calibration, calibration_for
from modelwright.plan.facts import Facts, card
from modelwright.plan.fit import compare_with_measured, fit, run_work
from modelwright.plan.gpus import GPUS, NETWORK
from modelwright.plan.memory import memory
from modelwright.plan.shapes import KNOWN
from modelwright.plan.time import Pace, operations, step_time
from modelwright.plan.work import Work
from modelwright.recipe.schema import Sft

RESULT = Path(__file__).parents[2] / "benchmarks" / "results" / "plan.json"
H200 = GPUS["H200"]


def work(name: str = "smollm3-3b", way: object = "all", **more: object) -> Work:
    shape = shape_of(KNOWN[name], name, "a test")
    moves = movement(shape, Sft.model_validate({"trainable": way}))
    return Work(shape, moves, **{"rows": 8, "length": 1024, **more})  # type: ignore[arg-type]


def test_a_full_step_is_six_operations_a_parameter_and_token() -> None:
    full = work("llama-6b")
    matrices, attention = operations(full)
    parameters = 6.083e9 - 50304 * 4096  # the embeddings are looked up, not multiplied
    assert matrices == pytest.approx(6 * parameters * full.tokens, rel=0.001)
    assert 0 < attention < 0.1 * matrices


def test_each_wish_costs_what_it_should() -> None:
    pace = calibration_for(H200).pace
    plain = step_time(work(), H200, pace).seconds
    assert 1.15 * plain < step_time(work(checkpointing=True), H200, pace).seconds < 1.5 * plain
    assert step_time(work(checkpointing="selective"), H200, pace).device < 1.15 * step_time(work(), H200, pace).device
    compiled, less = (step_time(work(compiled=True, checkpointing=how), H200, pace) for how in (False, "selective"))
    assert compiled.seconds < less.seconds < 1.05 * compiled.seconds
    assert operations(work(checkpointing="selective")) == operations(work())
    assert compiled.seconds < plain
    assert step_time(work(way={"last_layers": 2}), H200, pace).seconds < 0.5 * plain
    kept = work(way={"last_layers": 2}, kept_layers=34)
    assert step_time(kept, H200, pace).seconds < 0.5 * step_time(replace(kept, kept_layers=0), H200, pace).seconds
    slow = step_time(work(world=4), H200, pace, link=NETWORK)
    assert slow.exchange > 1.0 and slow.bound == "the network"


def test_tensor_cores_make_fp32_faster_and_bf16_is_faster_still() -> None:
    pace = calibration_for(H200).pace
    exact, rounded, half = (
        step_time(work("smollm2-1.7b", **way), H200, pace).seconds
        for way in ({"precision": "fp32"}, {"precision": "fp32", "tf32": True}, {"precision": "bf16"})
    )
    assert 2 * rounded < exact and half < rounded
    images = Work(VisionShape("resnet18", "a test"), work().moves, 512, precision="fp32")
    pictured = [step_time(replace(images, tf32=way), H200, pace).device for way in (True, False)]
    assert 1.5 * pictured[0] < pictured[1]


@pytest.mark.parametrize(
    ("layers", "sizes", "rows", "length", "way", "slower"),
    [
        (8, (4096, 11008, 32), 8, 2048, "all", 1.175),
        (12, (2048, 11008, 16), 8, 2048, "all", 1.271),
        (14, (1536, 4096, 12), 8, 512, "all", 1.293),
        (8, (4096, 14336, 32), 4, 4096, "lora", 1.038),
    ],
)
def test_a_scale_for_each_row_costs_what_it_did_on_an_h200(
    layers: int, sizes: tuple[int, int, int], rows: int, length: int, way: str, slower: float
) -> None:
    width, inner, heads = sizes
    config = {"model_type": "llama", "num_hidden_layers": layers, "hidden_size": width, "intermediate_size": inner,
              "num_attention_heads": heads, "num_key_value_heads": heads // 4, "vocab_size": 50_304}  # fmt: skip
    shape = shape_of(config, "a Llama", "a test")
    moves = movement(shape, Sft.model_validate({"trainable": way}))
    one = Work(shape, moves, rows=rows, length=length, precision="fp8", weights="bf16", compiled=True)
    one = replace(one, recorded=moves.total < 2e9)
    pace = calibration_for(H200).pace
    by_row = step_time(replace(one, by_row=True), H200, pace).seconds
    assert by_row / step_time(one, H200, pace).seconds == pytest.approx(slower, rel=0.05)


@pytest.mark.skipif(not RESULT.exists(), reason="no measurement is kept")
def test_the_shipped_coefficients_hold_for_the_kept_measurements() -> None:
    figures = json.loads(RESULT.read_text(encoding="utf-8"))["figures"]
    gpu = card(Facts(**figures["device"]))
    judged = compare_with_measured(figures["runs"], gpu, calibration_for(gpu))
    assert len({run["setting"]["name"] for run in judged}) >= 10
    assert all(abs(run["memory_error"]) < 0.05 for run in judged), "memory within 5 %"
    fitted = [run for run in judged if not run["setting"]["name"].startswith(UNSEEN_MARK)]
    assert all(abs(run["rate_error"]) < 0.10 for run in fitted), "tokens/s within 10 %"
    ran_out = [run for run in figures["runs"] if "ran_out" in run]
    needed = [memory(run_work(run, gpu), calibration_for(gpu).memory).needed for run in ran_out]
    assert ran_out and min(needed) > gpu.memory, "what ran out of memory is not said to fit"


def test_a_fit_finds_the_coefficients_that_made_the_runs() -> None:
    true = replace(calibration_for(H200).pace, matrices=0.5, host=5e-3)
    settings = [("smollm2-135m", 8, 512), ("smollm3-3b", 4, 2048), ("llama-6b", 2, 2048), ("pythia-410m", 16, 1024)]
    runs = []
    for name, rows, length in settings:
        made = work(name, rows=rows, length=length, weights="bf16")
        made = replace(made, recorded=made.moves.total < 2e9)
        plan = {"per_device": rows, "accumulation": 1, "precision": "bf16", "weights": "bf16"}
        rate = step_time(made, H200, true).rate
        runs.append({"setting": {"name": name, "model": name, "rows": rows, "length": length}, "plan": plan,
                     "peak_bytes": 1e10, "tokens_per_second": rate})  # fmt: skip
    found = fit(runs, H200, Calibration("H200"))
    assert found.spread < 0.05
    assert found.pace.matrices_tf32 == pytest.approx(Pace().matrices_tf32), "what no run speaks of stays a guess"


def test_the_shipped_file_names_what_it_was_measured_on() -> None:
    told = json.loads(SHIPPED.read_text(encoding="utf-8"))
    assert set(told) == {"H200", "CPU"} and all(each["runs"] >= 10 for each in told.values())
    sure, why = calibration_for(GPUS["L4"]).sureness(GPUS["L4"])
    assert sure > 0.2 and "H200" in why


def test_a_processor_is_guessed_until_it_is_measured(tmp_path: Path) -> None:
    processor = card(Facts("cpu", "2 CPU threads", 8 << 30, False))
    sure, why = calibration_for(processor).sureness(processor)
    assert sure > 0.2 and "modelwright plan --calibrate measures this one" in why
    (tmp_path / OWN).write_text(json.dumps({"CPU": {**json.loads(SHIPPED.read_text())["CPU"], "spread": 0.12}}))
    assert calibration_for(processor).sureness(processor)[0] == 0.12
