"""The index of a store: one line a sample, in columns, memory-mapped.

It only repeats what the shards say, so that a store of a million samples opens without reading
them; where it is missing, damaged or of other shards, it is made again.
"""

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch

from paceline.artefact import write_atomically
from paceline.contracts import SampleRecord
from paceline.errors import StoreCorruption, StoreError
from paceline.store import checksum
from paceline.store.files import shard_numbers, shard_path
from paceline.store.shard import MappedTensors, Shard, TensorEntry, bytes_of, seal_header

logger = logging.getLogger(__name__)

INDEX_NAME = "index.safetensors"
_FORMAT = "paceline-store-index"
_VERSION = 1
_HEADER_BYTES = 8192
_COUNTS = ("num_tokens", "num_aux_rows", "num_supervised", "num_past_end")
_CODED = ("source", "split")
_TEXT = ("sample_id", "conversation_id")
# TokenSample.finished as int8 and back.
_FINISHED_CODES = {None: -1, False: 0, True: 1}
_FINISHED_VALUES = {code: value for value, code in _FINISHED_CODES.items()}


class Records(Sequence[SampleRecord]):
    """The samples of a store in the order of (shard, position): a sequence of SampleRecord over
    columns that are not copied. Columns that many samples are chosen by are attributes."""

    def __init__(self, columns: dict[str, np.ndarray], tables: dict[str, list[str]]) -> None:
        self._columns = columns
        self._tables = tables
        self.num_tokens = columns["num_tokens"]
        self.num_aux_rows = columns["num_aux_rows"]
        self.num_supervised = columns["num_supervised"]
        self.num_past_end = columns["num_past_end"]
        self.shard_numbers = columns["shard_numbers"]
        self.shard_starts = columns["shard_starts"]

    def __len__(self) -> int:
        return len(self.num_tokens)

    @overload
    def __getitem__(self, index: int) -> SampleRecord: ...
    @overload
    def __getitem__(self, index: slice) -> list[SampleRecord]: ...
    def __getitem__(self, index: int | slice) -> SampleRecord | list[SampleRecord]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of a store of {len(self)} samples")
        index %= len(self)
        slot = int(np.searchsorted(self.shard_starts, index, side="right")) - 1
        return SampleRecord(
            sample_id=self._text("sample_id", index),
            conversation_id=self._text("conversation_id", index),
            source=self._tables["source"][self._columns["source"][index]],
            split=self._tables["split"][self._columns["split"][index]],
            finished=_FINISHED_VALUES[int(self._columns["finished"][index])],
            **{name: int(self._columns[name][index]) for name in _COUNTS},
            shard=int(self.shard_numbers[slot]),
            position=index - int(self.shard_starts[slot]),
        )

    def split(self, name: str) -> np.ndarray:
        """int64 indices of the samples of a split, ascending."""
        return self._where("split", name)

    def source(self, name: str) -> np.ndarray:
        """int64 indices of the samples of a source, ascending."""
        return self._where("source", name)

    @property
    def splits(self) -> list[str]:
        return self._tables["split"]

    @property
    def sources(self) -> list[str]:
        return self._tables["source"]

    def sample_ids(self) -> Iterator[str]:
        return (self._text("sample_id", i) for i in range(len(self)))

    def find(self, sample_id: str) -> int:
        """Index of a sample; KeyError where the store does not have it."""
        wanted = _id_hash(sample_id.encode())
        order, hashes = self._by_hash
        at = int(np.searchsorted(hashes, wanted))
        while at < len(hashes) and hashes[at] == wanted:
            if self._text("sample_id", int(order[at])) == sample_id:
                return int(order[at])
            at += 1
        raise KeyError(sample_id)

    @cached_property
    def _by_hash(self) -> tuple[np.ndarray, np.ndarray]:
        order = np.argsort(self._columns["sample_id.hash"], kind="stable")
        return order, self._columns["sample_id.hash"][order]

    def _where(self, column: str, name: str) -> np.ndarray:
        if name not in self._tables[column]:
            return np.empty(0, dtype=np.int64)
        return np.flatnonzero(self._columns[column] == self._tables[column].index(name))

    def _text(self, column: str, index: int) -> str:
        start, end = self._columns[f"{column}.ends"][index : index + 2]
        return self._columns[column][start:end].tobytes().decode()


def _id_hash(sample_id: bytes) -> np.int64:
    return np.frombuffer(bytes.fromhex(checksum.of(sample_id))[:8], dtype=np.int64)[0]


def open_index(folder: Path) -> Records:
    """The records of a store's published shards; from the index file if it is theirs."""
    numbers = shard_numbers(folder)
    path = folder / INDEX_NAME
    if path.is_file():
        try:
            return _load(path, folder, numbers)
        except StoreCorruption as error:
            logger.warning("the index is made again: %s", error)
    columns, tables = _build(folder, numbers)
    try:
        _write(path, columns, tables)
    except OSError as error:
        # A finished store may lie on a read-only medium; the index then lives in memory.
        logger.info("%s is not written (%s)", path, error)
    return Records(columns, tables)


