"""Render the report page of a run, its figures, and the page of a data preparation, each as one HTML file.

Text of models, data and recipes is untrusted: it is escaped and truncated, and the page's content security policy
allows no script but the one whose hash it names."""

from __future__ import annotations

import base64
import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from modelwright import __version__
from modelwright.report import charts, formatting
from modelwright.report.charts import Series, escape_line
from modelwright.report.formatting import (
    format_duration,
    format_float,
    format_number,
    format_setting,
    sanitize_multiline,
    single_line,
    truncate,
)
from modelwright.report.history import TIME_CATEGORIES, RunHistory, StageHistory, read_history
from modelwright.report.view import RunView, load_run_view
from modelwright.runs.folder import RunFolder, write_text


def overlay_charts(first: RunView, second: RunView) -> str:
    """The curves of two runs in one picture for each stage and measure."""
    figures = []
    for stage in first.stages:
        other = second.history.stages.get(stage.name)
        if other is None:
            continue
        for metric, title in (("loss", "Training loss"), ("eval_loss", "Held-out loss"), ("grad_norm", "Gradient norm"),
                             ("tokens_per_second", "Tokens per second")):  # fmt: skip
            series = [Series(view.folder.path.name, history.curves[metric].points, (), color)
                     for view, history, color in ((first, stage, 1), (second, other, 2))]  # fmt: skip
            figures.append(charts.line_chart(f"{title}, {stage.name}", series))
    return f'<div class="charts">{"".join(figures)}</div>' if any(figures) else ""


ASSETS_DIR = Path(__file__).parent
SECTIONS = ("head", "pipeline", "curves", "answers", "misclassified", "data", "plan", "time", "settings", "provenance")
"""The parts of a page, in its order; each is drawn alone, so that a live page exchanges only what changed."""


def write_report(folder: RunFolder) -> Path:
    """Write report.html of a run from what lies in its folder."""
    write_text(folder.report, render_report(folder, read_history(folder)))
    return folder.report


def render_report(folder: RunFolder, history: RunHistory) -> str:
    """The whole page."""
    return render_page(
        load_run_view(folder, history).name,
        render_sections(folder, history),
        (ASSETS_DIR / "page.js").read_text("utf-8"),
    )


def render_sections(folder: RunFolder, history: RunHistory) -> dict[str, str]:
    """Every part of a page by name; one without anything to show is empty."""
    view = load_run_view(folder, history)
    macros = jinja_environment().get_template("sections.html").module
    figures = {name: Markup(render(view)) for name, render in FIGURES.items()}
    return {name: str(getattr(macros, name)(view, figures)).strip() for name in SECTIONS}


def render_page(title: str, parts: dict[str, str], script: str, policy: str = "") -> str:
    """A whole page around its parts."""
    style = charts.CHART_CSS + (ASSETS_DIR / "page.css").read_text("utf-8")
    return jinja_environment().get_template("page.html").render(
        title=title, style=Markup(style), script=Markup(script), version=__version__,
        policy=policy or content_security_policy(script), parts={name: Markup(part) for name, part in parts.items()},
    )  # fmt: skip


def content_security_policy(script: str, connect: str = "'none'") -> str:
    """What a browser lets the page do: its own style and script, pictures it carries, nothing from anywhere."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'; "
        f"connect-src {connect}; base-uri 'none'; form-action 'none'"
    )


@functools.cache
def jinja_environment() -> Environment:
    """Templates that escape everything they are not told to leave alone."""
    env = Environment(loader=FileSystemLoader(ASSETS_DIR / "templates"), autoescape=True, undefined=StrictUndefined,
                       trim_blocks=True, lstrip_blocks=True)  # fmt: skip
    filters: dict[str, Callable[..., Any]] = {
        "format_float": format_float, "format_duration": format_duration, "single_line": lambda text: truncate(single_line(str(text)), 600), "sanitize_multiline": sanitize_multiline,
        "format_count": formatting.format_count, "format_bytes": formatting.format_bytes, "format_percent": formatting.format_percent, "format_setting": format_setting,
        "format_number": format_number,
    }  # fmt: skip
    env.filters.update(filters)
    return env


def training_curves(view: RunView) -> str:
    """Every stage's curves, those that have values."""
    groups = []
    for stage in view.stages:
        stage_html = "".join(_stage_charts(stage))
        if stage_html:
            groups.append(f'<h3>{charts.escape_line(stage.name)}</h3><div class="charts">{stage_html}</div>')
    return "".join(groups) if len(groups) != 1 else groups[0].partition("</h3>")[2]


