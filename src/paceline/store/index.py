"""The index of a store: its records in columns, in one memory-mapped file.

It only repeats what the shards say, so that a store of a million samples opens without reading
them; where it is missing, damaged or of other shards, it is made again.
"""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paceline import fingerprint
from paceline.artefact import write_atomically
from paceline.errors import StoreCorruption, StoreError
from paceline.store import checksum
from paceline.store.records import CODED, COUNTS, FINISHED_CODES, TEXTS, Records, id_hash
from paceline.store.shard import MappedTensors, Shard, bytes_of, lay_out, seal_header
from paceline.store.shelf import Shelf
from paceline.store.spec import StoreSpec

logger = logging.getLogger(__name__)

_FORMAT = "paceline-store-index"
_VERSION = 1
_HEADER_BYTES = 8192
_TABLES = "tables"


@dataclass(frozen=True)
class Index:
    """records, what all shards share (None where there is no shard), and the fingerprint of the
    content, which does not depend on the order of samples or the borders of shards."""

    records: Records
    spec: StoreSpec | None
    content: str


class IndexBuilder:
    """Gathers the records of shards, one after another; `records` may be asked for in between, at a
    cost that does not grow with what there is.

    Receipts of shards that were let go count as content, not as records, unless they are added as
    shards.
    """

    def __init__(self) -> None:
        self.spec: StoreSpec | None = None
        self._columns = {name: _Column(*about) for name, about in _COLUMNS.items()}
        self._codes: dict[str, dict[str, int]] = {name: {} for name in CODED}
        for name in _RUNNING_ENDS:
            self._columns[name].add([0])

    def add_receipt(self, shard: Shard) -> None:
        self._add_checksums(shard)

    def _add_checksums(self, shard: Shard) -> None:
        self._columns["sample_checksums"].add(shard.tensor("sample_checksums").numpy())

    def add(self, number: int, shard: Shard) -> None:
        """Raises StoreError for a shard of another store."""
        if self.spec is not None and shard.spec != self.spec:
            raise StoreError(
                f"{shard.path} is of another store than the shards before it: "
                f"{shard.spec.identity()}, not {self.spec.identity()}"
            )
        self.spec = shard.spec
        column = self._columns
        column["shard_numbers"].add([number])
        column["shard_starts"].add_lengths([shard.num_samples])
        column["shard_bytes"].add([shard.total_bytes])
        column["shard_headers"].add([list(bytes.fromhex(shard.header_checksum))])
        counts = np.column_stack(
            [np.diff(shard.offsets, axis=0), shard.tensor("num_past_end").numpy()]
        )
        for i, name in enumerate(COUNTS):
            column[name].add(counts[:, i])
        self._add_checksums(shard)
        values = shard.columns
        column["finished"].add([FINISHED_CODES[value] for value in values["finished"]])
        for name, codes in self._codes.items():
            column[name].add([codes.setdefault(value, len(codes)) for value in values[name]])
        for name in TEXTS:
            encoded = [value.encode() for value in values[name]]
            column[name].add(np.frombuffer(b"".join(encoded), dtype=np.uint8))
            column[f"{name}.ends"].add_lengths([len(value) for value in encoded])
            if name == "sample_id":
                column["sample_id.hash"].add([id_hash(value) for value in encoded])

    def records(self) -> Records:
        """Those of all shards so far; whether a sample is there twice was not looked at."""
        columns = {n: c.values for n, c in self._columns.items() if n != "sample_checksums"}
        return Records(columns, {name: list(codes) for name, codes in self._codes.items()})

    def build(self) -> Index:
        """Raises StoreError where a sample is in two shards."""
        records = self.records()
        records.refuse_repeats()
        content = content_of(self.spec, self._columns["sample_checksums"].values)
        return Index(records, self.spec, content)


class _Column:
    """Values of one dtype, added at the end."""

    def __init__(self, dtype: type[np.generic], tail: tuple[int, ...] = ()) -> None:
        self._buffer = np.empty((0, *tail), dtype)
        self._count = 0

    @property
    def values(self) -> np.ndarray:
        """A view, which what is added later does not change."""
        return self._buffer[: self._count]

    def add(self, values: Sequence[Any] | np.ndarray) -> None:
        end = self._count + len(values)
        if end > len(self._buffer):
            # Twice as much, so that shard after shard costs no more than all at once.
            larger = np.empty(
                (max(end, 2 * self._count), *self._buffer.shape[1:]), self._buffer.dtype
            )
            larger[: self._count] = self.values
            self._buffer = larger
        if len(values):
            self._buffer[self._count : end] = values
        self._count = end

    def add_lengths(self, lengths: Sequence[int]) -> None:
        """As running ends, after the last one there is."""
        self.add(self._buffer[self._count - 1] + np.cumsum(lengths, dtype=np.int64))


