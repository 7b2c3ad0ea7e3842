"""What a preparation did, in numbers: what went in, what was dropped and why, what came out."""

from __future__ import annotations

from typing import Any

import numpy as np

from modelwright.data.plan import Plan
from modelwright.data.shingles import Array
from modelwright.data.steps import EXACT, EXAMPLES, HELD_OUT, KEPT, NEAR

BINS = [0, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 1 << 62]
"""Edges of the length histogram, in tokens."""


def summary(plan: Plan, parts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The report of a preparation; the same input gives the same report."""
    units = range(len(plan.units))
    facts = [plan.work.facts(plan.clean, unit) for unit in units]
    total = {key: sum(fact[key] for fact in facts) for key in ("rows", "bad", "bytes_in", "bytes_out", "lines_dropped")}
    decisions = np.asarray(plan.work.array(plan.decide, 0, "decisions"))
    fates = {"train": KEPT, "held_out": HELD_OUT, "exact_duplicates": EXACT, "near_duplicates": NEAR}
    counts = {name: int((decisions == fate).sum()) for name, fate in fates.items()}
    lengths = np.concatenate([_lengths(plan, unit) for unit in units])
    return {
        "source": plan.data.source,
        "rows": total["rows"],
        "unreadable": total["bad"],
        "bytes": {"read": total["bytes_in"], "cleaned": total["bytes_out"]},
        "lines_dropped": total["lines_dropped"],
        "rules": _rules(facts),
        "documents": {"read": total["rows"] - total["bad"], "cleaned": len(decisions), **counts},
        "clusters": plan.work.facts(plan.decide)["clusters"],
        "lengths": histogram(lengths),
        "encoder": plan.work.facts(f"encoder-{plan.encode}"),
        "examination": plan.work.facts(f"exam-{plan.clean}") if plan.settings.decontaminate else None,
        "parts": {name: {key: part[key] for key in ("rows", "tokens", "documents", "text_bytes", "lost_tokens")}
                  for name, part in parts.items()},
        "length": plan.settings.row_length,
    }  # fmt: skip


def _lengths(plan: Plan, unit: int) -> Array:
    return np.concatenate([plan.work.array(plan.encode, unit, f"{part}.lengths") for part in ("train", "held_out")])


def _rules(facts: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts and examples of each rule, those that dropped most first."""
    rules: dict[str, dict[str, Any]] = {}
    for fact in facts:
        for name, told in fact["rules"].items():
            known = rules.setdefault(name, {"documents": 0, "bytes": 0, "examples": []})
            known["documents"] += told["documents"]
            known["bytes"] += told["bytes"]
            known["examples"] = (known["examples"] + told["examples"])[:EXAMPLES]
    return dict(sorted(rules.items(), key=lambda item: (-item[1]["documents"], item[0])))


def histogram(lengths: Array) -> dict[str, Any]:
    """How long documents are, in tokens."""
    counts, _ = np.histogram(lengths, bins=BINS)
    shares = np.percentile(lengths, [50, 90, 99]) if len(lengths) else [0, 0, 0]
    return {
        "bins": BINS[:-1],
        "counts": [int(count) for count in counts],
        **{name: int(value) for name, value in zip(("median", "p90", "p99"), shares, strict=True)},
        "longest": int(lengths.max()) if len(lengths) else 0,
    }
