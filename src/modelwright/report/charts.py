"""Draw inline SVG charts: line chart, bar chart, stacked bar, heatmap. No script, no network, no library.

The SVG holds only shapes and stretches with the page; labels are HTML around it. Every text is escaped; colors are
variables of the style sheet (`CHART_CSS`)."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Literal

from modelwright.report.formatting import format_si, single_line

WIDTH, HEIGHT = 600.0, 150.0
"""Size in SVG units; the page stretches them."""
NUM_COLORS = 12
"""Colors in the style sheet."""
CHART_CSS = (Path(__file__).parent / "charts.css").read_text(encoding="utf-8")
"""Style sheet of the charts."""
CSV_BUTTON = '<button type="button" class="csv" title="Save the points of this chart">CSV</button>'
Point = tuple[float, float]
Formatter = Callable[[float], str]
ScaleFn = Callable[[float], float]
Scale = Literal["fit", "zero", "log"]
"""An axis that fits the values, starts at zero, or is logarithmic."""


@dataclass(frozen=True)
class Series:
    """One line of a chart."""

    name: str
    """Its label."""
    points: Sequence[Point]
    """Points from left to right."""
    min_max: Sequence[tuple[float, float, float]] = ()
    """x, minimum and maximum, drawn as a band."""
    color: int = 1
    """Number of its color, from 1."""
    markers: bool = False
    """Whether each point is marked."""


def line_chart(
    title: str, lines: Sequence[Series], formatter: Formatter = format_si, scale: Scale = "fit", note: str = ""
) -> str:
    """Several series over a common x axis."""
    lines = [line for line in lines if line.points]
    if not lines:
        return ""
    log = scale == "log"
    low, high = _range(lines, scale)
    left = min(line.points[0][0] for line in lines)
    right = max(line.points[-1][0] for line in lines)
    x_scale = _linear_scale(left, right if right > left else left + 1, 0, WIDTH)
    y_scale = _log_scale(low, high) if log else _linear_scale(low, high, HEIGHT, 0)
    ticks = _log_ticks(low, high) if log else _ticks(low, high)
    ticks = [tick for tick in ticks if low <= tick <= high] or [low, high]
    steps = [tick for tick in _ticks(left, right, 8) if left <= tick <= right and tick == int(tick)] or [left]
    shapes = [f'<path class="grid" d="M0 {_coord(y_scale(tick))}H{_coord(WIDTH)}"/>' for tick in ticks]
    shapes += [f'<path class="axis" d="M{_coord(x_scale(tick))} {_coord(HEIGHT)}v5"/>' for tick in steps]
    shapes += [f'<path class="axis" d="M0 {_coord(HEIGHT)}H{_coord(WIDTH)}"/>']
    shapes += [_draw_min_max(line, x_scale, y_scale) for line in lines if line.min_max]
    shapes += [_draw_line(line, x_scale, y_scale) for line in lines]
    y_axis = "".join(
        f'<span style="top:{y_scale(tick) / HEIGHT:.1%}">{escape(formatter(tick)) if tick else "0"}</span>'
        for tick in ticks
    )
    x_axis = "".join(f'<span style="left:{x_scale(tick) / WIDTH:.1%}">{format_si(tick)}</span>' for tick in steps)
    legend = "".join(_legend_entry(line.name, line.color, formatter(line.points[-1][1])) for line in lines)
    description = "; ".join(
        f"{line.name} from {formatter(line.points[0][1])} to {formatter(line.points[-1][1])}" for line in lines
    )
    svg = _svg("".join(shapes), f"{title}: {description}", _hover(lines, left, right))
    plot = _plot(svg, f"{x_axis}<em>step</em>", y_axis).replace('class="x"', 'class="x at"')
    return _figure(title, legend, plot, note, CSV_BUTTON)


def bar_chart(title: str, counts: Sequence[tuple[str, float]], formatter: Formatter = format_si, note: str = "") -> str:
    """Vertical bars, such as a histogram: three labels below, each bar's label and value as its tooltip."""
    if not counts:
        return ""
    top = max(value for _, value in counts) or 1.0
    step = WIDTH / len(counts)
    y_scale = _linear_scale(0, top, HEIGHT, 0)
    shapes = []
    for index, (label, value) in enumerate(counts):
        x, y = index * step, y_scale(value)
        box = (
            f'x="{_coord(x + step * 0.06)}" y="{_coord(y)}" width="{_coord(step * 0.88)}" height="{_coord(HEIGHT - y)}"'
        )
        shapes.append(f'<rect class="bar" {box}><title>{escape_line(label)}: {escape(formatter(value))}</title></rect>')
    y_axis = f'<span style="top:0%">{escape(formatter(top))}</span><span style="top:100%">0</span>'
    axis_labels = [counts[0][0], *([counts[len(counts) // 2][0]] if len(counts) > 2 else []), counts[-1][0]]
    x_axis = "".join(f"<span>{escape_line(label)}</span>" for label in dict.fromkeys(axis_labels))
    description = "; ".join(f"{label} {formatter(value)}" for label, value in counts[:24])
    svg = _svg("".join(shapes), f"{title}: {description}")
    return _figure(title, "", _plot(svg, x_axis, y_axis), note)


def stacked_bar(title: str, parts: Sequence[tuple[str, float]], formatter: Formatter = format_si) -> str:
    """One horizontal bar of parts, such as memory by component."""
    parts = [(name, value) for name, value in parts if value > 0]
    total = sum(value for _, value in parts)
    if total <= 0:
        return ""
    x, shapes, legend = 0.0, "", ""
    for index, (name, value) in enumerate(parts):
        color, width = index % NUM_COLORS + 1, value / total * WIDTH
        shapes += f'<rect class="c{color}" x="{_coord(x)}" y="0" width="{_coord(width)}" height="20">'
        shapes += f"<title>{escape_line(name)}: {escape(formatter(value))}</title></rect>"
        legend += _legend_entry(name, color, f"{formatter(value)} · {value / total:.0%}")
        x += width
    description = "; ".join(f"{name} {formatter(value)}" for name, value in parts)
    box = f'viewBox="0 -2 {_coord(WIDTH)} 24" preserveAspectRatio="none"'
    svg = f'<svg class="stack" {box} role="img" aria-label="{escape_line(f"{title}: {description}")}">{shapes}</svg>'
    return _figure(title, "", f'{svg}<div class="keys below">{legend}</div>', "")


def heatmap(title: str, names: Sequence[str], table: Sequence[Sequence[int]], note: str = "") -> str:
    """A table of counts, such as a confusion matrix: true classes as rows, predicted classes as columns."""
    if not names or len(table) != len(names):
        return ""
    max_errors = max((count for i, row in enumerate(table) for j, count in enumerate(row) if i != j), default=0) or 1
    head = "".join(f'<th scope="col"><span>{escape_line(name)}</span></th>' for name in names)
    rows = [f"<tr><td></td>{head}</tr>"]
    for i, row in enumerate(table):
        row_total = sum(row) or 1
        cells = []
        for j, value in enumerate(row):
            kind, intensity = ("right", value / row_total) if i == j else ("wrong", value / max_errors)
            tooltip = escape_line(f"{names[i]} predicted as {names[j]}: {value}")
            cells.append(f'<td class="{kind}" style="--s:{intensity:.2f}" title="{tooltip}">{value or ""}</td>')
        rows.append(f'<tr><th scope="row">{escape_line(names[i])}</th>{"".join(cells)}</tr>')
    return _figure(title, "", f'<div class="scroll"><table class="heatmap">{"".join(rows)}</table></div>', note)


def _figure(title: str, keys: str, body: str, note: str, button: str = "") -> str:
    legend = f'<span class="keys">{keys}</span>' if keys else ""
    head = f'<figcaption><b class="title">{escape_line(title)}</b>{button}{legend}</figcaption>'
    foot = f'<p class="note">{escape_line(note)}</p>' if note else ""
    return f'<figure class="chart">{head}{body}{foot}</figure>'


def _plot(svg: str, x_axis: str, y_axis: str) -> str:
    return f'<div class="plot"><div class="y">{y_axis}</div>{svg}<div class="x">{x_axis}</div></div>'


def _legend_entry(name: str, color: int, value: str) -> str:
    return f'<span class="key"><i class="c{color}"></i>{escape_line(name)} <b>{escape(value)}</b></span>'


def _svg(shapes: str, description: str, attributes: str = "") -> str:
    box = f'viewBox="0 0 {_coord(WIDTH)} {_coord(HEIGHT)}" preserveAspectRatio="none"'
    return f'<svg {box} role="img" aria-label="{escape_line(description)}"{attributes}>{shapes}</svg>'


def _hover(lines: Sequence[Series], left: float, right: float) -> str:
    """The values for the tooltip of page.js."""
    values = [[line.name, line.color, [[x, float(f"{y:.5g}")] for x, y in line.points]] for line in lines]
    return f' tabindex="0" data-lines="{escape(json.dumps([left, right, values]))}"'


def _draw_line(line: Series, x_scale: ScaleFn, y_scale: ScaleFn) -> str:
    points = [(x_scale(x), y_scale(y)) for x, y in line.points]
    kind = f"s{line.color}"
    sparse = " sparse" if line.markers else ""  # dashed: between the marks nothing was measured
    shapes = f'<path class="line {kind}{sparse}" d="{_path(points)}"/>' if len(points) > 1 else ""
    if line.markers or len(points) == 1:  # a zero-length line with round caps stays round when the SVG is stretched
        shapes += f'<path class="dots {kind}" d="{"".join(f"M{_coord(x)} {_coord(y)}h0" for x, y in points)}"/>'
    return shapes


def _draw_min_max(line: Series, x_scale: ScaleFn, y_scale: ScaleFn) -> str:
    upper = [(x_scale(x), y_scale(high)) for x, _, high in line.min_max]
    lower = [(x_scale(x), y_scale(low)) for x, low, _ in reversed(line.min_max)]
    return f'<path class="band c{line.color}" d="{_path([*upper, *lower])}Z"/>'


def _path(points: Iterable[Point]) -> str:
    return "M" + "L".join(f"{_coord(x)} {_coord(y)}" for x, y in points)


def _range(lines: Sequence[Series], scale: Scale) -> tuple[float, float]:
    values = [y for line in lines for _, y in line.points] + [y for line in lines for b in line.min_max for y in b[1:]]
    if scale == "log":
        values = [value for value in values if value > 0] or [1.0]
        low, high = min(values), max(values)
        return (low / 1.15, high * 1.15) if high > low else (low / 2, high * 2)
    low, high = min(values), max(values)
    margin = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    return (0.0 if scale == "zero" or 0 <= low < 0.35 * high else low - margin), high + margin


def _linear_scale(low: float, high: float, start: float, end: float) -> ScaleFn:
    span = (high - low) or 1.0
    return lambda value: start + (value - low) / span * (end - start)


def _log_scale(low: float, high: float) -> ScaleFn:
    scale = _linear_scale(math.log10(low), math.log10(high), HEIGHT, 0)
    return lambda value: scale(math.log10(max(value, low)))


def _ticks(low: float, high: float, num_ticks: int = 6) -> list[float]:
    """About `num_ticks` round numbers between two others."""
    raw = (high - low) / num_ticks or 1.0
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw * 0.999)
    first = math.ceil(low / step)
    return [round(multiple * step, 12) for multiple in range(first, math.floor(high / step) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    powers = [10.0**power for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)]
    if len(powers) > 4:
        return powers[:: len(powers) // 4]
    return [power * factor for power in powers for factor in (1, 3)]


def _coord(value: float) -> str:
    return f"{value:.1f}".rstrip("0").rstrip(".")


def escape_line(value: str) -> str:
    """Untrusted text as one escaped line of bounded length."""
    return escape(single_line(value)[:300])
