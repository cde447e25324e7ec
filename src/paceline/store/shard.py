"""The bytes of one shard: a plain safetensors file of many samples. docs/formats.md specifies it.

Legend: S samples, N tokens, R auxiliary rows, M supervised tokens, A auxiliary layers,
D target hidden width.
"""

import json
import math
import mmap
import os
import struct
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paceline.errors import StoreCorruption, StoreError
from paceline.store import checksum
from paceline.store.blocks import BlockFile
from paceline.store.files import receipt_path, shard_path
from paceline.store.spec import StoreSpec

FORMAT = "paceline-store"
VERSION = 1
# The header is written last but stands first, so room is kept for it; a multiple of the page size
# puts the largest tensor on a page border.
HEADER_BYTES = 8192
_LENGTH = struct.Struct("<Q")
_ZERO_DIGEST = "0" * (2 * checksum.DIGEST_BYTES)
_HEADER_KEY = "header_checksum"
# Far above any real header: a damaged length must not make us read gigabytes.
_MAX_HEADER_BYTES = 1 << 20

TORCH_OF = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I32": torch.int32,
    "F32": torch.float32,
    "I64": torch.int64,
}
NAME_OF = {dtype: name for name, dtype in TORCH_OF.items()}


@dataclass(frozen=True)
class TensorEntry:
    """Where a tensor lies: `start` and `end` count from the first byte after the header."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int

    @cached_property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.dtype.itemsize


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy."""
    if tensor.numel() == 0:
        return memoryview(b"")
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())


def lay_out(
    tensors: Mapping[str, torch.Tensor],
) -> tuple[list[TensorEntry], dict[str, str], list[memoryview]]:
    """Tensors one after another from the first byte after the header on, in their order: where each
    lies, its checksum, its bytes (not copied)."""
    entries, checksums, pieces, end = [], {}, [], 0
    for name, tensor in tensors.items():
        data = bytes_of(tensor)
        entries.append(TensorEntry(name, tensor.dtype, tuple(tensor.shape), end, end + len(data)))
        checksums[name] = checksum.of(data)
        pieces.append(data)
        end += len(data)
    return entries, checksums, pieces


def build_header(
    entries: list[TensorEntry], spec: StoreSpec, checksums: dict[str, str], num_samples: int
) -> bytes:
    """Length and header of a shard, HEADER_BYTES in all, its own checksum filled in."""
    metadata = {
        "format": FORMAT,
        "version": str(VERSION),
        "spec": _compact(spec.identity()),
        "num_samples": str(num_samples),
    }
    return seal_header(entries, metadata, checksums, HEADER_BYTES)


