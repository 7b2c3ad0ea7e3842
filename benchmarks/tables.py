"""The README's tables of figures, made from benchmarks/results: nothing in them is typed by hand."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median
from typing import Any

from modelwright.runs.folder import read_json

Cells = tuple[str, str, str, str]
"""What was done, ours, a peer's on the same machine, and the command."""
Figures = dict[str, Any]
MARK = "<!-- figures: {name}, made from benchmarks/results by benchmarks.tables -->"
LAST = 5
"""Kept losses, one of ten steps each, that make the end of a curve."""
END = "<!-- end of figures -->"


def fill(text: str, folder: Path) -> str:
    """A page with every table in it made anew."""
    for name, table in TABLES.items():
        mark = MARK.format(name=name)
        pattern = re.compile(re.escape(mark) + r"\n.*?" + re.escape(END), re.DOTALL)
        text = pattern.sub(lambda _, mark=mark, table=table: f"{mark}\n{table(folder)}{END}", text)  # type: ignore[misc]
    return text


def on_a_gpu(folder: Path) -> str:
    """What was measured on a GPU."""
    rows: list[tuple[str, Callable[[Figures], list[Cells]]]] = [
        ("speed/6b", _six_billion), ("speed/0.5b", _half_a_billion),
        ("speed/135m, 300 steps of real text", _real_text), ("speed/fp32", _exact), ("speed/lora", _low_rank),
        ("speed/sft", _every_weight), ("speed/dpo", _preferences), ("speed/start", _command),
        ("survival-gpu", _survival), ("stages-gpu", _recipe), ("vision-gpu", _images), ("plan", _planner),
    ]  # fmt: skip
    return _table(folder, rows)


def on_a_cpu(folder: Path) -> str:
    """What was measured on a CPU."""
    rows: list[tuple[str, Callable[[Figures], list[Cells]]]] = [
        ("sft", _tuning), ("survival", _twin), ("data", _preparing), ("scale", _scaling), ("start", _starting),
    ]  # fmt: skip
    return _table(folder, rows)


def scorecard(folder: Path) -> str:
    """What was done to runs, what came of it, and what peers do; nothing before it was measured."""
    path = folder / "reliability.json"
    if not path.exists():
        return "The scorecard of faults has not been measured yet: `python -m tests.faults.scorecard --save`.\n"
    measured = read_json(path)
    rows = measured["figures"]["rows"]
    counts = {word: sum(each["verdict"] == word for each in rows.values()) for word in ("met", "gap", "skipped")}
    told = ", ".join(f"{count} {word}" for word, count in counts.items() if count)
    shown = "shown are those of which a figure of the HF Trainer is known, and every gap"
    head = f"{len(rows)} faults, {told} ({_stand(measured)}); {shown}.\n\n"
    lines = ["| fault | found | | peers |", "|---|---|---|---|"]
    lines += [
        f"| {_cell(each['name'])} | {_cell(each['figure'])} | {each['verdict']} | {_cell(each['baseline'])} |"
        for each in rows.values()
        if each["verdict"] == "gap" or each.get("baseline_measured_here") or "HF Trainer" in each["baseline"]
    ]
    return head + "\n".join(lines) + "\n"


TABLES: dict[str, Callable[[Path], str]] = {"gpu": on_a_gpu, "cpu": on_a_cpu, "scorecard": scorecard}
"""The tables of the README by their names."""


def _table(folder: Path, rows: list[tuple[str, Callable[[Figures], list[Cells]]]]) -> str:
    lines = ["| what | Modelwright | peer, same machine | command | measured |", "|---|---|---|---|---|"]
    for name, make in rows:
        if measured := _kept(folder, name):
            lines += [f"| {' | '.join(cells)} | {_stand(measured)} |" for cells in make(measured["figures"])]
    return "\n".join(lines) + "\n"


def _kept(folder: Path, name: str) -> dict[str, Any] | None:
    """What was measured under a name, which may be that of one work among others in a file."""
    file, _, work = name.partition("/")
    path = folder / f"{file}.json"
    measured = read_json(path) if path.exists() else {"figures": {}}
    if not work:
        return measured if path.exists() else None
    figures = measured["figures"].get(work)
    return {**measured, **figures.get("measured", {}), "figures": figures} if figures else None


def _stand(measured: dict[str, Any]) -> str:
    """The day and the machine."""
    machine, device = measured["machine"], measured["figures"].get("device")
    name = device.get("name") if isinstance(device, dict) else device
    return f"{measured['date'][:10]}, {name or machine.get('gpu') or '{cores} × {cpu}'.format(**machine)}"


def _six_billion(figures: Figures) -> list[Cells]:
    ways = figures["ways"]
    return [
        (
            "pretrain a 6.08 B Llama, 32 rows of 2048 tokens a step",
            f"{_way(ways['ours, bf16'])} in bf16, {_way(ways['ours, fp8'])} in fp8",
            _each_peer(_fastest_peer(ways, "HF Trainer", "tokens_per_second", "tokens/s"), ways),
            "`benchmarks.speed --work 6b`",
        )
    ]


