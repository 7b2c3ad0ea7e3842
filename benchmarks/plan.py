"""The planner against the machine: predict memory and speed of many trainings, then measure each by the real engine."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from benchmarks import common
from benchmarks.tables import markdown_table
from modelwright.errors import UsageError
from modelwright.plan.calibrate import (
    CPU_CASES,
    GPU_CASES,
    HALF_BILLION,
    LAST_TWO,
    Calibration,
    PlanCase,
    Run,
    calibration_for,
    case_workload,
    compare_with_measured,
    fit,
)
from modelwright.plan.hardware import DeviceInfo, GpuSpec, gpu_spec_of, probe_device
from modelwright.plan.memory import estimate_memory
from modelwright.plan.stage import StagePlan, plan_stage
from modelwright.runs.folder import write_json
from modelwright.stages.measure import case_settings, measure_case_or_error

EXPECTED_FILE = "it wants a runs.json that benchmarks.plan --into FOLDER has written"


def measure(wanted: Sequence[str] = (), into: Path | None = None) -> dict[str, Any]:
    """Measure every case, fit the coefficients, and compare predictions with measurements."""
    return compare(measure_all(wanted, into))


def compare(runs: dict[str, Any]) -> dict[str, Any]:
    """Runs with three predictions: by the coefficients before, fitted to all, and fitted to all other cases."""
    gpu, good = gpu_spec_of(DeviceInfo(**runs["device"])), [run for run in runs["runs"] if "peak_bytes" in run]
    if not good:
        return {**runs, "judged": [], "calibration": {}}
    held_out = {case.name for case in HELD_OUT_CASES}
    fitted_runs = [run for run in good if run["setting"]["name"] not in held_out] or good
    before = calibration_for(gpu)
    after = fit(fitted_runs, gpu, before)
    predicted_before, others = compare_with_measured(good, gpu, before), leave_one_out(good, fitted_runs, gpu, after)
    rows = [
        {**run, **_errors("before", first), **_errors("left_out", other)}
        for run, first, other in zip(compare_with_measured(good, gpu, after), predicted_before, others, strict=True)
    ]
    return {**runs, "judged": rows, "calibration": {after.device: after.as_json()}}


def _errors(prefix: str, run: dict[str, Any]) -> dict[str, float]:
    return {f"{prefix}_{name}": run[name] for name in ("memory_error", "rate_error")}


def read_runs(paths: Sequence[Path]) -> dict[str, Any]:
    """Runs that earlier measurements of one machine wrote with --into."""
    files: list[dict[str, Any]] = []
    for path in paths:
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UsageError(f"--from {path} could not be read ({reason}); {EXPECTED_FILE}") from None
        if not isinstance(content, dict) or not {"device", "runs"} <= content.keys():
            raise UsageError(f"--from {path} holds no measured runs; {EXPECTED_FILE}")
        files.append(content)
    if len({content["device"]["name"] for content in files}) > 1:
        raise UsageError("--from: the runs were measured on different devices; compare those of one at a time")
    return {"device": files[-1]["device"], "runs": [run for content in files for run in content["runs"]]}


def measure_all(wanted: Sequence[str] = (), into: Path | None = None) -> dict[str, Any]:
    """Measure every case in a guarded process, and write runs.json after each."""
    facts = probe_device()
    runs: list[dict[str, Any]] = []
    for case in (*ALL_GPU_CASES, *HELD_OUT_CASES) if facts.device == "cuda" else CPU_CASES:
        if wanted and not any(word in case.name for word in wanted):
            continue
        began = time.perf_counter()
        case, plan, run = plan_case(case, facts)
        run |= measure_case_or_error(case, plan)
        if "peak_bytes" in run:
            run["accelerate_bytes"] = accelerate_bytes(case, plan.precision)
        runs.append({"setting": asdict(case), "took": round(time.perf_counter() - began, 1), **run})
        print(json.dumps(runs[-1]), file=sys.stderr, flush=True)
        if into is not None:
            write_json(into / "runs.json", {"device": asdict(facts), "runs": runs})
    return {"device": asdict(facts), "runs": runs}


def plan_case(case: PlanCase, facts: DeviceInfo) -> tuple[PlanCase, StagePlan, dict[str, Any]]:
    """A case with its rows and plan, and the predicted memory."""
    gpu, fitted = gpu_spec_of(facts), calibration_for(gpu_spec_of(facts))
    plan = plan_stage(case_settings(case), 1, 1, facts)
    if not case.rows:
        largest = max_batch_rows(case, plan.as_json(), gpu, fitted)
        case = replace(case, rows=max(1, -(-int(1000 * case.beyond * largest) // 1000)))
        plan = plan_stage(case_settings(case), 1, 1, facts)
    needed = estimate_memory(case_workload(case, plan.as_json(), facts.device == "cuda"), fitted.memory).required
    prediction = {"plan": plan.as_json(), "needed_bytes": round(needed), "said_to_fit": needed <= gpu.memory}
    return case, plan, prediction


def main(
    only: Annotated[list[str] | None, typer.Option("--only", metavar="WORD", help="Settings with this word.")] = None,
    into: Annotated[Path | None, typer.Option("--into", help="Write runs.json here after each setting.")] = None,
    again: Annotated[
        list[Path] | None, typer.Option("--from", help="Compare one or several runs.json again, and measure nothing.")
    ] = None,
    save: common.Save = False,
    as_json: common.Json = False,
) -> None:
    """Predicted memory and tokens per second, compared with measurements of this machine."""
    if into:
        into.mkdir(parents=True, exist_ok=True)
    common.report(
        "plan", lambda: compare(read_runs(again)) if again else measure(only or (), into), lines, save, as_json
    )


def leave_one_out(runs: Sequence[Run], fitted_runs: Sequence[Run], gpu: GpuSpec, fitted: Calibration) -> list[Run]:
    """Each run predicted by coefficients fitted to the other cases; `fitted` are those of all."""
    predicted = []
    for run in runs:
        others = [other for other in fitted_runs if other["setting"]["name"] != run["setting"]["name"]]
        predicted += compare_with_measured(
            [run], gpu, fit(others, gpu, fitted) if 0 < len(others) < len(fitted_runs) else fitted
        )
    return predicted


def max_batch_rows(case: PlanCase, plan: dict[str, Any], gpu: GpuSpec, fitted: Calibration) -> int:
    """The largest micro-batch that fits by the prediction: training with it must not run out of memory."""
    rows = 1
    while (
        estimate_memory(case_workload(case, {**plan, "micro_batch_size": rows + 1}, True), fitted.memory).required
        <= gpu.memory
    ):
        rows += 1
    return rows


def accelerate_bytes(case: PlanCase, precision: str) -> int | None:
    """The training memory by accelerate's estimator; None if it is not installed or does not know the model."""
    try:
        import torch
        from accelerate.commands.estimate import estimate_training_usage  # type: ignore[import-untyped]
        from accelerate.utils import calculate_maximum_sizes  # type: ignore[import-untyped]

        if case.stage == "classify":
            return None
        from transformers import AutoModelForCausalLM

        from modelwright.stages.measure import case_config

        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(case_config(case))
        total, _ = calculate_maximum_sizes(model)
        usage = estimate_training_usage(
            total, {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}.get(precision, precision)
        )
        return int(max(usage.values()))
    except (ImportError, KeyError, ValueError, TypeError):
        return None