def _stage_charts(stage: StageHistory) -> list[str]:
    curve, unit = stage.curves, "Images" if stage.name == "classify" else "Tokens"
    loss = [_make_series(stage, "loss", "training"), _make_series(stage, "eval_loss", "held out", 2, markers=True)]
    return [
        charts.line_chart("Loss", loss, None, "log" if _needs_log_scale([point for line in loss for point in line.points]) else "fit"),
        charts.line_chart("Accuracy on held-out rows", [_make_series(stage, "eval_accuracy", "held out", 2, markers=True)],
                      formatting.format_percent),
        charts.line_chart("Learning rate", [_make_series(stage, "learning_rate", "", 3)], None, "zero"),
        charts.line_chart("Gradient norm", [_make_series(stage, "grad_norm", "", 4)],
                      scale="log" if _needs_log_scale(curve["grad_norm"].points) else "zero"),
        charts.line_chart(f"{unit} per second", [_make_series(stage, "tokens_per_second", "", 5)], None, "zero",
                      "median of recent steps"),
        charts.line_chart("Peak memory", [_make_series(stage, "peak_memory_bytes", "", 6)], formatting.format_bytes, "zero"),
    ]  # fmt: skip


def _make_series(stage: StageHistory, metric: str, name: str, color: int = 1, markers: bool = False) -> Series:
    series = stage.curves[metric]
    return Series(name, series.points, series.min_max, color, markers)


def _needs_log_scale(points: list[tuple[float, float]]) -> bool:
    """Whether values reach so far that small ones would lie on the ground."""
    values = [value for _, value in points if value > 0]
    return bool(values) and max(values) > 50 * min(values)


def time_figure(view: RunView) -> str:
    """Time breakdown, as one bar."""
    seconds = view.history.time_breakdown.seconds
    segments = [(category, seconds[category]) for category in TIME_CATEGORIES if seconds[category] >= 0.05]
    return charts.stacked_bar("Time breakdown", segments, format_duration)


def confusion_figure(view: RunView) -> str:
    """Which class was taken for which."""
    table, names = view.misclassified.get("confusion"), view.misclassified.get("classes")
    if not isinstance(table, list) or not isinstance(names, list) or len(names) > 40:
        return ""
    note = "Rows: true class. Columns: predicted class."
    return charts.heatmap("Confusion on the held-out images", [str(name) for name in names], table, note)


def memory_figure(view: RunView) -> str:
    """What filled the memory at its fullest moment, of the stages that were watched."""
    figures = []
    for stage in view.stages:
        event = stage.last_events.get("memory", {})
        parts = event.get("components")
        if isinstance(parts, dict):
            title = f"Memory of a step of {stage.name} at its peak, in the {event.get('peak_phase') or 'step'}"
            segments = sorted(((str(name), float(size)) for name, size in parts.items()), key=lambda part: -part[1])
            figures.append(charts.stacked_bar(title, segments, formatting.format_bytes))
    return "".join(figures)


FIGURES: dict[str, Callable[[RunView], str]] = {"curves": training_curves, "time": time_figure, "confusion": confusion_figure,
                                              "memory": memory_figure}  # fmt: skip
"""By the name a template calls them."""
MAX_CLUSTER_SIZES = 20
"""Sizes of clusters that are drawn."""


def write_data_report(path: Path, report: dict[str, Any]) -> None:
    """One file that needs nothing else."""
    write_text(path, render_data_report(report))