def _half_a_billion(figures: Figures) -> list[Cells]:
    ways = figures["ways"]
    return [
        (
            "pretrain 0.5 B, 8 rows of 512",
            f"{_rate(ways['ours, bf16'])} in bf16, {_rate(ways['ours, bf16, mean in bf16'])} with AdamW's mean in bf16",
            _each_peer(
                f"HF Trainer {_rate(ways['HF Trainer, bf16, eager'])} eager, "
                f"{_rate(ways['HF Trainer, bf16, torch_compile'])} compiled",
                ways,
            ),
            "`benchmarks.speed --work 0.5b`",
        )
    ]


def _real_text(figures: Figures) -> list[Cells]:
    ways = figures["ways"]
    ends = {way: mean(told["losses"][-LAST:]) for way, told in ways.items()}
    off = {way: f"{end / ends['ours, fp32 weights and autocast'] - 1:+.2%}" for way, end in ends.items()}
    return [
        (
            "pretrain 135 M, 16 rows of 512, 300 steps of real text",
            f"{_rate(ways['ours, bf16'])} in bf16, {_rate(ways['ours, fp8'])} in fp8",
            f"HF Trainer {_rate(ways['HF Trainer, bf16, eager'])}, eager",
            "`benchmarks.speed --work 135m`",
        ),
        (
            "… its training loss at the end, against exact fp32 weights",
            f"{off['ours, bf16']} in bf16, {off['ours, fp8']} in fp8, {off['ours, fp16']} in fp16, "
            f"{off['ours, fp32 on tensor cores']} in tf32",
            f"HF Trainer {off['HF Trainer, bf16, eager']}",
            "`benchmarks.speed --work 135m`",
        ),
    ]


def _exact(figures: Figures) -> list[Cells]:
    ways = figures["ways"]
    ours = f"{_rate(ways['ours, tf32'])} on tensor cores, {_rate(ways['ours, fp32'])} exact"
    peer = _fastest_peer(ways, "HF Trainer", "tokens_per_second", "tokens/s")
    return [("pretrain 0.5 B in fp32, 8 rows of 512", ours, peer, "`benchmarks.speed --work fp32`")]


def _low_rank(figures: Figures) -> list[Cells]:
    ways = figures["ways"]
    names = [name for name in ("ours, bf16", "ours, fp8") if name in ways]
    ours = ", ".join(f"{_way(ways[name])} in {name.removeprefix('ours, ')}" for name in names)
    peer = _fastest_peer(ways, "HF Trainer", "tokens_per_second", "tokens/s")
    return [("LoRA, 8.0 B shape, 4 rows of 4096", ours, peer, "`benchmarks.speed --work lora`")]


def _every_weight(figures: Figures) -> list[Cells]:
    ours = f"{figures['ways']['ours, bf16']['rows_per_second']:.0f} rows/s"
    peer = _fastest_peer(figures["ways"], "TRL", "rows_per_second", "rows/s")
    return [("SFT of every weight, SmolLM3-3B shape, 32 rows a step", ours, peer, "`benchmarks.speed --work sft`")]


def _command(figures: Figures) -> list[Cells]:
    held = max(save["share_of_a_minute"] for save in figures["saves"])
    return [
        ("from the command to the first step, 0.5 B, compiled before", f"{figures['warm']['seconds']:.1f} s", "–",
         "`benchmarks.speed --work start`"),
        ("what a save a minute holds up, 0.5 B", f"{held:.1%} of the time", "–", "`benchmarks.speed --work start`"),
    ]  # fmt: skip


def _each_peer(told: str, ways: dict[str, Any]) -> str:
    """What is told of the HF Trainer, and torchtitan beside it where it was measured."""
    titan = _fastest_peer(ways, "torchtitan", "tokens_per_second", "tokens/s")
    return "; ".join([text for text in (told, titan) if text != "–"] or ["–"])


def _fastest_peer(ways: dict[str, Any], name: str, figure: str, unit: str) -> str:
    """The best of the peer's ways."""
    rates = [told[figure] for way, told in ways.items() if way.startswith(name) and figure in told]
    return f"{name} {max(rates):,.0f} {unit}" if rates else "–"


def _preferences(figures: Figures) -> list[Cells]:
    ours, peer = (figures["ways"][name] for name in ("ours, bf16", "TRL, bf16"))
    return [
        (
            f"DPO, {figures['setting'].partition(',')[0]}, 512 prompt and 2 × 512 answer tokens",
            f"{ours['pairs_per_second']:.1f} pairs/s, {ours['memory_gb']:.0f} GB",
            f"TRL {peer['pairs_per_second']:.1f}, {peer['memory_gb']:.0f} GB",
            "`benchmarks.speed --work dpo`",
        )
    ]


def _survival(figures: Figures) -> list[Cells]:
    seconds = figures["modelwright"]["seconds"], figures["trl"]["seconds_extrapolated"]
    ours, peer = (f"{each:.0f} s" for each in seconds)
    return _last_two_layers("SmolLM3-3B shape", figures, ours, peer, "benchmarks.survival --scene smollm3")


