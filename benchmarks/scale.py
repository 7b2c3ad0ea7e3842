"""How much faster several devices are than one: measured with CPU ranks here, and on paper for GPUs and their links.

The paper is the planner's arithmetic: what a card computes in a step, and how long the gradients of what moves take on
the link beyond what hides behind the backward pass. Links are as fast as their data sheets say, which none quite is.
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
RANKS, WORLDS, CARDS = (1, 2), (2, 4, 8), ("L40S", "H200")
CLOSE = 0.95
"""Efficiency from which on so many cards are called so many times as fast."""
PAPER = (
    "On paper: times one card's tokens/s with the same rows on every card, in brackets with one card's batch shared; "
    "links at the speed of their data sheets."
)
BETWEEN = {f"{gigabits} Gbit/s": gigabits * 1e9 / 8 for gigabits in (100, 25, 10)}
"""Bytes per second between machines of one card each, over Ethernet."""
ENDLESS, SLOWEST, FASTEST = 1e15, 1e7, 1e13


def cases() -> dict[str, Case]:
    """What is asked about, by name."""
    return {
        "SmolLM3-3B, last 2 + head": survival(LAST_TWO),
        "SmolLM3-3B, last 2 + own head, trunk kept": survival({**LAST_TWO, "untie_lm_head": True}),
        "SmolLM3-3B, all weights": survival("all"),
        "Llama-7B, all weights": production("bf16", "llama-7b", gradient_checkpointing=True),
    }


def card(name: str) -> GpuSpec:
    """The card of a name."""
    found = find_gpu(name)
    if found is None:
        raise UsageError(f"--card is {name!r}; known are {', '.join(GPUS)}")
    return found


def measure(ranks: Sequence[int], cards: Sequence[GpuSpec]) -> dict[str, Any]:
    """Train with each number of ranks, none where none is named, and do the arithmetic for each card."""
    figures: dict[str, Any] = {"measured": _measured(ranks)} if ranks else {}
    return {**figures, "paper": [row for gpu in cards for row in paper(gpu)]}


def paper(gpu: GpuSpec) -> list[dict[str, Any]]:
    """For each case: how many times as fast as one such card that had memory enough, link by link."""
    rows = []
    for name, case in cases().items():
        alone = case.estimate_on(Hardware(1, 1, replace(gpu, memory=ENDLESS)))
        rate = alone.time.tokens_per_second
        rows.append({
            "card": gpu.name, "case": name, "trained_parameters": alone.trainable.trained,
            "one_card_tokens_per_second": round(rate, 1), "one_card_fits": case.estimate_on(Hardware(1, 1, gpu)).fits,
            "four_times_from_bytes_per_second": _four_times_from(case, gpu, rate),
            "links": [
                {"link": link, "bytes_per_second": places[2].slowest_bandwidth, **_over(case, places, rate)}
                for link, places in _links(gpu).items()
            ],
        })  # fmt: skip
    return rows


def _links(gpu: GpuSpec) -> dict[str, dict[int, Hardware]]:
    """By link the machines of 2, 4 and 8 cards: in one machine, or over Ethernet in one of its own each."""
    by_pcie = GPUS["H100-PCIe" if gpu.capability >= (9, 0) else "L40S"].interconnect_bandwidth
    inside = (
        {"NVLink": gpu.interconnect_bandwidth, "PCIe": by_pcie}
        if gpu.interconnect_bandwidth > by_pcie
        else {"PCIe": gpu.interconnect_bandwidth}
    )
    found = {
        link: {world: Hardware(1, world, replace(gpu, interconnect_bandwidth=speed)) for world in WORLDS}
        for link, speed in inside.items()
    }
    return found | {
        link: {world: Hardware(world, 1, gpu, network_bandwidth=speed) for world in WORLDS}
        for link, speed in BETWEEN.items()
    }


def _over(case: Case, places: dict[int, Hardware], alone: float) -> dict[str, Any]:
    """Two, four and eight cards over one link, beside one card's tokens per second."""
    grown = {str(world): case.estimate_on(place) for world, place in places.items()}
    kept = {str(world): _same_batch(case).estimate_on(place) for world, place in places.items()}
    return {
        "times": {world: _times(each, alone) for world, each in grown.items()},
        "times_same_batch": {world: _times(each, alone) for world, each in kept.items()},
        "sharding": {world: each.plan.sharding for world, each in grown.items()},
    }


def _four_times_from(case: Case, gpu: GpuSpec, alone: float) -> float | None:
    """The slowest link over which four cards are four times as fast as one; None where none is fast enough."""
    low, high = SLOWEST, FASTEST

    def reached(link: float) -> bool:
        return (_times(case.estimate_on(Hardware(4, 1, gpu, network_bandwidth=link)), alone) or 0.0) >= 4 * CLOSE

    if not reached(high):
        return None
    while high / low > 1.02:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if reached(middle) else (middle, high)
    return float(f"{high:.3g}")


def _same_batch(case: Case) -> Case:
    """The case with one card's batch shared among all, instead of a batch that grows with them."""
    settings = case.settings
    batch = settings.per_device_train_batch_size * settings.gradient_accumulation_steps
    told = {**settings.model_dump(exclude_unset=True), "global_batch_size": batch}
    return replace(case, settings=type(settings).model_validate(told))


def _times(found: StageEstimate, alone: float) -> float | None:
    """How many times one card's rate; None where it does not fit."""
    return round(found.time.tokens_per_second / alone, 2) if found.fits else None


