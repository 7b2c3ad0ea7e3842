"""Render the report of a run, its figures, and the report of a data preparation, each as one HTML file.

Text of models, data and recipes is untrusted: it is escaped and truncated, and the content security policy of the page
allows only the script with its hash."""

from __future__ import annotations

import base64
import functools
import hashlib
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from modelwright import __version__
from modelwright.recipe.stage_specs import throughput_unit
from modelwright.report import charts
from modelwright.report.charts import Series
from modelwright.report.console import format_event
from modelwright.report.formatting import (
    format_bytes,
    format_count,
    format_duration,
    format_number,
    format_percent,
    format_setting,
    sanitize_multiline,
    single_line,
    truncate,
)
from modelwright.report.history import TIME_CATEGORIES, RunHistory, StageHistory, read_history
from modelwright.report.view import IDENTITY_KEYS, RunView, load_run_view
from modelwright.runs.folder import RunFolder, write_text

ASSETS_DIR = Path(__file__).parent
SECTIONS = (
    "head",
    "pipeline",
    "curves",
    "answers",
    "misclassified",
    "data",
    "plan",
    "time",
    "settings",
    "provenance",
    "log",
)
"""Sections of the report, in order; rendered one by one, so that the dashboard sends only those that changed."""
MAX_JUDGED = 100
"""Judged answers in the report."""
OVERLAID_METRICS = {"loss": "Training loss", "eval_loss": "Held-out loss", "grad_norm": "Gradient norm",
                    "tokens_per_second": "Tokens per second", "images_per_second": "Images per second"}  # fmt: skip


def write_report(folder: RunFolder) -> Path:
    """Write report.html of a run."""
    write_text(folder.report, render_report(folder, read_history(folder)))
    return folder.report


def render_report(folder: RunFolder, history: RunHistory) -> str:
    """The report as one page."""
    script = (ASSETS_DIR / "page.js").read_text("utf-8")
    return render_page(load_run_view(folder, history).name, render_sections(folder, history), script)


def render_sections(folder: RunFolder, history: RunHistory) -> dict[str, str]:
    """Sections by name; empty where there is nothing to show."""
    view = load_run_view(folder, history)
    macros = jinja_environment().get_template("sections.html").module
    figures = {name: Markup(render_or_explain(render, view)) for name, render in FIGURES.items()}
    return {name: render_or_explain(getattr(macros, name), view, figures) for name in SECTIONS}


def render_or_explain(render: Callable[..., str], *args: Any) -> str:
    """A part of a page, or a sentence where a damaged file of the run prevents it; the other parts are still shown."""
    try:
        return str(render(*args)).strip()
    except Exception as error:  # of any kind, since any value may be of any type
        reason = charts.escape_line(f"{type(error).__name__}: {error}"[:200])
        return f'<p class="message">This part cannot be shown: a file of the run is damaged ({reason}).</p>'


def render_page(title: str, parts: dict[str, str], script: str, policy: str = "") -> str:
    """A page of sections."""
    style = charts.CHART_CSS + (ASSETS_DIR / "page.css").read_text("utf-8")
    links = {
        name: Markup(heading[1]) for name, part in parts.items() if (heading := re.search("<h2>([^<]+)</h2>", part))
    }
    page = jinja_environment().get_template("page.html").render(
        title=title, style=Markup(style), script=Markup(script), version=__version__, links=links,
        policy=policy or content_security_policy(script), parts={name: Markup(part) for name, part in parts.items()},
    )  # fmt: skip
    return page.encode("utf-8", "replace").decode()  # a folder's name may hold bytes that are not UTF-8


