"""Bytes that are appended to a file by a thread, from memory that is used again and again."""

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from paceline.store.files import AsideFile

# Large enough for a system call to cost nothing, small enough for a core's cache to hold.
_BUFFER_BYTES = 2 << 20
_NUM_BUFFERS = 4


class AppendStream:
    """Appends to one file after another. What the caller hands over is copied at once, and may be
    changed afterwards; the disk is waited for only where all memory is full of what it has not
    taken yet. An error of the disk is raised by a later call."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store-write")
        self._buffers = [np.empty(_BUFFER_BYTES, np.uint8) for _ in range(_NUM_BUFFERS)]
        self._writing: deque[Future[None]] = deque()
        self._fill = 0

    def begin(self, file: AsideFile, offset: int) -> None:
        """What is appended from now on goes into `file`, from a byte offset on."""
        self._file, self._offset = file, offset
        self._fill = 0

    def append(self, data: memoryview) -> None:
        source = np.frombuffer(data, np.uint8)
        while len(source):
            piece = source[: _BUFFER_BYTES - self._fill]
            # numpy lets go of the interpreter lock while it copies; a memoryview would not.
            np.copyto(self._buffers[0][self._fill : self._fill + len(piece)], piece)
            self._fill += len(piece)
            source = source[len(piece) :]
            if self._fill == _BUFFER_BYTES:
                self._send()

    def finish(self) -> None:
        """Return once everything is written. Raises DiskFullError or StoreError."""
        if self._fill:
            self._send()
        while self._writing:
            self._writing.popleft().result()

    def give_up(self) -> None:
        """Forget what is not written; when this returns nothing writes into the file any more."""
        self._fill = 0
        while self._writing:
            writing = self._writing.popleft()
            if not writing.cancel():
                writing.exception()

    def _send(self) -> None:
        buffer = self._buffers[0]
        data = memoryview(buffer)[: self._fill]
        self._writing.append(self._thread.submit(self._file.write_at, self._offset, data))
        self._offset += self._fill
        self._fill = 0
        self._buffers.append(self._buffers.pop(0))
        # The next buffer is free once the oldest of the others is written.
        if len(self._writing) == _NUM_BUFFERS:
            self._writing.popleft().result()
