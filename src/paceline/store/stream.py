"""Bytes on their way to a shard, in memory that is used again and again: fresh memory costs more
than the copy into it, since the kernel must clear each of its pages first.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from paceline.store import checksum
from paceline.store.files import AsideFile

BUFFER_BYTES = 1 << 20
_NUM_WRITING = 8
# What is copied at a time is still in the core's cache when it is hashed.
_PIECE_BYTES = 256 << 10


class Buffers:
    """Buffers of BUFFER_BYTES that are not in use. Safe to use from threads."""

    def __init__(self) -> None:
        self._free: deque[np.ndarray] = deque()

    def take(self) -> np.ndarray:
        try:
            return self._free.pop()
        except IndexError:
            return np.empty(BUFFER_BYTES, np.uint8)

    def give(self, buffer: np.ndarray) -> None:
        self._free.append(buffer)


class HeldBytes:
    """Bytes that grow in memory, copied from what the caller may change afterwards."""

    def __init__(self, buffers: Buffers) -> None:
        self.num_bytes = 0
        self._buffers = buffers
        self._held: list[np.ndarray] = []

    def append(self, data: memoryview, digests: Sequence[checksum.Digest]) -> None:
        """digests: updated with the same bytes on the way."""
        source = np.frombuffer(data, np.uint8)
        while len(source):
            fill = self.num_bytes % BUFFER_BYTES
            if not fill:
                self._held.append(self._buffers.take())
            size = _copy(source, self._held[-1][fill:], digests)
            self.num_bytes += size
            source = source[size:]

    def take_out(self) -> Iterator[memoryview]:
        """The bytes in order, a buffer at a time; each goes back when the next is asked for."""
        held, left = self._held, self.num_bytes
        self._held, self.num_bytes = [], 0
        for buffer in held:
            yield memoryview(buffer)[: min(left, BUFFER_BYTES)]
            left -= BUFFER_BYTES
            self._buffers.give(buffer)


class AppendStream:
    """Appends to one file after another, in a thread. What the caller hands over is copied at once;
    the disk is waited for only where much is waiting for it already. An error of the disk is raised
    by a later call."""

    def __init__(self, buffers: Buffers) -> None:
        self._buffers = buffers
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store-write")
        self._writing: deque[tuple[Future[None], np.ndarray]] = deque()
        self._filling = buffers.take()
        self._fill = 0

    def begin(self, file: AsideFile, offset: int) -> None:
        """What is appended from now on goes into `file`, from a byte offset on."""
        self._file, self._offset = file, offset
        self._fill = 0

    def append(self, data: memoryview, digests: Sequence[checksum.Digest]) -> None:
        """digests: updated with the same bytes on the way."""
        source = np.frombuffer(data, np.uint8)
        while len(source):
            size = _copy(source, self._filling[self._fill :], digests)
            self._fill += size
            source = source[size:]
            if self._fill == BUFFER_BYTES:
                self._send()

    def finish(self) -> None:
        """Return once everything is written. Raises DiskFullError or StoreError."""
        if self._fill:
            self._send()
        while self._writing:
            self._wait()

    def give_up(self) -> None:
        """Forget what is not written; when this returns nothing writes into the file any more."""
        self._fill = 0
        while self._writing:
            writing, buffer = self._writing.popleft()
            if not writing.cancel():
                writing.exception()
            self._buffers.give(buffer)

    def _send(self) -> None:
        data = memoryview(self._filling)[: self._fill]
        writing = self._thread.submit(self._file.write_at, self._offset, data)
        self._writing.append((writing, self._filling))
        self._offset += self._fill
        if len(self._writing) == _NUM_WRITING:
            self._wait()
        self._filling, self._fill = self._buffers.take(), 0

    def _wait(self) -> None:
        writing, buffer = self._writing.popleft()
        try:
            writing.result()
        finally:
            self._buffers.give(buffer)


def _copy(source: np.ndarray, room: np.ndarray, digests: Sequence[checksum.Digest]) -> int:
    """Copy as much as fits and stays in the cache. Returns how much that was."""
    size = min(len(source), len(room), _PIECE_BYTES)
    # numpy lets go of the interpreter lock while it copies; a memoryview would not.
    np.copyto(room[:size], source[:size])
    for digest in digests:
        digest.update(room[:size])
    return size
