"""A page about a preparation: what went in, what was dropped and why, what came out, with pictures."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from modelwright.runs.folder import write_text

STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#1c2330;background:#fff}
h1{font-size:1.4rem}h2{font-size:1.1rem;margin-top:2rem}table{border-collapse:collapse;width:100%}
td,th{padding:.3rem .6rem;border-bottom:1px solid #ddd;text-align:left;vertical-align:top}
td.n{text-align:right;font-variant-numeric:tabular-nums}small{color:#556}
svg text{font:12px system-ui,sans-serif;fill:#1c2330}
@media (prefers-color-scheme:dark){body{background:#14181f;color:#dde3ec}td,th{border-color:#333}
svg text{fill:#dde3ec}small{color:#99a}}
"""


def write_page(path: Path, report: dict[str, Any]) -> None:
    """One file that needs nothing else."""
    write_text(path, page(report))


def page(report: dict[str, Any]) -> str:
    """The page as HTML."""
    documents, parts = report["documents"], report["parts"]
    dropped = {f"rule: {name}": rule["documents"] for name, rule in report["rules"].items()}
    fates = {"to train on": documents["train"], "held out": documents["held_out"], **dropped,
             "the same as another": documents["exact_duplicates"],
             "nearly the same as another": documents["near_duplicates"]}  # fmt: skip
    lengths = report["lengths"]
    names = [f"{start:,}+" for start in lengths["bins"]]
    sections = [
        f"<h1>What became of {escape(str(report['source']))}</h1>",
        f"<p>{documents['read']:,} documents, {report['bytes']['read']:,} bytes; {report['unreadable']:,} rows could "
        f"not be read and stand in quarantine.jsonl. {report['lines_dropped']:,} boilerplate lines were taken out.</p>",
        "<h2>Documents</h2>" + bars(list(fates), list(fates.values()), "documents by what became of them"),
        "<h2>Rules</h2>" + _rules(report["rules"]),
        "<h2>Clusters of near-duplicates</h2>" + _clusters(report["clusters"]),
        f"<h2>Lengths in tokens</h2><p>Half of the documents have at most {lengths['median']:,} tokens, 99 % at most "
        f"{lengths['p99']:,}; the longest has {lengths['longest']:,}.</p>"
        + bars(names, lengths["counts"], "documents by length in tokens"),
        "<h2>Shards</h2>" + _parts(parts, report["length"]),
        f"<p>Tokenized by {escape(report['encoder']['encoder'])}: {escape(report['encoder']['reason'])}.</p>",
    ]
    head = f'<meta charset="utf-8"><title>Data</title><style>{STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(sections)}</body></html>\n'


def bars(names: Sequence[str], values: Sequence[int], title: str) -> str:
    """Horizontal bars with their numbers."""
    widest, row = max([*values, 1]), 22
    lines = [f'<svg viewBox="0 0 720 {row * len(names) + 4}" role="img" aria-label="{escape(title)}">']
    for place, (name, value) in enumerate(zip(names, values, strict=True)):
        top, width = place * row, 380 * value / widest
        lines.append(
            f'<text x="230" y="{top + 15}" text-anchor="end">{escape(name)}</text>'
            f'<rect x="240" y="{top + 3}" width="{width:.1f}" height="{row - 6}" rx="2" fill="#3b7dd8"/>'
            f'<text x="{246 + width:.1f}" y="{top + 15}">{value:,}</text>'
        )
    return "".join([*lines, "</svg>"])


def _rules(rules: dict[str, Any]) -> str:
    if not rules:
        return "<p>No document broke a rule.</p>"
    rows = "".join(
        f'<tr><td>{escape(name)}</td><td class="n">{rule["documents"]:,}</td><td class="n">{rule["bytes"]:,}</td><td>'
        + "<br>".join(f"{escape(str(each['where']))}: <b>{escape(str(each['found']))}</b> "
                      f"<small>{escape(each['text'])}</small>" for each in rule["examples"])
        + "</td></tr>"
        for name, rule in rules.items()
    )  # fmt: skip
    return f"<table><tr><th>rule</th><th>documents</th><th>bytes</th><th>for example</th></tr>{rows}</table>"


def _clusters(clusters: dict[str, int]) -> str:
    if not clusters:
        return "<p>None was found.</p>"
    sizes = sorted(clusters, key=int)[:20]
    return bars([f"{size} alike" for size in sizes], [clusters[size] for size in sizes], "clusters by size")


def _parts(parts: dict[str, Any], length: int) -> str:
    rows = "".join(
        f'<tr><td>{escape(name)}</td><td class="n">{part["documents"]:,}</td><td class="n">{part["tokens"]:,}</td>'
        f'<td class="n">{part["rows"]:,} of {length}</td><td class="n">{part["lost_tokens"]:,}</td></tr>'
        for name, part in parts.items()
    )
    head = "<tr><th>part</th><th>documents</th><th>tokens</th><th>rows</th><th>tokens lost with the last row</th></tr>"
    return f"<table>{head}{rows}</table>"
