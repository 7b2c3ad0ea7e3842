"""The card that ends a run: what was measured, the verdict, where the files are, what to type next."""

from __future__ import annotations

import shlex
from typing import Any

from modelwright.report.ledger import Ledger
from modelwright.report.lines import counted, duration, number, plain
from modelwright.runs import journal
from modelwright.runs.folder import RunFolder

QUIET = str.maketrans('"`', "''", "$\\!")
"""Takes out of a question what a shell would act upon between double quotes."""


def facts_of(folder: RunFolder) -> dict[str, Any]:
    """The last verdict, metrics and time of a run, from its journal."""
    facts: dict[str, Any] = {"folder": str(folder.path)}
    ledger = Ledger()
    for event in journal.read(folder.journal):
        ledger.add(event)
        if event["event"] == "verdict":
            facts |= {
                "stage": event["stage"],
                "open": event["open"],
                "letter": event["letter"],
                "metrics": event["metrics"],
            }
        elif event["event"] == "answers" and event["answers"]:
            facts["question"] = plain(event["answers"][0]["question"]).translate(QUIET)
        elif event["event"] == "done":
            facts["seconds"] = event["seconds"]
    return {**facts, **ledger.as_json()}


def card(folder: RunFolder) -> str:
    """Ten lines that are enough."""
    facts = facts_of(folder)
    metrics = facts.get("metrics", {})
    lines = ["", f"── {folder.path} " + "─" * max(0, 66 - len(str(folder.path)))]
    for label, before, after in (
        ("held-out loss", "base_eval_loss", "eval_loss"),
        ("accuracy", "base_eval_accuracy", "eval_accuracy"),
        ("style score", "base_style_score", "style_score"),
        ("words an answer", "base_answer_words", "answer_words"),
        ("exactness", "base_exactness", "exactness"),
    ):
        if metrics.get(after) is not None:
            change = _change(metrics.get(before), metrics[after]) if after == "eval_loss" else ""
            lines.append(f"  {label:<16} {number(metrics.get(before))} → {number(metrics[after])}{change}")
    verdict = "open" if facts.get("open") else "closed" if "stage" in facts else "none: nothing was trained yet"
    lines.append(f"  {'verdict':<16} {verdict}")
    unit = "image" if metrics.get("eval_accuracy") is not None else "token"
    trained = f"{counted(metrics.get('steps', 0), 'step')}, {counted(metrics.get('tokens', 0), unit)}"
    whole = f"; {duration(facts['seconds'])} in all since this start" if "seconds" in facts else ""
    lines.append(f"  {'time':<16} {duration(metrics.get('seconds', 0))} for {trained}{whole}")
    if facts["goodput"] is not None:
        lines.append(f"  {'goodput':<16} {facts['goodput']:.0%} of the run's time went into steps whose result is kept")
    if facts.get("stage") and not facts.get("open"):
        lines.append(f"  {'model':<16} {folder.model(facts['stage'])} (not promoted)")
    shown = folder.demo_outputs / "before_after.md"
    for label, path in (("model", folder.best_model), ("before / after", shown), ("report", folder.report)):
        if path.exists():
            lines.append(f"  {label:<16} {path}")
    lines += ["", "next:"]
    place = shlex.quote(str(folder.path))
    if "question" in facts:
        lines.append(f'  modelwright ask {place} "{facts["question"]}" --both')
        lines.append(f"  modelwright compare {place}")
    lines.append(f"  modelwright gate {place}")
    return "\n".join(lines)


def _change(before: float | None, after: float) -> str:
    return f"  ({after / before - 1:+.0%})" if before else ""
