"""`paceline watch`: shows a running job in the terminal until it ends, or its user leaves."""

import importlib
import time
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from paceline.cli.command import Command
from paceline.cli.output import count, facts, share, sparkline
from paceline.recipe import WatchOptions
from paceline.units import size_text

# Between two stages of a run nothing is at work for a moment.
_IDLE_LOOKS = 3


def show(result: dict[str, Any], console: Console) -> None:
    """Once, or on a terminal again and again while something is at work."""
    if result["once"] or not console.is_terminal:
        console.print(render(result))
        return
    look = importlib.import_module("paceline.watch").snapshot
    idle = 0 if result["is_running"] else _IDLE_LOOKS
    with Live(render(result), console=console, auto_refresh=False) as live:
        try:
            while idle < _IDLE_LOOKS:
                time.sleep(result["interval_s"])
                found = look(Path(result["folder"]))
                live.update(render(found), refresh=True)
                idle = 0 if found["is_running"] else idle + 1
        except KeyboardInterrupt:
            # Only the looking ends.
            return


def render(result: dict[str, Any]) -> Group:
    return Group(*(_stage(stage) for stage in result["stages"]))


def _stage(stage: dict[str, Any]) -> Table:
    pairs = _PAIRS.get(stage["stage"], lambda _: [])(stage)
    folder = Path(stage["folder"]).resolve().name
    # A folder that is called otherwise may be one of several of its stage.
    name = stage["stage"] if folder == stage["stage"] else f"{stage['stage']} ({folder})"
    return facts(f"{name}: {stage['status']}", pairs)


def _extracted(stage: dict[str, Any]) -> list[tuple[str, str]]:
    pairs = [
        ("samples", _of(stage["samples"], stage["planned_samples"])),
        ("samples/s", count(stage["samples_per_s"])),
        ("on the disk", f"{size_text(stage['bytes'])}, {count(stage['shards'])} shards"),
    ]
    if stage["shards_removed"]:
        pairs.append(("removed", f"{count(stage['shards_removed'])} shards, trained on"))
    if stage["reader"]:
        pairs.append(("training that reads along", stage["reader"]))
    if stage["waiting_for_room"]:
        pairs.append(("waiting for room", f"{count(stage['waiting_for_room'])} writers"))
    return pairs


def _trained(stage: dict[str, Any]) -> list[tuple[str, str]]:
    pairs = [("steps", _of(stage["steps"], stage["planned_steps"]))]
    if not stage["steps"]:
        return pairs
    pairs += [
        ("tokens/s", f"{count(stage['tokens_per_s'])}, rows/s {count(stage['rows_per_s'])}"),
        ("waiting for data", share(stage["wait_share"])),
        ("needed arithmetic, of matrix products", share(stage["mfu"])),
        ("peak memory", size_text(stage["peak_bytes"]) if stage["peak_bytes"] else "n/a"),
        ("left", f"{count(stage['seconds_left'])} s"),
        ("learning rate", f"{stage['learning_rate']:.2e}"),
    ]
    curves = {
        "loss": stage["loss"],
        "sum of min(p, q), step 0": stage["acceptance_rate"],
        "held-out loss": stage["heldout_loss"],
        "held-out acceptance length": stage["heldout_acceptance_length"],
    }
    for name, values in curves.items():
        known = [value for value in values if value is not None]
        if known:
            pairs.append((name, f"{known[0]:.3f} {sparkline(known)} {known[-1]:.3f}"))
    return pairs


def _of(done: int, planned: int | None) -> str:
    return (
        f"{count(done)} of {count(planned)} ({share(done / planned)})" if planned else count(done)
    )


_PAIRS = {"extract": _extracted, "train": _trained}

COMMAND = Command("watch", WatchOptions, "paceline.watch", show)
