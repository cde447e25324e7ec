"""The section that holds the plan against what came: bytes, files and time of each stage."""

from collections.abc import Callable
from typing import Any

from paceline.report.gather import RunRecord
from paceline.report.sections import Cell, Rows, Table
from paceline.units import duration_text, size_text


def planned(run: RunRecord) -> dict[str, Any] | None:
    """None where no plan was kept."""
    if run.plan is None:
        return None
    stages = {name: entry for name, entry in run.plan["stages"].items() if name in run.stages}
    if not stages:
        return None
    rows: Rows = [
        [
            name,
            _cell(entry["bytes"], run.sizes[name].num_bytes, size_text),
            _cell(entry["files"], run.sizes[name].num_files, _count),
            _cell(entry["seconds"], run.seconds.get(name), duration_text),
        ]
        for name, entry in stages.items()
    ]
    rows.append(["in all", *_totals(run, stages)])
    how = "rates measured on this machine" if run.plan["measured"] else "arithmetic alone"
    about = (
        f"What came, and under it what was planned before the start and its share. Planned from "
        f"{run.plan['data']['origin']}; times by {how}."
    )
    return {"about": about, "table": Table(["stage", "bytes", "files", "time"], rows)}


def _totals(run: RunRecord, stages: dict[str, Any]) -> list[Cell]:
    timed = [n for n, entry in stages.items() if entry["seconds"] is not None and n in run.seconds]
    total = lambda key, names: sum(stages[name][key] for name in names)
    taken = sum(run.seconds[name] for name in timed) if timed else None
    return [
        _cell(total("bytes", stages), sum(run.sizes[n].num_bytes for n in stages), size_text),
        _cell(total("files", stages), sum(run.sizes[n].num_files for n in stages), _count),
        _cell(total("seconds", timed), taken, duration_text),
    ]


def _cell(told: float | None, found: float | None, write: Callable[[float], str]) -> Cell:
    """What came, and under it what was planned."""
    text = "not kept" if found is None else write(found)
    if not told:
        return text
    # A share of what reads 0.0 s says nothing.
    reads_zero = write is duration_text and told < 0.05
    share = "" if found is None or reads_zero else f", {100 * found / told:.0f}%"
    return text, f"of {write(told)}{share}"


def _count(number: float) -> str:
    return f"{number:,.0f}"