# dtype, and the shape of a value.
_COLUMNS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys((*COUNTS, *CODED), (np.int32,)),
    **dict.fromkeys(TEXTS, (np.uint8,)),
    **dict.fromkeys(("sample_checksums", "shard_headers"), (np.uint8, (checksum.DIGEST_BYTES,))),
    **dict.fromkeys((*(f"{name}.ends" for name in TEXTS), "sample_id.hash"), (np.int64,)),
    **dict.fromkeys(("shard_numbers", "shard_starts", "shard_bytes"), (np.int64,)),
    "finished": (np.int8,),
}
# They hold one value more than there are things that end: where the first begins.
_RUNNING_ENDS = ("shard_starts", *(f"{name}.ends" for name in TEXTS))


def content_of(spec: StoreSpec | None, sample_checksums: np.ndarray) -> str:
    """Fingerprint of samples: of what they share, and of their checksums [S, 16], sorted."""
    halves = np.ascontiguousarray(sample_checksums).view(">u8")
    in_order = halves[np.lexsort((halves[:, 1], halves[:, 0]))]
    shared = spec.identity() if spec else None
    return fingerprint.of_json([shared, fingerprint.of_bytes(in_order.tobytes())])


def open_index(shelf: Shelf, keep: bool = True) -> Index:
    """The index of a store's published shards, from its file if that is theirs.

    keep: write an index that had to be made, if the folder lets us.
    """
    path = shelf.index_path
    if path.is_file():
        try:
            return _load(path, shelf)
        except StoreCorruption as error:
            logger.warning("the index is made again: %s", error)
    index = build_index(shelf)
    if keep:
        try:
            _write(path, index)
        except StoreError as error:
            # A finished store may lie on a read-only medium; the index then lives in memory.
            logger.info("%s is not written (%s)", path, error)
    return index


def build_index(shelf: Shelf, look: Callable[[Shard], None] = lambda shard: None) -> Index:
    """The index of a store's published shards, from these and the receipts alone; `look` sees each
    of both."""
    builder = IndexBuilder()
    for number in shelf.shard_bytes():
        shard = shelf.open(number)
        look(shard)
        builder.add(number, shard)
    for number in shelf.receipt_numbers():
        receipt = shelf.open_receipt(number)
        look(receipt)
        builder.add_receipt(receipt)
    return builder.build()


def _load(path: Path, shelf: Shelf) -> Index:
    file = MappedTensors(path)
    version = file.metadata.get("format"), file.metadata.get("version")
    # The first stores had an index of this version without the last two.
    if version != (_FORMAT, str(_VERSION)) or not {"spec", "content"} <= file.metadata.keys():
        raise StoreCorruption(f"{path} is of another version")
    file.verify()
    columns = {name: file.tensor(name).numpy() for name in file.entries if name != _TABLES}
    found = shelf.shard_bytes()
    if columns["shard_numbers"].tolist() != list(found):
        raise StoreCorruption(f"{path} is of other shards than {shelf.folder} has")
    for number, num_bytes in zip(found, columns["shard_bytes"].tolist(), strict=True):
        if found[number] != num_bytes:
            raise StoreCorruption(
                f"{path}: shard {number} has {found[number]} bytes, it had {num_bytes}"
            )
    records = Records(columns, json.loads(bytes(bytes_of(file.tensor(_TABLES)))))
    spec = json.loads(file.metadata["spec"])
    return Index(records, StoreSpec.from_dict(spec) if spec else None, file.metadata["content"])


def _write(path: Path, index: Index) -> None:
    tables = json.dumps(index.records.tables, ensure_ascii=False).encode()
    columns: Mapping[str, np.ndarray] = {
        **index.records.columns,
        _TABLES: np.frombuffer(tables, dtype=np.uint8),
    }
    widest_first = sorted(columns.items(), key=lambda c: (-c[1].itemsize, c[0]))
    tensors = {name: torch.from_numpy(np.array(values)) for name, values in widest_first}
    entries, checksums, pieces = lay_out(tensors)
    metadata = {
        "format": _FORMAT,
        "version": str(_VERSION),
        "spec": json.dumps(index.spec.identity() if index.spec else None),
        "content": index.content,
    }
    header = seal_header(entries, metadata, checksums, _HEADER_BYTES)
    write_atomically(path, b"".join([header, *pieces]))
