"""A sparse local copy of a remote file: blocks that were read once are read from the disk.

Beside the copy lies a list of digests, one for each block that is there. A block is held against
its digest when a process first uses it, so that a cache that was cut short (by a kill, a power cut,
a full disk) is filled again and never read as it is.
"""

import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from threading import Condition

import numpy as np
import xxhash

from paceline.artefact import disk_errors
from paceline.store.files import write_all

BLOCK_BYTES = 256 << 10
# Longer runs of blocks are fetched in pieces, so that a failed one costs little.
_FETCH_BLOCKS = 64
_ABSENT = 0


def digests_path(path: Path) -> Path:
    """The list of digests beside the copy at `path`."""
    return path.with_name(f"{path.name}.digests")


class BlockFile:
    """The copy at `path` of a file of `total_bytes`; fetch(start, stop) gets bytes of the original.

    Safe to use from threads; processes may share a copy: what two of them fetch is the same.
    """

    def __init__(self, path: Path, total_bytes: int, fetch: Callable[[int, int], bytes]) -> None:
        self._path = path
        self._total_bytes = total_bytes
        self._fetch = fetch
        num_blocks = -(-total_bytes // BLOCK_BYTES)
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._data = _open_sized(path, total_bytes)
            weakref.finalize(self, os.close, self._data)
            self._digests = _open_sized(digests_path(path), num_blocks * _DIGEST.itemsize)
            weakref.finalize(self, os.close, self._digests)
        self._is_sound = np.zeros(num_blocks, dtype=bool)
        self._in_work: set[int] = set()
        self._changed = Condition()

    def need(self, start: int, stop: int) -> None:
        """Return once bytes [start, stop) are in the copy. Raises what `fetch` raises."""
        first, last = start // BLOCK_BYTES, -(-stop // BLOCK_BYTES)
        while not self._is_sound[first:last].all():
            with self._changed:
                lacking = (first + np.flatnonzero(~self._is_sound[first:last])).tolist()
                mine = [block for block in lacking if block not in self._in_work]
                if not mine:
                    # Other threads fetch the rest; what they fail at is ours in the next round.
                    self._changed.wait()
                    continue
                self._in_work.update(mine)
            try:
                for run in _runs(mine):
                    self._fill(run)
            finally:
                with self._changed:
                    self._in_work.difference_update(mine)
                    self._changed.notify_all()

    def pass_through(self, start: int, stop: int) -> Iterator[bytes]:
        """Bytes [start, stop) of the original in pieces; none of them is kept."""
        step = _FETCH_BLOCKS * BLOCK_BYTES
        for at in range(start, stop, step):
            yield self._fetch(at, min(at + step, stop))

    def fetch_again(self) -> None:
        """Fetch all that was in use anew: it has turned out to be wrong."""
        with self._changed:
            used = np.flatnonzero(self._is_sound).tolist()
            self._write_digests(range(len(self._is_sound)), [_ABSENT] * len(self._is_sound))
            self._is_sound[:] = False
        for run in _runs(used):
            self.need(*self._span(run))

    def is_gone(self) -> bool:
        """The copy was removed to make room; what is open still works, but frees nothing."""
        return os.fstat(self._data).st_nlink == 0

    def _fill(self, run: range) -> None:
        stored = self._read_digests(run)
        lacking = [b for b, d in zip(run, stored, strict=True) if not self._holds(b, d)]
        for piece in _runs(lacking):
            start, stop = self._span(piece)
            data = memoryview(self._fetch(start, stop))
            blocks = [data[i : i + BLOCK_BYTES] for i in range(0, len(data), BLOCK_BYTES)]
            with disk_errors(self._path):
                write_all(self._data, data, start)
                self._write_digests(piece, [_digest(block) for block in blocks])
        self._is_sound[run.start : run.stop] = True

    def _holds(self, block: int, digest: int) -> bool:
        if digest == _ABSENT:
            return False
        start, stop = self._span(range(block, block + 1))
        return _digest(os.pread(self._data, stop - start, start)) == digest

    def _span(self, run: range) -> tuple[int, int]:
        return run.start * BLOCK_BYTES, min(run.stop * BLOCK_BYTES, self._total_bytes)

    def _read_digests(self, run: range) -> list[int]:
        # From the file each time: another process may have filled these blocks.
        size = _DIGEST.itemsize
        data = os.pread(self._digests, len(run) * size, run.start * size)
        return np.frombuffer(data, dtype=_DIGEST).tolist()

    def _write_digests(self, run: range, digests: list[int]) -> None:
        data = np.asarray(digests, dtype=_DIGEST).tobytes()
        write_all(self._digests, data, run.start * _DIGEST.itemsize)


_DIGEST = np.dtype("<u8")


def _digest(data: bytes | memoryview) -> int:
    return xxhash.xxh3_64_intdigest(data) or 1


def _runs(blocks: Iterable[int]) -> Iterator[range]:
    """Ascending numbers -> runs of neighbours, none longer than is fetched at once."""
    run = range(0)
    for block in blocks:
        if block == run.stop and 0 < len(run) < _FETCH_BLOCKS:
            run = range(run.start, block + 1)
            continue
        if run:
            yield run
        run = range(block, block + 1)
    if run:
        yield run


def _open_sized(path: Path, num_bytes: int) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    os.ftruncate(descriptor, num_bytes)
    return descriptor
