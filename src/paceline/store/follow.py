"""Reads a store while it is written: a training that starts with the first shard.

The reader consumes windows of shards in the order in which it saw them, and keeps that order in
the folder, so that a restarted reader goes on at any batch and other ranks read the same.
"""

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from threading import Event, Lock
from types import TracebackType
from typing import Any, Self

import numpy as np

from paceline.artefact import COMPLETE, load_manifest, write_json
from paceline.contracts import MANIFEST_NAME
from paceline.errors import StreamError
from paceline.store.budget import RESTART, ByteBudget, mark_consumed
from paceline.store.files import (
    aside_numbers,
    receipt_numbers,
    receipt_path,
    shard_numbers,
    shard_path,
)
from paceline.store.index import IndexBuilder
from paceline.store.packing import cut, shuffled
from paceline.store.presence import (
    DEAD,
    DONE,
    FAILED,
    READER,
    RUNNING,
    STREAM_FOLDER,
    WRITER,
    Peer,
    look,
    present,
)
from paceline.store.reader import ShardReader
from paceline.store.shard import Shard

_POLL_S = 0.1
_ORDER_NAME = "order.json"
# Stands in the order for: the budget is full of shards that were read but not released.
_PAUSE: list[int] = []


class Follower(ShardReader):
    """The reader of a stream; a context manager, and for PackedReader as good as a Store.

    A finished store can be followed too: the same code trains from both. Records are numbered in
    the order of reading and grow with it. rank: rank 0 is the reader, which releases shards and
    fixes the order; other ranks of the same training read along. wait_s: how long to wait for a
    writer that has not begun.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        window_shards: int = 2,
        rank: int = 0,
        world_size: int = 1,
        wait_s: float = 600.0,
    ) -> None:
        self._folder = Path(folder)
        self._window_shards = window_shards
        self._rank = rank
        self._world_size = world_size
        self._wait_s = wait_s
        self._stopped = Event()
        self._builder = IndexBuilder()
        # Guards what the pulling thread adds and the training thread takes.
        self._books = Lock()
        self._unreleased: list[tuple[int, list[int]]] = []
        self._num_releases = 0
        self._paused_at = -1

    def __enter__(self) -> Self:
        """Waits for the first shard. Raises LockedError where the stream has a reader already."""
        writer = look(self._folder, WRITER)
        self._old_run = writer.run if writer and writer.state != RUNNING else None
        deadline = time.monotonic() + self._wait_s
        self._wait_for_manifest(deadline)
        with ExitStack() as stack:
            if self._rank == 0:
                stack.enter_context(present(self._folder, READER))
            first = self._wait_for_shard(deadline)
            self._exit = stack.pop_all()
        super().__init__(self._folder, first.spec, self._builder.build().records)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
        self._exit.__exit__(kind, error, trace)

    def stop(self) -> None:
        """Ends every waiting; give it to PackedReader as `on_close`."""
        self._stopped.set()

    @property
    def is_whole(self) -> bool:
        """The writer is done and every shard is still there: further epochs can use Store."""
        manifest = load_manifest(self.folder, "extract")
        return manifest.status == COMPLETE and not receipt_numbers(self.folder)

    def groups(
        self, split: str, max_tokens: int, *, seed: int, start: int = 0
    ) -> Iterator[list[int]]:
        """Batches of sample indices as `iterate_packed` gives them, as shards appear.

        Ends when the writer is done and all is read. An empty batch says: nothing more fits into
        the byte budget until shards are released; checkpoint and call `release`. Empty batches do
        not count in `start`. Raises StreamError where the writer died or failed.
        """
        number = 0
        for window in self._windows():
            if window == _PAUSE:
                if number >= start:
                    yield []
                continue
            first = len(self.records)
            lacks = self._take_in(window)
            order = np.arange(first, len(self.records))
            chosen = np.isin(order, self.split(split)) & (self.records.num_supervised[order] > 0)
            order = shuffled(order[chosen], seed, epoch=first)
            for batch in cut(order, self.records.num_tokens, max_tokens):
                if number >= start and lacks:
                    raise StreamError(
                        f"{self.folder}: batch {number} needs shards {lacks}, which were let go. "
                        "Release shards only once a checkpoint has passed them."
                    )
                if number >= start and number % self._world_size == self._rank:
                    yield batch
                number += 1
            with self._books:
                self._unreleased.append((number, window))

    def release(self, num_batches: int) -> None:
        """The first `num_batches` batches (over all ranks) will not be read again, whatever comes:
        their shards may go when the writer needs room. Call it after each checkpoint."""
        with self._books:
            done = [window for end, window in self._unreleased if end <= num_batches]
            self._unreleased = [w for w in self._unreleased if w[0] > num_batches]
            self._num_releases += 1
        for number in (n for window in done for n in window):
            self.close_shard(number)
            if shard_path(self.folder, number).exists():
                mark_consumed(self.folder, number)

    def _take_in(self, window: list[int]) -> list[int]:
        """Adds the records of shards. Returns the numbers of those that were let go."""
        lacks = [n for n in window if receipt_path(self.folder, n).exists()]
        for number in window:
            # Of a shard that went, the receipt still says which batches it made.
            where = receipt_path if number in lacks else shard_path
            self._builder.add(number, Shard(where(self.folder, number)))
        self.records = self._builder.build().records
        return lacks

    def _windows(self) -> Iterator[list[int]]:
        """Numbers of the shards to read next, again and again; first those of an earlier run."""
        done = 0
        while not self._stopped.is_set():
            order = self._read_order()
            yield from order["windows"][done:]
            done = len(order["windows"])
            if order["ended"]:
                return
            if self._rank == 0:
                self._extend(order)
            else:
                self._wait_for_order(done)

    def _extend(self, order: dict[str, Any]) -> None:
        """Rank 0 waits for news and writes it into the order."""
        seen = {n for window in order["windows"] for n in window}
        if unknown := [n for n in receipt_numbers(self.folder) if n not in seen]:
            raise StreamError(
                f"{self.folder}: shards {unknown} were let go by another reader; `extract` must "
                "make them again in a new folder"
            )
        deadline = time.monotonic() + self._wait_s
        while not self._stopped.wait(_POLL_S):
            # Looked at before the shards: what a writer that is done wrote is all there.
            writer = self._writer()
            is_over = self._is_over(writer)
            is_full = writer is not None and self._is_full(writer)
            new = [n for n in shard_numbers(self.folder) if n not in seen]
            if len(new) >= self._window_shards or (new and (is_over or is_full)):
                order["windows"].append(new[: self._window_shards])
            elif is_over:
                order["ended"] = True
            elif is_full and self._paused_at != self._num_releases:
                self._paused_at = self._num_releases
                order["windows"].append(_PAUSE)
            else:
                self._refuse_lost(writer, deadline)
                continue
            write_json(self.folder / STREAM_FOLDER / _ORDER_NAME, order)
            return

    def _wait_for_order(self, done: int) -> None:
        """Other ranks wait for rank 0 to write on."""
        while not self._stopped.wait(_POLL_S):
            order = self._read_order()
            if len(order["windows"]) > done or order["ended"]:
                return
            first_rank = look(self.folder, READER)
            if first_rank and first_rank.state in (DEAD, FAILED):
                raise StreamError(f"{self.folder}: rank 0 ({first_rank}) is gone. {RESTART}")

    def _read_order(self) -> dict[str, Any]:
        try:
            return json.loads((self.folder / STREAM_FOLDER / _ORDER_NAME).read_text())
        except FileNotFoundError:
            return {"windows": [], "ended": False}

    def _writer(self) -> Peer | None:
        """The writer of this run; None before it begins, as long as only an old one is known."""
        writer = look(self._folder, WRITER)
        return None if writer is None or writer.run == self._old_run else writer

    def _is_over(self, writer: Peer | None) -> bool:
        if writer is not None and writer.state != DONE:
            return False
        return writer is not None or load_manifest(self._folder, "extract").status == COMPLETE

    def _is_full(self, writer: Peer) -> bool:
        """Nothing can come until shards are released."""
        if writer.budget_bytes is None or aside_numbers(self.folder):
            return False
        return ByteBudget(self.folder, writer.budget_bytes, writer.shard_bytes).is_full()

    def _refuse_lost(self, writer: Peer | None, deadline: float) -> None:
        if writer is None and time.monotonic() > deadline:
            raise StreamError(
                f"{self._folder}: nobody has written to it for {self._wait_s:.0f} s; start "
                "`paceline extract` on it"
            )
        if writer is not None and writer.state == FAILED:
            raise StreamError(f"{self._folder}: the writer ({writer}) failed: {writer.error}")
        if writer is not None and writer.state == DEAD:
            raise StreamError(f"{self._folder}: the writer ({writer}) died. {RESTART}")

    def _wait_for_manifest(self, deadline: float) -> None:
        # Before it, the folder is not a store, and must stay empty for its writer.
        while not (self._folder / MANIFEST_NAME).is_file():
            self._refuse_lost(None, deadline)
            self._stopped.wait(_POLL_S)

    def _wait_for_shard(self, deadline: float) -> Shard:
        """The first shard, or its receipt."""
        while not self._stopped.wait(_POLL_S):
            writer = self._writer()
            is_over = self._is_over(writer)
            for numbers, where in ((receipt_numbers, receipt_path), (shard_numbers, shard_path)):
                for number in numbers(self._folder)[:1]:
                    return Shard(where(self._folder, number))
            if is_over:
                break
            self._refuse_lost(writer, deadline)
        raise StreamError(f"{self._folder}: the writer is done and stored no sample")
