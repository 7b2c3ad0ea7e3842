"""The time estimate: more work takes longer, and measured runs are predicted as measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.plan import HELD_OUT_PREFIX
from modelwright.plan.calibrate import (
    SHIPPED,
    USER_FILE,
    Calibration,
    calibration_for,
    compare_with_measured,
    fit,
    run_workload,
)
from modelwright.plan.hardware import DEFAULT_NETWORK_BANDWIDTH, GPUS, DeviceInfo, gpu_spec_of
from modelwright.plan.memory import StepWorkload, estimate_memory
from modelwright.plan.model_shape import SHIPPED_CONFIGS, ResNetShape, count_trainable, shape_from_config
from modelwright.plan.step_time import TimeCoefficients, count_flops, step_time
from modelwright.recipe.stage_specs import SftConfig

RESULT = Path(__file__).parents[2] / "benchmarks" / "results" / "plan.json"
H200 = GPUS["H200"]


def work(name: str = "smollm3-3b", trainable: object = "all", **more: object) -> StepWorkload:
    shape = shape_from_config(SHIPPED_CONFIGS[name], name, "a test")
    summary = count_trainable(shape, SftConfig.model_validate({"trainable": trainable}))
    return StepWorkload(shape, summary, **{"micro_batch_size": 8, "seq_len": 1024, **more})  # type: ignore[arg-type]


def test_a_full_step_is_six_operations_a_parameter_and_token() -> None:
    full = work("llama-6b")
    matrices, attention = count_flops(full)
    parameters = 6.083e9 - 50304 * 4096  # the embeddings are looked up, not multiplied
    assert matrices == pytest.approx(6 * parameters * full.tokens, rel=0.001)
    assert 0 < attention < 0.1 * matrices


def test_each_setting_changes_the_time_as_expected() -> None:
    coefficients = calibration_for(H200).time
    plain = step_time(work(), H200, coefficients).seconds
    assert 1.15 * plain < step_time(work(checkpointing=True), H200, coefficients).seconds < 1.5 * plain
    assert (
        step_time(work(checkpointing="selective"), H200, coefficients).device
        < 1.15 * step_time(work(), H200, coefficients).device
    )
    compiled, less = (
        step_time(work(compiled=True, checkpointing=how), H200, coefficients) for how in (False, "selective")
    )
    assert compiled.seconds < less.seconds < 1.05 * compiled.seconds
    assert count_flops(work(checkpointing="selective")) == count_flops(work())
    assert compiled.seconds < plain
    assert step_time(work(trainable={"last_layers": 2}), H200, coefficients).seconds < 0.5 * plain
    cached = work(trainable={"last_layers": 2}, cached_layers=34)
    assert (
        step_time(cached, H200, coefficients).seconds
        < 0.5 * step_time(replace(cached, cached_layers=0), H200, coefficients).seconds
    )
    slow = step_time(work(world_size=4), H200, coefficients, link_bandwidth=DEFAULT_NETWORK_BANDWIDTH)
    assert slow.communication > 1.0 and slow.bottleneck == "network"


def test_tensor_cores_make_fp32_faster_and_bf16_is_faster_still() -> None:
    coefficients = calibration_for(H200).time
    exact, rounded, bf16 = (
        step_time(work("smollm2-1.7b", **options), H200, coefficients).seconds
        for options in ({"precision": "fp32"}, {"precision": "fp32", "tf32": True}, {"precision": "bf16"})
    )
    assert 2 * rounded < exact and bf16 < rounded
    images = StepWorkload(ResNetShape("resnet18", "a test"), work().trainable, 512, precision="fp32")
    seconds = [step_time(replace(images, tf32=options), H200, coefficients).device for options in (True, False)]
    assert 1.5 * seconds[0] < seconds[1]


@pytest.mark.parametrize(
    ("layers", "sizes", "rows", "length", "trainable", "slower"),
    [
        (8, (4096, 11008, 32), 8, 2048, "all", 1.175),
        (12, (2048, 11008, 16), 8, 2048, "all", 1.271),
        (14, (1536, 4096, 12), 8, 512, "all", 1.293),
        (8, (4096, 14336, 32), 4, 4096, "lora", 1.038),
    ],
)
def test_a_scale_for_each_row_costs_what_it_did_on_an_h200(
    layers: int, sizes: tuple[int, int, int], rows: int, length: int, trainable: str, slower: float
) -> None:
    width, inner, heads = sizes
    config = {"model_type": "llama", "num_hidden_layers": layers, "hidden_size": width, "intermediate_size": inner,
              "num_attention_heads": heads, "num_key_value_heads": heads // 4, "vocab_size": 50_304}  # fmt: skip
    shape = shape_from_config(config, "a Llama", "a test")
    summary = count_trainable(shape, SftConfig.model_validate({"trainable": trainable}))
    plain = StepWorkload(
        shape, summary, micro_batch_size=rows, seq_len=length, precision="fp8", param_dtype="bf16", compiled=True
    )
    plain = replace(plain, cuda_graphs=summary.total < 2e9)
    coefficients = calibration_for(H200).time
    by_row = step_time(replace(plain, rowwise_fp8=True), H200, coefficients).seconds
    assert by_row / step_time(plain, H200, coefficients).seconds == pytest.approx(slower, rel=0.05)


@pytest.mark.skipif(not RESULT.exists(), reason="no measurement is kept")
def test_the_shipped_coefficients_hold_for_the_kept_measurements() -> None:
    figures = json.loads(RESULT.read_text(encoding="utf-8"))["figures"]
    gpu = gpu_spec_of(DeviceInfo(**figures["device"]))
    # in fp16 the loss is computed in chunks since these were measured
    runs = [run for run in figures["runs"] if run["plan"]["precision"] != "fp16"]
    judged = compare_with_measured(runs, gpu, calibration_for(gpu))
    assert len({run["setting"]["name"] for run in judged}) >= 10
    assert all(abs(run["memory_error"]) < 0.05 for run in judged), "memory within 5 %"
    fitted = [run for run in judged if not run["setting"]["name"].startswith(HELD_OUT_PREFIX)]
    assert all(abs(run["rate_error"]) < 0.10 for run in fitted), "tokens/s within 10 %"
    ran_out = [run for run in figures["runs"] if "ran_out" in run]
    needed = [estimate_memory(run_workload(run, gpu), calibration_for(gpu).memory).required for run in ran_out]
    assert ran_out and min(needed) > gpu.memory, "what ran out of memory is not said to fit"


def test_a_fit_finds_the_coefficients_that_made_the_runs() -> None:
    true = replace(calibration_for(H200).time, matmul=0.5, host_seconds=5e-3)
    settings = [("smollm2-135m", 8, 512), ("smollm3-3b", 4, 2048), ("llama-6b", 2, 2048), ("pythia-410m", 16, 1024)]
    runs = []
    for name, rows, length in settings:
        workload = work(name, micro_batch_size=rows, seq_len=length, param_dtype="bf16")
        workload = replace(workload, cuda_graphs=workload.trainable.total < 2e9)
        plan = {"micro_batch_size": rows, "gradient_accumulation_steps": 1, "precision": "bf16", "param_dtype": "bf16"}
        rate = step_time(workload, H200, true).tokens_per_second
        runs.append({"setting": {"name": name, "model": name, "rows": rows, "length": length}, "plan": plan,
                     "peak_bytes": 1e10, "tokens_per_second": rate})  # fmt: skip
    fitted = fit(runs, H200, Calibration("H200"))
    assert fitted.max_rate_error < 0.05
    assert fitted.time.matmul_tf32 == pytest.approx(TimeCoefficients().matmul_tf32), (
        "what no run speaks of stays a guess"
    )


def test_the_shipped_file_names_what_it_was_measured_on() -> None:
    shipped = json.loads(SHIPPED.read_text(encoding="utf-8"))
    assert set(shipped) == {"H200", "CPU"} and all(each["runs"] >= 10 for each in shipped.values())
    error, basis = calibration_for(GPUS["L4"]).uncertainty(GPUS["L4"])
    assert error > 0.2 and "H200" in basis


def test_a_processor_is_guessed_until_it_is_measured(tmp_path: Path) -> None:
    processor = gpu_spec_of(DeviceInfo("cpu", "2 CPU threads", 8 << 30, False))
    error, basis = calibration_for(processor).uncertainty(processor)
    assert error > 0.2 and "modelwright plan --calibrate measures this one" in basis
    (tmp_path / USER_FILE).write_text(
        json.dumps({"CPU": {**json.loads(SHIPPED.read_text())["CPU"], "max_rate_error": 0.12}})
    )
    assert calibration_for(processor).uncertainty(processor)[0] == 0.12
