"""Figures as inline SVG: axes, lines with whiskers, bars. Knows shapes, not what they mean.

All colours and fonts are classes of `page.css`, so that a figure follows the page's light or dark
scheme. Sizes are for a picture 400 units wide, readable on a phone and three in a row on a desk.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from markupsafe import Markup, escape

WIDTH, HEIGHT = 400, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 12, 44
_BAR_HEIGHT, _BAR_GAP = 22, 10
NUM_STYLES = 6


@dataclass(frozen=True)
class Point:
    """x, y in data units; low and high: an interval around y, where there is one."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Series:
    """Points under one name; `style` picks colour and marker (0 .. NUM_STYLES - 1)."""

    name: str
    points: Sequence[Point]
    style: int = 0
    line: bool = True
    markers: bool = True


@dataclass(frozen=True)
class Axis:
    """A range in data units and the ticks to write, with their labels."""

    label: str
    low: float
    high: float
    ticks: Sequence[tuple[float, str]] = field(default_factory=list)

    def place(self, value: float, start: float, end: float) -> float:
        """A value's place between `start` and `end`, in picture units."""
        span = self.high - self.low
        return start + (end - start) * ((value - self.low) / span if span else 0.5)


def linear_axis(
    label: str, values: Sequence[float], write: Callable[[float], str], floor: float | None = None
) -> Axis:
    """An axis around values, with round ticks; `floor` is where it starts, whatever the values."""
    low = min([*values]) if floor is None else floor
    high = max([*values, low])
    if high - low < 1e-9:
        high = low + max(abs(low) * 0.1, 1e-3)
    step = _round_step((high - low) / 4)
    first = math.floor(low / step + 1e-9) if floor is None else math.ceil(low / step - 1e-9)
    last = math.ceil(high / step - 1e-9)
    ticks = [i * step for i in range(first, last + 1)]
    return Axis(label, min(low, ticks[0]), max(high, ticks[-1]), [(t, write(t)) for t in ticks])


def line_figure(title: str, series: Sequence[Series], x: Axis, y: Axis) -> Markup:
    """Lines with markers and 95% whiskers; a legend stands above when there are several."""
    right, bottom = WIDTH - _RIGHT, HEIGHT - _BOTTOM
    parts = [_grid(x, y)]
    for one in series:
        xs = [x.place(p.x, _LEFT, right) for p in one.points]
        ys = [y.place(p.y, bottom, _TOP) for p in one.points]
        if one.line and len(xs) > 1:
            path = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(xs, ys, strict=True))
            parts.append(f'<polyline class="line s{one.style}" points="{path}"/>')
        for point, at_x, at_y in zip(one.points, xs, ys, strict=True):
            if point.low is not None and point.high is not None:
                low, high = (y.place(v, bottom, _TOP) for v in (point.low, point.high))
                parts.append(_whisker(one.style, at_x, low, high))
            if one.markers or len(one.points) == 1:
                parts.append(_marker(one.style, at_x, at_y, _says(one.name, point, x, y)))
    legend = _legend(series) if len(series) > 1 else ""
    return Markup(legend + _svg(title, HEIGHT, "".join(parts)))


def bar_figure(title: str, bars: Sequence[tuple[str, float, str]]) -> Markup:
    """Horizontal bars from (name, value, text): the name above, the text behind its bar."""
    longest = max((value for _, value, _ in bars), default=0.0) or 1.0
    parts = []
    row = _BAR_HEIGHT + _BAR_GAP
    for i, (name, value, text) in enumerate(bars):
        middle = i * row + row / 2 + 4
        width = max(1.0, (WIDTH - 90 - 90) * value / longest)
        parts.append(
            f'<text class="tick" x="82" y="{middle}" text-anchor="end">{escape(name)}</text>'
            f'<rect class="bar" x="90" y="{middle - 15}" width="{width:.1f}" height="20" rx="2"/>'
            f'<text class="tick" x="{96 + width:.1f}" y="{middle}">{escape(text)}</text>'
        )
    return Markup(_svg(title, row * len(bars) + 4, "".join(parts)))


def _grid(x: Axis, y: Axis) -> str:
    right, bottom = WIDTH - _RIGHT, HEIGHT - _BOTTOM
    parts = []
    for value, label in y.ticks:
        at = y.place(value, bottom, _TOP)
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}"/>'
            f'<text class="tick" x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">'
            f"{escape(label)}</text>"
        )
    for value, label in x.ticks:
        at = x.place(value, _LEFT, right)
        parts.append(
            f'<text class="tick" x="{at:.1f}" y="{bottom + 18}" text-anchor="middle">'
            f"{escape(label)}</text>"
        )
    parts.append(f'<line class="axis" x1="{_LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
    middle = (_LEFT + right) / 2
    parts.append(
        f'<text class="label" x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">'
        f"{escape(x.label)}</text>"
    )
    return "".join(parts)


def _whisker(style: int, x: float, low: float, high: float) -> str:
    return (
        f'<path class="whisker s{style}" d="M{x:.1f} {low:.1f}V{high:.1f}'
        f'M{x - 4:.1f} {low:.1f}h8M{x - 4:.1f} {high:.1f}h8"/>'
    )


def _marker(style: int, x: float, y: float, says: str = "") -> str:
    shapes = (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4"',
        f'<rect x="{x - 3.6:.1f}" y="{y - 3.6:.1f}" width="7.2" height="7.2"',
        f'<path d="M{x:.1f} {y - 5:.1f}l4.6 8.4h-9.2z"',
        f'<path d="M{x:.1f} {y - 5.2:.1f}l5.2 5.2l-5.2 5.2l-5.2 -5.2z"',
        f'<path d="M{x:.1f} {y + 5:.1f}l4.6 -8.4h-9.2z"',
        f'<rect x="{x - 5:.1f}" y="{y - 2.4:.1f}" width="10" height="4.8"',
    )
    inside = f"<title>{escape(says)}</title>" if says else ""
    shape = shapes[style % len(shapes)]
    return f'{shape} class="marker s{style}">{inside}</{shape[1 : shape.index(" ")]}>'


def _says(name: str, point: Point, x: Axis, y: Axis) -> str:
    around = ""
    if point.low is not None and point.high is not None:
        around = f" [{point.low:.3g}, {point.high:.3g}]"
    return f"{name}: {x.label} {point.x:g}, {y.label} {point.y:.4g}{around}"


def _legend(series: Sequence[Series]) -> str:
    items = "".join(
        '<li><svg viewBox="0 0 16 16" aria-hidden="true">'
        f"{_marker(one.style, 8, 8)}</svg>{escape(one.name)}</li>"
        for one in series
    )
    return f'<ul class="legend">{items}</ul>'


def _svg(title: str, height: float, inside: str) -> str:
    return (
        f'<svg class="figure" role="img" aria-label="{escape(title)}" '
        f'viewBox="0 0 {WIDTH} {height:g}">{inside}</svg>'
    )


def _round_step(rough: float) -> float:
    """The smallest of 1, 2, 2.5, 5 times a power of ten that is not below `rough`."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * (1 - 1e-9))
