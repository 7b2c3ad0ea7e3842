"""Scaling efficiency of several devices: measured with CPU ranks here, and predicted for GPUs and their links.

The prediction is the planner's: the time of a step on one GPU, and the time of the trainable parameters' gradients
on the link that the backward pass does not hide. Links have the bandwidth of their data sheets, which none reaches.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from benchmarks import common
from benchmarks.common import environment
from docs.plan_verdicts import LAST_TWO, Case, production, survival
from modelwright.errors import UsageError
from modelwright.plan.choose import StageEstimate
from modelwright.plan.hardware import GPUS, GpuSpec, Hardware, find_gpu
from modelwright.runs import journal

STEPS, WARM_UP, ROWS, LAYERS, WIDTH = 24, 6, 4, 6, 192
RANKS, WORLDS, GPU_NAMES = (1, 2), (2, 4, 8), ("L40S", "H200")
FULL_EFFICIENCY = 0.95
"""Efficiency from which N GPUs count as N times as fast."""
PREDICTION_NOTE = (
    "On paper: times one GPU's tokens/s with the same rows on every GPU, in brackets with one GPU's batch shared; "
    "links at the speed of their data sheets."
)
ETHERNET = {f"{gigabits} Gbit/s": gigabits * 1e9 / 8 for gigabits in (100, 25, 10)}
"""Bytes per second between machines of one GPU each, over Ethernet."""
UNLIMITED_MEMORY, SLOWEST_LINK, FASTEST_LINK = 1e15, 1e7, 1e13


def cases() -> dict[str, Case]:
    """The trainings, by name; compiled where a long training is, whatever the number of GPUs leaves of its steps."""
    return {
        "SmolLM3-3B, last 2 + head": survival(LAST_TWO, torch_compile=True),
        "SmolLM3-3B, last 2 + untied head, cached frozen layers": survival(
            {**LAST_TWO, "untie_lm_head": True}, torch_compile=True
        ),
        "SmolLM3-3B, all weights": survival("all", torch_compile=True),
        "Llama-7B, all weights": production("bf16", "llama-7b", gradient_checkpointing=True),
    }


def gpu_by_name(name: str) -> GpuSpec:
    """The GPU of a name."""
    gpu = find_gpu(name)
    if gpu is None:
        raise UsageError(f"--gpu is {name!r}; known are {', '.join(GPUS)}")
    return gpu


def measure(ranks: Sequence[int], gpus: Sequence[GpuSpec]) -> dict[str, Any]:
    """Train with each number of ranks (none if empty), and predict for each GPU."""
    figures: dict[str, Any] = {"measured": _measure_ranks(ranks)} if ranks else {}
    return {**figures, "paper": [row for gpu in gpus for row in predict(gpu)]}


def predict(gpu: GpuSpec) -> list[dict[str, Any]]:
    """For each case and link: the speedup over one such GPU with enough memory."""
    rows = []
    for name, case in cases().items():
        alone = case.estimate_on(Hardware(1, 1, replace(gpu, memory=UNLIMITED_MEMORY)))
        rate = alone.time.tokens_per_second
        rows.append({
            "gpu": gpu.name, "case": name, "trained_parameters": alone.trainable.trained,
            "one_gpu_tokens_per_second": round(rate, 1), "one_gpu_fits": case.estimate_on(Hardware(1, 1, gpu)).fits,
            "four_times_from_bytes_per_second": _four_times_from(case, gpu, rate),
            "links": [
                {"link": link, "bytes_per_second": hardware[2].slowest_bandwidth, **_speedups(case, hardware, rate)}
                for link, hardware in _links(gpu).items()
            ],
        })  # fmt: skip
    return rows


def _links(gpu: GpuSpec) -> dict[str, dict[int, Hardware]]:
    """By link, the hardware of 2, 4 and 8 GPUs: in one machine, or one per machine over Ethernet."""
    by_pcie = GPUS["H100-PCIe" if gpu.capability >= (9, 0) else "L40S"].interconnect_bandwidth
    inside = (
        {"NVLink": gpu.interconnect_bandwidth, "PCIe": by_pcie}
        if gpu.interconnect_bandwidth > by_pcie
        else {"PCIe": gpu.interconnect_bandwidth}
    )
    links = {
        link: {world: Hardware(1, world, replace(gpu, interconnect_bandwidth=speed)) for world in WORLDS}
        for link, speed in inside.items()
    }
    return links | {
        link: {world: Hardware(world, 1, gpu, network_bandwidth=speed) for world in WORLDS}
        for link, speed in ETHERNET.items()
    }


def _speedups(case: Case, hardware_by_world: dict[int, Hardware], alone: float) -> dict[str, Any]:
    """Speedup of two, four and eight GPUs over one link."""
    grown = {str(world): case.estimate_on(hardware) for world, hardware in hardware_by_world.items()}
    fixed = {str(world): _same_batch(case).estimate_on(hardware) for world, hardware in hardware_by_world.items()}
    return {
        "times": {world: _speedup(each, alone) for world, each in grown.items()},
        "times_same_batch": {world: _speedup(each, alone) for world, each in fixed.items()},
        "sharding": {world: each.plan.sharding for world, each in grown.items()},
    }


def _four_times_from(case: Case, gpu: GpuSpec, alone: float) -> float | None:
    """The slowest link over which four GPUs are four times as fast as one; None where none is fast enough."""
    low, high = SLOWEST_LINK, FASTEST_LINK

    def reached(link: float) -> bool:
        return (
            _speedup(case.estimate_on(Hardware(4, 1, gpu, network_bandwidth=link)), alone) or 0.0
        ) >= 4 * FULL_EFFICIENCY

    if not reached(high):
        return None
    while high / low > 1.02:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if reached(middle) else (middle, high)
    return float(f"{high:.3g}")


def _same_batch(case: Case) -> Case:
    """The case with a fixed global batch, instead of one that grows with the GPUs."""
    settings = case.settings
    batch = settings.per_device_train_batch_size * settings.gradient_accumulation_steps
    changed = {**settings.model_dump(exclude_unset=True), "global_batch_size": batch}
    return replace(case, settings=type(settings).model_validate(changed))


def _speedup(estimate: StageEstimate, alone: float) -> float | None:
    """Speedup over one GPU; None if it does not fit."""
    return round(estimate.time.tokens_per_second / alone, 2) if estimate.fits else None


def _measure_ranks(ranks: Sequence[int]) -> dict[str, Any]:
    """Tokens per second with so many ranks of one thread each, with the same micro-batch per rank."""
    from benchmarks.workloads import save_small_model
    from modelwright.data.sources import EMBEDDED_DATASETS

    busy = os.getloadavg()[0]
    by_ranks: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="scale-") as folder:
        texts = EMBEDDED_DATASETS["field-guide"].read_text(encoding="utf-8").splitlines()
        save_small_model(Path(folder) / "model", texts, layers=LAYERS, width=WIDTH)
        for count in ranks:
            by_ranks[str(count)] = _train(Path(folder), count)
    for name, rate in (("efficiency", "tokens_per_second"), ("fastest_efficiency", "fastest_tokens_per_second")):
        each = {count: by_ranks[str(count)][rate] / count for count in ranks}
        for count in ranks:
            by_ranks[str(count)][name] = round(each[count] / each[ranks[0]], 3)
    return {
        "setting": f"{LAYERS}-layer Llama of width {WIDTH}, {ROWS} rows a rank, fp32, one thread a rank, gloo, ddp, "
        f"median of {STEPS - WARM_UP} steps",
        "load_before": round(busy, 2),
        "cores": len(os.sched_getaffinity(0)),
        "ranks": by_ranks,
    }


def _train(folder: Path, ranks: int) -> dict[str, Any]:
    """One run through the real launcher; the speed is read from its journal."""
    run, recipe = folder / f"run-{ranks}", folder / f"ranks-{ranks}.yaml"
    recipe.write_text(f"""\
