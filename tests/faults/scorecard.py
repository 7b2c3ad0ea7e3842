"""The scorecard: inject the selected faults, compare each with its goal, and print a table."""

from __future__ import annotations

import json
import sys
import tempfile
import textwrap
import time
import traceback
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks import common as results
from benchmarks.tables import markdown_table
from modelwright.errors import UsageError, first_line
from tests.faults import damage, environment, kills, numerics, security, storage, two_nodes
from tests.faults.context import FaultContext, FaultResult, FaultRow, FaultSkipped

SEED = 20261115
BEGIN = "<!-- figures: made by `python -m tests.faults.scorecard --save` from benchmarks/results/reliability.json -->"
END_MARK = "<!-- end of figures -->"
MODULES = (kills, damage, storage, numerics, two_nodes, environment, security)


def _number(fault: FaultRow) -> tuple[str, int]:
    return fault.id[0], int(fault.id[1:])


FAULTS: tuple[FaultRow, ...] = tuple(sorted((fault for module in MODULES for fault in module.FAULTS), key=_number))
"""Every line of the table, in its order."""


def select(only: Sequence[str], skip: Sequence[str]) -> list[FaultRow]:
    """The selected faults, by their ids or by ranges such as R1-R11."""
    selected = _parse_ids(only) or {fault.id for fault in FAULTS}
    skipped = _parse_ids(skip)
    return [fault for fault in FAULTS if fault.id in selected and fault.id not in skipped]


def _parse_ids(words: Sequence[str]) -> set[str]:
    known = [fault.id for fault in FAULTS]
    selected: set[str] = set()
    for word in (part.strip().upper() for each in words for part in each.split(",")):
        first, _, last = word.partition("-")
        if first not in known or (last and last not in known):
            raise UsageError(f"there is no fault {word!r}; the table has {', '.join(known)}")
        selected |= set(known[known.index(first) : known.index(last or first) + 1])
    return selected


def measure(faults: Sequence[FaultRow], seed: int = SEED, smoke: bool = False, peers: bool = True) -> dict[str, Any]:
    """Inject one fault after the other."""
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="reliability-") as folder:
        context = FaultContext(Path(folder), seed, smoke)
        context.run_peers = peers and not smoke
        try:
            for fault in faults:
                context.log(f"{fault.id} {fault.name} (seed {seed}, about {fault.seconds} s)")
                rows[fault.id] = row(fault, context)
                context.log(f"  {rows[fault.id]['verdict']}: {rows[fault.id]['figure']}")
        finally:
            context.close()
    return {"rows": rows, "seed": seed, "smoke": smoke}


def row(fault: FaultRow, context: FaultContext) -> dict[str, Any]:
    """Inject one fault: met, gap, or skipped where this machine cannot inject it."""
    began = time.monotonic()
    try:
        result = fault.run(context)
        verdict = "met" if result.met else "gap"
    except FaultSkipped as reason:
        result, verdict = FaultResult(str(reason), False), "skipped"
    except Exception as error:
        traceback.print_exc()
        result = FaultResult(f"the trial failed ({type(error).__name__}: {first_line(error)[:200]})", False)
        verdict = "gap"
    return {
        "name": fault.name,
        "injected": fault.injected,
        "figure": result.figure,
        "goal": fault.goal,
        "verdict": verdict,
        "baseline": result.baseline or fault.baseline,
        "baseline_measured_here": result.baseline is not None,
        "numbers": result.numbers,
        "notes": list(result.notes),
        "seed": context.seed,
        "seconds": round(time.monotonic() - began, 1),
    }


def save_rows(measured: dict[str, Any]) -> Path:
    """Save the rows and update the page that shows them.

    Saved rows that were not measured now stay; each row has its own date and commit.
    """
    stamp = {"date": measured["date"], "commit": measured["commit"]}
    fresh = {name: {**each, **stamp} for name, each in measured["figures"]["rows"].items()}
    known = {**(results.load_result("reliability") or {}).get("figures", {}).get("rows", {}), **fresh}
    rows = {fault.id: known[fault.id] for fault in FAULTS if fault.id in known}
    path = results.save({**measured, "figures": {**measured["figures"], "rows": rows}})
    if (shown := page()) is not None:
        before, _, rest = shown.read_text(encoding="utf-8").partition(BEGIN)
        after = rest.partition(END_MARK)[2]
        shown.write_text(f"{before}{BEGIN}\n{as_markdown({'rows': rows})}{END_MARK}{after}", encoding="utf-8")
    return path


def page() -> Path | None:
    """The page of the documentation that shows the table, in a checkout."""
    path = results.ROOT / "docs" / "concepts" / "what-a-run-survives.md"
    return path if path.exists() else None


def lines(figures: dict[str, Any]) -> list[str]:
    """The table for a terminal."""
    output = []
    for name, each in figures["rows"].items():
        output.append(
            f"{name:<4} {each['verdict'].upper() if each['verdict'] == 'gap' else each['verdict']:<8} {each['name']}"
        )
        for word, text in (("found", each["figure"]), ("goal", each["goal"]), ("peers", each["baseline"])):
            output += textwrap.wrap(text, 100, initial_indent=f"     {word:<6} ", subsequent_indent=" " * 12)
        output += [f"     ! {note}" for note in each["notes"][:5]]
    counts = {
        word: sum(each["verdict"] == word for each in figures["rows"].values()) for word in ("met", "gap", "skipped")
    }
    output.append(", ".join(f"{count} {word}" for word, count in counts.items()) + f"; seed {figures['seed']}")
    return output


def as_markdown(figures: dict[str, Any]) -> str:
    """The table for the documentation; `--list` prints how each fault is injected."""
    rows = (
        (name, each["name"], _result_cell(each), each["baseline"].removesuffix(" (measured Nov 2026)"))
        for name, each in figures["rows"].items()
    )
    return markdown_table(("", "fault", "result", "other tools"), rows)


def _result_cell(each: dict[str, Any]) -> str:
    """What was measured, with the goal if it is not met."""
    return each["figure"] if each["verdict"] == "met" else f"{each['verdict']}: {each['figure']} (goal: {each['goal']})"


def listing() -> list[str]:
    """Every fault in a line, with about how long it takes."""
    return [f"{fault.id:<4} {fault.seconds:>4} s  {fault.name}: {fault.injected}" for fault in FAULTS]


def main(
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="ID", help="Only these, as R3 or R1-R11; may be given often.")
    ] = None,
    skip: Annotated[
        list[str] | None, typer.Option("--skip", metavar="ID", help="Not these; may be given often.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of all random numbers.")] = SEED,
    smoke: Annotated[bool, typer.Option("--smoke", help="Few trials of each, without peers.")] = False,
    peers: Annotated[bool, typer.Option("--peers/--no-peers", help="Inject the same into the HF Trainer.")] = True,
    listed: Annotated[
        bool, typer.Option("--list", help="Only list the faults, and about how long each takes.")
    ] = False,
    save: results.Save = False,
    as_json: results.Json = False,
) -> None:
    """What a run survives: every fault that this machine can inject, compared with the HF Trainer and torchrun."""
    chosen = select(only or (), skip or ())
    if listed:
        print("\n".join(listing()))
        return
    with redirect_stdout(sys.stderr):
        figures = measure(chosen, seed, smoke, peers)
    measured = results.result("reliability", figures)
    print(json.dumps(measured, ensure_ascii=False) if as_json else "\n".join(lines(figures)))
    if save:
        print(f"saved to {save_rows(measured)}", file=sys.stderr)


if __name__ == "__main__":
    results.run(main)