_ONE_BILLION = {"num_hidden_layers": 16, "hidden_size": 2048, "intermediate_size": 8192, "vocab_size": 128256,
                "tie_word_embeddings": True}  # fmt: skip
_FOUR_BILLION = {"num_hidden_layers": 36, "hidden_size": 2560, "intermediate_size": 9728, "head_dim": 128,
                 "vocab_size": 151936}  # fmt: skip
ALL_GPU_CASES = (
    *GPU_CASES,
    PlanCase("0.5B full 1024 tf32", "llama-6b", 4, 1024, settings={"precision": "fp32"}, smaller=HALF_BILLION),
    PlanCase("270M full 2048, 262k words", "gemma-3-270m", 4, 2048),
    PlanCase("360M full 1024", "smollm2-360m", 8, 1024),
    PlanCase("410M full 1024", "pythia-410m", 16, 1024, settings={"param_dtype": "fp32"}),
    PlanCase("3B last 2 + tied head 1024 checkpointed", "smollm3-3b", 8, 1024,
            settings={"trainable": LAST_TWO, "gradient_checkpointing": True}),
    PlanCase("3B last 2 + own head 1024", "smollm3-3b", 8, 1024,
            settings={"trainable": {**LAST_TWO, "untie_lm_head": True}}),
    PlanCase("3B LoRA 2048 selective", "smollm3-3b", 4, 2048,
            settings={"trainable": "lora", "gradient_checkpointing": "selective"}),
    PlanCase("3B LoRA 2048 selective compiled", "smollm3-3b", 4, 2048,
            settings={"trainable": "lora", "gradient_checkpointing": "selective", "torch_compile": True}),
    PlanCase("3B full 2048 compiled", "smollm3-3b", 4, 2048, settings={"torch_compile": True}),
    PlanCase("3B full 4096", "smollm3-3b", 2, 4096),
    PlanCase("3B full 4096 compiled", "smollm3-3b", 2, 4096, settings={"torch_compile": True}),
    PlanCase("3B full 4096 checkpointed", "smollm3-3b", 2, 4096, settings={"gradient_checkpointing": True}),
    PlanCase("3B full 4096 selective", "smollm3-3b", 2, 4096, settings={"gradient_checkpointing": "selective"}),
    PlanCase("3B full 4096 selective compiled", "smollm3-3b", 2, 4096,
            settings={"gradient_checkpointing": "selective", "torch_compile": True}),
    PlanCase("3B full 4096 checkpointed compiled", "smollm3-3b", 2, 4096,
            settings={"gradient_checkpointing": True, "torch_compile": True}),
    PlanCase("3B full 4096 selective compiled fp8", "smollm3-3b", 2, 4096,
            settings={"gradient_checkpointing": "selective", "torch_compile": True, "precision": "fp8"}),
    PlanCase("3B full 4096 compiled fp8", "smollm3-3b", 2, 4096,
            settings={"torch_compile": True, "precision": "fp8"}),
    PlanCase("3B DPO LoRA 1024", "smollm3-3b", 4, 1024, "dpo", settings={"trainable": "lora"}),
    PlanCase("6B last 2 layers 1024", "llama-6b", 8, 1024, settings={"trainable": {"last_layers": 2}}),
    PlanCase("6B full 2048 checkpointed", "llama-6b", 4, 2048,
            settings={"gradient_checkpointing": True, "param_dtype": "fp32"}),
    PlanCase("6B full 2048 compiled", "llama-6b", 2, 2048, settings={"torch_compile": True}),
    PlanCase("6B full 2048 compiled fp8", "llama-6b", 2, 2048,
            settings={"torch_compile": True, "precision": "fp8"}),
    PlanCase("7B full 1024 checkpointed compiled", "llama-7b", 4, 1024,
            settings={"gradient_checkpointing": True, "torch_compile": True}),
    PlanCase("7B LoRA 4096 checkpointed", "llama-7b", 2, 4096,
            settings={"trainable": "lora", "gradient_checkpointing": True}),
    PlanCase("ResNet-18 bf16 1024", "resnet18", 1024, stage="classify"),
    PlanCase("0.5B full 512 compiled, not recorded", "llama-6b", 8, 512,
            settings={"torch_compile": True, "cuda_graphs": "never"}, smaller=HALF_BILLION),
    PlanCase("1.2B full 1024", "llama-6b", 6, 1024, smaller=_ONE_BILLION),
    PlanCase("360M DPO LoRA 512", "smollm2-360m", 16, 512, "dpo", settings={"trainable": "lora"}),
    PlanCase("2.1B full 512 checkpointed, twice", "smollm2-1.7b", 16, 512, smaller={"num_hidden_layers": 30},
            settings={"gradient_checkpointing": True, "gradient_accumulation_steps": 2}),
    PlanCase("3B LoRA 1024 compiled", "smollm3-3b", 6, 1024, settings={"trainable": "lora", "torch_compile": True}),
    PlanCase("4B last 4 layers 1536", "llama-6b", 6, 1536, settings={"trainable": {"last_layers": 4}},
            smaller=_FOUR_BILLION),
    PlanCase("5B full 1024 fp8", "llama-6b", 4, 1024, settings={"precision": "fp8"},
            smaller={"num_hidden_layers": 26}),
    PlanCase("7B DPO LoRA 1024 checkpointed", "llama-7b", 4, 1024, "dpo",
            settings={"trainable": "lora", "gradient_checkpointing": True}),
    PlanCase("ResNet-18 of width 96, 768", "resnet18", 768, stage="classify", smaller={"width": 96}),
    PlanCase("1.7B full 2048, as many rows as fit", "smollm2-1.7b", 0, 2048),
    PlanCase("3B full 1024, as many rows as fit", "smollm3-3b", 0, 1024),
    PlanCase("3B full 1024, an eighth more than fit", "smollm3-3b", 0, 1024, beyond=1.125),
    PlanCase("7B LoRA 2048, as many rows as fit", "llama-7b", 0, 2048, settings={"trainable": "lora"}),
    PlanCase("7B LoRA 2048, an eighth more than fit", "llama-7b", 0, 2048, settings={"trainable": "lora"},
             beyond=1.125),
    PlanCase("4B full 2048, 8 rows", "llama-6b", 8, 2048, smaller=_FOUR_BILLION),
    PlanCase("4B full 2048, 9 rows", "llama-6b", 9, 2048, smaller=_FOUR_BILLION),
    PlanCase("6B full 2048, fp32 weights, 16 rows", "llama-6b", 16, 2048, settings={"param_dtype": "fp32"}),
)  # fmt: skip
"""The last ones go to the limit of the memory: what is predicted to fit must run, the others must run out."""