def _recipe(figures: Figures) -> list[Cells]:
    stages: dict[str, list[str]] = {}
    for row in figures["stages"]:
        if "failed" not in row:
            told = f"{row['tokens_per_second']:,.0f} tokens/s ({row['memory_gb']:.0f} GB) in {row['precision']}"
            stages.setdefault(row["stage"], []).append(told)
    return [
        (f"{stage} of {figures['recipe']}, its real shapes", ", ".join(told), "–", "`plan llama-7b --measure`")
        for stage, told in stages.items()
    ]


def _images(figures: Figures) -> list[Cells]:
    runs, script = figures["runs"], figures.get("script")
    seeds = f"mean of {len(runs)} seeds" if len(runs) > 1 else "one seed"
    return [
        (
            f"ResNet-18, {runs[0]['epochs']:.0f} epochs of {figures['source']}, compiling counted",
            f"{figures['accuracy']:.1%} ({seeds}) in {figures['seconds']:.1f} s, "
            f"{figures['epoch_seconds']:.2f} s an epoch",
            f"a plain script in fp32: {script['epoch_seconds']:.1f} s an epoch" if script else "–",
            "`benchmarks.vision`",
        )
    ]


def _twin(figures: Figures) -> list[Cells]:
    rates = figures["modelwright"]["overall_rows_per_second"], figures["trl"]["rows_per_second"]
    ours, peer = (f"{each:.2f} rows/s" for each in rates)
    return _last_two_layers("SmolLM2-135M", figures, ours, peer, "benchmarks.survival")


def _last_two_layers(model: str, figures: Figures, ours: str, peer: str, command: str) -> list[Cells]:
    """Our whole run beside what TRL's median step foretells."""
    what = f"{model}, last two layers and an own head, {figures['rows']:,} rows × {figures['epochs']} epochs"
    return [(what, f"{ours}, start included", f"TRL {peer} by its median step", f"`{command}`")]


def _planner(figures: Figures) -> list[Cells]:
    judged = figures["judged"]
    memory, rate = ([abs(run[f"left_out_{name}"]) for run in judged] for name in ("memory_error", "rate_error"))
    peer = [abs(run["accelerate_error"]) for run in judged if run.get("accelerate_error") is not None]
    settings = len({run["setting"]["name"] for run in judged})
    return [
        (
            f"the plan of {settings} trainings, 0.1 B to 7 B, each foreseen by coefficients fitted to the others",
            f"memory {median(memory):.1%} off (worst {max(memory):.1%}), "
            f"tokens/s {median(rate):.1%} (worst {max(rate):.1%})",
            f"accelerate's estimate: memory {median(peer):.0%} off",
            "`benchmarks.plan`",
        )
    ]


def _tuning(figures: Figures) -> list[Cells]:
    ours, peer = figures["modelwright"], figures["trl"]
    same = "the same mean loss" if abs(ours["mean_loss"] - peer["mean_loss"]) < 1e-4 else "another mean loss"
    what = f"SFT, {figures['setting'].partition(',')[0]}, {same}"
    return [
        (what, f"{ours['tokens_per_second']:.0f} tokens/s", f"TRL {peer['tokens_per_second']:.0f}", "`benchmarks.sft`"),
    ]


def _preparing(figures: Figures) -> list[Cells]:
    near, tokens = figures["near_duplicates"], figures["tokens"]
    slow = near.get("datatrove_signatures_mb_per_cpu_s")
    return [
        (
            f"near-duplicates in {figures['corpus']['megabytes']:.0f} MB of text, per CPU-second",
            f"{near['modelwright_mb_per_cpu_s']:.0f} MB",
            f"rensa with Python shingles {near['rensa_python_shingles_mb_per_cpu_s']:.0f} MB"
            + (f", datatrove {slow:.2f} MB" if slow else ""),
            "`benchmarks.data`",
        ),
        (
            "reading packed rows at random, per CPU-second",
            f"{tokens['read_mtok_per_cpu_s']:.0f} M tokens",
            f"datasets {tokens['datasets_torch_mtok_per_cpu_s']:.0f} M",
            "`benchmarks.data`",
        ),
    ]


def _scaling(figures: Figures) -> list[Cells]:
    ranks = figures["measured"]["ranks"]
    most = max(ranks, key=int)
    what = f"{most} ranks against one, {figures['measured']['setting'].partition(',')[0]}"
    return [(what, f"{ranks[most]['efficiency']:.0%} of {most} times one", "–", "`benchmarks.scale`")]


def _starting(figures: Figures) -> list[Cells]:
    return [
        (
            f"{what}, CPU-seconds",
            f"{figures[name]['modelwright']['cpu_seconds']:.2f}",
            f"TRL {figures[name]['trl']['cpu_seconds']:.1f}",
            "`benchmarks.startup`",
        )
        for name, what in (("help", "help of a command"), ("typo", "the answer to a misspelt setting"))
    ]


def _way(told: dict[str, Any]) -> str:
    return f"{told['tokens_per_second']:,.0f} tokens/s ({told['mfu']:.1%} MFU, {told['memory_gb']:.0f} GB)"


def _rate(told: dict[str, Any]) -> str:
    return f"{told['tokens_per_second'] / 1000:.0f} k tokens/s"


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", "\\|")
