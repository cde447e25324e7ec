"""The page's figures: which numbers of a run go into which picture."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from paceline.report.figures import (
    Axis,
    Point,
    Series,
    bar_figure,
    line_figure,
    linear_axis,
)
from paceline.runlog import TrainingLog, acceptance_of
from paceline.units import duration_text

METHOD_NAMES = {"draft": "draft", "bigram": "bigram table", "prompt_lookup": "prompt lookup"}
_MAX_POINTS = 160
_MAX_SOURCES = 12


@dataclass(frozen=True)
class Figure:
    """A picture with its caption."""

    title: str
    svg: Markup
    note: str = ""


def methods_of(measured: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The draft, its baselines and a draft beside it, under the names that people read."""
    found = {"draft": measured["results"], **measured.get("baselines", {})}
    if beside := measured.get("beside"):
        found[f"draft {beside['name']}"] = beside["results"]
    return {METHOD_NAMES.get(name, name): tables for name, tables in found.items() if tables}


def acceptance_figures(methods: dict[str, dict[str, Any]], lengths: Sequence[str]) -> list[Figure]:
    """Acceptance length over chain length K, and acceptance per position of the longest chain, of
    several methods (name -> K -> tables)."""
    return [_by_length(methods, lengths), _by_position(methods, lengths[-1])]


def _by_length(methods: dict[str, dict[str, Any]], lengths: Sequence[str]) -> Figure:
    series = []
    for style, (name, tables) in enumerate(methods.items()):
        points = []
        for i, k in enumerate(lengths):
            pooled = tables[k]["pooled"]
            if pooled["acceptance_length"] is not None:
                # Methods stand side by side, so that their whiskers do not hide each other.
                low, high = pooled["interval"] or (None, None)
                points.append(Point(i + 0.06 * (style - 1), pooled["acceptance_length"], low, high))
        series.append(Series(name, points, style))
    tops = [p.high or p.y for one in series for p in one.points]
    x = Axis(
        "chain length K", -0.3, len(lengths) - 0.7, [(i, str(k)) for i, k in enumerate(lengths)]
    )
    y = linear_axis("acceptance length", tops, lambda v: f"{v:.3g}", floor=1.0)
    title = "Acceptance length"
    return Figure(title, line_figure(title, series, x, y), "tokens per verify step")


def _by_position(methods: dict[str, dict[str, Any]], length: str) -> Figure:
    longest = int(length)
    series = []
    for style, (name, tables) in enumerate(methods.items()):
        pooled = tables[length]["pooled"]
        intervals = pooled.get("per_position_intervals") or [None] * longest
        points = [
            Point(i + 1 + 0.06 * (style - 1), 100 * share, *_percent(interval))
            for i, (share, interval) in enumerate(
                zip(pooled["per_position"], intervals, strict=True)
            )
        ]
        series.append(Series(name, points, style))
    tops = [p.high or p.y for one in series for p in one.points]
    ticks = [(i + 1, str(i + 1)) for i in range(longest)]
    x = Axis("position in the chain", 0.7, longest + 0.3, ticks)
    y = linear_axis("accepted", tops, lambda v: f"{v:g}%", floor=0.0)
    title = f"Acceptance per position, K = {longest}"
    note = "share of verify steps that accepted it and all before it"
    return Figure(title, line_figure(title, series, x, y), note)


def acceptance_by_source(measured: dict[str, Any], length: str) -> Figure | None:
    """Acceptance length of each source at one K; None where there is only one source."""
    sources = measured["results"][length]["sources"]
    if len(sources) < 2:
        return None
    chosen = sorted(sources, key=lambda s: -sources[s]["conversations"])[:_MAX_SOURCES]
    series = []
    for style, (name, tables) in enumerate(methods_of(measured).items()):
        points = []
        for i, source in enumerate(chosen):
            found = tables[length]["sources"][source]
            if found["acceptance_length"] is not None:
                low, high = found["interval"] or (None, None)
                points.append(Point(i + 0.1 * (style - 1), found["acceptance_length"], low, high))
        series.append(Series(name, points, style, line=False))
    tops = [p.high or p.y for one in series for p in one.points]
    # Long names do not fit under an axis; the table beside tells which number is which source.
    ticks = [(i, source if len(chosen) <= 4 else str(i + 1)) for i, source in enumerate(chosen)]
    x = Axis("source", -0.5, len(chosen) - 0.5, ticks)
    y = linear_axis("acceptance length", tops, lambda v: f"{v:.3g}", floor=1.0)
    title = f"Acceptance length by source, K = {length}"
    return Figure(title, line_figure(title, series, x, y))


def training_figures(log: TrainingLog) -> list[Figure]:
    """Curves of a training run."""
    if not log.train:
        return []
    heldout = [(r["step"], r["heldout"]) for r in log.heldout]
    return [
        _loss_figure(log, heldout),
        _overlap_figure(log, heldout),
        *_heldout_acceptance(heldout),
        _gradient_figure(log),
    ]


def loss_figure(logs: dict[str, TrainingLog]) -> Figure:
    """The training loss of several runs."""
    series = [
        Series(
            name, _thinned([(r["step"] + 1, r["loss"]) for r in log.train]), style, markers=False
        )
        for style, (name, log) in enumerate(logs.items())
    ]
    note = "sum over TTT steps, nats; comparable where TTT steps and vocabularies are equal"
    return _steps_figure("Loss", series, lambda v: f"{v:.4g}", None, note)