HELD_OUT_CASES = (
    PlanCase("unseen: 4B full 2048, as many rows as fit", "llama-6b", 0, 2048, smaller=_FOUR_BILLION),
    PlanCase("unseen: 0.9B full 1536", "smollm2-1.7b", 4, 1536, smaller={"num_hidden_layers": 12}),
    PlanCase("unseen: 2.5B last 3 + own head 2048", "smollm3-3b", 4, 2048, smaller={"num_hidden_layers": 28},
            settings={"trainable": {"last_layers": 3, "lm_head": True, "untie_lm_head": True}}),
    PlanCase("unseen: 135M DPO full 512", "smollm2-135m", 16, 512, "dpo"),
    PlanCase("unseen: 5B LoRA 1024 checkpointed", "llama-6b", 8, 1024, smaller={"num_hidden_layers": 26},
            settings={"trainable": "lora", "gradient_checkpointing": True}),
    PlanCase("unseen: ResNet-18 of width 128, 256", "resnet18", 256, stage="classify", smaller={"width": 128}),
    PlanCase("unseen: 7B full 2048, as many rows as fit", "llama-7b", 0, 2048),
)  # fmt: skip
"""Never used to fit the coefficients: other shapes and combinations of settings."""


PREDICTIONS = {"before": "by what was known before", "": "fitted to all", "left_out": "fitted to the others"}
"""Prefixes of the error keys, and their description."""