def _measured(ranks: Sequence[int]) -> dict[str, Any]:
    """Tokens per second with so many ranks of one thread each, every rank given the same number of rows."""
    from benchmarks.workloads import save_small_model
    from modelwright.data.sources import EMBEDDED_DATASETS

    busy = os.getloadavg()[0]
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="scale-") as place:
        texts = EMBEDDED_DATASETS["field-guide"].read_text(encoding="utf-8").splitlines()
        save_small_model(Path(place) / "model", texts, layers=LAYERS, width=WIDTH)
        for count in ranks:
            found[str(count)] = _train(Path(place), count)
    for name, rate in (("efficiency", "tokens_per_second"), ("fastest_efficiency", "fastest_tokens_per_second")):
        each = {count: found[str(count)][rate] / count for count in ranks}
        for count in ranks:
            found[str(count)][name] = round(each[count] / each[ranks[0]], 3)
    return {
        "setting": f"{LAYERS}-layer Llama of width {WIDTH}, {ROWS} rows a rank, fp32, one thread a rank, gloo, ddp, "
        f"median of {STEPS - WARM_UP} steps",
        "load_before": round(busy, 2),
        "cores": len(os.sched_getaffinity(0)),
        "ranks": found,
    }


def _train(place: Path, ranks: int) -> dict[str, Any]:
    """One run through the real launcher; its own journal tells the speed."""
    run, recipe = place / f"run-{ranks}", place / f"ranks-{ranks}.yaml"
    recipe.write_text(f"""\
name: scale
output_dir: {run}
model: {{model_name_or_path: {place / "model"}}}
data: {{dataset_name: field-guide, columns: {{question: prompt, answer: completion}}, test_size: 4}}
sft: {{max_steps: {STEPS}, per_device_train_batch_size: {ROWS}, max_length: 128, precision: fp32, packing: true,
  save_steps: {STEPS}, eval_steps: {STEPS}, logging_steps: 1}}
""", encoding="utf-8")  # fmt: skip
    words = ["launch", str(recipe), "--nproc-per-node", str(ranks), "--log-format", "plain", "--until-stage", "sft"]
    command = [sys.executable, "-m", "modelwright", *words]
    done = subprocess.run(
        command, cwd=place, env=environment({"CUDA_VISIBLE_DEVICES": ""}), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{ranks} ranks could not train: {done.stdout[-1000:]}{done.stderr[-1000:]}")
    steps = [event for event in journal.read(run / "journal.jsonl") if event["event"] == "step"]
    rates = [event["tokens"] / event["step_seconds"] for event in steps if event["step"] > WARM_UP]
    return {"tokens_per_second": round(median(rates), 1), "fastest_tokens_per_second": round(max(rates), 1)}


def lines(figures: dict[str, Any]) -> list[str]:
    """The figures as tables."""
    told = _measured_lines(figures["measured"]) if "measured" in figures else []
    for row in figures["paper"]:
        needed = row["four_times_from_bytes_per_second"]
        judged = f"four cards are 4 × as fast from {needed * 8 / 1e9:,.0f} Gbit/s on" if needed else "never 4 × on four"
        alone = "" if row["one_card_fits"] else ", had it memory enough"
        told += ["", f"{row['card']}, {row['case']}: {row['trained_parameters'] / 1e6:,.1f} M weights move; one card "
                 f"{row['one_card_tokens_per_second']:,.0f} tokens/s{alone}; {judged}"]  # fmt: skip
        told.append(f"  {'link':<11}" + "".join(f"{f'{world} cards':>19}" for world in WORLDS))
        for link in row["links"]:
            told.append(f"  {link['link']:<11}" + "".join(f"{_cell(link, str(world)):>19}" for world in WORLDS))
    return [*told, "", PAPER]


def _measured_lines(measured: dict[str, Any]) -> list[str]:
    told = [measured["setting"]]
    for count, each in measured["ranks"].items():
        told.append(
            f"{count} rank{'s' * (count != '1')}: {each['tokens_per_second']:,.0f} tokens/s, "
            f"efficiency {each['efficiency']:.0%} (by the fastest steps {each['fastest_efficiency']:.0%})"
        )
    if measured["load_before"] > 0.5:
        told.append(f"the machine was busy ({measured['load_before']:g} processes running before): not to be relied on")
    return told


def _cell(link: dict[str, Any], world: str) -> str:
    grown, kept = link["times"][world], link["times_same_batch"][world]
    if grown is None:
        return "does not fit"
    split = " fsdp" if link["sharding"][world] == "fsdp" else ""
    return f"{grown:.2f} ({kept:.2f}){split}" if kept is not None else f"{grown:.2f}{split}"


def main(
    ranks: Annotated[
        list[int] | None, typer.Option("--ranks", min=1, help="CPU ranks to try; may be given often.")
    ] = None,
    cards: Annotated[list[str] | None, typer.Option("--card", help="A GPU to compute for; may be given often.")] = None,
    only_paper: Annotated[bool, typer.Option("--paper", help="Only the arithmetic; nothing is trained.")] = False,
    save: common.Save = False,
    as_json: common.Json = False,
) -> None:
    """How much faster several devices are: measured with CPU ranks, computed for GPUs and their links."""
    chosen, sizes = [card(name) for name in cards or CARDS], () if only_paper else ranks or RANKS
    common.report("scale", lambda: measure(sizes, chosen), lines, save, as_json)


if __name__ == "__main__":
    common.run(main)
