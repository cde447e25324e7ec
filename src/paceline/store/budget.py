"""The byte budget of a stream: a writer that needs room lets consumed shards go, or waits.

What stands in the folder is the account: published shards by their size, shards in work by what
they may grow to. So it is the same for all workers and survives all of them.
"""

import fcntl
import logging
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from paceline.artefact import fsync_folder, write_atomically
from paceline.errors import StreamError, UsageError
from paceline.store.files import (
    AsideFile,
    aside_numbers,
    published_bytes,
    receipt_path,
    shard_numbers,
    shard_path,
)
from paceline.store.presence import (
    DEAD,
    DONE,
    FAILED,
    READER,
    RUNNING,
    STREAM_FOLDER,
    WRITER,
    Peer,
    ended_before,
    look,
    present,
)
from paceline.store.shard import HEADER_BYTES, Shard, build_header, lay_out
from paceline.store.spec import StoreSpec

logger = logging.getLogger(__name__)

_CONSUMED_FOLDER = "consumed"
_WAITING_FOLDER = "waiting"
_POLL_S = 0.1
# How often a writer that has room looks whether its reader is still there.
_LOOK_S = 1.0
# Said when either side is gone.
RESTART = "What is published is kept: start both sides again with the same commands."
_KEPT = ("offsets", "num_past_end", "samples", "sample_checksums")


class ByteBudget:
    """Room for shards of `shard_bytes` in a folder that may hold `max_bytes` of them, as the writer
    announced."""

    def __init__(self, folder: Path, writer: Peer) -> None:
        self.folder = folder
        self.max_bytes = writer.budget_bytes
        self.shard_bytes = writer.shard_bytes
        self._old_run = writer.reader_before
        self._looked = time.monotonic()

    def claim(self) -> AsideFile:
        """A new shard in work, as soon as it fits.

        Raises StreamError where the reader that should make room died, failed or left.
        """
        mark: Path | None = None
        try:
            while True:
                with self._lock():
                    if self._has_room() or self._make_room():
                        if mark:
                            mark.unlink()
                        return AsideFile(self.folder)
                    mark = mark or self._mark_waiting()
                self._refuse_absent_reader()
                time.sleep(_POLL_S)
        except BaseException:
            if mark:
                mark.unlink(missing_ok=True)
            raise

    def check_reader(self) -> None:
        """Raises StreamError where the reader died or failed: what goes on being written would
        soon stand in its way. Cheap; call it often."""
        if time.monotonic() - self._looked >= _LOOK_S:
            self._looked = time.monotonic()
            self._refuse_lost(self._reader())

    def is_stuck(self) -> bool:
        """A writer waits for room, and nothing that was consumed could be let go."""
        with self._lock():
            is_waiting = num_waiting(self.folder) > 0
            return is_waiting and not self._has_room() and not consumed_numbers(self.folder)

    def _mark_waiting(self) -> Path:
        reader = self._reader()
        logger.info(
            "%s is full (%d bytes): waiting for %s",
            self.folder,
            self.max_bytes,
            f"the reader ({reader})" if reader else "`paceline train --follow` on it",
        )
        path = _waiting_folder(self.folder) / uuid.uuid4().hex
        path.parent.mkdir(exist_ok=True)
        path.touch()
        return path

    def _has_room(self) -> bool:
        in_work = len(aside_numbers(self.folder)) * self.shard_bytes
        return published_bytes(self.folder) + in_work + self.shard_bytes <= self.max_bytes

    def _make_room(self) -> bool:
        for number in consumed_numbers(self.folder):
            let_go(self.folder, number)
            if self._has_room():
                return True
        return False

    def _reader(self) -> Peer | None:
        """The reader of this run; None before it begins."""
        reader = look(self.folder, READER)
        return None if reader is None or reader.run == self._old_run else reader

    def _refuse_absent_reader(self) -> None:
        reader = self._reader()
        self._refuse_lost(reader)
        if reader and reader.state == DONE:
            raise StreamError(
                f"{self.folder}: the reader ({reader}) is done, so nobody makes room. What is "
                "published is kept; run this again without a budget for the rest."
            )

    def _refuse_lost(self, reader: Peer | None) -> None:
        if reader and reader.state in (FAILED, DEAD):
            how = f"failed: {reader.error}" if reader.state == FAILED else "died"
            raise StreamError(f"{self.folder}: the reader ({reader}) {how}. {RESTART}")

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """One worker at a time counts and claims."""
        with (self.folder / STREAM_FOLDER / "budget.lock").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


