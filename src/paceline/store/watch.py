"""What a reader makes of the writer of a stream: has it begun, is it done, was it lost."""

import logging
import time
from pathlib import Path

from paceline.artefact import COMPLETE, Manifest, load_manifest
from paceline.contracts import MANIFEST_NAME
from paceline.errors import StreamError
from paceline.store.budget import RESTART, budget_of
from paceline.store.presence import DEAD, DONE, FAILED, RUNNING, WRITER, Peer, ended_before, look

logger = logging.getLogger(__name__)

POLL_S = 0.1
# How often a reader that has work looks whether its writer is still there.
_LOOK_S = 1.0


class WriterWatch:
    """wait_s: how long to wait for a writer that has not begun."""

    def __init__(self, folder: Path, wait_s: float) -> None:
        self.folder = folder
        self._wait_s = wait_s
        self._is_told = False
        self._began = self._looked = time.monotonic()
        self._old_run = ended_before(folder, WRITER)

    def peer(self) -> Peer | None:
        """The writer of this run; None before it begins, as long as only an old one is known."""
        writer = look(self.folder, WRITER)
        return None if writer is None or writer.run == self._old_run else writer

    def wait_for_manifest(self) -> Manifest:
        """The manifest of the store once its writer has announced what it will hold."""
        while True:
            # Before it, the folder is not a store, and must stay empty for its writer.
            if (self.folder / MANIFEST_NAME).is_file():
                manifest = load_manifest(self.folder, "extract")
                if manifest.result:
                    return manifest
            self.refuse_lost(self.peer())
            time.sleep(POLL_S)

    def is_over(self, writer: Peer | None) -> bool:
        """What is published now is all that there will be."""
        if writer is not None and writer.state != DONE:
            return False
        return writer is not None or load_manifest(self.folder, "extract").status == COMPLETE

    def is_stuck(self, writer: Peer | None) -> bool:
        """The writer can publish nothing until shards are released."""
        if writer is None or writer.state != RUNNING:
            return False
        budget = budget_of(self.folder)
        return budget is not None and budget.is_stuck()

    def refuse_lost(self, writer: Peer | None) -> None:
        """Raises StreamError where the writer died, failed, or has not begun for `wait_s`."""
        if writer is None and not self._is_told:
            logger.info("%s: waiting for `paceline extract` to write to it", self.folder)
            self._is_told = True
        if writer is None and time.monotonic() - self._began > self._wait_s:
            raise StreamError(
                f"{self.folder}: nobody has written to it for {self._wait_s:.0f} s; start "
                "`paceline extract` on it"
            )
        if writer is not None and writer.state == FAILED:
            raise StreamError(
                f"{self.folder}: the writer ({writer}) failed: {writer.error}. {RESTART}"
            )
        if writer is not None and writer.state == DEAD:
            raise StreamError(f"{self.folder}: the writer ({writer}) died. {RESTART}")

    def check(self) -> None:
        """Like refuse_lost for a reader that has work and need not wait. Cheap; call it often."""
        if time.monotonic() - self._looked >= _LOOK_S:
            self._looked = time.monotonic()
            if (writer := self.peer()) is not None:
                self.refuse_lost(writer)