def coverage_figure(aligned: dict[str, Any]) -> Figure:
    """Share of the supervised tokens that a vocabulary covers, over its size (log2)."""
    curve = aligned["curve"]
    size = aligned["draft_vocab_size"]
    points = [Point(math.log2(p["draft_vocab_size"]), 100 * p["coverage"]) for p in curve]
    chosen = Series("chosen", [Point(math.log2(size), 100 * aligned["coverage"])], 1, line=False)
    places = [p.x for p in (*points, *chosen.points)]
    doublings = range(math.floor(min(places)), math.ceil(max(places)) + 1)
    ticks = [(d, _thousands(2**d)) for d in doublings if d % 2 == 0]
    x = Axis("size of the draft vocabulary", doublings[0] - 0.2, doublings[-1] + 0.2, ticks)
    lowest = min(p.y for p in (*points, *chosen.points))
    # Where everything is covered, the axis still has a range, and none above 100%.
    y = linear_axis("covered", [min(lowest, 96.0), 100.0], lambda v: f"{v:g}%")
    title = "Coverage of the supervised tokens"
    return Figure(title, line_figure(title, [Series("most frequent tokens", points), chosen], x, y))


def times_figure(seconds: dict[str, float]) -> Figure | None:
    """Time of each stage; None where it was not kept."""
    if not seconds:
        return None
    bars = [(name, value, duration_text(value)) for name, value in seconds.items()]
    total = duration_text(sum(seconds.values()))
    return Figure("Time per stage", bar_figure("Time per stage", bars), f"{total} in all")


def _loss_figure(log: TrainingLog, heldout: list[tuple[int, dict[str, Any]]]) -> Figure:
    train = _thinned([(r["step"] + 1, r["loss"]) for r in log.train])
    series = [Series("training", train, 0, markers=False)]
    if heldout:
        points = [Point(step, figures["loss"]) for step, figures in heldout]
        series.append(Series("held out", points, 1))
    return _steps_figure("Loss", series, lambda v: f"{v:.4g}", None, "sum over TTT steps, nats")


def _overlap_figure(log: TrainingLog, heldout: list[tuple[int, dict[str, Any]]]) -> Figure:
    num_steps = max(len(r["train"]["acceptance_rate"]) for r in log.train)
    series = []
    for j in range(min(num_steps, 4)):
        pairs = [(r["step"] + 1, _at(r["train"]["acceptance_rate"], j)) for r in log.train]
        points = _thinned([(step, 100 * value) for step, value in pairs if value is not None])
        series.append(Series(f"step {j}", points, j, markers=False))
    ends = [(step, _at(figures["acceptance_rate"], 0)) for step, figures in heldout]
    points = [Point(step, 100 * value) for step, value in ends if value is not None]
    if points:
        series.append(Series("held out, step 0", points, 5))
    note = "mean of sum(min(p, q)) within the draft vocabulary, by TTT step"
    return _steps_figure("Agreement with the target", series, lambda v: f"{v:g}%", 0.0, note)


def _heldout_acceptance(heldout: list[tuple[int, dict[str, Any]]]) -> list[Figure]:
    """Acceptance length on held-out samples while training went on; nothing where it was not
    looked at."""
    looks = [(step, figures["acceptance"]) for step, figures in heldout if acceptance_of(figures)]
    if not looks:
        return []
    points = [
        Point(step, found["acceptance_length"], *(found["interval"] or (None, None)))
        for step, found in looks
    ]
    k = looks[-1][1]["num_draft_tokens"]
    x = linear_axis("optimiser step", [p.x for p in points], lambda v: f"{v:,.0f}", floor=0.0)
    tops = [p.high or p.y for p in points]
    y = linear_axis("acceptance length", tops, lambda v: f"{v:.3g}", floor=1.0)
    title = f"Held-out acceptance length, K = {k}"
    series = [Series("held out", points, 1)]
    return [Figure(title, line_figure(title, series, x, y), "tokens per verify step, server-free")]


def _gradient_figure(log: TrainingLog) -> Figure:
    norms = _thinned([(r["step"] + 1, r["grad_norm"]) for r in log.train])
    series = [Series("Gradient norm", norms, 0, markers=False)]
    return _steps_figure("Gradient norm", series, lambda v: f"{v:.4g}", 0.0, "")


def _steps_figure(
    title: str,
    series: list[Series],
    write: Callable[[float], str],
    floor: float | None,
    note: str,
) -> Figure:
    everything = [p for one in series for p in one.points]
    x = linear_axis("optimiser step", [p.x for p in everything], lambda v: f"{v:,.0f}", floor=0.0)
    y = linear_axis(title.lower(), [p.y for p in everything], write, floor)
    return Figure(title, line_figure(title, series, x, y), note)


def _thinned(pairs: Sequence[tuple[float, float]]) -> list[Point]:
    """At most _MAX_POINTS points; each stands for its share of the pairs by their mean."""
    count = min(len(pairs), _MAX_POINTS)
    borders = [i * len(pairs) // count for i in range(count + 1)] if count else [0]
    return [
        Point(*(sum(values) / len(values) for values in zip(*pairs[a:b], strict=True)))
        for a, b in itertools.pairwise(borders)
    ]


def _at(values: Sequence[float | None], index: int) -> float | None:
    return values[index] if index < len(values) else None


def _percent(interval: Sequence[float] | None) -> tuple[float | None, float | None]:
    return (100 * interval[0], 100 * interval[1]) if interval else (None, None)


def _thousands(size: int) -> str:
    return f"{size // 1024}k" if size >= 1024 else str(size)
