"""Reads batches ahead: samples packed one after another into memory that is used again and again.

Threads, not processes: reading and decoding let go of the interpreter lock, and what a process
reads must be copied once more (measured in benchmarks/store.py).
"""

import math
import mmap
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from queue import SimpleQueue
from threading import Thread
from typing import NamedTuple

import torch

from paceline.contracts import SampleRecord
from paceline.store.reader import ShardReader
from paceline.store.shard import Shard, bytes_of


@dataclass(frozen=True)
class PackedSamples:
    """Samples one after another, none padded.

    input_ids int32 [N] and loss_mask bool [N] on the CPU, where batches are laid out; aux [R, A, D]
    and last [M, D] on the reader's device: concatenated over the samples. token_starts, aux_starts,
    last_starts: S + 1 ints; sample i has the rows from start i to start i + 1.
    """

    records: Sequence[SampleRecord]
    token_starts: Sequence[int]
    aux_starts: Sequence[int]
    last_starts: Sequence[int]
    input_ids: torch.Tensor
    loss_mask: torch.Tensor
    aux: torch.Tensor
    last: torch.Tensor


class PackedReader:
    """Iterates groups of sample indices as PackedSamples, reading ahead.

    groups: what `iterate_packed` gives, or any lists of indices; pulled as far ahead as is read.
    keep: how many of the newest batches stay valid; memory of older ones is used again, so copy
    what you need for longer. device: where batches are wanted; for CUDA they are read into pinned
    memory, copied and decoded on a stream of their own. on_close: called when the iteration ends,
    so that groups which wait for something can be told to stop.
    """

    def __init__(
        self,
        store: ShardReader,
        groups: Iterable[list[int]],
        *,
        device: str | torch.device = "cpu",
        num_threads: int = 2,
        keep: int = 1,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self._store = store
        self._groups = groups
        self._device = torch.device(device)
        self._num_threads = num_threads
        self._keep = keep
        self._on_close = on_close

    def __iter__(self) -> Iterator[PackedSamples]:
        line = _Line()
        largest: dict[str, int] = {}
        for _ in range(self._num_threads + self._keep + 1):
            line.free.put(_Slot(self._store, self._device, largest))
        fillers = ThreadPoolExecutor(self._num_threads, thread_name_prefix="store-read")
        # One thread pulls the groups: waiting for the next one must not hold up those at hand.
        puller = Thread(target=line.pull, args=(self._groups, fillers), daemon=True)
        puller.start()
        lent: deque[_Slot] = deque()
        try:
            while (item := line.coming.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                slot, batch = item
                yield slot.hand_over(batch.result())
                lent.append(slot)
                if len(lent) >= self._keep:
                    line.free.put(lent.popleft())
        finally:
            line.is_closed = True
            self._on_close()
            line.free.put(None)
            puller.join()
            fillers.shutdown(cancel_futures=True)


class _Line:
    """What goes between the consumer and the thread that pulls groups. free: slots; None wakes the
    thread up. coming: batches in the order of their groups, at last None or what went wrong."""

    def __init__(self) -> None:
        self.free: SimpleQueue[_Slot | None] = SimpleQueue()
        self.coming: SimpleQueue[tuple[_Slot, Future[PackedSamples]] | BaseException | None]
        self.coming = SimpleQueue()
        self.is_closed = False

    def pull(self, groups: Iterable[list[int]], fillers: ThreadPoolExecutor) -> None:
        """Runs in a thread. What goes wrong is raised in the consumer's."""
        try:
            rest = iter(groups)
            while (slot := self.free.get()) and not self.is_closed:
                if (group := next(rest, None)) is None:
                    break
                self.coming.put((slot, fillers.submit(slot.fill, group)))
            self.coming.put(None)
        except BaseException as error:
            self.coming.put(error)


class _Slot:
    """The memory of one batch. largest: bytes that any slot has needed for each tensor."""

    def __init__(self, store: ShardReader, device: torch.device, largest: dict[str, int]) -> None:
        self._store = store
        self._device = device
        self._largest = largest
        self._buffers: dict[str, torch.Tensor] = {}
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._copied = torch.cuda.Event() if self._stream else None

    def fill(self, group: list[int]) -> PackedSamples:
        """Runs in a reading thread."""
        if self._copied:
            self._copied.synchronize()
        records = self._store.records.choose(group)
        pieces = [self._piece(*place) for place in records.places()]
        starts = {name: records.starts(count) for name, count in _COUNTED.items()}
        batch = PackedSamples(
            records=records,
            token_starts=starts["input_ids"],
            aux_starts=starts["aux"],
            last_starts=starts["last"],
            input_ids=self._read(pieces, "input_ids", (), torch.int32, starts["input_ids"]),
            loss_mask=self._read(pieces, "loss_mask", (), torch.bool, starts["input_ids"]),
            aux=torch.empty(0),
            last=torch.empty(0),
        )
        states = {kind: self._parts(pieces, kind, starts[kind]) for kind in ("aux", "last")}
        if self._stream is None:
            return replace(batch, **{k: self._decode(k, v) for k, v in states.items()})
        with torch.cuda.stream(self._stream):
            move = lambda tensor: tensor.to(self._device, non_blocking=True)
            moved = {k: [move(part) for part in parts] for k, parts in states.items()}
            batch = replace(batch, **{k: self._decode(k, v) for k, v in moved.items()})
            self._copied.record(self._stream)
        return batch

    def hand_over(self, batch: PackedSamples) -> PackedSamples:
        """Runs in the consumer's thread: its stream waits for ours."""
        if self._copied:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(self._copied)
            for tensor in (batch.aux, batch.last):
                tensor.record_stream(current)
        return batch

    def _piece(self, number: int, position: int) -> "_Piece":
        shard = self._store.shard(number)
        self._store.prove(shard, position)
        return _Piece(shard, position, shard.offsets[position].tolist())

    def _parts(self, pieces: "list[_Piece]", kind: str, starts: list[int]) -> list[torch.Tensor]:
        """The encoded states of all samples, or where parts cannot be joined, the states."""
        shape = self._store.row_shape(kind)
        parts = self._store.codec.parts(shape)
        if all(part.row_shape is not None for part in parts):
            return [
                self._read(pieces, kind + p.suffix, p.row_shape, p.dtype, starts) for p in parts
            ]
        out = self._take(kind, (starts[-1], *shape), self._store.spec.torch_dtype)
        for piece, start, stop in zip(pieces, starts, starts[1:], strict=False):
            self._store.read_states(piece.shard, piece.position, kind, out[start:stop])
        return [out]

    def _decode(self, kind: str, parts: list[torch.Tensor]) -> torch.Tensor:
        if parts[0].dtype == self._store.spec.torch_dtype:
            return parts[0]
        out = None
        if self._stream is None:
            out = self._take(f"{kind} decoded", parts[0].shape, self._store.spec.torch_dtype)
        return self._store.codec.decode(parts, tuple(parts[0].shape), out)

    def _read(
        self,
        pieces: "list[_Piece]",
        name: str,
        row_shape: tuple[int, ...],
        dtype: torch.dtype,
        starts: list[int],
    ) -> torch.Tensor:
        """One tensor's rows of all samples, one read each."""
        column = 0 if name in ("input_ids", "loss_mask") else 1 if name.startswith("aux") else 2
        out = self._take(name, (starts[-1], *row_shape), dtype)
        # Bytes from here on: a tensor for each sample would take about as long as a short read.
        view, row_bytes = bytes_of(out), dtype.itemsize * math.prod(row_shape)
        for piece, start, stop in zip(pieces, starts, starts[1:], strict=False):
            to = view[start * row_bytes : stop * row_bytes]
            piece.shard.read_rows(name, piece.first_rows[column], to)
        return out

    def _take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Memory for a tensor: that of the batch before, if it is enough. Fresh memory is as large
        as any slot has needed, since it is slow to get."""
        num_bytes = dtype.itemsize * torch.Size(shape).numel()
        if name not in self._buffers or self._buffers[name].nbytes < num_bytes:
            self._largest[name] = max(num_bytes * 9 // 8, self._largest.get(name, 0))
            self._buffers[name] = _memory(self._largest[name], is_pinned=self._stream is not None)
        return self._buffers[name][:num_bytes].view(dtype).view(shape)


def _memory(num_bytes: int, is_pinned: bool) -> torch.Tensor:
    """uint8 [num_bytes], aligned to pages. In huge pages where the system has them: reading into
    them was 5 to 10% faster (two threads, batches of 16 MB, an EPYC under KVM)."""
    if is_pinned or not num_bytes:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_pinned)
    mapped = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):
            mapped.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapped, dtype=torch.uint8)


class _Piece(NamedTuple):
    """Where a sample lies. first_rows: of its tokens, auxiliary rows and supervised rows."""

    shard: Shard
    position: int
    first_rows: list[int]


_COUNTED = {"input_ids": "num_tokens", "aux": "num_aux_rows", "last": "num_supervised"}