@contextmanager
def stream_writer(
    folder: str | Path,
    spec: StoreSpec,
    budget_bytes: int | None,
    kept_bytes: int = 0,
    least_bytes: int | None = None,
) -> Iterator[None]:
    """What a run that writes a store holds while its workers write: followers then see it live,
    fail or end.

    budget_bytes: how many bytes of shards may stand in the folder; None: any. kept_bytes: how many
    of them no reader lets go. least_bytes: the smallest budget that would do, where the size of
    shards follows the budget. Raises UsageError for a budget in which nothing could move.
    """
    folder = Path(folder)
    needed = kept_bytes + 2 * spec.shard_bytes
    if budget_bytes is not None and budget_bytes < needed:
        raise UsageError(
            f"a budget of {budget_bytes:,} bytes is too small: held-out samples that stay take "
            f"about {kept_bytes:,}, and of two shards of {spec.shard_bytes:,} one is read while "
            f"the next is written. Give {least_bytes or needed:,} or more, or smaller shards."
        )
    with present(
        folder,
        WRITER,
        budget_bytes=budget_bytes,
        shard_bytes=spec.shard_bytes,
        reader_before=ended_before(folder, READER),
    ):
        # Of workers that died while they waited.
        shutil.rmtree(_waiting_folder(folder), ignore_errors=True)
        yield


def budget_of(folder: Path) -> ByteBudget | None:
    """The budget that the writer at work announced, if any."""
    writer = look(folder, WRITER)
    if writer is None or writer.state != RUNNING or writer.budget_bytes is None:
        return None
    return ByteBudget(folder, writer)


def num_waiting(folder: Path) -> int:
    """How many workers of the writer wait for room."""
    waiting = _waiting_folder(folder)
    return len(os.listdir(waiting)) if waiting.is_dir() else 0


def mark_consumed(folder: Path, number: int) -> None:
    """The reader says that it will not read a shard again."""
    path = _consumed_path(folder, number)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()


def consumed_numbers(folder: Path) -> list[int]:
    """Published shards that the reader is done with, ascending."""
    marked = folder / STREAM_FOLDER / _CONSUMED_FOLDER
    names = os.listdir(marked) if marked.is_dir() else []
    return sorted({int(name) for name in names} & set(shard_numbers(folder)))


def let_go(folder: Path, number: int) -> None:
    """Replace a shard with its receipt. The receipt stands before the shard goes, so that at no
    instant its samples are unknown."""
    path = receipt_path(folder, number)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, _receipt_of(Shard(shard_path(folder, number))))
    shard_path(folder, number).unlink(missing_ok=True)
    fsync_folder(shard_path(folder, number).parent)
    _consumed_path(folder, number).unlink(missing_ok=True)


def _receipt_of(shard: Shard) -> bytes:
    """The shard's file without what takes room."""
    entries, checksums, pieces = lay_out({name: shard.tensor(name) for name in _KEPT})
    header = build_header(entries, shard.spec, checksums, shard.num_samples)
    assert len(header) == HEADER_BYTES
    return b"".join([header, *pieces])


def _waiting_folder(folder: Path) -> Path:
    return folder / STREAM_FOLDER / _WAITING_FOLDER


def _consumed_path(folder: Path, number: int) -> Path:
    return folder / STREAM_FOLDER / _CONSUMED_FOLDER / f"{number:05d}"
