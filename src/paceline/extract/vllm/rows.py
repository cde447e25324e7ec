"""From the streams of a step to rows in host memory: picked on the device, copied aside.

Only rows that somebody reads are copied: auxiliary rows before the last supervised token, last
rows at supervised positions. Legend: N rows of the step, R picked auxiliary rows, A auxiliary
layers held here, M picked last rows, D target width.
"""

import queue
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock

import numpy as np
import torch

from paceline.contracts import TokenSample
from paceline.errors import EngineError
from paceline.extract.guards import row_norms
from paceline.extract.vllm.batch import Segment

_POLL_S = 0.1
# Where a tensor may start in a slot: any dtype can be read from there.
_ALIGN_BYTES = 64


@dataclass(frozen=True)
class Pick:
    """Which rows of a step to copy: indices int64 [R] and [M], and how many each segment gets."""

    aux: np.ndarray
    last: np.ndarray
    aux_counts: list[int]
    last_counts: list[int]


def pick_rows(
    segments: Sequence[Segment], samples: Mapping[int, TokenSample], has_last: bool
) -> Pick:
    """Rows of a step that the samples need, segment after segment; without the last layer here,
    no last rows."""
    aux, last = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for segment in segments:
        sample = samples[segment.number]
        aux_stop = max(min(segment.stop, sample.num_aux_rows), segment.start)
        aux.append(segment.row + np.arange(aux_stop - segment.start))
        wanted = sample.loss_mask[segment.start : segment.stop] & has_last
        supervised = np.flatnonzero(wanted)
        last.append(segment.row + supervised)
    return Pick(
        np.concatenate(aux),
        np.concatenate(last),
        [len(part) for part in aux[1:]],
        [len(part) for part in last[1:]],
    )


