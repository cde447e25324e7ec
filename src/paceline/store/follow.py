"""Reads a store while it is written: a training that starts with the first shards.

The reader takes shards in the order in which it saw them and keeps that order in a file of its own,
so that a restarted reader goes on anywhere and other ranks read the same. One shard is one window
of samples that are mixed: of a single writer the order is then that of its shards, whatever the
speed of either side.
"""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np

from paceline.artefact import COMPLETE, Manifest, write_json
from paceline.contracts import TRAIN_SPLIT
from paceline.errors import StreamError
from paceline.store.announced import announced_rows
from paceline.store.budget import RESTART, mark_consumed
from paceline.store.files import (
    aside_numbers,
    receipt_numbers,
    receipt_path,
    shard_numbers,
    shard_path,
)
from paceline.store.index import IndexBuilder
from paceline.store.presence import DEAD, FAILED, READER, look, present
from paceline.store.reader import ShardReader
from paceline.store.shard import Shard
from paceline.store.spec import StoreSpec
from paceline.store.watch import POLL_S, WriterWatch

# How long workers of the writer may take to finish what they have in work before a stream that
# does not move is an error.
_PATIENCE_S = 60.0


@dataclass(frozen=True)
class _Window:
    """A shard, and the indices [start, stop) of its samples."""

    shard: int
    start: int
    stop: int


@contextmanager
def follow(
    folder: str | Path,
    order_path: Path,
    *,
    rank: int = 0,
    wait_s: float = 600.0,
) -> Iterator["Follower"]:
    """Be the reader of a store that is written now, will be, or was.

    order_path: the JSON file that keeps the order of reading; it belongs to one training. rank:
    rank 0 is the reader, which releases shards and fixes the order; other ranks of its training
    read along. wait_s: how long to wait for a writer that has not begun. Raises LockedError where
    the stream has another reader, StreamError where no writer comes.
    """
    folder = Path(folder)
    watch = WriterWatch(folder, wait_s)
    manifest = watch.wait_for_manifest()
    # A finished store may be read by many, and lie on a read-only medium.
    is_reader = rank == 0 and manifest.status != COMPLETE
    with present(folder, READER) if is_reader else nullcontext():
        follower = Follower(folder, manifest, watch, order_path, rank)
        try:
            yield follower
        finally:
            follower.stop()