def _load(path: Path, folder: Path, numbers: list[int]) -> Records:
    file = MappedTensors(path)
    if (file.metadata.get("format"), file.metadata.get("version")) != (_FORMAT, str(_VERSION)):
        raise StoreCorruption(f"{path} is of another version")
    file.verify()
    columns = {name: file.tensor(name).numpy() for name in file.entries if name != "tables"}
    if columns["shard_numbers"].tolist() != numbers:
        raise StoreCorruption(f"{path} is of other shards")
    for number, num_bytes in zip(numbers, columns["shard_bytes"].tolist(), strict=True):
        if (found := shard_path(folder, number).stat().st_size) != num_bytes:
            raise StoreCorruption(f"{path}: shard {number} has {found} bytes, it had {num_bytes}")
    return Records(columns, json.loads(bytes(bytes_of(file.tensor("tables")))))


@dataclass
class _Growing:
    """The columns while shards are read one after another."""

    counts: list[np.ndarray]
    texts: dict[str, list[Any]]
    numbers: list[int]
    starts: list[int]
    sizes: list[int]


def _build(folder: Path, numbers: list[int]) -> tuple[dict[str, np.ndarray], dict[str, list[str]]]:
    grown = _Growing([], {name: [] for name in (*_TEXT, *_CODED, "finished")}, numbers, [0], [])
    first = None
    for number in numbers:
        shard = Shard(shard_path(folder, number))
        first = first or shard
        if shard.spec != first.spec:
            raise StoreError(f"{shard.path} and {first.path} are of different stores")
        past_end = shard.tensor("num_past_end").numpy()
        grown.counts.append(np.column_stack([np.diff(shard.offsets, axis=0), past_end]))
        for name, values in grown.texts.items():
            values += shard.columns[name]
        grown.starts.append(grown.starts[-1] + shard.num_samples)
        grown.sizes.append(shard.total_bytes)
    return _as_columns(grown)


def _as_columns(grown: _Growing) -> tuple[dict[str, np.ndarray], dict[str, list[str]]]:
    columns = {
        "shard_numbers": np.asarray(grown.numbers, dtype=np.int64),
        "shard_starts": np.asarray(grown.starts, dtype=np.int64),
        "shard_bytes": np.asarray(grown.sizes, dtype=np.int64),
    }
    counts = np.concatenate([np.empty((0, len(_COUNTS)), np.int64), *grown.counts])
    for i, name in enumerate(_COUNTS):
        columns[name] = counts[:, i].astype(np.int32)
    finished = [_FINISHED_CODES[value] for value in grown.texts["finished"]]
    columns["finished"] = np.asarray(finished, dtype=np.int8)
    tables = {}
    for name in _CODED:
        tables[name] = sorted(set(grown.texts[name]))
        codes = {value: code for code, value in enumerate(tables[name])}
        columns[name] = np.asarray([codes[v] for v in grown.texts[name]], dtype=np.int32)
    for name in _TEXT:
        encoded = [value.encode() for value in grown.texts[name]]
        ends = np.zeros(len(encoded) + 1, dtype=np.int64)
        np.cumsum([len(value) for value in encoded], out=ends[1:])
        columns[name] = np.frombuffer(b"".join(encoded), dtype=np.uint8)
        columns[f"{name}.ends"] = ends
        if name == "sample_id":
            hashes = np.asarray([_id_hash(value) for value in encoded], dtype=np.int64)
            columns["sample_id.hash"] = hashes
            _refuse_repeats(grown.texts[name], hashes)
    return columns, tables


def _refuse_repeats(sample_ids: list[str], hashes: np.ndarray) -> None:
    if len(np.unique(hashes)) < len(hashes):
        seen: set[str] = set()
        for sample_id in sample_ids:
            if sample_id in seen:
                raise StoreError(f"sample {sample_id!r} is in the store twice")
            seen.add(sample_id)


def _write(path: Path, columns: dict[str, np.ndarray], tables: dict[str, list[str]]) -> None:
    tensors = {name: torch.from_numpy(np.array(values)) for name, values in columns.items()}
    text = json.dumps(tables, ensure_ascii=False).encode()
    tensors["tables"] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    entries, pieces, end = [], [], 0
    for name, tensor in sorted(tensors.items(), key=lambda t: (-t[1].dtype.itemsize, t[0])):
        data = bytes_of(tensor)
        entries.append(TensorEntry(name, tensor.dtype, tuple(tensor.shape), end, end + len(data)))
        pieces.append(data)
        end += len(data)
    checksums = {entry.name: checksum.of(data) for entry, data in zip(entries, pieces, strict=True)}
    metadata = {"format": _FORMAT, "version": str(_VERSION)}
    header = seal_header(entries, metadata, checksums, _HEADER_BYTES)
    write_atomically(path, b"".join([header, *pieces]))
