"""Draw small pictures as inline SVG: curves, bars, a stacked bar, a table of shades. No script, no network, no library.

The drawing stretches with the page while its words do not: an SVG holds only shapes, the words stand around it as HTML.
Every text that is handed in is escaped; colours are variables of the page's style sheet (`STYLE`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Literal

from modelwright.report.lines import plain

WIDTH, HEIGHT = 600.0, 150.0
"""The drawing's own units; the page stretches them."""
COLOURS = 6
"""Colours the style sheet knows, in the order they are taken."""
STYLE = (Path(__file__).parent / "charts.css").read_text(encoding="utf-8")
"""What a page must have in its style sheet for these pictures."""

Point = tuple[float, float]
Say = Callable[[float], str]
Place = Callable[[float], float]
Scale = Literal["fit", "zero", "log"]
"""An axis that fits its values, begins at zero, or spreads the small ones."""


@dataclass(frozen=True)
class Line:
    """One curve."""

    name: str
    """What it shows."""
    points: Sequence[Point]
    """Where it runs, left to right."""
    band: Sequence[tuple[float, float, float]] = ()
    """Place, lowest and highest: the spread of what a point stands for, drawn as a shade."""
    colour: int = 1
    """Which of the style sheet's colours it has."""
    dots: bool = False
    """Whether each point is marked, as few measured values want to be."""


def curves(title: str, lines: Sequence[Line], say: Say | None = None, scale: Scale = "fit", note: str = "") -> str:
    """Curves over a common axis; `say` writes a value."""
    say = say or compact
    lines = [line for line in lines if line.points]
    if not lines:
        return ""
    log = scale == "log"
    low, high = _range(lines, scale)
    left = min(line.points[0][0] for line in lines)
    right = max(line.points[-1][0] for line in lines)
    across = _scale(left, right if right > left else left + 1, 0, WIDTH)
    up = _logarithmic(low, high) if log else _scale(low, high, HEIGHT, 0)
    ticks = _powers(low, high) if log else _ticks(low, high)
    ticks = [tick for tick in ticks if low <= tick <= high] or [low, high]
    drawn = [f'<path class="grid" d="M0 {_n(up(tick))}H{_n(WIDTH)}"/>' for tick in ticks]
    drawn += [_band(line, across, up) for line in lines if line.band]
    drawn += [_curve(line, across, up) for line in lines]
    labels = [(tick, up(tick) / HEIGHT, say(tick)) for tick in ticks]
    side = "".join(f'<span style="top:{place:.1%}">{escape(said)}</span>' for _, place, said in labels)
    below = "".join(f"<span>{escape(compact(value))}</span>" for value in _ends(left, right))
    keys = "".join(_key(line.name, line.colour, say(line.points[-1][1])) for line in lines)
    svg = _svg("".join(drawn), f"{title}: {'; '.join(_told(line, say) for line in lines)}", _hover(lines, left, right))
    body = f'<div class="plot"><div class="y">{side}</div>{svg}<div class="x">{below}</div></div>'
    return _figure(title, keys, body, note)


