"""Answers of the part in the making, kept line by line until the part is published whole."""

import json
import os
from pathlib import Path
from typing import Any, Self


class Journal:
    """Records of one part, appended as they come; a run that was killed finds them again."""

    def __init__(self, path: Path, part: int) -> None:
        self.path = path
        self.part = part
        self.records = self._restore()
        self._file = self.path.open("ab")

    def append(self, record: dict[str, Any]) -> None:
        line = json.dumps({"part": self.part, **record}, ensure_ascii=False)
        self._file.write(line.encode() + b"\n")
        self._file.flush()

    def remove(self) -> None:
        """The part is published: its records are not needed any more."""
        self._file.close()
        self.path.unlink()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _restore(self) -> list[dict[str, Any]]:
        """The part's records; a last line that a kill broke off is cut away."""
        if not self.path.exists():
            return []
        records, end = [], 0
        with self.path.open("rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break
                records.append(json.loads(line))
                end += len(line)
        os.truncate(self.path, end)
        return [record for record in records if record["part"] == self.part]
