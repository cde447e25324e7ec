"""Figures: what is drawn stands where the numbers say."""

import math
import xml.etree.ElementTree as ElementTree

import pytest

from paceline.report.figures import (
    HEIGHT,
    WIDTH,
    Axis,
    Point,
    Series,
    bar_figure,
    line_figure,
    linear_axis,
)
from paceline.units import duration_text


def _tree(markup):
    return ElementTree.fromstring(f"<div>{markup}</div>")


def _svg(markup):
    return next(e for e in _tree(markup).iter("svg") if e.get("class") == "figure")


def _plain(value):
    return f"{value:g}"


@pytest.mark.parametrize(
    ("values", "floor", "expected"),
    [
        ([1.0, 1.62, 2.19], 1.0, [1.0, 1.5, 2.0, 2.5]),
        ([0.0, 36.5], 0.0, [0, 10, 20, 30, 40]),
        ([0.004, 0.0001], 0.0, [0, 0.001, 0.002, 0.003, 0.004]),
        ([13.4, 18.7], None, [12, 14, 16, 18, 20]),
        ([480.0, 10.0], 0.0, [0, 200, 400, 600]),
    ],
)
def test_ticks_are_round_and_hold_all_values(values, floor, expected):
    axis = linear_axis("x", values, _plain, floor)
    assert [tick for tick, _ in axis.ticks] == pytest.approx(expected)
    assert axis.low <= min(values)
    assert axis.high >= max(values)


@pytest.mark.parametrize("value", [0.0, 1.0, -3.0, 1e-12, 1e9])
def test_one_value_is_no_crash(value):
    axis = linear_axis("x", [value, value], _plain)
    assert axis.low <= value <= axis.high
    assert axis.high > axis.low
    assert all(math.isfinite(tick) for tick, _ in axis.ticks)


def test_points_whiskers_and_ticks_share_one_scale():
    """A point drawn at the height of a tick's line has the tick's value."""
    x = Axis("x", 0, 10, [(0, "0"), (5, "5"), (10, "10")])
    y = Axis("y", 0, 100, [(0, "0"), (50, "50"), (100, "100")])
    series = [Series("one", [Point(5, 50, 0, 100)], 0)]
    svg = _svg(line_figure("title", series, x, y))
    lines = sorted(float(e.get("y1")) for e in svg.iter("line") if e.get("class") == "grid")
    top, middle, bottom = lines
    circle = next(svg.iter("circle"))
    assert float(circle.get("cy")) == pytest.approx(middle, abs=0.06)
    tick = next(e for e in svg.iter("text") if e.text == "5" and e.get("text-anchor") == "middle")
    assert float(circle.get("cx")) == pytest.approx(float(tick.get("x")), abs=0.06)
    whisker = next(e for e in svg.iter("path") if "whisker" in e.get("class"))
    assert whisker.get("d").startswith(f"M{float(circle.get('cx')):.1f} {bottom:.1f}V{top:.1f}")


def test_a_line_goes_through_its_points_in_order():
    x, y = Axis("x", 0, 4, []), Axis("y", 0, 4, [])
    svg = _svg(line_figure("t", [Series("s", [Point(i, i) for i in range(5)])], x, y))
    places = [
        tuple(map(float, p.split(","))) for p in next(svg.iter("polyline")).get("points").split()
    ]
    assert len(places) == 5
    assert places == sorted(places)
    assert [b for _, b in places] == sorted((b for _, b in places), reverse=True)
    assert all(0 <= a <= WIDTH and 0 <= b <= HEIGHT for a, b in places)


def test_every_marker_tells_its_numbers_and_a_legend_names_the_series():
    x, y = Axis("K", 0, 4, []), Axis("length", 1, 4, [])
    series = [Series("draft", [Point(3, 1.62, 1.55, 1.7)], 0), Series("other", [Point(1, 2)], 1)]
    tree = _tree(line_figure("t", series, x, y))
    titles = [e.text for e in tree.iter("title")]
    assert titles == ["draft: K 3, length 1.62 [1.55, 1.7]", "other: K 1, length 2"]
    assert [e.findall("svg")[0].tail for e in tree.iter("li")] == ["draft", "other"]


def test_names_cannot_break_out_of_the_page():
    hostile = '<script>alert("x")</script>&'
    x = Axis(hostile, 0, 1, [(0, hostile)])
    markup = line_figure(hostile, [Series(hostile, [Point(0, 0)]), Series("b", [])], x, x)
    markup += bar_figure(hostile, [(hostile, 1.0, hostile)])
    assert "<script" not in markup
    _tree(markup)  # still well-formed


def test_bars_are_as_long_as_their_values():
    svg = _svg(bar_figure("t", [("a", 10.0, "10"), ("b", 5.0, "5"), ("c", 0.0, "0")]))
    widths = [float(e.get("width")) for e in svg.iter("rect")]
    assert widths[0] == pytest.approx(2 * widths[1], rel=0.01)
    assert widths[2] == 1.0  # nothing is still seen
    assert not list(_tree(bar_figure("t", [])).iter("rect"))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (59.94, "59.9 s"), (60, "1 min 0 s"), (200.4, "3 min 20 s")]
    + [(3599.6, "1 h 0 min"), (7500, "2 h 5 min")],
)
def test_durations(seconds, text):
    assert duration_text(seconds) == text