def bars(title: str, counts: Sequence[tuple[str, float]], say: Say | None = None, note: str = "") -> str:
    """Upright bars, as of a histogram; the first and last labels stand below, every bar says its own on a touch."""
    if not counts:
        return ""
    say = say or compact
    top = max(value for _, value in counts) or 1.0
    step = WIDTH / len(counts)
    up = _scale(0, top, HEIGHT, 0)
    drawn = []
    for place, (label, value) in enumerate(counts):
        x, y = place * step, up(value)
        box = f'x="{_n(x + step * 0.06)}" y="{_n(y)}" width="{_n(step * 0.88)}" height="{_n(HEIGHT - y)}"'
        drawn.append(f'<rect class="bar" {box}><title>{text(label)}: {escape(say(value))}</title></rect>')
    side = f'<span style="top:0%">{escape(say(top))}</span><span style="top:100%">0</span>'
    shown = [counts[0][0], *([counts[len(counts) // 2][0]] if len(counts) > 2 else []), counts[-1][0]]
    below = "".join(f"<span>{text(label)}</span>" for label in dict.fromkeys(shown))
    told = "; ".join(f"{label} {say(value)}" for label, value in counts[:24])
    svg = _svg("".join(drawn), f"{title}: {told}")
    return _figure(
        title, "", f'<div class="plot"><div class="y">{side}</div>{svg}<div class="x">{below}</div></div>', note
    )


def stack(title: str, parts: Sequence[tuple[str, float]], say: Say | None = None, limit: float | None = None,
          note: str = "") -> str:  # fmt: skip
    """One bar made of parts, such as memory by what fills it; `limit` is what there is room for."""
    parts = [(name, value) for name, value in parts if value > 0]
    whole = sum(value for _, value in parts)
    if whole <= 0:
        return ""
    say = say or compact
    span, x, drawn = max(whole, limit or 0.0), 0.0, []
    for number, (name, value) in enumerate(parts):
        width = value / span * WIDTH
        drawn.append(f'<rect class="c{_colour(number)}" x="{_n(x)}" y="0" width="{_n(width)}" height="20">'
                     f"<title>{text(name)}: {escape(say(value))}</title></rect>")  # fmt: skip
        x += width
    if limit is not None:
        place = min(limit / span * WIDTH, WIDTH - 1)
        drawn.append(f'<path class="limit{" over" if whole > limit else ""}" d="M{_n(place)} -2V22"/>')
    keys = "".join(
        _key(name, _colour(number), f"{say(value)} · {value / whole:.0%}") for number, (name, value) in enumerate(parts)
    )
    if limit is not None:
        keys += f'<span class="key">room <b>{escape(say(limit))}</b></span>'
    told = "; ".join(f"{name} {say(value)}" for name, value in parts)
    svg = f'<svg class="stack" viewBox="0 -2 {_n(WIDTH)} 24" preserveAspectRatio="none" role="img" ' \
          f'aria-label="{text(f"{title}: {told}")}">{"".join(drawn)}</svg>'  # fmt: skip
    return _figure(title, "", f'{svg}<div class="keys below">{keys}</div>', note)


def shades(title: str, names: Sequence[str], table: Sequence[Sequence[int]], note: str = "") -> str:
    """A table of counts as shades, such as which class (down) was taken for which (across)."""
    if not names or len(table) != len(names):
        return ""
    wrong = max((value for i, row in enumerate(table) for j, value in enumerate(row) if i != j), default=0) or 1
    rows = ["<tr><td></td>" + "".join(f'<th scope="col"><span>{text(name)}</span></th>' for name in names) + "</tr>"]
    for i, row in enumerate(table):
        whole = sum(row) or 1
        cells = []
        for j, value in enumerate(row):
            share = value / whole if i == j else value / wrong
            kind = "right" if i == j else "wrong"
            told = f"{names[i]} taken for {names[j]}: {value}"
            cells.append(f'<td class="{kind}" style="--s:{share:.2f}" title="{text(told)}">{value or ""}</td>')
        rows.append(f'<tr><th scope="row">{text(names[i])}</th>{"".join(cells)}</tr>')
    return _figure(title, "", f'<div class="scroll"><table class="shades">{"".join(rows)}</table></div>', note)


def compact(value: float) -> str:
    """A number in few signs: 1.2k, 3.4M, 0.25, 3e-4."""
    size = abs(value)
    if size == 0:
        return "0"
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= limit:
            return f"{value / limit:.3g}{unit}"
    if size >= 1e-3:
        return f"{value:.3g}"
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"


def thousands(value: float) -> str:
    """A count with its digits in threes."""
    return f"{value:,.0f}"


def gigabytes(value: float) -> str:
    """Bytes as a person says them."""
    return f"{value / 1e9:.3g} GB" if value >= 1e8 else f"{value / 1e6:.3g} MB"


def percent(value: float) -> str:
    """A share in hundredths."""
    return f"{value:.1%}"


def _figure(title: str, keys: str, body: str, note: str) -> str:
    head = f'<figcaption><b class="title">{text(title)}</b><span class="keys">{keys}</span></figcaption>'
    foot = f'<p class="note">{text(note)}</p>' if note else ""
    return f'<figure class="chart">{head}{body}{foot}</figure>'


def _key(name: str, colour: int, value: str) -> str:
    return f'<span class="key"><i class="c{colour}"></i>{text(name)} <b>{escape(value)}</b></span>'


def _svg(drawn: str, told: str, more: str = "") -> str:
    box = f'viewBox="0 0 {_n(WIDTH)} {_n(HEIGHT)}" preserveAspectRatio="none"'
    return f'<svg {box} role="img" aria-label="{text(told)}"{more}>{drawn}</svg>'


def _hover(lines: Sequence[Line], left: float, right: float) -> str:
    """The values, for the page's script to show under a finger; nothing depends on it."""
    values = [[line.name, line.colour, [[x, float(f"{y:.5g}")] for x, y in line.points]] for line in lines]
    return f' data-lines="{escape(json.dumps([left, right, values]))}"'


def _told(line: Line, say: Say) -> str:
    return f"{line.name} from {say(line.points[0][1])} to {say(line.points[-1][1])}"


def _curve(line: Line, across: Place, up: Place) -> str:
    places = [(across(x), up(y)) for x, y in line.points]
    kind = f"s{line.colour}"
    drawn = f'<path class="line {kind}" d="{_path(places)}"/>' if len(places) > 1 else ""
    if line.dots or len(places) == 1:  # a line of no length with a round end is a dot that no stretching makes an egg
        drawn += f'<path class="dots {kind}" d="{"".join(f"M{_n(x)} {_n(y)}h0" for x, y in places)}"/>'
    return drawn


def _band(line: Line, across: Place, up: Place) -> str:
    upper = [(across(x), up(high)) for x, _, high in line.band]
    lower = [(across(x), up(low)) for x, low, _ in reversed(line.band)]
    return f'<path class="band c{line.colour}" d="{_path([*upper, *lower])}Z"/>'


def _path(places: Iterable[Point]) -> str:
    return "M" + "L".join(f"{_n(x)} {_n(y)}" for x, y in places)


def _range(lines: Sequence[Line], scale: Scale) -> tuple[float, float]:
    values = [y for line in lines for _, y in line.points] + [y for line in lines for b in line.band for y in b[1:]]
    if scale == "log":
        values = [value for value in values if value > 0] or [1.0]
        low, high = min(values), max(values)
        return (low, high) if high > low else (low / 2, high * 2)
    low, high = min(values), max(values)
    margin = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    return (0.0 if scale == "zero" or 0 <= low < 0.35 * high else low - margin), high + margin


def _scale(low: float, high: float, start: float, end: float) -> Place:
    span = (high - low) or 1.0
    return lambda value: start + (value - low) / span * (end - start)


def _logarithmic(low: float, high: float) -> Place:
    scale = _scale(math.log10(low), math.log10(high), HEIGHT, 0)
    return lambda value: scale(math.log10(max(value, low)))


def _ticks(low: float, high: float, wanted: int = 3) -> list[float]:
    """Round numbers between two others, about so many."""
    raw = (high - low) / wanted or 1.0
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw * 0.999)
    first = math.ceil(low / step)
    return [round(place * step, 12) for place in range(first, math.floor(high / step) + 1)]


def _powers(low: float, high: float) -> list[float]:
    found = [10.0**power for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)]
    return found[:: max(1, len(found) // 4)]


def _ends(left: float, right: float) -> list[float]:
    return [left] if left == right else [left, round((left + right) / 2), right]


def _colour(number: int) -> int:
    return number % COLOURS + 1


def _n(value: float) -> str:
    return f"{value:.1f}".rstrip("0").rstrip(".")


def text(value: str) -> str:
    """A text as HTML in which nothing acts, on one line and not too long."""
    return escape(plain(value)[:300])
