"""The log that training leaves, `log.jsonl`: one JSON object a line.

A run that was broken off and resumed from a checkpoint logs some steps twice: the last word counts.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import DataError

LOG_FILE = "log.jsonl"


@dataclass(frozen=True)
class TrainingLog:
    """train: records of optimiser steps, ascending (`step` from 0, `loss`, `learning_rate`, `train`
    with a list per figure, one entry a TTT step). heldout: {"step", "heldout"} of the same form and
    with `acceptance`; its `step` is how many optimiser steps were done."""

    train: list[dict[str, Any]]
    heldout: list[dict[str, Any]]


def throughput(records: list[dict[str, Any]]) -> dict[str, float | None]:
    """Of some records of optimiser steps together, waiting counted: tokens_per_s, rows_per_s
    (supervised rows), wait_share (of the time, waiting for data), mfu (needed arithmetic beside
    what matrix products alone would do in the time), peak_bytes; None where a log has it not."""
    seconds = sum(record["step_s"] for record in records)
    is_known = all("mfu" in record for record in records)
    worked = sum(record["mfu"] * record["step_s"] for record in records) if is_known else 0.0
    return {
        "tokens_per_s": sum(record["tokens"] for record in records) / seconds,
        "rows_per_s": sum(record["rows"] for record in records) / seconds,
        "wait_share": sum(record["wait_s"] for record in records) / seconds,
        "mfu": worked / seconds if is_known else None,
        "peak_bytes": max(record["peak_bytes"] for record in records) if is_known else None,
    }


def acceptance_of(heldout: dict[str, Any] | None) -> float | None:
    """The acceptance length in held-out figures; None where they have none."""
    return (heldout or {}).get("acceptance", {}).get("acceptance_length")


def append_record(path: Path, record: dict[str, Any]) -> None:
    """One JSON line a record."""
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")


def cut_torn_line(folder: str | Path) -> None:
    """Drop what a broken write left after the last whole line: a run that goes on must not write
    behind it."""
    path = Path(folder) / LOG_FILE
    if not path.is_file():
        return
    with path.open("rb+") as file:
        file.truncate(file.read().rfind(b"\n") + 1)


def read_log(folder: str | Path) -> TrainingLog:
    """The log in a folder of `train`; empty where there is none yet. DataError names the line."""
    path = Path(folder) / LOG_FILE
    train: dict[int, dict[str, Any]] = {}
    heldout: dict[int, dict[str, Any]] = {}
    lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
    for number, line in enumerate(lines, start=1):
        if not line.endswith(b"\n"):
            break  # cut off by a kill, or being written now
        try:
            record = json.loads(line)
            step = record["step"]
            if "heldout" in record:
                heldout[step] = record
                continue
            if train and step <= next(reversed(train)):
                # A run that goes on from a checkpoint makes all later steps again.
                train = {s: r for s, r in train.items() if s < step}
            train[step] = record
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path}, line {number}: not a log record: {error}") from error
    return TrainingLog([train[s] for s in sorted(train)], [heldout[s] for s in sorted(heldout)])
