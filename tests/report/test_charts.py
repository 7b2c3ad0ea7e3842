"""Pictures are shapes with words around them; whatever text is handed in stays text."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from modelwright.report.charts import CHART_CSS, NUM_COLORS, Series, bar_chart, heatmap, line_chart, stacked_bar
from modelwright.report.formatting import format_bytes, format_si

HOSTILE = '<script>alert(1)</script>" onload="x" \x1b[31m\u202e'


def parse(drawn: str) -> ElementTree.Element:
    """A figure as a tree: what is not well-formed does not come this far."""
    return ElementTree.fromstring(drawn.replace("&nbsp;", " "))


def test_a_curve_begins_at_the_left_and_ends_at_the_right() -> None:
    figure = parse(line_chart("Loss", [Series("training", [(1, 4.0), (2, 3.0), (3, 2.0)])]))
    [path] = [each.get("d") or "" for each in figure.iter("path") if "line" in (each.get("class") or "").split()]
    points = [tuple(map(float, point.split())) for point in path.removeprefix("M").split("L")]
    assert [x for x, _ in points] == [0.0, 300.0, 600.0]
    assert points[0][1] < points[1][1] < points[2][1], "down on the paper is down in value"


def test_a_curve_says_its_last_value_and_is_read_aloud_from_first_to_last() -> None:
    drawn = line_chart("Loss", [Series("training", [(1, 4.0), (9, 2.5)])])
    assert "training <b>2.5</b>" in drawn
    assert 'aria-label="Loss: training from 4 to 2.5"' in drawn


@pytest.mark.parametrize("scale", ["fit", "zero", "log"])
@pytest.mark.parametrize("points", [[(5, 0.0)], [(1, 3.0), (2, 3.0)], [(0, -1.0), (9, 1e9)], [(1, 1e-9), (2, 5.0)]])
def test_no_values_break_the_drawing(points: list[tuple[float, float]], scale: str) -> None:
    drawn = line_chart("x", [Series("a", points), Series("empty", [])], scale=scale)  # type: ignore[arg-type]
    parse(drawn)
    assert "nan" not in drawn and "inf" not in drawn


def test_nothing_is_drawn_of_nothing() -> None:
    assert line_chart("x", []) == bar_chart("x", []) == stacked_bar("x", []) == heatmap("x", [], []) == ""
    assert stacked_bar("x", [("a", 0.0)]) == ""


def test_a_stacked_bar_takes_the_whole_width() -> None:
    figure = parse(stacked_bar("Memory", [("weights", 30.0), ("moments", 70.0)]))
    assert sum(float(each.get("width") or 0) for each in figure.iter("rect")) == pytest.approx(600.0)


def test_bars_are_as_high_as_their_counts() -> None:
    figure = parse(bar_chart("Lengths", [("0-10", 1.0), ("10-20", 4.0)]))
    heights = [float(each.get("height") or 0) for each in figure.iter("rect")]
    assert heights[1] == pytest.approx(4 * heights[0])


def test_a_table_of_shades_has_a_cell_for_every_pair() -> None:
    figure = parse(heatmap("Confusion", ["cat", "dog"], [[8, 2], [0, 10]]))
    assert [cell.get("class") for cell in figure.iter("td") if cell.get("class")] == [
        "right",
        "wrong",
        "wrong",
        "right",
    ]


def test_no_text_acts() -> None:
    drawn = [
        line_chart(HOSTILE, [Series(HOSTILE, [(1, 1.0), (2, 2.0)])], note=HOSTILE),
        bar_chart(HOSTILE, [(HOSTILE, 1.0)]),
        stacked_bar(HOSTILE, [(HOSTILE, 1.0)]),
        heatmap(HOSTILE, [HOSTILE], [[1]]),
    ]
    for picture in drawn:
        tags = {each.tag for each in parse(picture).iter()}
        assert not tags & {"script", "a", "image", "foreignObject"}
        assert not any(name.startswith("on") for each in parse(picture).iter() for name in each.attrib)
        assert "\x1b" not in picture and "\u202e" not in picture


def test_every_colour_is_in_the_style_sheet() -> None:
    for number in range(1, NUM_COLORS + 1):
        assert re.search(rf"svg \.s{number} .*svg \.c{number} .*i\.c{number} ", CHART_CSS)


def test_numbers_take_few_signs() -> None:
    texts = [format_si(value) for value in (0, 1234, 2.5e6, 0.25, 3e-4, 6.85e-7, -12.0)]
    assert texts == ["0", "1.23k", "2.5M", "0.25", "3e-4", "6.85e-7", "-12"]
    assert [format_bytes(value) for value in (5e9, 4.12e8, 2e6)] == ["5 GB", "0.412 GB", "2 MB"]