def seal_header(
    entries: list[TensorEntry],
    metadata: dict[str, str],
    checksums: dict[str, str],
    total_bytes: int,
) -> bytes:
    """A safetensors header padded to `total_bytes`, with the checksum of itself inside.

    The checksum is that of these bytes with its own digits set to zero.
    """
    sums = {
        "checksum": checksum.NAME,
        "checksums": _compact(checksums),
        _HEADER_KEY: _ZERO_DIGEST,
    }
    header: dict[str, Any] = {"__metadata__": {**metadata, **sums}}
    for entry in entries:
        header[entry.name] = {
            "dtype": NAME_OF[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [entry.start, entry.end],
        }
    text = _compact(header).encode()
    room = total_bytes - _LENGTH.size
    assert len(text) <= room, f"a header of {len(text)} bytes does not fit in {room}"
    blank = _LENGTH.pack(room) + text.ljust(room)
    return blank.replace(_ZERO_DIGEST.encode(), checksum.of(blank).encode(), 1)


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


class MappedTensors:
    """A safetensors file with paceline's checksums: tensors as views of a memory mapping, or read
    into memory that the caller has.

    The mapping is private: what a caller writes into a view never reaches the file. Raises
    StoreCorruption, which names the file, where the header is not what was written.
    """

    def __init__(self, path: Path, copy: BlockFile | None = None, where: str | None = None) -> None:
        """copy: fills the file at `path` as it is read, where the original is far away; `where`
        names the original in messages."""
        self.path = where or path
        self._copy = copy
        self._proved: set[str] = set()
        self._descriptor = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._descriptor)
        self.total_bytes = os.fstat(self._descriptor).st_size
        self._need(0, min(self.total_bytes, HEADER_BYTES))
        start = os.pread(self._descriptor, _LENGTH.size, 0)
        if len(start) < _LENGTH.size:
            raise self._corrupt(f"it is cut to {self.total_bytes} bytes")
        self.header_bytes = _LENGTH.unpack(start)[0] + _LENGTH.size
        if self.header_bytes > min(self.total_bytes, _MAX_HEADER_BYTES):
            raise self._corrupt("the header's length is damaged, or the file is cut")
        self._need(0, self.header_bytes)
        self._header = os.pread(self._descriptor, self.header_bytes, 0)
        self._parse()

    @cached_property
    def _map(self) -> mmap.mmap:
        # Without MAP_NORESERVE the kernel would set memory aside for writes that nobody makes.
        flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)
        return mmap.mmap(self._descriptor, 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)

    def _parse(self) -> None:
        try:
            header = json.loads(self._header[_LENGTH.size :])
            self.metadata: dict[str, str] = header.pop("__metadata__")
            self.checksums: dict[str, str] = json.loads(self.metadata["checksums"])
            self.header_checksum = self.metadata[_HEADER_KEY]
            self.entries = {
                name: TensorEntry(name, TORCH_OF[v["dtype"]], tuple(v["shape"]), *v["data_offsets"])
                for name, v in header.items()
            }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise self._corrupt(f"the header is damaged ({error})") from error
        blank = self._header.replace(self.header_checksum.encode(), _ZERO_DIGEST.encode(), 1)
        if checksum.of(blank) != self.header_checksum:
            raise self._corrupt("the header does not match its checksum")
        end = max((entry.end for entry in self.entries.values()), default=0)
        if self.header_bytes + end != self.total_bytes:
            raise self._corrupt(
                f"it has {self.total_bytes} bytes, its header says {self.header_bytes + end}"
            )

    def __contains__(self, name: str) -> bool:
        return name in self.entries

    def tensor(self, name: str) -> torch.Tensor:
        """A whole tensor as a view of the file; of a remote one, compared with its checksum."""
        entry = self.entries[name]
        view = self._view(entry, 0, entry.shape[0])
        if self._copy and name not in self._proved:
            is_same = lambda: checksum.of(bytes_of(view)) == self.checksums.get(name)
            if not is_same():
                self.fetch_again()
                if not is_same():
                    raise self._damage(entry)
            self._proved.add(name)
        return view

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows [start, stop) of a tensor as a view of the file."""
        return self._view(self.entries[name], start, stop)

    def read_rows(self, name: str, start: int, view: memoryview) -> None:
        """The bytes of a tensor's rows from `start` on, into `view`: as many as fill it.

        One copy out of the page cache: about twice as fast as touching a mapping for the first
        time, since no page of it must be set up.
        """
        offset = self._offset(self.entries[name], start)
        self._need(offset, offset + len(view))
        while view:
            done = os.preadv(self._descriptor, [view], offset)
            if not done:
                raise StoreCorruption(f"{self.path} was cut while it was open")
            view, offset = view[done:], offset + done

    def _view(self, entry: TensorEntry, start: int, stop: int) -> torch.Tensor:
        shape = (stop - start, *entry.shape[1:])
        count = math.prod(shape)
        if not count:
            return torch.empty(shape, dtype=entry.dtype)
        offset = self._offset(entry, start)
        self._need(offset, offset + count * entry.dtype.itemsize)
        return torch.frombuffer(self._map, dtype=entry.dtype, count=count, offset=offset).view(
            shape
        )

    def _offset(self, entry: TensorEntry, row: int) -> int:
        return self.header_bytes + entry.start + row * entry.row_bytes

    def verify(self) -> int:
        """Compare every tensor with its checksum; StoreCorruption names file and tensor.

        Returns the number of bytes checked.
        """
        for entry in self.entries.values():
            digest = checksum.new()
            for piece in self._pieces(entry):
                digest.update(piece)
            if digest.hexdigest() != self.checksums.get(entry.name):
                raise self._damage(entry)
        return self.total_bytes

    @property
    def is_copy(self) -> bool:
        """The original is far away; what is read here was fetched from it."""
        return self._copy is not None

    def is_gone(self) -> bool:
        """The copy of a remote file was removed to make room; open it anew."""
        return self._copy is not None and self._copy.is_gone()

    def fetch_again(self) -> None:
        """Whatever is there of a copy is fetched anew, since it is not what it should be: the
        network or the cache's disk may have been at fault."""
        if self._copy:
            self._copy.fetch_again()

    def _need(self, start: int, stop: int) -> None:
        """Called before bytes are read."""
        if self._copy:
            self._copy.need(start, stop)

    def _pieces(self, entry: TensorEntry) -> Iterator[bytes | memoryview]:
        """A tensor's bytes as they are in the original, not in a copy of it."""
        start, stop = self.header_bytes + entry.start, self.header_bytes + entry.end
        if self._copy:
            yield from self._copy.pass_through(start, stop)
            return
        with memoryview(self._map) as whole:
            yield whole[start:stop]

    def _damage(self, entry: TensorEntry) -> StoreCorruption:
        start, end = self.header_bytes + entry.start, self.header_bytes + entry.end
        return self._corrupt(
            f"tensor {entry.name!r} does not match its checksum (bytes {start} to {end})"
        )

    def _corrupt(self, what: str) -> StoreCorruption:
        return StoreCorruption(f"{self.path}: {what}{self._advice()}")

    def _advice(self) -> str:
        """What to do about damage, said after it."""
        return ""


