"""A page about a preparation: what went in, what was dropped and why, what came out, with pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from modelwright.report import charts
from modelwright.report.charts import text
from modelwright.report.page import document
from modelwright.runs.folder import write_text

MOST_CLUSTERS = 20
"""Sizes of clusters that are drawn."""


def write_page(path: Path, report: dict[str, Any]) -> None:
    """One file that needs nothing else."""
    write_text(path, page(report))


def page(report: dict[str, Any]) -> str:
    """The page as HTML."""
    parts = {"head": _head(report), "documents": _fates(report), "rules": _rules(report["rules"]),
             "clusters": _clusters(report["clusters"]), "lengths": _lengths(report["lengths"]),
             "shards": _shards(report)}  # fmt: skip
    return document(f"Data: {report['source']}", parts, script="")


def _head(report: dict[str, Any]) -> str:
    documents = report["documents"]
    return (
        f"<h1>What became of {text(str(report['source']))}</h1>"
        f'<p class="lede">{documents["read"]:,} documents, {report["bytes"]["read"]:,} bytes; {report["unreadable"]:,} '
        f"rows could not be read and stand in quarantine.jsonl. {report['lines_dropped']:,} boilerplate lines were "
        "taken out.</p>"
    )


def _fates(report: dict[str, Any]) -> str:
    documents = report["documents"]
    fates = [("to train on", documents["train"]), ("held out", documents["held_out"]),
             ("the same as another", documents["exact_duplicates"]),
             ("nearly the same", documents["near_duplicates"]),
             *((f"rule {name}", rule["documents"]) for name, rule in report["rules"].items())]  # fmt: skip
    return "<h2>Documents</h2>" + charts.stack("What became of them", fates, charts.thousands)


def _rules(rules: dict[str, Any]) -> str:
    if not rules:
        return "<h2>Rules</h2><p>No document broke a rule.</p>"
    rows = "".join(
        f"<tr><td>{text(name)}</td><td>{rule['documents']:,}</td><td>{rule['bytes']:,}</td><td>"
        + "<br>".join(f"{text(str(each['where']))}: <b>{text(str(each['found']))}</b> "
                      f"<small>{text(each['text'])}</small>" for each in rule["examples"])
        + "</td></tr>"
        for name, rule in rules.items()
    )  # fmt: skip
    head = "<tr><th>rule</th><th>documents</th><th>bytes</th><th>for example</th></tr>"
    return f'<h2>Rules</h2><div class="scroll"><table>{head}{rows}</table></div>'


def _clusters(clusters: dict[str, int]) -> str:
    counts = [(f"{size} alike", clusters[size]) for size in sorted(clusters, key=int)[:MOST_CLUSTERS]]
    drawn = charts.bars("Clusters by size", counts, charts.thousands) or "<p>None was found.</p>"
    return f"<h2>Near-duplicates</h2>{drawn}"


def _lengths(lengths: dict[str, Any]) -> str:
    counts = [(f"{start:,}+", count) for start, count in zip(lengths["bins"], lengths["counts"], strict=True)]
    note = (f"Half of the documents have at most {lengths['median']:,} tokens, 99 % at most {lengths['p99']:,}; the "
            f"longest has {lengths['longest']:,}.")  # fmt: skip
    return "<h2>Lengths</h2>" + charts.bars("Documents by tokens", counts, charts.thousands, note)


def _shards(report: dict[str, Any]) -> str:
    rows = "".join(
        f"<tr><td>{text(name)}</td><td>{part['documents']:,}</td><td>{part['tokens']:,}</td>"
        f"<td>{part['rows']:,} of {report['length']}</td><td>{part['lost_tokens']:,}</td></tr>"
        for name, part in report["parts"].items()
    )
    head = "<tr><th>part</th><th>documents</th><th>tokens</th><th>rows</th><th>tokens lost with the last row</th></tr>"
    encoder = report["encoder"]
    said = f"<p>Tokenized by {text(encoder['encoder'])}: {text(encoder['reason'])}.</p>"
    return f'<h2>Shards</h2><div class="scroll"><table>{head}{rows}</table></div>{said}'