HELD_OUT_PREFIX = "unseen: "
OPENING = """# Predicted and measured

<!-- written by benchmarks.plan; UPDATE_GOLDEN=1 python -m pytest tests/benchmarks/test_tables.py -->

Memory and speed of trainings on one {device}, measured, and in brackets the error of the prediction by coefficients
fitted to all other settings (`python -m benchmarks.plan`, {day}). Settings called *unseen* were never used to fit.
The last column is the error of accelerate's estimate of the memory, which counts weights and optimizer, but not the
batch or what is trainable.

{since}"""
NOTABLE_MEMORY, NOTABLE_RATE = 0.05, 0.10
"""Errors above which a run has a row on the page."""
AT_LIMIT = """## At the limit of the memory

What is predicted to fit must run, and what is predicted not to fit should run out:
"""


def lines(figures: dict[str, Any]) -> list[str]:
    """The table of predictions and measurements."""
    three = f"{'before':>7} {'fitted':>7} {'others':>7}"
    output = [f"{'setting':<42} {'memory':>9} {three}   {'tokens/s':>10} {three}   accelerate"]
    output += [_text_row(run) for run in figures["judged"]]
    output += [f"{run['setting']['name']}: failed, {run['failed']}" for run in figures["runs"] if "failed" in run]
    output += [_limit_line(run) for run in figures["runs"] if _is_at_limit(run)]
    if figures["judged"]:
        output += [
            f"{description}: {summary(figures['judged'], prefix)}" for prefix, description in PREDICTIONS.items()
        ]
        peers = [abs(run["accelerate_error"]) for run in figures["judged"] if run.get("accelerate_error") is not None]
        output += [f"accelerate's estimate: memory {median(peers):.0%} off, worst {max(peers):.0%}"] if peers else []
    broken = [run["setting"]["name"] for run in figures["runs"] if run.get("said_to_fit") and "ran_out" in run]
    output.append(f"said to fit and ran out of memory: {', '.join(broken) or 'none'}")
    return output


