"""The limit on bad samples: a run stops as soon as it is passed, not days later at its end."""

import time
from pathlib import Path
from typing import Any

from paceline.errors import EngineError
from paceline.extract.sink import QUARANTINE_PATTERN, read_lines

# How often a run that goes on looks what its workers have quarantined.
_LOOK_S = 10.0


class Quarantine:
    """What a run's workers quarantined in `folder`, of `num_in` samples, and how large a share of
    them may be."""

    def __init__(self, folder: Path, num_in: int, max_share: float) -> None:
        self.folder = folder
        self._num_in = num_in
        self._max_share = max_share
        self._looked = time.monotonic()

    def forget(self) -> None:
        """Before a start: all that is not stored runs again, what was bad before too, since its
        cause may have been mended. So what is there afterwards is of this run alone."""
        for path in self.folder.glob(QUARANTINE_PATTERN.format(worker="*")):
            path.unlink()

    def entries(self) -> list[dict[str, Any]]:
        return read_lines(self.folder, QUARANTINE_PATTERN)

    def look(self) -> None:
        """`refuse` what there is so far. Cheap; call it often."""
        if time.monotonic() - self._looked >= _LOOK_S:
            self._looked = time.monotonic()
            self.refuse(self.entries())

    def refuse(self, bad: list[dict[str, Any]]) -> None:
        """Raises EngineError where these entries are more than may be."""
        if len(bad) > self._max_share * self._num_in:
            raise EngineError(
                f"{self.folder}: {len(bad)} of {self._num_in} samples are bad, more than "
                f"max_quarantined_share {self._max_share}; first: {bad[0]['sample_id']}: "
                f"{bad[0]['reason']}. What is published is kept. Mend the cause, or raise the "
                "share, and run the same command: it runs the bad samples again"
            )
