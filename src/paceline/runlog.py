"""Reads the log that training leaves, `log.jsonl`: one JSON object a line.

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
    with a list per figure, one entry a TTT step). heldout: {"step", "heldout"} of the same form."""

    train: list[dict[str, Any]]
    heldout: list[dict[str, Any]]


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
            (heldout if "heldout" in record else train)[record["step"]] = record
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path}, line {number}: not a log record: {error}") from error
    return TrainingLog([train[s] for s in sorted(train)], [heldout[s] for s in sorted(heldout)])