name: scale
output_dir: {run}
model: {{model_name_or_path: {folder / "model"}}}
data: {{dataset_name: field-guide, columns: {{question: prompt, answer: completion}}, test_size: 4}}
sft: {{max_steps: {STEPS}, per_device_train_batch_size: {ROWS}, max_length: 128, precision: fp32, packing: true,
  save_steps: {STEPS}, eval_steps: {STEPS}, logging_steps: 1}}
""", encoding="utf-8")  # fmt: skip
    arguments = ["launch", str(recipe), "--nproc-per-node", str(ranks), "--log-format", "plain", "--until-stage", "sft"]
    command = [sys.executable, "-m", "modelwright", *arguments]
    done = subprocess.run(
        command, cwd=folder, env=environment({"CUDA_VISIBLE_DEVICES": ""}), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{ranks} ranks could not train: {done.stdout[-1000:]}{done.stderr[-1000:]}")
    steps = [event for event in journal.read(run / "journal.jsonl") if event["event"] == "step"]
    rates = [event["tokens"] / event["step_seconds"] for event in steps if event["step"] > WARM_UP]
    return {"tokens_per_second": round(median(rates), 1), "fastest_tokens_per_second": round(max(rates), 1)}


def lines(figures: dict[str, Any]) -> list[str]:
    """The figures as tables."""
    output = _measured_lines(figures["measured"]) if "measured" in figures else []
    for row in figures["paper"]:
        needed = row["four_times_from_bytes_per_second"]
        scaling = f"four GPUs are 4 × as fast from {needed * 8 / 1e9:,.0f} Gbit/s on" if needed else "never 4 × on four"
        alone = "" if row["one_gpu_fits"] else ", had it memory enough"
        size = f"{row['trained_parameters'] / 1e6:,.1f} M parameters trainable"
        rate = f"one GPU {row['one_gpu_tokens_per_second']:,.0f} tokens/s{alone}"
        output += ["", f"{row['gpu']}, {row['case']}: {size}; {rate}; {scaling}"]
        output.append(f"  {'link':<11}" + "".join(f"{f'{world} GPUs':>19}" for world in WORLDS))
        for link in row["links"]:
            output.append(f"  {link['link']:<11}" + "".join(f"{_cell(link, str(world)):>19}" for world in WORLDS))
    return [*output, "", PREDICTION_NOTE]


def _measured_lines(measured: dict[str, Any]) -> list[str]:
    output = [measured["setting"]]
    for count, each in measured["ranks"].items():
        output.append(
            f"{count} rank{'s' * (count != '1')}: {each['tokens_per_second']:,.0f} tokens/s, "
            f"efficiency {each['efficiency']:.0%} (by the fastest steps {each['fastest_efficiency']:.0%})"
        )
    if measured["load_before"] > 0.5:
        output.append(f"the machine was busy ({measured['load_before']:g} processes running before): not reliable")
    return output


def _cell(link: dict[str, Any], world: str) -> str:
    grown, fixed = link["times"][world], link["times_same_batch"][world]
    if grown is None:
        return "does not fit"
    split = " fsdp" if link["sharding"][world] == "fsdp" else ""
    return f"{grown:.2f} ({fixed:.2f}){split}" if fixed is not None else f"{grown:.2f}{split}"


def main(
    ranks: Annotated[list[int] | None, typer.Option("--ranks", min=1, help="Numbers of CPU ranks; repeatable.")] = None,
    gpus: Annotated[list[str] | None, typer.Option("--gpu", help="A GPU to predict for; repeatable.")] = None,
    only_paper: Annotated[bool, typer.Option("--paper", help="Only the prediction; nothing is trained.")] = False,
    save: common.Save = False,
    as_json: common.Json = False,
) -> None:
    """Scaling efficiency: measured with CPU ranks, predicted for GPUs and their links."""
    chosen, sizes = [gpu_by_name(name) for name in gpus or GPU_NAMES], () if only_paper else ranks or RANKS
    common.report("scale", lambda: measure(sizes, chosen), lines, save, as_json)


if __name__ == "__main__":
    common.run(main)