def content_security_policy(script: str, connect: str = "'none'") -> str:
    """Only the page's own style, script and inline images; nothing from the network."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'; "
        f"connect-src {connect}; base-uri 'none'; form-action 'none'"
    )


@functools.cache
def jinja_environment() -> Environment:
    """Templates with autoescape and our filters."""
    env = Environment(loader=FileSystemLoader(ASSETS_DIR / "templates"), autoescape=True, undefined=StrictUndefined,
                      trim_blocks=True, lstrip_blocks=True)  # fmt: skip
    filters = (format_bytes, format_count, format_duration, format_number, format_percent, format_setting,
               sanitize_multiline)  # fmt: skip
    env.filters.update({function.__name__: function for function in filters})
    env.filters |= {"event_line": _event_line, "breakable": _breakable}
    env.filters["single_line"] = lambda text: truncate(single_line(str(text)), 600)
    env.globals |= {"IDENTITY_KEYS": IDENTITY_KEYS, "MAX_JUDGED": MAX_JUDGED, "throughput_unit": throughput_unit}
    return env


def _event_line(event: dict[str, Any]) -> str:
    """An event as in the terminal, with its time; empty where it is not printed, its kind where it is damaged."""
    try:
        line = format_event(event) or event.get("message", "") or (event["event"] == "done" and "done")
        return f"{time.strftime('%H:%M:%S', time.gmtime(event['time']))} {line}" if line else ""
    except Exception:  # of any kind, since any value may be of any type
        return str(event.get("event", ""))


def _breakable(name: str) -> Markup:
    """A setting or a path that may break after its separators, so that no word breaks inside."""
    return Markup(re.sub(r"([._/:-]+)", r"\1<wbr>", charts.escape_line(name)))


def training_curves(view: RunView) -> str:
    """The curves of every stage."""
    groups = []
    for stage in view.stages:
        stage_html = "".join(_stage_charts(stage))
        if stage_html:
            groups.append(f'<h3>{charts.escape_line(stage.name)}</h3><div class="charts">{stage_html}</div>')
    return "".join(groups) if len(groups) != 1 else groups[0].partition("</h3>")[2]


def _stage_charts(stage: StageHistory) -> list[str]:
    curve, unit = stage.curves, throughput_unit(stage.name)
    loss = [_make_series(stage, "loss", "training"), _make_series(stage, "eval_loss", "held out", 2, markers=True)]
    accuracy = [_make_series(stage, "eval_accuracy", "held out", 2, markers=True)]
    loss_points = [point for series in loss for point in series.points]
    return [
        charts.line_chart("Loss", loss, scale="log" if _needs_log_scale(loss_points) else "fit"),
        charts.line_chart("Accuracy on held-out rows", accuracy, format_percent),
        charts.line_chart("Learning rate", [_make_series(stage, "learning_rate", "", 3)], scale="zero"),
        charts.line_chart("Gradient norm", [_make_series(stage, "grad_norm", "", 4)],
                          scale="log" if _needs_log_scale(curve["grad_norm"].points) else "zero"),
        charts.line_chart(f"{unit.title()} per second", [_make_series(stage, f"{unit}_per_second", "", 5)],
                          scale="zero", note="median of recent steps"),
        charts.line_chart("Peak memory", [_make_series(stage, "peak_memory_bytes", "", 6)], format_bytes, "zero"),
        charts.line_chart("GPU utilization", [_make_series(stage, "gpu_utilization", "", 5)], format_percent, "zero"),
        charts.line_chart("GPU power, watts", [_make_series(stage, "gpu_power_watts", "", 6)], scale="zero"),
        charts.line_chart("GPU temperature, °C", [_make_series(stage, "gpu_temperature", "", 3)]),
    ]  # fmt: skip


def overlay_charts(views: dict[str, RunView]) -> str:
    """The curves of runs overlaid, one chart for each stage and metric."""
    figures = []
    for stage in dict.fromkeys(name for view in views.values() for name in view.history.stages):
        for metric, title in OVERLAID_METRICS.items():
            stages = {name: view.history.stages.get(stage) for name, view in views.items()}
            series = [Series(name, run.curves[metric].points if run else (), color=number)
                      for number, (name, run) in enumerate(stages.items(), 1)]  # fmt: skip
            log = _needs_log_scale([point for line in series for point in line.points])
            scale: charts.Scale = "log" if log else "fit" if metric.endswith("loss") else "zero"
            figures.append(charts.line_chart(f"{title}, {stage}", series, scale=scale))
    return f'<div class="charts">{"".join(figures)}</div>' if any(figures) else ""


def _make_series(stage: StageHistory, metric: str, name: str, color: int = 1, markers: bool = False) -> Series:
    series = stage.curves[metric]
    return Series(name, series.points, series.min_max, color, markers)


def _needs_log_scale(points: list[tuple[float, float]]) -> bool:
    """Whether the values span more than a factor of 50."""
    values = [value for _, value in points if value > 0]
    return bool(values) and max(values) > 50 * min(values)


def time_figure(view: RunView) -> str:
    """The run's time by category."""
    seconds = view.history.time_breakdown.seconds
    shown = [category for category in TIME_CATEGORIES if seconds[category] >= 0.05]
    segments = [(category.replace("_", " "), seconds[category]) for category in shown]
    return charts.stacked_bar("Time breakdown", segments, format_duration)


