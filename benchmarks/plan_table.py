"""The planner's figures for people: measured beside planned, setting by setting, and the edge of the memory."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

JUDGES = {"before": "by what was known before", "": "fitted", "left_out": "fitted to the others"}
"""Who foresaw: the prefixes of the errors, and their words."""


UNSEEN_MARK = "unseen: "
OPENING = """# Foreseen and measured

<!-- written by benchmarks.plan_table; UPDATE_GOLDEN=1 python -m pytest tests/benchmarks/test_tables.py -->

What the planner said of trainings and what they took: {device}, {day}, `python -m benchmarks.plan`. Each was foreseen
by coefficients that were fitted to all others, and none was ever fitted to a setting that is called unseen. The last
column is accelerate's estimate of the memory, which knows weights and optimizer, but neither rows nor what moves.
{since}"""
EDGE = """## At the edge of the memory

What is said to fit must run, and what is said not to fit should run out:
"""


def lines(figures: dict[str, Any]) -> list[str]:
    """The table of predictions and measurements."""
    three = f"{'before':>7} {'fitted':>7} {'others':>7}"
    told = [f"{'setting':<42} {'memory':>9} {three}   {'tokens/s':>10} {three}   accelerate"]
    told += [_line(run) for run in figures["judged"]]
    told += [f"{run['setting']['name']}: failed, {run['failed']}" for run in figures["runs"] if "failed" in run]
    told += [_edge(run) for run in figures["runs"] if _is_edge(run)]
    if figures["judged"]:
        told += [f"{words}: {summary(figures['judged'], prefix)}" for prefix, words in JUDGES.items()]
        peers = [abs(run["accelerate_error"]) for run in figures["judged"] if run.get("accelerate_error") is not None]
        told += [f"accelerate's estimate: memory {median(peers):.0%} off, worst {max(peers):.0%}"] if peers else []
    broken = [run["setting"]["name"] for run in figures["runs"] if run.get("said_to_fit") and "ran_out" in run]
    told.append(f"said to fit and ran out of memory: {', '.join(broken) or 'none'}")
    return told


def page(measured: dict[str, Any]) -> str:
    """The page of figures for the docs, from what was kept."""
    figures, since = measured["figures"], measured.get("since", "")
    opening = {
        "day": measured["date"][:10],
        "device": figures["device"]["name"],
        "since": f"{since}\n" if since else "",
    }
    told = [OPENING.format(**opening)]
    told += ["| setting | GB | planned | tokens/s | planned | accelerate |", "|---|---|---|---|---|---|"]
    told += [_row(run) for run in figures["judged"]]
    told += ["", *(f"- {JUDGES[prefix]}: {summary(figures['judged'], prefix)}." for prefix in ("", "left_out"))]
    if unseen := [run for run in figures["judged"] if run["setting"]["name"].startswith(UNSEEN_MARK)]:
        told.append(f"- the {len(unseen)} unseen ones alone, {JUDGES['before']}: {summary(unseen, 'before')}.")
    edge = [run for run in figures["runs"] if _is_edge(run)]
    told += ["", EDGE, *(f"- {_edge(run)}" for run in edge)]
    told += [] if edge else ["None of these settings has been measured yet, nor has one that is called unseen."]
    return "\n".join(told) + "\n"


def summary(judged: Sequence[dict[str, Any]], prefix: str) -> str:
    """How far one judge was off, in the middle and at worst."""
    memory = sorted(abs(run[named(prefix, "memory_error")]) for run in judged)
    rate = sorted(abs(run[named(prefix, "rate_error")]) for run in judged)
    inside = sum(value <= 0.05 for value in memory), sum(value <= 0.10 for value in rate)
    return (
        f"memory {median(memory):.1%} off, worst {memory[-1]:.1%}, within 5 % {inside[0]} of {len(memory)}; "
        f"tokens/s {median(rate):.1%}, worst {rate[-1]:.1%}, within 10 % {inside[1]} of {len(rate)}"
    )


def named(prefix: str, error: str) -> str:
    """The key of an error by who foresaw."""
    return f"{prefix}_{error}" if prefix else error


def _line(run: dict[str, Any]) -> str:
    peer = run.get("accelerate_error")
    memory, rate = (
        " ".join(f"{run[named(prefix, error)]:>+7.1%}" for prefix in JUDGES) for error in ("memory_error", "rate_error")
    )
    return (
        f"{run['setting']['name']:<42} {run['peak_bytes'] / 1e9:>7.2f}GB {memory}   "
        f"{run['tokens_per_second']:>10,.0f} {rate}   " + (f"{peer:+.0%}" if peer is not None else "-")
    )


def _row(run: dict[str, Any]) -> str:
    peer, prefix = run.get("accelerate_error"), "left_out"
    cells = (
        run["setting"]["name"],
        f"{run['peak_bytes'] / 1e9:.2f}",
        f"{run[named(prefix, 'memory_error')]:+.1%}",
        f"{run['tokens_per_second']:,.0f}",
        f"{run[named(prefix, 'rate_error')]:+.1%}",
        "–" if peer is None else f"{peer:+.0%}",
    )
    return f"| {' | '.join(cells)} |"


def _is_edge(run: dict[str, Any]) -> bool:
    return "fit" in run["setting"]["name"] or "ran_out" in run


def _edge(run: dict[str, Any]) -> str:
    said = "fits" if run.get("said_to_fit") else "does not fit"
    found = "ran out of memory" if "ran_out" in run else f"ran with {run.get('reserved_bytes', 0) / 1e9:.1f} GB"
    needs = f"{run.get('needed_bytes', 0) / 1e9:.1f} GB"
    return f"{run['setting']['name']}, {run['plan']['per_device']} rows: said to need {needs}, {said}; {found}"
