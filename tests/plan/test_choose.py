"""The plan fits the GPU: what fits is kept, what does not is changed, with a line per change."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from modelwright.plan.choose import StageEstimate, choose_plan, compile_seconds, trainable_of, uses_cuda_graphs
from modelwright.plan.hardware import GPUS, Hardware, device_info_of, parse_hardware
from modelwright.plan.model_shape import SHIPPED_CONFIGS, ModelShape, ResNetShape, shape_from_config
from modelwright.plan.stage import plan_stage
from modelwright.plan.table import PlanTable, format_table, plan_table, summary_line
from modelwright.recipe.schema import Recipe
from modelwright.recipe.stage_specs import ClassifyConfig, PretrainConfig, RowStats, SftConfig

LYRICS = {"trainable": {"last_layers": 2}, "per_device_train_batch_size": 16, "gradient_accumulation_steps": 4,
          "max_length": 2048, "cache_frozen_layers": "off"}  # fmt: skip


FP32 = {"param_dtype": "fp32"}
LORA = {"trainable": "lora", "per_device_train_batch_size": 1, "max_length": 4096, "torch_compile": True}
LORA_EAGER = {**LORA, "cuda_graphs": "never"}


def shape(name: str) -> ModelShape:
    return shape_from_config(SHIPPED_CONFIGS[name], name, "a test")


def planned(name: str, on: str, length: int = 1024, **settings: Any) -> StageEstimate:
    config, hardware = SftConfig.model_validate(settings), parse_hardware(on)
    rows = RowStats(10_000, length, float(length))
    return choose_plan(
        plan_stage(config, 10_000, hardware.world_size, device_info_of(hardware)), config, shape(name), rows, hardware
    )


def test_what_fits_is_left_as_it_was_asked_for() -> None:
    estimate = planned("pythia-410m", "1xL40S", 512, **LYRICS)
    assert estimate.fits and (estimate.plan.micro_batch_size, estimate.plan.gradient_accumulation_steps) == (16, 4)
    assert not any("instead of" in line for line in estimate.plan.reasons)


def test_from_l40s_to_l4_the_batch_is_kept_and_each_change_is_a_line() -> None:
    requested = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 4}
    large, small = (
        planned("pythia-410m", "1xL40S", 2048, **requested),
        planned("pythia-410m", "1xL4", 2048, **requested),
    )
    assert large.fits and small.fits
    assert large.plan.global_batch_size == small.plan.global_batch_size == 64
    assert small.plan.micro_batch_size < large.plan.micro_batch_size or small.plan.gradient_checkpointing
    changed = [line for line in small.plan.reasons if "L4" in line and "for the" in line]
    assert changed and all("\n" not in line for line in changed)
    assert small.memory.required <= small.hardware.gpu.memory


@pytest.mark.parametrize("requested", [False, "selective"])
def test_checkpointing_recomputes_as_little_as_fits(requested: Any) -> None:
    required = {
        mode: planned("llama-7b", "1xH200", 4096, **LORA_EAGER, gradient_checkpointing=mode).memory.required
        for mode in (False, "selective", True)
    }
    assert required[False] > required["selective"] > required[True]
    hardware = parse_hardware("1xH200")
    for mode, memory in required.items():
        config = SftConfig.model_validate({**LORA_EAGER, "gradient_checkpointing": requested})
        limited = replace(hardware, gpu=replace(hardware.gpu, memory=memory * 1.001))
        plan = plan_stage(config, 10_000, 1, device_info_of(hardware))
        estimate = choose_plan(plan, config, shape("llama-7b"), RowStats(10_000, 4096, 4096.0), limited)
        assert estimate.fits and estimate.plan.gradient_checkpointing == (mode or requested)
        changes = [line for line in estimate.plan.reasons if "gradient checkpointing: " in line]
        prefix = {"selective": "selective", True: "full"}.get(mode, "")
        assert len(changes) == (0 if (mode or requested) == requested else 1) and all(
            line.startswith(prefix) for line in changes
        )


@pytest.mark.parametrize(
    ("requested", "memory", "hint"),
    [
        (True, 1e12, "false"),
        (True, "selective", "selective"),
        (True, True, ""),
        ("selective", 1e12, ""),  # compiled, it is as fast
        (True, 1.0, ""),  # nothing fits
    ],
)
def test_a_lighter_checkpointing_that_would_fit_is_suggested(requested: Any, memory: Any, hint: str) -> None:
    config = SftConfig.model_validate({**LORA_EAGER, "gradient_checkpointing": requested})
    hardware = parse_hardware("1xH200")
    if not isinstance(memory, float):
        memory = (
            1.001 * planned("llama-7b", "1xH200", 4096, **LORA_EAGER, gradient_checkpointing=memory).memory.required
        )
    plan = plan_stage(config, 10_000, 1, device_info_of(hardware))
    limited = replace(hardware, gpu=replace(hardware.gpu, memory=memory))
    estimate = choose_plan(plan, config, shape("llama-7b"), RowStats(10_000, 4096, 4096.0), limited)
    lines = [line for line in estimate.plan.reasons if "would fit too" in line]
    assert len(lines) == bool(hint) and all(
        re.fullmatch(rf"gradient_checkpointing: {hint} would fit too, 1\.[1-5]\d × as fast", line) for line in lines
    ), estimate.plan.reasons
    assert estimate.plan.gradient_checkpointing == requested, "the recipe has the word"


def test_a_gpu_without_bf16_computes_in_fp16() -> None:
    estimate = planned("pythia-410m", "1xT4", 512, **{**LYRICS, "precision": "bf16"})
    assert estimate.plan.precision == "fp16"
    assert "fp16 instead of bf16: T4 has no bf16" in estimate.plan.reasons


def test_seven_billion_fp32_masters_do_not_fit_80_gb_and_what_would_is_said() -> None:
    estimate = planned("llama-7b", "1xA100-80", 2048, **FP32, per_device_train_batch_size=8)
    assert not estimate.fits
    assert estimate.alternatives == ("trainable: lora", "distributed_strategy: fsdp over 2 × A100-80", "1 × H200")


@pytest.mark.parametrize(
    ("on", "sharding", "reason"),
    [
        ("8xA100-80", "fsdp", "the weights are split over 8 GPUs"),
        ("8x1xA100-80", "fsdp", "the weights are split over 8 GPUs"),
        ("2x8xA100-80", "hsdp", "the weights are split over the 8 GPUs of each of 2 machines"),
        ("2x2xL40S", "fsdp", "the weights are split over 4 GPUs"),  # the two of one machine do not hold it
        ("2xH200", "ddp", "each of 2 devices holds a copy"),
        ("1xH200", "ddp", ""),
    ],
)
def test_several_gpus_split_what_one_cannot_hold_and_the_plan_says_why(on: str, sharding: str, reason: str) -> None:
    estimate = planned("llama-7b", on, 512, **FP32, per_device_train_batch_size=1)
    assert estimate.fits and estimate.plan.sharding == sharding
    lines = [line for line in estimate.plan.reasons if line.startswith(f"{sharding}: ") or "instead of ddp" in line]
    assert (len(lines), reason in lines[0] if lines else True) == (1 if reason else 0, True), estimate.plan.reasons


@pytest.mark.parametrize(
    ("on", "settings"), [("1xL4", {"trainable": "lora"}), ("8xL4", {"distributed_strategy": "fsdp"})]
)
def test_full_fp32_weights_must_fit_while_loading(on: str, settings: Any) -> None:
    estimate = planned("llama-7b", on, 512, per_device_train_batch_size=1, **settings)
    assert not estimate.fits and estimate.memory.peak_phase == "loading"
    bytes_of_fp32 = 4 * estimate.trainable.total
    assert bytes_of_fp32 < estimate.memory.total < 1.07 * bytes_of_fp32, "and the embeddings while they are split"


def test_a_sharding_set_in_the_recipe_is_kept() -> None:
    for strategy in ("ddp", "fsdp", "hsdp"):
        assert planned("smollm2-135m", "2x8xL40S", distributed_strategy=strategy).plan.sharding == strategy


def test_one_device_has_nothing_to_shard_and_replays_its_steps() -> None:
    alone, sharded = (
        planned("smollm2-135m", "1xH200", 512, distributed_strategy=strategy) for strategy in ("ddp", "fsdp")
    )
    assert sharded.plan.sharding == "ddp" and sharded.time == alone.time
    assert uses_cuda_graphs("auto", sharded.trainable.trained, sharded.plan, on_gpu=True)


def test_split_inside_each_machine_what_crosses_the_slow_network_is_less() -> None:
    over_all, inside = (
        planned("llama-7b", "2x8xA100-80", 512, **FP32, distributed_strategy=strategy) for strategy in ("fsdp", "hsdp")
    )
    assert inside.time.communication < 0.5 * over_all.time.communication


def test_a_free_micro_batch_is_chosen_by_the_plan() -> None:
    estimate = planned("smollm2-135m", "1xH200", 512, global_batch_size=64)
    assert estimate.plan.micro_batch_size * estimate.plan.gradient_accumulation_steps == 64
    assert estimate.plan.micro_batch_size > 8, "one that nobody wrote down may grow to what the GPU does best"


SMALL = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8, "torch_compile": False}
"""Micro-batches that leave an H200 waiting."""


@pytest.mark.parametrize("on", ["1xH200", "4xH200", "4x1xH200"])
def test_small_micro_batches_that_leave_a_gpu_waiting_are_merged(on: str) -> None:
    estimate = planned("pythia-410m", on, 128, **SMALL, cuda_graphs="never")
    assert (estimate.plan.micro_batch_size, estimate.plan.gradient_accumulation_steps) == (16, 1)
    assert estimate.plan.global_batch_size == 16 * estimate.plan.world_size
    [line] = [line for line in estimate.plan.reasons if "per_device_train_batch_size" in line]
    assert re.fullmatch(
        r"16 rows at once instead of 2: (\S+) s a step instead of \S+; the batch of (16|64) is kept \(.*\)", line
    )
    assert not any("for the 140 GiB" in line for line in estimate.plan.reasons), "they would fit"


def test_micro_batches_stay_where_merging_gains_little_or_takes_memory() -> None:
    assert planned("pythia-410m", "1xH200", 8192, **SMALL).plan.micro_batch_size == 2, "2 × 8,192 tokens fill it"
    full = planned("pythia-410m", "1xH200", 128, **SMALL).memory.required
    config, rows = SftConfig.model_validate({**SMALL, "cuda_graphs": "never"}), RowStats(9999, 128, 128.0)
    for memory, size in ((4 * full, 16), (1.2 * full, 2)):
        hardware = Hardware(1, 1, replace(GPUS["H200"], memory=memory))
        plan = plan_stage(config, 9999, 1, device_info_of(hardware))
        estimate = choose_plan(plan, config, shape("pythia-410m"), rows, hardware)
        assert estimate.fits and estimate.plan.micro_batch_size == size
    cpu = Hardware(1, 1, replace(GPUS["H200"], name="CPU"))
    assert choose_plan(plan, config, shape("pythia-410m"), rows, cpu).plan.micro_batch_size == 2, "a CPU does not wait"


def test_what_depends_on_the_micro_batch_is_not_merged() -> None:
    lora = {**SMALL, "cuda_graphs": "never", "trainable": "lora"}
    assert planned("pythia-410m", "1xH200", 128, **lora).plan.micro_batch_size == 16
    assert planned("pythia-410m", "1xH200", 128, **lora, lora_dropout=0.1).plan.micro_batch_size == 2
    hardware, rows = parse_hardware("1xH200"), RowStats(50_000, 1, 1.0)
    images = ClassifyConfig(per_device_train_batch_size=16, gradient_accumulation_steps=8)
    plan = plan_stage(images, 50_000, 1, device_info_of(hardware))
    chosen = choose_plan(plan, images, ResNetShape("resnet18", "a test"), rows, hardware).plan
    assert chosen.micro_batch_size == 16, "batch norm"


@pytest.mark.parametrize(("padding_free", "size"), [(False, 8), (True, 16)])
def test_merging_counts_the_padding_of_short_rows_among_long_ones(padding_free: bool, size: int) -> None:
    lengths = (64,) * 1500 + (2048,) * 1500
    rows, hardware = RowStats(3000, 2048, 1056.0, lengths=lengths), parse_hardware("1xH200")
    config = SftConfig.model_validate({**SMALL, "cuda_graphs": "never"})
    plan = plan_stage(config, 3000, 1, device_info_of(hardware)).revise(padding_free=padding_free)
    estimate = choose_plan(plan, config, shape("smollm2-360m"), rows, hardware)
    assert estimate.plan.micro_batch_size == size, "in one micro-batch, half of the rows are padded to 2,048 tokens"


def test_images_are_planned_too() -> None:
    config, hardware = (
        ClassifyConfig(per_device_train_batch_size=512, gradient_checkpointing=True),
        parse_hardware("1xL4"),
    )
    plan = plan_stage(config, 50_000, 1, device_info_of(hardware))
    estimate = choose_plan(plan, config, ResNetShape("resnet18", "a test"), RowStats(50_000, 1, 1.0), hardware)
    assert estimate.fits and estimate.time.tokens_per_second > 1000
    assert estimate.plan.gradient_checkpointing is False, "nothing of an image is computed again"
    assert len([line for line in estimate.plan.reasons if "gradient_checkpointing has no effect here" in line]) == 1
    table = PlanTable("classify", ResNetShape("resnet18", "a test"), RowStats(50_000, 1, 1.0), (estimate,))
    assert any(line.startswith("images/s") for line in format_table(table)) and " images/s, " in summary_line(table)


def test_the_table_shows_targets_in_columns_with_hours_and_cost() -> None:
    recipe = {"name": "r", "model": {"model_name_or_path": "pythia-410m"}, "data": {"dataset_name": "x"}, "sft": LYRICS}
    targets = (parse_hardware("1xH200"), parse_hardware("4xL40S"))
    rows = RowStats(10_000_000, 512, 300.0, 1.0, "a test")
    table = plan_table(Recipe.model_validate(recipe), "sft", shape("pythia-410m"), rows, targets)
    text = "\n".join(format_table(table))
    assert "1xH200" in text and "4xL40S" in text and "64 = 16 × 1 × 4" in text and "256 = 16 × 4 × 4" in text
    as_json = table.as_json()["on"]
    assert as_json[1]["gpu_hours"] == pytest.approx(4 * as_json[1]["hours"], rel=0.01)
    assert as_json[0]["cost"] == pytest.approx(as_json[0]["gpu_hours"] * 4.5, abs=0.01)


def test_more_gpus_are_faster_but_never_more_than_their_number() -> None:
    one, four = planned("smollm3-3b", "1xL40S", 512), planned("smollm3-3b", "4xL40S", 512)
    assert one.time.tokens_per_second < four.time.tokens_per_second <= 4 * one.time.tokens_per_second * 1.001


def test_the_link_between_nodes_and_what_it_costs_are_in_the_plan() -> None:
    settings: dict[str, Any] = {"trainable": {"last_layers": 2, "lm_head": True}, "per_device_train_batch_size": 8}
    settings["torch_compile"] = False  # four GPUs have too few steps to pay for it
    four, one = (planned("smollm3-3b", on, 352, **settings) for on in ("4x1xL40S", "1xL40S"))
    [line] = [line for line in four.plan.reasons if "between nodes" in line]
    assert line.startswith("25 Gbit/s between nodes is assumed: ")
    speedup = four.time.tokens_per_second / one.time.tokens_per_second
    assert f"4 GPUs do the work of {speedup:.1f} without a network" in line and speedup < 4
    assert not any("between nodes" in line for line in planned("smollm3-3b", "4xL40S", 352, **settings).plan.reasons)


def qa_rows(count: int = 7473) -> RowStats:
    """Questions and answers of 40 to 512 tokens, 217 in the mean."""
    lengths = tuple(min(512, 60 + (7919 * row % 131) + (104729 * row % 184)) for row in range(count))
    return RowStats(count, max(lengths), sum(lengths) / count, 0.55, "a test", lengths=lengths)


def small_model(settings: SftConfig, gpu: str = "H200", rows: RowStats | None = None) -> StageEstimate:
    rows, hardware = rows or qa_rows(), Hardware(1, 1, GPUS[gpu])
    plan = plan_stage(settings, rows.count, 1, device_info_of(hardware))
    return choose_plan(plan, settings, shape("smollm2-360m"), rows, hardware)


def test_rows_of_many_lengths_take_the_memory_and_the_time_of_their_tokens() -> None:
    settings = {"per_device_train_batch_size": 32, "torch_compile": False, "max_length": 512}
    flat, padded = (small_model(SftConfig(**settings, padding_free=each)) for each in ("auto", False))
    assert flat.plan.padding_free and not padded.plan.padding_free
    assert flat.time.tokens == pytest.approx(padded.time.tokens, rel=0.02), "padding is no token"
    assert flat.time.device < 0.75 * padded.time.device
    assert flat.memory.transient_bytes < 0.75 * padded.memory.transient_bytes
    assert flat.time.host == 0 < padded.time.host, "only a shape that comes again is replayed"
    assert not flat.plan.gradient_checkpointing and not padded.plan.gradient_checkpointing
    lines = "\n".join(flat.plan.reasons)
    assert re.search(r"rows end to end, rounded up to \d+ tokens: [1-5]% of the tokens are padding, of padded", lines)
    assert "activations are kept: " in lines


def test_layers_are_compiled_where_all_steps_together_pay_for_it() -> None:
    long, short = (small_model(SftConfig(max_length=512, max_steps=steps)) for steps in (50_000, 40))
    assert long.plan.torch_compile and not short.plan.torch_compile
    assert any("layers are compiled: 50,000 steps save" in line for line in long.plan.reasons), long.plan.reasons
    assert any("layers are not compiled: 40 steps save" in line for line in short.plan.reasons), short.plan.reasons
    assert small_model(SftConfig(max_steps=1, torch_compile=True)).plan.torch_compile
    cpu = Hardware(1, 1, replace(GPUS["H200"], name="CPU"))
    plan, long_job = plan_stage(SftConfig(max_steps=10**6), 100, 1, device_info_of(cpu)), SftConfig(max_steps=10**6)
    assert not choose_plan(plan, long_job, shape("smollm2-360m"), qa_rows(), cpu).plan.torch_compile


@pytest.mark.parametrize(
    ("name", "on", "settings", "precision", "why"),
    [
        ("llama-6b", "8xH100", {}, "fp8", "fp8: predicted 1.2[0-9] × as fast as bf16 on H100; the run compares both"),
        ("llama-6b", "1xA100-80", {}, "bf16", "bf16, not fp8: A100-80 has no fp8"),
        ("llama-6b", "1xH200", {"max_steps": 20}, "bf16", "bf16, not fp8: 20 steps save [0-9]+ s, comparing takes"),
        ("smollm2-135m", "1xH200", {}, "bf16", "bf16, not fp8: hidden_size 576 is too small"),
        ("llama-6b", "1xH100", {"precision": "bf16"}, "bf16", None),
        ("llama-6b", "1xH100", {"fp8_validation": "off"}, "bf16", None),
        ("llama-6b", "1xH100", {"max_length": 1000}, "bf16", None),
    ],
)
def test_pretraining_with_precision_auto_takes_fp8_where_the_gpu_has_it_and_it_pays(
    name: str, on: str, settings: dict[str, Any], precision: str, why: str | None
) -> None:
    config = PretrainConfig.model_validate(
        {"max_steps": 100_000, "torch_compile": True, "max_length": 2048, **settings}
    )
    hardware = parse_hardware(on)
    plan = plan_stage(config, 10_000, hardware.world_size, device_info_of(hardware))
    estimate = choose_plan(plan, config, shape(name), RowStats(10_000, 2048, 2048.0), hardware)
    assert estimate.plan.precision == precision
    reasons = [line for line in estimate.plan.reasons if "fp8" in line]
    assert re.match(why, reasons[0]) if why else not reasons


def test_compiling_takes_longer_for_each_kind_of_layer() -> None:
    plain = SHIPPED_CONFIGS["smollm3-3b"]
    other_layers = {**plain, "no_rope_layers": [1, 1, 1, 0] * (plain["num_hidden_layers"] // 4)}
    settings = SftConfig(trainable={"last_layers": 2, "lm_head": True})
    recomputing = settings.model_copy(update={"gradient_checkpointing": True})
    trained = [(plain, SftConfig()), (other_layers, SftConfig()), (other_layers, settings), (other_layers, recomputing)]
    plans = [plan_stage(stage, 100, 1, device_info_of(parse_hardware("1xH200"))) for _, stage in trained]
    seconds = [
        compile_seconds(each := shape_from_config(config, "it", "a test"), trainable_of(each, stage), plan)
        for (config, stage), plan in zip(trained, plans, strict=True)
    ]
    assert seconds == [8, 12, 20, 36]


def test_the_memory_of_a_partly_trained_model_while_it_is_loaded() -> None:
    """SmolLM3-3B, last two layers and head: 16.04 GB at most on an H200, 14 bytes for each number that was split."""
    estimate = planned("smollm3-3b", "1xH200", 64, trainable={"last_layers": 2, "lm_head": True})
    assert estimate.memory.peak_phase == "loading"
    assert estimate.memory.total == pytest.approx(16.04e9 - (14 - 8) * 262.7e6, rel=0.02)


@pytest.mark.parametrize(
    ("on", "length", "settings", "rows"),
    [
        ("1xH200", 200, {"per_device_train_batch_size": 32}, 64),
        ("1xH200", 200, {"per_device_train_batch_size": 32, "per_device_eval_batch_size": 8}, 8),
        ("1xH200", 2048, {"per_device_train_batch_size": 32}, 8),
        ("8xH200", 200, {"per_device_train_batch_size": 32}, 32),
        ("1xT4", 512, {"per_device_train_batch_size": 1}, 8),
    ],
    ids=["short rows", "a set number", "long rows", "256 rows for 8 GPUs", "more memory than training"],
)
def test_evaluations_take_as_many_rows_at_once_as_keep_a_gpu_busy(
    on: str, length: int, settings: dict[str, Any], rows: int
) -> None:
    """256 rows of 217 tokens took 1.4 s in 32 forward passes of a 0.6 B model, most of it launches (H200)."""
    estimate = planned("pythia-410m", on, length, **settings)
    assert estimate.plan.eval_micro_batch_size == rows


@pytest.mark.parametrize(("settings", "replayed"), [(LORA, True), ({}, False)])
def test_a_large_model_of_which_little_is_trained_is_replayed(settings: dict[str, Any], replayed: bool) -> None:
    """LoRA of 8 B with 3,500 tokens a step took 0.231 s, and 0.198 replayed; launching its kernels took longer than
    computing them (H200)."""
    estimate = planned("llama-7b", "1xH200", 512, **settings)
    assert (estimate.time.host == 0.0) is replayed
