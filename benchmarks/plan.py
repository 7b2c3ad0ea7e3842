"""The planner against the machine: predict memory and speed of many trainings, then measure each by the real engine."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks import common
from benchmarks.judge import accelerate_bytes, leave_one_out, max_batch_rows
from benchmarks.plan_table import lines
from benchmarks.settings import ALL_GPU_CASES, HELD_OUT_CASES
from modelwright.errors import UsageError
from modelwright.plan.calibration import calibration_for
from modelwright.plan.facts import Facts, card, probe
from modelwright.plan.fit import CPU_CASES, PlanCase, compare_with_measured, fit, work_of
from modelwright.plan.memory import memory
from modelwright.plan.stage import StagePlan, plan_stage
from modelwright.runs.folder import write_json
from modelwright.stages.measure import case_settings, guarded_case

WANTED = "it wants a runs.json that benchmarks.plan --into FOLDER has written"


def measure(wanted: Sequence[str] = (), into: Path | None = None) -> dict[str, Any]:
    """Measure every setting, fit the coefficients to them, and judge all."""
    return judged(measure_all(wanted, into))


def judged(runs: dict[str, Any]) -> dict[str, Any]:
    """Measured runs with three predictions: by what was known before, fitted to all, and fitted to all others."""
    gpu, good = card(Facts(**runs["device"])), [run for run in runs["runs"] if "peak_bytes" in run]
    if not good:
        return {**runs, "judged": [], "calibration": {}}
    unseen = {case.name for case in HELD_OUT_CASES}
    seen = [run for run in good if run["setting"]["name"] not in unseen] or good
    before = calibration_for(gpu)
    after = fit(seen, gpu, before)
    blind, others = compare_with_measured(good, gpu, before), leave_one_out(good, seen, gpu, after)
    told = [
        {**run, **_errors("before", first), **_errors("left_out", other)}
        for run, first, other in zip(compare_with_measured(good, gpu, after), blind, others, strict=True)
    ]
    return {**runs, "judged": told, "calibration": {after.card: after.as_json()}}


def _errors(prefix: str, run: dict[str, Any]) -> dict[str, float]:
    return {f"{prefix}_{name}": run[name] for name in ("memory_error", "rate_error")}


def read_runs(paths: Sequence[Path]) -> dict[str, Any]:
    """What earlier measurements of one machine wrote with --into, together."""
    found: list[dict[str, Any]] = []
    for path in paths:
        try:
            told = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UsageError(f"--from {path} could not be read ({reason}); {WANTED}") from None
        if not isinstance(told, dict) or not {"device", "runs"} <= told.keys():
            raise UsageError(f"--from {path} holds no measured runs; {WANTED}")
        found.append(told)
    if len({told["device"]["name"] for told in found}) > 1:
        raise UsageError("--from: the runs were measured on different devices; judge those of one at a time")
    return {"device": found[-1]["device"], "runs": [run for told in found for run in told["runs"]]}


def measure_all(wanted: Sequence[str] = (), into: Path | None = None) -> dict[str, Any]:
    """Measure every setting, each guarded, and write what is known after each one."""
    facts = probe()
    runs: list[dict[str, Any]] = []
    for case in (*ALL_GPU_CASES, *HELD_OUT_CASES) if facts.device == "cuda" else CPU_CASES:
        if wanted and not any(word in case.name for word in wanted):
            continue
        began = time.perf_counter()
        case, plan, run = planned(case, facts)
        run |= guarded_case(case, plan)
        if "peak_bytes" in run:
            run["accelerate_bytes"] = accelerate_bytes(case, plan.precision)
        runs.append({"setting": asdict(case), "took": round(time.perf_counter() - began, 1), **run})
        print(json.dumps(runs[-1]), file=sys.stderr, flush=True)
        if into is not None:
            write_json(into / "runs.json", {"device": asdict(facts), "runs": runs})
    return {"device": asdict(facts), "runs": runs}


def planned(case: PlanCase, facts: Facts) -> tuple[PlanCase, StagePlan, dict[str, Any]]:
    """A case with its rows and its plan, and what the planner says of its memory before it is tried."""
    gpu, fitted = card(facts), calibration_for(card(facts))
    plan = plan_stage(case_settings(case), 1, 1, facts)
    if not case.rows:
        most = max_batch_rows(case, plan.as_json(), gpu, fitted)
        case = replace(case, rows=max(1, -(-int(1000 * case.beyond * most) // 1000)))
        plan = plan_stage(case_settings(case), 1, 1, facts)
    needed = memory(work_of(case, plan.as_json(), facts.device == "cuda"), fitted.memory).needed
    told = {"plan": plan.as_json(), "needed_bytes": round(needed), "said_to_fit": needed <= gpu.memory}
    return case, plan, told


def main(
    only: Annotated[list[str] | None, typer.Option("--only", metavar="WORD", help="Settings with this word.")] = None,
    into: Annotated[Path | None, typer.Option("--into", help="Write runs.json here after each setting.")] = None,
    again: Annotated[
        list[Path] | None, typer.Option("--from", help="Judge a runs.json again, or several, and measure nothing.")
    ] = None,
    save: common.Save = False,
    as_json: common.Json = False,
) -> None:
    """Memory and tokens per second as planned, beside what this machine measures."""
    if into:
        into.mkdir(parents=True, exist_ok=True)
    common.report(
        "plan", lambda: judged(read_runs(again)) if again else measure(only or (), into), lines, save, as_json
    )


if __name__ == "__main__":
    common.run(main)