class Slot:
    """Host memory of one step; free again when everybody who holds it has let go."""

    def __init__(self, buffer: torch.Tensor | None, on_free: Callable[["Slot"], None]) -> None:
        self._buffer = buffer
        self._on_free = on_free
        self._holders = 0
        self._used = 0
        self._lock = Lock()

    def hold(self) -> None:
        with self._lock:
            self._holders += 1

    def release(self) -> None:
        with self._lock:
            self._holders -= 1
            free = self._holders == 0
        if free:
            self._used = 0
            self._on_free(self)

    def receive(self, source: torch.Tensor) -> torch.Tensor:
        """A host copy of `source`, in the slot's pinned memory; complete once the stream's work
        so far is. On a CPU engine the source is host memory of our own already."""
        if self._buffer is None or not source.numel():
            return source.cpu()
        start = -(-self._used // _ALIGN_BYTES) * _ALIGN_BYTES
        stop = start + source.nbytes
        if stop > len(self._buffer):
            raise EngineError(
                f"a step's rows need {stop} bytes of host memory, a slot has {len(self._buffer)}"
            )
        self._used = stop
        target = self._buffer[start:stop].view(source.dtype).view(source.shape)
        target.copy_(source, non_blocking=True)
        return target


class Ring:
    """A fixed number of slots: when all are in use the engine waits, memory does not grow. A step
    holds its slot until its rows are assigned, and each sample that it completed until it is
    written; one that is not yet complete holds none, so that it cannot wait for itself.

    pinned: memory that the GPU writes on its own. It is registered rather than taken from torch's
    pinned allocator, which rounds sizes up to powers of two.
    """

    def __init__(self, num_slots: int, slot_bytes: int, pinned: bool) -> None:
        self.shape = (num_slots, slot_bytes, pinned)
        # How long an engine stood still because its rows were not written fast enough, seconds.
        self.waited_s = 0.0
        slot_bytes = -(-slot_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
        self._free: queue.Queue[Slot] = queue.Queue()
        self._memory: torch.Tensor | None = None
        if pinned:
            self._memory = torch.empty(num_slots * slot_bytes, dtype=torch.uint8)
            _check(torch.cuda.cudart().cudaHostRegister(*_place(self._memory), 0))
        for i in range(num_slots):
            buffer = None
            if self._memory is not None:
                buffer = self._memory[i * slot_bytes : (i + 1) * slot_bytes]
            self._free.put(Slot(buffer, self._free.put))

    @property
    def whole(self) -> bool:
        """Whether every slot is free."""
        return self._free.qsize() == self.shape[0]

    def close(self) -> None:
        """Give the memory back; no copy into it may be under way."""
        if self._memory is not None:
            _check(torch.cuda.cudart().cudaHostUnregister(self._memory.data_ptr()))
            self._memory = None

    def take(self, broken: Callable[[], bool]) -> Slot:
        """A free slot, held once; EngineError where the writers are `broken` and none will come."""
        started = time.perf_counter()
        while True:
            try:
                slot = self._free.get(timeout=_POLL_S)
            except queue.Empty:
                if broken():
                    raise EngineError("the writers have stopped; no host memory is left") from None
                continue
            self.waited_s += time.perf_counter() - started
            slot.hold()
            return slot


@dataclass
class HostRows:
    """A step's rows on their way to, and in, host memory.

    aux [R, A, D], last [M, D] (M = 0 on a pipeline stage without the last layer), their rows'
    norms float32 [R, A] and [M], tokens and positions int [N]. `wait` returns when they are there.
    """

    slot: Slot
    aux: torch.Tensor
    last: torch.Tensor
    aux_norms: torch.Tensor
    last_norms: torch.Tensor
    tokens: torch.Tensor
    positions: torch.Tensor
    event: torch.cuda.Event | None = None
    _kept: list[torch.Tensor] = field(default_factory=list)

    def wait(self) -> None:
        if self.event is not None:
            self.event.synchronize()
            self._kept.clear()


class Mover:
    """Picks rows on the model's stream and copies them on a side stream."""

    def __init__(self, device: torch.device, ring: Ring) -> None:
        self._ring = ring
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @torch.no_grad()
    def move(
        self,
        pick: Pick,
        aux: Sequence[torch.Tensor],
        last: torch.Tensor | None,
        fed: tuple[torch.Tensor, torch.Tensor],
        broken: Callable[[], bool],
    ) -> HostRows:
        """aux: A streams [N, D]; last: the last stream [N, D]; fed: tokens and positions [N]."""
        slot = self._ring.take(broken)
        try:
            sources = self._pick(pick, aux, last, fed)
            return self._copy(slot, sources)
        except BaseException:
            slot.release()
            raise

    def _pick(
        self,
        pick: Pick,
        aux: Sequence[torch.Tensor],
        last: torch.Tensor | None,
        fed: tuple[torch.Tensor, torch.Tensor],
    ) -> list[torch.Tensor]:
        device = fed[1].device
        nothing = torch.empty(0, device=device)
        if aux:
            rows = _to_device(pick.aux, device)
            picked = torch.stack([states.index_select(0, rows) for states in aux], 1)
        else:
            picked = nothing.new_empty((len(pick.aux), 0, 1))
        if last is not None:
            picked_last = last.index_select(0, _to_device(pick.last, device))
        else:
            picked_last = nothing.new_empty((0, 1))
        # Norms tell of NaN, infinity and empty rows; on the device they cost next to nothing.
        norms = row_norms(picked, picked_last)
        return [picked, picked_last, norms.aux, norms.last, *fed]

    def _copy(self, slot: Slot, sources: list[torch.Tensor]) -> HostRows:
        if self._stream is None:
            return HostRows(slot, *sources)
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            copies = [slot.receive(source) for source in sources]
            event = torch.cuda.Event()
            event.record(self._stream)
        # The sources must live until the copies are done: their memory belongs to the other stream.
        return HostRows(slot, *copies, event, sources)


def _place(memory: torch.Tensor) -> tuple[int, int]:
    return memory.data_ptr(), memory.nbytes


def _check(status: int) -> None:
    if int(status) != 0:
        raise EngineError(f"host memory for captured rows cannot be pinned (CUDA error {status})")


def _to_device(rows: np.ndarray, device: torch.device) -> torch.Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(rows, np.int64))
    if device.type != "cuda":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