class Follower(ShardReader):
    """The reader of a stream, made by `follow`. For whoever reads samples as good as a Store;
    records are numbered in the order of reading and grow with it."""

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        watch: WriterWatch,
        order_path: Path,
        rank: int,
    ) -> None:
        self._builder = IndexBuilder()
        spec = StoreSpec.from_dict(manifest.result["store"])
        super().__init__(folder, spec, self._builder.records())
        self.manifest = manifest
        self._watch = watch
        self._order_path = order_path
        self._rank = rank
        self._stopped = Event()
        self._windows: list[_Window | None] = []
        self._id_hashes: set[int] = set()
        self._gone: set[int] = set()
        self._kept: set[int] = set()
        self._num_released = 0
        self._is_pause_answered = False

    @cached_property
    def _order(self) -> "_Order":
        # Not before it is needed: a training that starts over removes the file first.
        return _Order(self._order_path)

    def windows(self, split: str) -> Iterator[np.ndarray | None]:
        """int64 sample indices of a split, window by window as shards appear; ends when the writer
        is done and all was read.

        None says: the writer waits for room. Checkpoint and call `answer_pause`. Raises StreamError
        where the writer died or failed.
        """
        for number in count():
            if number == len(self._windows) and not self._grow():
                return
            window = self._windows[number]
            if window is None:
                yield None
            else:
                indices = self.split(split)
                yield indices[(indices >= window.start) & (indices < window.stop)]

    def expected_rows(self, split: str, at_most: int | None = None) -> int:
        """Supervised tokens that the whole store will have, of each sample at most so many (see
        `announced_rows`); or a few more: bad samples count."""
        return announced_rows(self.manifest.result["planned"].get(split, {}), at_most)

    def release(self, num_windows: int) -> None:
        """The first windows (pauses not counted) will not be read again, whatever comes: their
        shards may go when the writer needs room. Call it after each checkpoint.

        Shards that hold samples of another split than the training's stay, and all of a store that
        was finished before it was followed.
        """
        if self.manifest.status == COMPLETE:
            return
        windows = [window for window in self._windows if window is not None]
        # Only what came since the last release: a stream may have tens of thousands of shards.
        released, self._num_released = self._num_released, max(self._num_released, num_windows)
        for number in (window.shard for window in windows[released:num_windows]):
            self.close_shard(number)
            if self._rank:
                continue
            if number not in self._kept and shard_path(self.folder, number).exists():
                mark_consumed(self.folder, number)

    def answer_pause(self, num_windows: int) -> None:
        """Like release, once all before a pause is done: more cannot go without new shards."""
        self.release(num_windows)
        self._is_pause_answered = True

    def drain(self) -> None:
        """Let all go, unread, that a writer with a byte budget still has to write."""
        writer = self._watch.peer()
        if writer is None or writer.budget_bytes is None:
            return
        self._stopped.clear()
        num_windows = 0
        for window in self.windows(TRAIN_SPLIT):
            num_windows += window is not None
            (self.release if window is not None else self.answer_pause)(num_windows)

    def check_writer(self) -> None:
        """Raises StreamError where the writer died or failed. Cheap; call it often."""
        self._watch.check()

    def stop(self) -> None:
        """Ends every waiting; give it to PackedReader as `on_close`."""
        self._stopped.set()

    def shard(self, number: int) -> Shard:
        if number in self._gone:
            raise StreamError(
                f"{self.folder}: shard {number} is to be read, and was let go. Release shards only "
                "once a checkpoint has passed them."
            )
        return super().shard(number)

    def _grow(self) -> bool:
        """Take in the next window, waiting for it. False: there is none any more."""
        number = len(self._windows)
        while number >= len(self._order.shards):
            if self._order.ended or self._stopped.is_set():
                return False
            if self._rank == 0:
                self._extend_order()
            else:
                self._wait_for_order()
        self._take_in(self._order.shards[number])
        return True

    def _take_in(self, number: int | None) -> None:
        if number is None:
            self._is_pause_answered = False
            self._windows.append(None)
            return
        start = len(self.records)
        # Of a shard that went, the receipt still says which samples it had.
        is_gone = receipt_path(self.folder, number).exists()
        if not is_gone and not shard_path(self.folder, number).exists():
            raise StreamError(
                f"{self.folder}: shard {number}, which this training has read, is not there any "
                "more. Train anew on the store as it is now."
            )
        shard = Shard((receipt_path if is_gone else shard_path)(self.folder, number))
        self._builder.add(number, shard)
        if is_gone:
            self._gone.add(number)
        if set(shard.columns["split"]) != {TRAIN_SPLIT}:
            self._kept.add(number)
        self.records = self._builder.records()
        self._refuse_repeats(start)
        self._windows.append(_Window(number, start, len(self.records)))

    def _refuse_repeats(self, start: int) -> None:
        """Of the records from `start` on; those before were looked at."""
        new = self.records.columns["sample_id.hash"][start:].tolist()
        known = len(self._id_hashes)
        self._id_hashes.update(new)
        if len(self._id_hashes) < known + len(new):
            self.records.refuse_repeats()

    def _extend_order(self) -> None:
        """Rank 0 waits for news and writes it into the order."""
        seen = set(self._order.shards)
        if unknown := [n for n in receipt_numbers(self.folder) if n not in seen]:
            raise StreamError(
                f"{self.folder}: shards {unknown} were let go by another training; `extract` must "
                "make them again in a new folder"
            )
        began = time.monotonic()
        while not self._stopped.is_set():
            # Looked at before the shards: what a writer that is done wrote is all there.
            writer = self._watch.peer()
            is_over = self._watch.is_over(writer)
            new = [n for n in shard_numbers(self.folder) if n not in seen]
            if new:
                self._order.append(new)
            elif is_over:
                self._order.end()
            elif not self._watch.is_stuck(writer):
                self._watch.refuse_lost(writer)
                self._stopped.wait(POLL_S)
                continue
            elif not self._ask_for_release(time.monotonic() - began):
                self._stopped.wait(POLL_S)
                continue
            return

    def _ask_for_release(self, waited_s: float) -> bool:
        """Write a pause into the order. False: there is one, which was not answered yet."""
        if self._order.shards[-1:] != [None]:
            self._order.append([None])
            return True
        # Other workers of the writer may still finish what they have in work.
        patience_s = _PATIENCE_S if aside_numbers(self.folder) else 1.0
        if self._is_pause_answered and waited_s > patience_s:
            raise StreamError(
                f"{self.folder}: the byte budget is full of shards of which the next optimiser "
                "step needs more than fit. Raise `stream_bytes` of extract, or lower its "
                "shard_bytes or train's batch_rows; then start both sides again."
            )
        return False

    def _wait_for_order(self) -> None:
        """Other ranks wait for rank 0 to write on."""
        known = self._order.state()
        while not self._stopped.wait(POLL_S):
            self._order.load()
            if self._order.state() != known:
                return
            first_rank = look(self.folder, READER)
            if first_rank and first_rank.state in (DEAD, FAILED):
                raise StreamError(f"{self.folder}: rank 0 ({first_rank}) is gone. {RESTART}")


class _Order:
    """The shards in the order of reading, kept in a file. None is a pause: the writer waits for
    room that only a release can make."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.shards: list[int | None] = []
        self.ended = False
        self.load()

    def load(self) -> None:
        if self._path.is_file():
            values: dict[str, Any] = json.loads(self._path.read_text())
            self.shards, self.ended = values["shards"], values["ended"]

    def state(self) -> tuple[int, bool]:
        return len(self.shards), self.ended

    def append(self, shards: list[int] | list[None]) -> None:
        self.shards += shards
        self._write()

    def end(self) -> None:
        self.ended = True
        self._write()

    def _write(self) -> None:
        write_json(self._path, {"shards": self.shards, "ended": self.ended})