def page(measured: dict[str, Any]) -> str:
    """The page of figures for the docs, from a saved result."""
    figures, since = measured["figures"], measured.get("since", "")
    opening = {
        "day": measured["date"][:10],
        "device": figures["device"]["name"],
        "since": f"{since}\n" if since else "",
    }
    header = ("setting", "GB (error)", "tokens/s (error)", "accelerate")
    shown = [run for run in figures["judged"] if _is_notable(run)]
    rest = f"The {len(figures['judged']) - len(shown)} others are in `benchmarks/results/plan.json`. All together:"
    table = markdown_table(header, (_table_cells(run) for run in shown))
    output = [OPENING.format(**opening), table.rstrip(), "", rest]
    output += [
        "",
        *(
            f"- by coefficients {PREDICTIONS[prefix]}: {summary(figures['judged'], prefix)}."
            for prefix in ("", "left_out")
        ),
    ]
    if held_out := [run for run in figures["judged"] if run["setting"]["name"].startswith(HELD_OUT_PREFIX)]:
        output.append(
            f"- the {len(held_out)} unseen ones alone, {PREDICTIONS['before']}: {summary(held_out, 'before')}."
        )
    edge = [run for run in figures["runs"] if _is_at_limit(run)]
    output += ["", AT_LIMIT, *(f"- {_limit_line(run)}" for run in edge)]
    output += [] if edge else ["None of these settings has been measured yet, nor has one that is called unseen."]
    return "\n".join(output) + "\n"


def summary(runs: Sequence[dict[str, Any]], prefix: str) -> str:
    """Median and worst error of one kind of prediction."""
    memory = sorted(abs(run[error_key(prefix, "memory_error")]) for run in runs)
    rate = sorted(abs(run[error_key(prefix, "rate_error")]) for run in runs)
    inside = sum(value <= 0.05 for value in memory), sum(value <= 0.10 for value in rate)
    return (
        f"memory {median(memory):.1%} off, worst {memory[-1]:.1%}, within 5 % {inside[0]} of {len(memory)}; "
        f"tokens/s {median(rate):.1%}, worst {rate[-1]:.1%}, within 10 % {inside[1]} of {len(rate)}"
    )


def error_key(prefix: str, error: str) -> str:
    """The key of an error."""
    return f"{prefix}_{error}" if prefix else error


def _text_row(run: dict[str, Any]) -> str:
    peer = run.get("accelerate_error")
    memory, rate = (
        " ".join(f"{run[error_key(prefix, error)]:>+7.1%}" for prefix in PREDICTIONS)
        for error in ("memory_error", "rate_error")
    )
    return (
        f"{run['setting']['name']:<42} {run['peak_bytes'] / 1e9:>7.2f}GB {memory}   "
        f"{run['tokens_per_second']:>10,.0f} {rate}   " + (f"{peer:+.0%}" if peer is not None else "-")
    )


def _is_notable(run: dict[str, Any]) -> bool:
    """Whether a run is worth a row: an unseen one, or one whose prediction is off by more than a little."""
    memory, rate = (abs(float(run[error_key("left_out", error)])) for error in ("memory_error", "rate_error"))
    return memory > NOTABLE_MEMORY or rate > NOTABLE_RATE or str(run["setting"]["name"]).startswith(HELD_OUT_PREFIX)


def _table_cells(run: dict[str, Any]) -> tuple[str, ...]:
    peer, prefix = run.get("accelerate_error"), "left_out"
    return (
        run["setting"]["name"],
        f"{run['peak_bytes'] / 1e9:.2f} ({run[error_key(prefix, 'memory_error')]:+.1%})",
        f"{run['tokens_per_second']:,.0f} ({run[error_key(prefix, 'rate_error')]:+.1%})",
        "–" if peer is None else f"{peer:+.0%}",
    )


def _is_at_limit(run: dict[str, Any]) -> bool:
    return "fit" in run["setting"]["name"] or "ran_out" in run


def _limit_line(run: dict[str, Any]) -> str:
    fits = "fits" if run.get("said_to_fit") else "does not fit"
    outcome = "ran out of memory" if "ran_out" in run else f"ran with {run.get('reserved_bytes', 0) / 1e9:.1f} GB"
    needs = f"{run.get('needed_bytes', 0) / 1e9:.1f} GB"
    rows = f"{run['plan']['micro_batch_size']} rows"
    name = run["setting"]["name"].removesuffix(f", {rows}")
    return f"{name}, {rows}: predicted {needs}, {fits}; {outcome}"


if __name__ == "__main__":
    common.run(main)
