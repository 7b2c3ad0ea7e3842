"""The pictures of a run's page: which curves and bars, from which values."""

from __future__ import annotations

from collections.abc import Callable

from modelwright.report import charts
from modelwright.report.charts import Line
from modelwright.report.ledger import KINDS
from modelwright.report.lines import duration
from modelwright.report.story import StageStory
from modelwright.report.view import View


def curves_of(view: View) -> str:
    """Every stage's curves, those that have values."""
    drawn = []
    for stage in view.stages:
        found = "".join(_curves(stage))
        if found:
            drawn.append(f'<h3>{charts.text(stage.name)}</h3><div class="charts">{found}</div>')
    return "".join(drawn) if len(drawn) != 1 else drawn[0].partition("</h3>")[2]


def _curves(stage: StageStory) -> list[str]:
    curve, what = stage.curves, "Images" if stage.name == "classify" else "Tokens"
    loss = [_line(stage, "loss", "training"), _line(stage, "eval_loss", "held out", 2, dots=True)]
    return [
        charts.curves("Loss", loss, None, "log" if _wide([point for line in loss for point in line.points]) else "fit"),
        charts.curves("Accuracy on held-out rows", [_line(stage, "eval_accuracy", "held out", 2, dots=True)],
                      charts.percent),
        charts.curves("Learning rate", [_line(stage, "learning_rate", "", 3)], None, "zero"),
        charts.curves("Gradient norm", [_line(stage, "grad_norm", "", 4)],
                      scale="log" if _wide(curve["grad_norm"].points) else "zero"),
        charts.curves(f"{what} a second", [_line(stage, "tokens_per_second", "", 5)], None, "zero",
                      "median of recent steps"),
        charts.curves("Memory, most held", [_line(stage, "memory_bytes", "", 6)], charts.gigabytes, "zero"),
    ]  # fmt: skip


def _line(stage: StageStory, curve: str, name: str, colour: int = 1, dots: bool = False) -> Line:
    found = stage.curves[curve]
    return Line(name, found.points, found.band, colour, dots)


def _wide(points: list[tuple[float, float]]) -> bool:
    """Whether values reach so far that small ones would lie on the ground."""
    values = [value for _, value in points if value > 0]
    return bool(values) and max(values) > 50 * min(values)


def time_of(view: View) -> str:
    """Where the time went, as one bar."""
    parts = view.story.ledger.parts
    shown = [(kind, parts[kind]) for kind in KINDS if parts[kind] >= 0.05]
    return charts.stack("Where the time went", shown, duration)


def confusion_of(view: View) -> str:
    """Which class was taken for which."""
    table, names = view.mistakes.get("confusion"), view.mistakes.get("classes")
    if not isinstance(table, list) or not isinstance(names, list) or len(names) > 40:
        return ""
    note = "Down: what it is. Across: what it was taken for."
    return charts.shades("Confusion on the held-out images", [str(name) for name in names], table, note)


def memory_of(view: View) -> str:
    """What filled the memory at its fullest moment, of the stages that were watched."""
    drawn = []
    for stage in view.stages:
        told = stage.facts.get("memory", {})
        parts = told.get("parts")
        if isinstance(parts, dict):
            title = f"Memory of a step of {stage.name} at its fullest, in the {told.get('peak_in') or 'step'}"
            shown = sorted(((str(name), float(size)) for name, size in parts.items()), key=lambda part: -part[1])
            drawn.append(charts.stack(title, shown, charts.gigabytes))
    return "".join(drawn)


PICTURES: dict[str, Callable[[View], str]] = {"curves": curves_of, "time": time_of, "confusion": confusion_of,
                                              "memory": memory_of}  # fmt: skip
"""By the name a template calls them."""