def confusion_figure(view: RunView) -> str:
    """Confusion matrix of an image classifier."""
    table, names = view.misclassified.get("confusion"), view.misclassified.get("classes")
    if not isinstance(table, list) or not isinstance(names, list) or len(names) > 40:
        return ""
    note = "Rows: true class. Columns: predicted class."
    return charts.heatmap("Confusion on the held-out images", [str(name) for name in names], table, note)


def memory_figure(view: RunView) -> str:
    """Peak memory by component, of the stages that were profiled."""
    figures = []
    for stage in view.stages:
        event = stage.last_events.get("memory", {})
        parts = event.get("components")
        if isinstance(parts, dict):
            title = f"Memory of a step of {stage.name} at its peak, in the {event.get('peak_phase') or 'step'}"
            segments = sorted(((str(name), float(size)) for name, size in parts.items()), key=lambda part: -part[1])
            figures.append(charts.stacked_bar(title, segments, format_bytes))
    return "".join(figures)


FIGURES: dict[str, Callable[[RunView], str]] = {
    "curves": training_curves, "time": time_figure, "confusion": confusion_figure, "memory": memory_figure
}  # fmt: skip
"""Figures by the name used in the templates."""
MAX_CLUSTER_SIZES = 20
"""Cluster sizes shown in the chart."""


def write_data_report(path: Path, report: dict[str, Any]) -> None:
    """Write the report of a data preparation."""
    write_text(path, render_data_report(report))


def render_data_report(report: dict[str, Any]) -> str:
    """The report of a data preparation as one page."""
    documents, lengths, clusters = report["documents"], report["lengths"], report["clusters"]
    outcomes = [("training", documents["train"]), ("held out", documents["held_out"]),
                ("exact duplicates", documents["exact_duplicates"]), ("near duplicates", documents["near_duplicates"]),
                *((f"rule {name}", rule["documents"]) for name, rule in report["filters"].items())]  # fmt: skip
    sizes = [(f"clusters of {size}", clusters[size]) for size in sorted(clusters, key=int)[:MAX_CLUSTER_SIZES]]
    counts = [(f"{start:,}+", count) for start, count in zip(lengths["bins"], lengths["counts"], strict=True)]
    note = f"Median {lengths['median']:,} tokens, p99 {lengths['p99']:,}, max {lengths['longest']:,}."
    macros: Any = jinja_environment().get_template("data.html").module
    parts = {
        "head": str(macros.head(report)),
        "documents": "<h2>Documents</h2>" + charts.stacked_bar("Documents by outcome", outcomes, format_count),
        "filters": str(macros.filters(report["filters"])),
        "clusters": "<h2>Near-duplicates</h2>"
        + (charts.bar_chart("Clusters by size", sizes, format_count) or "<p>No near-duplicates.</p>"),
        "lengths": "<h2>Lengths</h2>" + charts.bar_chart("Documents by tokens", counts, format_count, note),
        "shards": str(macros.shards(report)),
    }
    return render_page(f"Data: {report['source']}", parts, script="")
