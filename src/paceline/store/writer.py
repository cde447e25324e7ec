"""Writes samples into shards. The largest tensor goes to the disk as samples come; the others,
about a quarter of the bytes at most, are kept in memory until the shard is closed.
"""

import json
import logging
import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from paceline.artefact import differences
from paceline.contracts import TokenSample
from paceline.errors import StoreError
from paceline.store import checksum
from paceline.store.budget import budget_of
from paceline.store.codecs import Codec, codec_of
from paceline.store.encoded import (
    COLUMNS,
    STATE_KINDS,
    EncodedSample,
    Parts,
    begin_digest,
    describe,
)
from paceline.store.files import AsideFile, shard_numbers
from paceline.store.shard import (
    HEADER_BYTES,
    TensorEntry,
    build_header,
    bytes_of,
    open_published,
)
from paceline.store.spec import StoreSpec
from paceline.store.stream import AppendStream, Buffers, HeldBytes

logger = logging.getLogger(__name__)

# Offsets (24), num_past_end (4) and checksum (16) of a sample.
_ENTRY_BYTES = 44
# Names of the JSON columns, padding, the first entry of each offsets tensor.
_FIXED_BYTES = 256
# What follows the streamed tensor starts at a multiple of this, so that any tool can map it.
_ALIGN_BYTES = 8


