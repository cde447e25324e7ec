"""The parts of a `generate` folder: answers, and a record of what became of the part's rows."""

import json
from collections import Counter
from collections.abc import Iterable
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
    """Write a part's record, with the counts of its rows, and then the rows: when their name
    appears, both count."""
    path = folder / ANSWERS_FOLDER / f"{number:05d}.jsonl"
    path.parent.mkdir(exist_ok=True)
    write_json(path.with_suffix(".json"), {**record, "counts": _counts(rows)})
    write_rows(path, rows)


def counts_of(part: Path, record: dict[str, Any]) -> dict[str, Any]:
    """What the rows of a part amount to: `answered` (rows), `exact_answers` and their
    `response_tokens`, and `finish_reasons`, how often each."""
    if "counts" in record:
        return record["counts"]
    # A part of an earlier version. Its rows are far more than its record: minutes for a million.
    with part.open("rb") as file:
        return _counts(map(json.loads, file))


def _counts(rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    answered = exact = response_tokens = 0
    reasons: Counter[str] = Counter()
    for row in rows:
        answered += 1
        if "finish_reasons" in row:
            reasons.update(row["finish_reasons"])
            continue
        for answer in row.get("answers", [row]):
            reasons[answer["finish_reason"]] += 1
            response_tokens += len(answer["response_ids"]) - answer["num_past_end"]
            exact += 1
    return {
        "answered": answered,
        "exact_answers": exact,
        "response_tokens": response_tokens,
        "finish_reasons": reasons,
    }


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    lines = [json.dumps(row, ensure_ascii=False, separators=(",", ":")) for row in rows]
    write_atomically(path, "".join(line + "\n" for line in lines).encode())
