"""The tables of figures in docs/benchmarks.md, made from benchmarks/results: nothing in them is typed by hand."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

from modelwright.runs.folder import read_json

Cells = tuple[str, str, str, str]
"""The workload, our figure, a peer's on the same machine, and the command."""
Figures = dict[str, Any]
MARK = "<!-- figures: {name}, made from benchmarks/results by benchmarks.tables -->"
END = "<!-- end of figures -->"
LAST_LOSSES = 5
"""Saved losses, one of ten steps each, that make the end of a curve."""
HEADER = ("what", "Modelwright", "peer, same machine", "command", "measured")


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; pipes and line breaks in cells are escaped."""
    lines = [f"| {' | '.join(header)} |".replace("|  |", "| |"), "|---" * len(header) + "|"]
    for row in rows:
        cells = (re.sub(r"\s+", " ", cell).replace("|", "\\|") for cell in row)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def fill(text: str, folder: Path) -> str:
    """A page with all of its tables regenerated."""
    for name, table in TABLES.items():
        mark = MARK.format(name=name)
        pattern = re.compile(re.escape(mark) + r"\n.*?" + re.escape(END), re.DOTALL)
        text = pattern.sub(lambda _, mark=mark, table=table: f"{mark}\n{table(folder)}{END}", text)  # type: ignore[misc]
    return text


def gpu_table(folder: Path) -> str:
    """Results of a GPU."""
    rows: list[tuple[str, Callable[[Figures], list[Cells]]]] = [
        ("speed/6b", _pretrain_6b), ("speed/0.5b", _pretrain_half_b),
        ("speed/135m, 300 steps of real text", _pretrain_135m), ("speed/fp32", _fp32), ("speed/lora", _lora),
        ("speed/sft", _sft), ("speed/dpo", _dpo), ("speed/start", _first_step),
        ("survival-gpu", _survival_gpu), ("stages-gpu", _stages), ("vision-gpu", _vision), ("decoding", _decoding),
        ("plan", _plan),
    ]  # fmt: skip
    return _table(folder, rows)


def cpu_table(folder: Path) -> str:
    """Results of a CPU."""
    rows: list[tuple[str, Callable[[Figures], list[Cells]]]] = [
        ("sft", _small_sft), ("survival", _survival_cpu), ("data", _data), ("tokenizing", _tokenizing),
        ("scale", _scale), ("start", _startup),
    ]  # fmt: skip
    return _table(folder, rows)


def techniques_table(figures: Figures) -> str:
    """The techniques beside what the document claims, as a Markdown table."""
    header = ("technique", "claimed", "measured", "without → with", "on")
    rows = []
    for name, row in figures["techniques"].items():
        sides = [row["without"], row["with"]]
        if failed := [side["failed"] for side in sides if "failed" in side]:
            rows.append((name, row["claim"], "failed", failed[0], row["work"]))
            continue
        gain = f"{row['ratio'] - 1:+.0%}" if row["ratio"] < 2 else f"{row['ratio']:.1f} ×"
        if alone := row.get("alone"):
            times = f"{alone['plain_ms']} → {alone['fused_ms']} ms"
            gain = f"{alone['ratio']:.1f} × of attention ({times}), {gain} of the step"
        rates = " → ".join(f"{side['per_second']:,.0f}" for side in sides)
        rows.append((name, row["claim"], gain, f"{rates} {row['unit']}/s", row["work"]))
    return markdown_table(header, rows)


def _saved_techniques(folder: Path) -> str:
    measured = read_json(folder / "techniques.json")
    return f"{techniques_table(measured['figures'])}\n{_provenance(measured)}\n"


TABLES: dict[str, Callable[[Path], str]] = {"gpu": gpu_table, "cpu": cpu_table, "techniques": _saved_techniques}
"""The tables of docs/benchmarks.md by their names."""


def _table(folder: Path, rows: list[tuple[str, Callable[[Figures], list[Cells]]]]) -> str:
    lines: list[tuple[str, ...]] = []
    for name, make in rows:
        if measured := _load(folder, name):
            lines += [(*cells, _provenance(measured)) for cells in make(measured["figures"])]
    return markdown_table(HEADER, lines)


def _load(folder: Path, name: str) -> dict[str, Any] | None:
    """The result of a name, which may be FILE/WORKLOAD."""
    file, _, work = name.partition("/")
    path = folder / f"{file}.json"
    measured = read_json(path) if path.exists() else {"figures": {}}
    if not work:
        return measured if path.exists() else None
    figures = measured["figures"].get(work)
    return {**measured, **figures.get("measured", {}), "figures": figures} if figures else None


def _provenance(measured: dict[str, Any]) -> str:
    """The date and the machine."""
    machine, device = measured["machine"], measured["figures"].get("device")
    name = device.get("name") if isinstance(device, dict) else device
    return f"{measured['date'][:10]}, {name or machine.get('gpu') or '{cores} × {cpu}'.format(**machine)}"


def _pretrain_6b(figures: Figures) -> list[Cells]:
    variants = figures["variants"]
    return [
        (
            "pretrain a 6.08 B Llama, 32 rows of 2048 tokens a step",
            f"{_full_rate(variants['ours, bf16'])} in bf16, {_full_rate(variants['ours, fp8'])} in fp8",
            _with_torchtitan(_fastest_peer(variants, "HF Trainer", "tokens_per_second", "tokens/s"), variants),
            "`benchmarks.speed --work 6b`",
        )
    ]


def _pretrain_half_b(figures: Figures) -> list[Cells]:
    variants = figures["variants"]
    return [
        (
            "pretrain 0.5 B, 8 rows of 512",
            f"{_rate(variants['ours, bf16'])} in bf16, "
            f"{_rate(variants['ours, bf16, mean in bf16'])} with AdamW's first moment in bf16",
            _with_torchtitan(
                f"HF Trainer {_rate(variants['HF Trainer, bf16, eager'])} eager, "
                f"{_rate(variants['HF Trainer, bf16, torch_compile'])} compiled",
                variants,
            ),
            "`benchmarks.speed --work 0.5b`",
        )
    ]


def _pretrain_135m(figures: Figures) -> list[Cells]:
    variants = figures["variants"]
    ends = {name: mean(variant["losses"][-LAST_LOSSES:]) for name, variant in variants.items()}
    off = {name: f"{end / ends['ours, fp32 weights and autocast'] - 1:+.2%}" for name, end in ends.items()}
    return [
        (
            "pretrain 135 M, 16 rows of 512, 300 steps of real text",
            f"{_rate(variants['ours, bf16'])} in bf16, {_rate(variants['ours, fp8'])} in fp8",
            f"HF Trainer {_rate(variants['HF Trainer, bf16, eager'])}, eager",
            "`benchmarks.speed --work 135m`",
        ),
        (
            "final training loss of these runs, compared with fp32 weights",
            f"{off['ours, bf16']} in bf16, {off['ours, fp8']} in fp8, {off['ours, fp16']} in fp16, "
            f"{off['ours, fp32 on tensor cores']} in tf32",
            f"HF Trainer {off['HF Trainer, bf16, eager']}",
            "`benchmarks.speed --work 135m`",
        ),
    ]


def _fp32(figures: Figures) -> list[Cells]:
    variants = figures["variants"]
    ours = f"{_rate(variants['ours, tf32'])} with TF32, {_rate(variants['ours, fp32'])} without"
    peer = _fastest_peer(variants, "HF Trainer", "tokens_per_second", "tokens/s")
    return [("pretrain 0.5 B in fp32, 8 rows of 512", ours, peer, "`benchmarks.speed --work fp32`")]


def _lora(figures: Figures) -> list[Cells]:
    variants = figures["variants"]
    names = [name for name in ("ours, bf16", "ours, fp8") if name in variants]
    ours = ", ".join(f"{_full_rate(variants[name])} in {name.removeprefix('ours, ')}" for name in names)
    peer = _fastest_peer(variants, "HF Trainer", "tokens_per_second", "tokens/s")
    return [("LoRA, 8.0 B shape, 4 rows of 4096", ours, peer, "`benchmarks.speed --work lora`")]


def _sft(figures: Figures) -> list[Cells]:
    ours = f"{figures['variants']['ours, bf16']['rows_per_second']:.0f} rows/s"
    peer = _fastest_peer(figures["variants"], "TRL", "rows_per_second", "rows/s")
    return [("SFT of every weight, SmolLM3-3B shape, 32 rows a step", ours, peer, "`benchmarks.speed --work sft`")]


def _first_step(figures: Figures) -> list[Cells]:
    stalled = max(save["share_of_a_minute"] for save in figures["saves"])
    return [
        ("command to first step, 0.5 B, warm compile cache", f"{figures['warm']['seconds']:.1f} s", "–",
         "`benchmarks.speed --work start`"),
        ("cost of one save a minute, 0.5 B", f"{stalled:.1%} of the time", "–", "`benchmarks.speed --work start`"),
    ]  # fmt: skip


def _with_torchtitan(hf_trainer: str, variants: dict[str, Any]) -> str:
    """The figure of the HF Trainer, and that of torchtitan where it was measured."""
    titan = _fastest_peer(variants, "torchtitan", "tokens_per_second", "tokens/s")
    return "; ".join([text for text in (hf_trainer, titan) if text != "–"] or ["–"])


def _fastest_peer(variants: dict[str, Any], peer: str, figure: str, unit: str) -> str:
    """The fastest variant of the peer."""
    rates = [variant[figure] for name, variant in variants.items() if name.startswith(peer) and figure in variant]
    return f"{peer} {max(rates):,.0f} {unit}" if rates else "–"


def _dpo(figures: Figures) -> list[Cells]:
    ours, peer = (figures["variants"][name] for name in ("ours, bf16", "TRL, bf16"))
    return [
        (
            f"DPO, {figures['setting'].partition(',')[0]}, 512 prompt and 2 × 512 answer tokens",
            f"{ours['pairs_per_second']:.1f} pairs/s, {ours['memory_gb']:.0f} GB",
            f"TRL {peer['pairs_per_second']:.1f}, {peer['memory_gb']:.0f} GB",
            "`benchmarks.speed --work dpo`",
        )
    ]


def _survival_gpu(figures: Figures) -> list[Cells]:
    seconds = figures["modelwright"]["seconds"], figures["trl"]["seconds_extrapolated"]
    ours, peer = (f"{each:.0f} s" for each in seconds)
    return _last_two_layers("SmolLM3-3B shape", figures, ours, peer, "benchmarks.speed --work survival-3b")


def _stages(figures: Figures) -> list[Cells]:
    stages: dict[str, list[str]] = {}
    for row in figures["stages"]:
        if "failed" not in row:
            text = f"{row['tokens_per_second']:,.0f} in {row['precision']}"
            stages.setdefault(row["stage"], []).append(text)
    rates = "; ".join(f"{stage} {', '.join(text)}" for stage, text in stages.items())
    name = f"stages of {figures['recipe']}, real shapes, tokens/s"
    return [(name, rates, "–", "`modelwright plan llama-7b --measure`")]


def _vision(figures: Figures) -> list[Cells]:
    runs, script = figures["runs"], figures.get("script")
    seeds = f"mean of {len(runs)} seeds" if len(runs) > 1 else "one seed"
    return [
        (
            f"ResNet-18, {runs[0]['epochs']:.0f} epochs with compiling ({figures['source']})",
            f"{figures['accuracy']:.1%} ({seeds}) in {figures['seconds']:.1f} s, "
            f"{figures['epoch_seconds']:.2f} s an epoch",
            f"a plain script in fp32: {script['epoch_seconds']:.1f} s an epoch" if script else "–",
            "`benchmarks.vision`",
        )
    ]


def _decoding(figures: Figures) -> list[Cells]:
    rows, command = figures["rows"], "`benchmarks.decoding`"

    def rate(begin: str, end: str = "") -> str:
        [row] = (row for name, row in rows.items() if name.startswith(begin) and name.endswith(end))
        return f"{row['tokens_per_second']:,.0f} tokens/s"

    [ten] = (row for name, row in rows.items() if name.startswith("ten answers"))
    generate = rate("transformers.generate:"), rate("transformers.generate, static cache")
    one, many, slow = (rate("serve --compile", end) for end in ("one request of 256 tokens", "32 requests", "a second"))
    return [
        (
            "32 answers of 512 tokens, Qwen3-4B shape",
            f"{rate('decoder, compiled:')} compiled, {rate('decoder, not')} not",
            f"transformers {generate[0]}, with a static cache {generate[1]}, not compiled",
            command,
        ),
        (
            "`serve` of that model, 32 requests at once",
            f"{many}, {slow} beside a client that reads one byte a second; one request alone {one}",
            "–",
            command,
        ),
        ("ten answers of 128 tokens, SmolLM3-3B shape", f"{ten['seconds']:.1f} s", "–", command),
    ]


def _survival_cpu(figures: Figures) -> list[Cells]:
    rates = figures["modelwright"]["overall_rows_per_second"], figures["trl"]["rows_per_second"]
    ours, peer = (f"{each:.2f} rows/s" for each in rates)
    return _last_two_layers("SmolLM2-135M", figures, ours, peer, "benchmarks.speed --work survival")


def _last_two_layers(model: str, figures: Figures, ours: str, peer: str, command: str) -> list[Cells]:
    """Our full run, and TRL extrapolated from its median step."""
    label = f"{model}, last two layers and an untied head, {figures['rows']:,} rows × {figures['epochs']} epochs"
    return [(label, f"{ours}, start included", f"TRL {peer}, extrapolated from its median step", f"`{command}`")]


def _plan(figures: Figures) -> list[Cells]:
    judged = figures["judged"]
    memory, rate = ([abs(run[f"left_out_{name}"]) for run in judged] for name in ("memory_error", "rate_error"))
    peer = [abs(run["accelerate_error"]) for run in judged if run.get("accelerate_error") is not None]
    settings = len({run["setting"]["name"] for run in judged})
    return [
        (
            f"median error of the plan for {settings} trainings (0.1 B to 7 B), each left out of the fit",
            f"memory {median(memory):.1%} (worst {max(memory):.1%}), "
            f"tokens/s {median(rate):.1%} (worst {max(rate):.1%})",
            f"accelerate: memory {median(peer):.0%}",
            "`benchmarks.plan`",
        )
    ]


def _small_sft(figures: Figures) -> list[Cells]:
    ours, peer = figures["modelwright"], figures["trl"]
    same = "the same mean loss" if abs(ours["mean_loss"] - peer["mean_loss"]) < 1e-4 else "another mean loss"
    label = f"SFT, {figures['setting'].partition(',')[0]}, {same}"
    rates = f"{ours['tokens_per_second']:.0f} tokens/s", f"TRL {peer['tokens_per_second']:.0f}"
    return [(label, *rates, "`benchmarks.speed --work sft-small`")]


def _data(figures: Figures) -> list[Cells]:
    near, tokens = figures["near_duplicates"], figures["tokens"]
    slow = near.get("datatrove_signatures_mb_per_cpu_s")
    return [
        (
            f"finding near-duplicates in {figures['corpus']['megabytes']:.0f} MB of text, per CPU-second",
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


def _tokenizing(figures: Figures) -> list[Cells]:
    sides = []
    for side in ("modelwright", "trl"):
        starts = {start: run for start, run in figures.get(side, {}).items() if "seconds" in run}
        sides.append(", ".join(f"{start} start {run['seconds']:.1f} s" for start, run in starts.items()))
    peer = f"TRL {sides[1]}" if sides[1] else "–"
    label = f"tokenizing {figures['rows']:,} questions and answers"
    return [(label, sides[0], peer, "`benchmarks.tokenizing`")]


def _scale(figures: Figures) -> list[Cells]:
    ranks = figures["measured"]["ranks"]
    largest = max(ranks, key=int)
    label = f"{largest} ranks compared with one, {figures['measured']['setting'].partition(',')[0]}"
    return [(label, f"{ranks[largest]['efficiency']:.0%} efficiency", "–", "`benchmarks.scale`")]


def _startup(figures: Figures) -> list[Cells]:
    return [
        (
            f"{label}, CPU-seconds",
            f"{figures[name]['modelwright']['cpu_seconds']:.2f}",
            f"TRL {figures[name]['trl']['cpu_seconds']:.1f}",
            "`benchmarks.startup`",
        )
        for name, label in (("help", "--help of a command"), ("typo", "error for a misspelt setting"))
    ]


def _full_rate(variant: dict[str, Any]) -> str:
    return f"{variant['tokens_per_second']:,.0f} tokens/s ({variant['mfu']:.1%} MFU, {variant['memory_gb']:.0f} GB)"


def _rate(variant: dict[str, Any]) -> str:
    return f"{variant['tokens_per_second'] / 1000:.0f} k tokens/s"