def spare_lanes() -> int:
    """Lanes for a writer beside an engine: one for every eight cores, at most four."""
    return max(1, min(4, (os.cpu_count() or 1) // 8))


class ShardWriter:
    """Packs samples into shards of about `spec.shard_bytes` under `folder`.

    One writer belongs to one worker; several may write into one folder at a time. Nothing is
    visible before its shard is whole. As a context manager: closed (the last shard published) on
    success; on an exception, the shard that is not full is given up.

    States are written, and full shards flushed and published, in threads: an engine must not wait
    for a disk. What fails there is raised by a later `add`, or by `close`. In a run that announced
    a byte budget, a writer that needs room waits for the reader.

    num_lanes: shards that grow side by side, samples going to them in turns. A file system lets one
    thread at a time write into a file, so one lane is as fast as one file is.
    """

    def __init__(
        self, folder: str | Path, spec: StoreSpec, worker: int = 0, num_lanes: int = 1
    ) -> None:
        self.folder = Path(folder)
        self.spec = spec
        self.worker = worker
        self.num_samples = 0
        self._codec = codec_of(spec)
        self._budget = budget_of(self.folder)
        self._seen: set[str] = set()
        # With a budget one: a lane that waits for room would hold up the shards of the others.
        self._lanes = [_Lane() for _ in range(1 if self._budget else num_lanes)]
        self._refuse_other_store()

    def add(self, sample: TokenSample, aux: torch.Tensor, last: torch.Tensor) -> None:
        """Store one sample.

        aux: [at least sample.num_aux_rows, A, D]; what lies past num_aux_rows is dropped.
        last: [M, D], the last state at the M positions where loss_mask is true. Both in the
        store's dtype, on any device. Raises StoreError that names the sample; that one is then
        not stored, and the writer can go on unless the disk failed.
        """
        self._check(sample, aux, last)
        states = {"aux": aux[: sample.num_aux_rows], "last": last}
        self._keep(sample, {name: self._codec.encode(value) for name, value in states.items()})

    def add_encoded(self, stored: EncodedSample) -> None:
        """Store a sample of another shard of the same layers, width, dtype and codec, bit by bit.

        Raises StoreError, which names the sample, where it was stored already.
        """
        self._refuse([], stored.sample)
        self._keep(stored.sample, stored.parts)

    def _keep(self, sample: TokenSample, encoded: Parts) -> None:
        lane = self._lanes[self.num_samples % len(self._lanes)]
        num_bytes = _most_bytes(sample, encoded)
        try:
            if lane.shard and lane.shard.num_bytes + num_bytes > self.spec.shard_bytes:
                lane.publish(self.worker)
            if self._budget:
                self._budget.check_reader()
            if lane.shard is None:
                file = self._budget.claim() if self._budget else AsideFile(self.folder)
                lane.shard = _ShardInWork(file, self.spec, self._codec, lane.stream, lane.buffers)
            lane.shard.add(sample, encoded, num_bytes)
        except BaseException:
            self.discard()
            raise
        self._seen.add(sample.sample_id)
        self.num_samples += 1

    def close(self) -> None:
        """Publish the last shards and wait until all are published. The writer can go on."""
        try:
            for lane in self._lanes:
                lane.publish(self.worker)
            for lane in self._lanes:
                lane.wait()
        except BaseException:
            self.discard()
            raise

    def discard(self) -> None:
        """Give up the shards that are not full; whole ones are published."""
        for lane in self._lanes:
            lane.discard()
        for lane in self._lanes:
            lane.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()

    def _refuse_other_store(self) -> None:
        for number in shard_numbers(self.folder)[:1]:
            found = open_published(self.folder, number).spec.identity()
            if lines := differences(found, self.spec.identity()):
                raise StoreError(
                    f"{self.folder} holds shards of another store: " + "; ".join(lines)
                )

    def _check(self, sample: TokenSample, aux: torch.Tensor, last: torch.Tensor) -> None:
        spec = self.spec
        problems = []
        for name, states in (("aux", aux), ("last", last)):
            tail = spec.row_shape(name)
            if states.dtype != spec.torch_dtype:
                problems.append(f"{name} is {states.dtype}, the store keeps {spec.dtype}")
            if tuple(states.shape[1:]) != tail:
                problems.append(f"{name} is {list(states.shape)}, rows must be {list(tail)}")
        if len(aux) < sample.num_aux_rows:
            problems.append(f"aux has {len(aux)} rows, {sample.num_aux_rows} are needed")
        if len(last) != sample.num_supervised:
            problems.append(
                f"last has {len(last)} rows, {sample.num_supervised} tokens are supervised"
            )
        self._refuse(problems, sample)

    def _refuse(self, problems: list[str], sample: TokenSample) -> None:
        if sample.sample_id in self._seen:
            problems.append("it was stored already")
        if problems:
            raise StoreError(f"sample {sample.sample_id}: " + "; ".join(problems))


class _Lane:
    """One shard after another: one grows while the one before it is published."""

    def __init__(self) -> None:
        self.buffers = Buffers()
        self.stream = AppendStream(self.buffers)
        self.shard: _ShardInWork | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store-publish")
        self._publishing: Future[None] | None = None

    def publish(self, worker: int) -> None:
        """Publish the shard, if there is one, in a thread."""
        # One at a time: more would only pile up memory in front of a slow disk.
        self.wait()
        if self.shard:
            self.stream.finish()
            shard, self.shard = self.shard, None
            self._publishing = self._thread.submit(_publish, shard, worker)

    def wait(self) -> None:
        """Raises what the publishing of the shard before failed with."""
        if self._publishing:
            publishing, self._publishing = self._publishing, None
            publishing.result()

    def discard(self) -> None:
        self.stream.give_up()
        if self.shard:
            shard, self.shard = self.shard, None
            shard.discard()


def _publish(shard: "_ShardInWork", worker: int) -> None:
    try:
        path = shard.publish()
    except BaseException:
        shard.discard()
        raise
    logger.info(
        "worker %d: %s, %d samples, %d bytes", worker, path.name, shard.num_samples, shard.num_bytes
    )


class _ShardInWork:
    """One shard while it grows: the first part of `aux` in the aside file, the rest in memory."""

    def __init__(
        self, file: AsideFile, spec: StoreSpec, codec: Codec, stream: AppendStream, buffers: Buffers
    ) -> None:
        self.spec = spec
        self.num_samples = 0
        # Never less than what the file will have, so that no shard outgrows its limit.
        self.num_bytes = HEADER_BYTES + _FIXED_BYTES
        self._parts = {kind: codec.parts(spec.row_shape(kind)) for kind in STATE_KINDS}
        self._held: dict[str, _Held] = {}
        self._columns: dict[str, list[str | bool | None]] = {name: [] for name in COLUMNS}
        self._offsets = [(0, 0, 0)]
        self._byte_offsets: dict[str, list[int]] = {}
        self._num_past_end: list[int] = []
        self._sample_checksums: list[bytes] = []
        self._streamed_bytes = 0
        self._streamed_hash = checksum.new()
        self._file = file
        self._stream = stream
        self._buffers = buffers
        stream.begin(file, HEADER_BYTES)

    def add(self, sample: TokenSample, encoded: Parts, num_bytes: int) -> None:
        """num_bytes: the most that the sample adds."""
        self._hold("input_ids", torch.from_numpy(sample.input_ids))
        self._hold("loss_mask", torch.from_numpy(sample.loss_mask))
        digest = begin_digest(sample)
        for kind in STATE_KINDS:
            for part, tensor in zip(self._parts[kind], encoded[kind], strict=True):
                self._keep(kind + part.suffix, tensor, part.row_shape is None, digest)
        rows = (sample.num_tokens, sample.num_aux_rows, sample.num_supervised)
        ends = tuple(a + b for a, b in zip(self._offsets[-1], rows, strict=True))
        self._offsets.append(ends)
        self._num_past_end.append(sample.num_past_end)
        for name in COLUMNS:
            self._columns[name].append(getattr(sample, name))
        self._sample_checksums.append(digest.digest())
        self.num_samples += 1
        self.num_bytes += num_bytes

    def _keep(
        self, name: str, tensor: torch.Tensor, is_variable: bool, digest: checksum.Digest
    ) -> None:
        if is_variable:
            ends = self._byte_offsets.setdefault(name, [0])
            ends.append(ends[-1] + tensor.nbytes)
        if name == "aux":
            self._stream.append(bytes_of(tensor), (digest, self._streamed_hash))
            self._streamed_bytes += tensor.nbytes
        else:
            self._hold(name, tensor, digest)

    def _hold(self, name: str, tensor: torch.Tensor, *digests: checksum.Digest) -> None:
        if name not in self._held:
            self._held[name] = _Held(tensor, self._buffers)
        self._held[name].add(tensor, *digests)

    def publish(self) -> Path:
        """Once the stream is finished: write the rest and show the shard."""
        tensors = self._finished_tensors()
        first = self._parts["aux"][0]
        rows = self._offsets[-1][1]
        shape = (self._streamed_bytes,) if first.row_shape is None else (rows, *first.row_shape)
        entries = [TensorEntry("aux", first.dtype, shape, 0, self._streamed_bytes)]
        checksums = {"aux": self._streamed_hash.hexdigest()}
        end = self._streamed_bytes
        for name, held in tensors.items():
            start = end
            for data in held.data.take_out():
                self._file.write_at(HEADER_BYTES + end, data)
                end += len(data)
            checksums[name] = held.digest.hexdigest()
            entries.append(TensorEntry(name, held.dtype, held.shape, start, end))
        header = build_header(entries, self.spec, checksums, self.num_samples)
        self._file.write_at(0, header)
        self.num_bytes = HEADER_BYTES + end
        return self._file.publish()

    def discard(self) -> None:
        self._file.discard()

    def _finished_tensors(self) -> dict[str, "_Held"]:
        """All tensors but the streamed one, in file order: the wider their elements, the earlier,
        so that each is aligned."""
        tensors = {}
        tensors["offsets"] = torch.tensor(self._offsets, dtype=torch.int64)
        for name, ends in self._byte_offsets.items():
            tensors[f"{name}.offsets"] = torch.tensor(ends, dtype=torch.int64)
        tensors["num_past_end"] = torch.tensor(self._num_past_end, dtype=torch.int32)
        tensors["sample_checksums"] = _from_bytes(b"".join(self._sample_checksums)).view(
            -1, checksum.DIGEST_BYTES
        )
        text = json.dumps(self._columns, ensure_ascii=False, separators=(",", ":"))
        tensors["samples"] = _from_bytes(text.encode())
        for name, tensor in tensors.items():
            self._hold(name, tensor)
        padding = torch.zeros(-self._streamed_bytes % _ALIGN_BYTES, dtype=torch.uint8)
        pad = _Held(padding, self._buffers)
        pad.add(padding)
        in_order = sorted(self._held.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))
        return {"pad": pad, **dict(in_order)}


class _Held:
    """A tensor that grows in memory, along its first axis."""

    def __init__(self, like: torch.Tensor, buffers: Buffers) -> None:
        self.dtype = like.dtype
        self.digest = checksum.new()
        self.data = HeldBytes(buffers)
        self._num_rows = 0
        self._tail = like.shape[1:]

    def add(self, rows: torch.Tensor, *digests: checksum.Digest) -> None:
        """digests: updated with the same bytes."""
        self.data.append(bytes_of(rows), (self.digest, *digests))
        self._num_rows += len(rows)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self._num_rows, *self._tail)


def _most_bytes(sample: TokenSample, encoded: Parts) -> int:
    """The most that a sample adds to a shard."""
    parts = [part for kind in encoded.values() for part in kind]
    states = sum(part.nbytes for part in parts)
    tokens = sample.input_ids.nbytes + sample.loss_mask.nbytes
    return states + tokens + len(describe(sample)) + _ENTRY_BYTES + 8 * len(parts)


def _from_bytes(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
