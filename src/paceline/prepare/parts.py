"""The parts of a `generate` folder: answers, and a record of what became of the part's rows."""

import json
from pathlib import Path
from typing import Any

from paceline.artefact import write_atomically, write_json

ANSWERS_FOLDER = "answers"


def list_answer_parts(folder: Path) -> list[Path]:
    """The published parts, in order."""
    return sorted((folder / ANSWERS_FOLDER).glob("[0-9]*.jsonl"))


def read_part_record(part: Path) -> dict[str, Any]:
    return json.loads(part.with_suffix(".json").read_text())


def publish_part(
    folder: Path, number: int, rows: list[dict[str, Any]], record: dict[str, Any]
) -> None:
    """Write a part's record and then its rows: when the rows' name appears, both count."""
    path = folder / ANSWERS_FOLDER / f"{number:05d}.jsonl"
    path.parent.mkdir(exist_ok=True)
    write_json(path.with_suffix(".json"), record)
    write_rows(path, rows)


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    lines = [json.dumps(row, ensure_ascii=False, separators=(",", ":")) for row in rows]
    write_atomically(path, "".join(line + "\n" for line in lines).encode())
