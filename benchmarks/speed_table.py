"""The speed table on one GPU: every row with its goal, each work in a process of its own.

`--out DIR` gets speed.json, in the form of benchmarks/results/speed.json, and the log; it is complete after each work.
`--merge FILE` puts such a file into benchmarks/results, where the README's table is made from.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks import common
from modelwright.runs.folder import read_json, write_json

Figures = dict[str, Any]
OURS, FP8, HF = "ours, bf16", "ours, fp8", "HF Trainer, bf16"
FASTEST = ", deterministic: false"
TRL_SFT = ("TRL, bf16, liger", "TRL, bf16 weights, liger")
RUNS = {
    "0.5b": (40, (OURS, OURS + FASTEST), ("ours, bf16, mean in bf16", f"{HF}, eager", f"{HF}, torch_compile")),
    "sft": (14, (OURS, OURS + FASTEST, *TRL_SFT), ()),
    "dpo": (12, (OURS, OURS + FASTEST, "TRL, bf16"), ()),
    "lora": (12, (OURS, OURS + FASTEST), (FP8, "HF Trainer and PEFT, bf16, checkpointing, liger")),
    "6b": (5, (OURS, OURS + FASTEST, FP8, FP8 + FASTEST), (f"{HF}, checkpointing, liger",)),
}
"""Steps, variants, and those that --all adds, of each work."""


@dataclass(frozen=True)
class Goal:
    """A row of the table and the least it must reach."""

    label: str
    work: str
    unit: str
    at_least: float
    figure: str = "tokens_per_second"
    variant: str = OURS

    def measured(self, variants: Figures, ending: str) -> float:
        """The figure of the variant with this ending, or its ratio to the fastest variant of TRL."""
        ours = float(variants[self.variant + ending][self.figure])
        trl = [each[self.figure] for name, each in variants.items() if name.startswith("TRL")]
        return ours / max(trl) if self.unit == "× TRL" else ours


GOALS = (
    Goal("pretrain 6.08 B, bf16", "6b", "tokens/s", 15_500),
    Goal("pretrain 6.08 B, fp8", "6b", "tokens/s", 21_500, variant=FP8),
    Goal("pretrain 0.5 B, bf16", "0.5b", "tokens/s", 155_000),
    Goal("LoRA 8 B, bf16, equal rows", "lora", "tokens/s", 15_500),
    Goal("SFT 3 B", "sft", "× TRL", 3.5, "rows_per_second"),
    Goal("DPO 1 B", "dpo", "× TRL", 1.9, "pairs_per_second"),
)


def lines(figures: Figures) -> Iterator[str]:
    """The table: each goal with what was measured, by default and without deterministic kernels."""
    for goal, ending in ((goal, ending) for goal in GOALS if goal.work in figures for ending in ("", FASTEST)):
        variants = figures[goal.work]["variants"]
        if ending and goal.variant + ending not in variants:
            continue
        label = f"{goal.label + ending:<50}"
        try:
            reached = goal.measured(variants, ending)
        except (KeyError, ValueError):
            yield f"{label} failed, see the log"
            continue
        word = "met" if reached >= goal.at_least else "MISSED"
        yield f"{label} {reached:>12,.2f} {goal.unit:<9} at least {goal.at_least:>10,.1f}  {word}"


def run_work(work: str, rows: Path | None, every: bool, log: Any) -> Figures:
    """The figures of a work, measured by benchmarks.speed in a process of its own."""
    steps, variants, more = RUNS[work]
    command = [sys.executable, "-m", "benchmarks.speed", "--work", work, "--steps", str(steps), "--json"]
    command += [word for name in (*variants, *(more if every else ())) for word in ("--variant", name)]
    command += ["--rows", str(rows)] if rows and work == "sft" else []
    began = time.monotonic()
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=log, text=True, check=False)
    print(f"{work}: {time.monotonic() - began:.0f} s, exit {done.returncode}", flush=True)
    if done.returncode:
        return {"variants": {}}
    measured = json.loads(done.stdout)
    return {**measured["figures"], "measured": {name: measured[name] for name in ("date", "commit")}}


def merge(path: Path) -> Path:
    """Put measured works into benchmarks/results/speed.json; variants that were not measured again stay as they are."""
    saved = common.load_result("speed") or common.result("speed", {})
    for work, figures in read_json(path).items():
        before = saved["figures"].get(work, {}).get("variants", {})
        saved["figures"][work] = {**figures, "variants": {**before, **figures["variants"]}}
    return common.save(saved)


def main(
    out: Annotated[Path, typer.Option("--out", help="Folder for speed.json and the log.")] = Path("build/speed-table"),
    works: Annotated[list[str] | None, typer.Option("--work", help="This work; repeatable.")] = None,
    rows: Annotated[Path | None, typer.Option("--rows", help="Questions and answers for sft.")] = None,
    every: Annotated[bool, typer.Option("--all", help="More variants, and the HF Trainer.")] = False,
    merged: Annotated[Path | None, typer.Option("--merge", help="Save this speed.json in benchmarks/results.")] = None,
) -> None:
    """Measure the rows of the speed table and compare them with their goals."""
    if merged is not None:
        print(f"saved to {merge(merged)}")
        return
    out.mkdir(parents=True, exist_ok=True)
    figures: Figures = {}
    with (out / "log").open("a", encoding="utf-8") as log:
        for work in works or RUNS:
            figures[work] = run_work(work, rows, every, log)
            write_json(out / "speed.json", figures)
            print(
                "\n".join(lines({work: figures[work]})), flush=True
            )  # a run that is stopped has said what it measured
    print("\n".join(lines(figures)))


if __name__ == "__main__":
    common.run(main)
