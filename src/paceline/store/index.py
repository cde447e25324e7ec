"""The index of a store: its records in columns, in one memory-mapped file.

It only repeats what the shards say, so that a store of a million samples opens without reading
them; where it is missing, damaged or of other shards, it is made again.
"""

import json
import logging
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from paceline import fingerprint
from paceline.artefact import write_atomically
from paceline.errors import StoreCorruption, StoreError
from paceline.store import checksum
from paceline.store.records import CODED, COUNTS, FINISHED_CODES, TEXTS, Records, id_hash
from paceline.store.shard import MappedTensors, Shard, TensorEntry, bytes_of, seal_header
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
    """Gathers the records of shards, one after another; `build` may be called in between.

    Receipts of shards that were let go count as content, not as records, unless they are added as
    shards.
    """

    def __init__(self) -> None:
        self.spec: StoreSpec | None = None
        self._pieces: dict[str, list[np.ndarray]] = defaultdict(list)
        self._codes: dict[str, dict[str, int]] = {name: {} for name in CODED}
        self._shards: list[tuple[int, int, int]] = []
        self._headers: list[bytes] = []

    def add_receipt(self, shard: Shard) -> None:
        self._add_checksums(shard)

    def _add_checksums(self, shard: Shard) -> None:
        # A copy: a view would keep the file's space taken after the shard is let go.
        self._pieces["sample_checksums"].append(shard.tensor("sample_checksums").numpy().copy())

    def add(self, number: int, shard: Shard) -> None:
        """Raises StoreError for a shard of another store."""
        if self.spec is not None and shard.spec != self.spec:
            raise StoreError(
                f"{shard.path} is of another store than the shards before it: "
                f"{shard.spec.identity()}, not {self.spec.identity()}"
            )
        self.spec = shard.spec
        self._shards.append((number, shard.num_samples, shard.total_bytes))
        self._headers.append(bytes.fromhex(shard.header_checksum))
        counts = np.column_stack(
            [np.diff(shard.offsets, axis=0), shard.tensor("num_past_end").numpy()]
        )
        for i, name in enumerate(COUNTS):
            self._pieces[name].append(counts[:, i].astype(np.int32))
        self._add_checksums(shard)
        columns = shard.columns
        finished = [FINISHED_CODES[value] for value in columns["finished"]]
        self._pieces["finished"].append(np.asarray(finished, dtype=np.int8))
        for name, codes in self._codes.items():
            numbers = [codes.setdefault(value, len(codes)) for value in columns[name]]
            self._pieces[name].append(np.asarray(numbers, dtype=np.int32))
        for name in TEXTS:
            encoded = [value.encode() for value in columns[name]]
            self._pieces[name].append(np.frombuffer(b"".join(encoded), dtype=np.uint8))
            lengths = [len(value) for value in encoded]
            self._pieces[f"{name}.ends"].append(np.asarray(lengths, dtype=np.int64))
            if name == "sample_id":
                hashes = np.asarray([id_hash(value) for value in encoded], dtype=np.int64)
                self._pieces["sample_id.hash"].append(hashes)

    def build(self) -> Index:
        """Raises StoreError where a sample is in two shards."""
        numbers, num_samples, num_bytes = np.asarray(self._shards, np.int64).reshape(-1, 3).T
        columns = {
            "shard_numbers": numbers,
            "shard_starts": np.concatenate([[0], np.cumsum(num_samples)]),
            "shard_bytes": num_bytes,
            "shard_headers": np.frombuffer(b"".join(self._headers), np.uint8).reshape(-1, 16),
        }
        for name, dtype in _COLUMN_DTYPES.items():
            pieces = self._pieces[name]
            columns[name] = np.concatenate([np.empty((0, *_tail(name)), dtype), *pieces])
        for name in TEXTS:
            columns[f"{name}.ends"] = np.concatenate([[0], np.cumsum(columns[f"{name}.ends"])])
        content = content_of(self.spec, columns.pop("sample_checksums"))
        records = Records(columns, {name: list(codes) for name, codes in self._codes.items()})
        records.refuse_repeats()
        return Index(records, self.spec, content)


_COLUMN_DTYPES = {
    **dict.fromkeys((*COUNTS, *CODED), np.int32),
    **dict.fromkeys((*TEXTS, "sample_checksums"), np.uint8),
    **dict.fromkeys((*(f"{name}.ends" for name in TEXTS), "sample_id.hash"), np.int64),
    "finished": np.int8,
}


def _tail(name: str) -> tuple[int, ...]:
    return (checksum.DIGEST_BYTES,) if name == "sample_checksums" else ()


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
    entries, pieces, end = [], [], 0
    for name, values in sorted(columns.items(), key=lambda c: (-c[1].itemsize, c[0])):
        tensor = torch.from_numpy(np.array(values))
        data = bytes_of(tensor)
        entries.append(TensorEntry(name, tensor.dtype, tuple(tensor.shape), end, end + len(data)))
        pieces.append(data)
        end += len(data)
    checksums = {entry.name: checksum.of(data) for entry, data in zip(entries, pieces, strict=True)}
    metadata = {
        "format": _FORMAT,
        "version": str(_VERSION),
        "spec": json.dumps(index.spec.identity() if index.spec else None),
        "content": index.content,
    }
    header = seal_header(entries, metadata, checksums, _HEADER_BYTES)
    write_atomically(path, b"".join([header, *pieces]))