class Shard(MappedTensors):
    """One published shard, open for reading."""

    def __init__(self, path: Path, copy: BlockFile | None = None, where: str | None = None) -> None:
        super().__init__(path, copy, where)
        found = self.metadata.get("format"), self.metadata.get("version")
        if found != (FORMAT, str(VERSION)):
            raise StoreCorruption(
                f"{self.path} is {found[0]!r} of version {found[1]!r}; this paceline reads "
                f"{FORMAT!r} of version {VERSION}"
            )
        try:
            self.spec = StoreSpec.from_dict(json.loads(self.metadata["spec"]))
            self.num_samples = int(self.metadata["num_samples"])
        except (KeyError, ValueError, StoreError) as error:
            raise StoreCorruption(f"{self.path}: the header lacks {error}") from error
        # Positions of samples that were held against their checksums; used for copies only.
        self.proved_samples: set[int] = set()

    def _advice(self) -> str:
        if self.is_copy:
            return ". Make or upload the store again with --overwrite"
        return (
            ". Remove this file and run the command that made the store (as `paceline extract`) "
            "with the same options: it makes the samples again"
        )

    @cached_property
    def offsets(self) -> np.ndarray:
        """int64 [S + 1, 3]: the first token, auxiliary row and supervised row of each sample."""
        return self.tensor("offsets").numpy()

    @cached_property
    def columns(self) -> dict[str, list[Any]]:
        """What the samples are: sample_id, conversation_id, source, split (strings) and finished
        (true, false or null), each a list of S.

        Raises StoreError for a shard of the first stores, which have no `finished`.
        """
        columns = self.stored_columns()
        if "finished" not in columns:
            raise StoreError(
                f"{self.path} is of an early form of shards: bring its folder up to date with "
                "`paceline upgrade-store`"
            )
        return columns

    def stored_columns(self) -> dict[str, list[Any]]:
        """The columns as they were written, of early shards too."""
        return json.loads(bytes(bytes_of(self.tensor("samples"))))


def open_published(folder: Path, number: int) -> Shard:
    """A shard that was just seen published. Another process may have let it go since: then its
    receipt, which says all but the states and stood there before the shard went."""
    try:
        return Shard(shard_path(folder, number))
    except FileNotFoundError:
        return Shard(receipt_path(folder, number))