def render_data_report(report: dict[str, Any]) -> str:
    """The page as HTML."""
    parts = {"head": _summary_section(report), "documents": _document_outcomes(report), "filters": _rules_section(report["filters"]),
             "clusters": _clusters_section(report["clusters"]), "lengths": _lengths_section(report["lengths"]),
             "shards": _shards_section(report)}  # fmt: skip
    return render_page(f"Data: {report['source']}", parts, script="")


def _summary_section(report: dict[str, Any]) -> str:
    documents = report["documents"]
    return (
        f"<h1>Data preparation: {escape_line(str(report['source']))}</h1>"
        f'<p class="lede">{documents["read"]:,} documents, {report["bytes"]["read"]:,} bytes; {report["invalid_rows"]:,} '
        f"rows could not be read (listed in quarantine.jsonl). {report['lines_dropped']:,} boilerplate lines were "
        "taken out.</p>"
    )


def _document_outcomes(report: dict[str, Any]) -> str:
    documents = report["documents"]
    outcomes = [("training", documents["train"]), ("held out", documents["held_out"]),
             ("exact duplicates", documents["exact_duplicates"]),
             ("near duplicates", documents["near_duplicates"]),
             *((f"rule {name}", rule["documents"]) for name, rule in report["filters"].items())]  # fmt: skip
    return "<h2>Documents</h2>" + charts.stacked_bar("Documents by outcome", outcomes, formatting.format_count)


def _rules_section(rules: dict[str, Any]) -> str:
    if not rules:
        return "<h2>Rules</h2><p>No document broke a rule.</p>"
    rows = "".join(
        f"<tr><td>{escape_line(name)}</td><td>{rule['documents']:,}</td><td>{rule['bytes']:,}</td><td>"
        + "<br>".join(f"{escape_line(str(example['where']))}: <b>{escape_line(str(example['value']))}</b> "
                      f"<small>{escape_line(example['text'])}</small>" for example in rule["examples"])
        + "</td></tr>"
        for name, rule in rules.items()
    )  # fmt: skip
    head = "<tr><th>rule</th><th>documents</th><th>bytes</th><th>examples</th></tr>"
    return f'<h2>Rules</h2><div class="scroll"><table>{head}{rows}</table></div>'


def _clusters_section(clusters: dict[str, int]) -> str:
    counts = [(f"clusters of {size}", clusters[size]) for size in sorted(clusters, key=int)[:MAX_CLUSTER_SIZES]]
    figure = charts.bar_chart("Clusters by size", counts, formatting.format_count) or "<p>None was found.</p>"
    return f"<h2>Near-duplicates</h2>{figure}"


def _lengths_section(lengths: dict[str, Any]) -> str:
    counts = [(f"{start:,}+", count) for start, count in zip(lengths["bins"], lengths["counts"], strict=True)]
    note = (f"Half of the documents have at most {lengths['median']:,} tokens, 99 % at most {lengths['p99']:,}; the "
            f"longest has {lengths['longest']:,}.")  # fmt: skip
    return "<h2>Lengths</h2>" + charts.bar_chart("Documents by tokens", counts, formatting.format_count, note)


def _shards_section(report: dict[str, Any]) -> str:
    rows = "".join(
        f"<tr><td>{escape_line(name)}</td><td>{part['documents']:,}</td><td>{part['tokens']:,}</td>"
        f"<td>{part['rows']:,} of {report['sequence_length']}</td><td>{part['dropped_tokens']:,}</td></tr>"
        for name, part in report["splits"].items()
    )
    head = (
        "<tr><th>part</th><th>documents</th><th>tokens</th><th>rows</th><th>tokens dropped (last partial row)</th></tr>"
    )
    encoder = report["tokenizer_backend"]
    encoder_note = f"<p>Tokenized by {escape_line(encoder['tokenizer_backend'])}: {escape_line(encoder['reason'])}.</p>"
    return f'<h2>Shards</h2><div class="scroll"><table>{head}{rows}</table></div>{encoder_note}'
