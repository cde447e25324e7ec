"""The records of a store: a sequence of SampleRecord over columns, for millions of samples."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import overload

import numpy as np

from paceline.contracts import SampleRecord
from paceline.errors import StoreError
from paceline.store import checksum

COUNTS = ("num_tokens", "num_aux_rows", "num_supervised", "num_past_end")
# Columns of few different values: codes, and a table of the values.
CODED = ("source", "split")
# Columns of many different values: one run of UTF-8 bytes, and where each value ends.
TEXTS = ("sample_id", "conversation_id")
# TokenSample.finished as int8.
FINISHED_CODES = {None: -1, False: 0, True: 1}
_FINISHED_VALUES = {code: value for value, code in FINISHED_CODES.items()}


class Records(Sequence[SampleRecord]):
    """The samples of a store in the order of (shard, position): a sequence of SampleRecord over
    columns that are not copied. Columns that many samples are chosen by are attributes."""

    def __init__(self, columns: Mapping[str, np.ndarray], tables: Mapping[str, list[str]]) -> None:
        self.columns = columns
        self.tables = tables
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
            source=self.tables["source"][self.columns["source"][index]],
            split=self.tables["split"][self.columns["split"][index]],
            finished=_FINISHED_VALUES[int(self.columns["finished"][index])],
            **{name: int(self.columns[name][index]) for name in COUNTS},
            shard=int(self.shard_numbers[slot]),
            position=index - int(self.shard_starts[slot]),
        )

    def choose(self, indices: Sequence[int]) -> "ChosenRecords":
        """Samples by their indices, none negative, in that order."""
        return ChosenRecords(self, np.asarray(indices, np.int64))

    def split(self, name: str) -> np.ndarray:
        """int64 indices of the samples of a split, ascending."""
        return self._where("split", name)

    def source(self, name: str) -> np.ndarray:
        """int64 indices of the samples of a source, ascending."""
        return self._where("source", name)

    def in_shards(self, numbers: Sequence[int]) -> np.ndarray:
        """int64 indices of the samples of some shards, ascending."""
        shards = np.repeat(self.shard_numbers, np.diff(self.shard_starts))
        return np.flatnonzero(np.isin(shards, numbers))

    def refuse_repeats(self) -> None:
        """Raises StoreError where a sample is there twice."""
        if len(np.unique(self.columns["sample_id.hash"])) == len(self):
            return
        seen: set[str] = set()
        for sample_id in self.sample_ids():
            if sample_id in seen:
                raise StoreError(f"sample {sample_id!r} is in the store twice")
            seen.add(sample_id)

    def sample_ids(self) -> Iterator[str]:
        return (self._text("sample_id", i) for i in range(len(self)))

    def shard_header(self, number: int) -> str:
        """The checksum of a shard's header, as the index knows it."""
        slot = int(np.flatnonzero(self.shard_numbers == number)[0])
        return self.columns["shard_headers"][slot].tobytes().hex()

    def find(self, sample_id: str) -> int:
        """Index of a sample; KeyError where the store does not have it."""
        wanted = id_hash(sample_id.encode())
        order, hashes = self._by_hash
        at = int(np.searchsorted(hashes, wanted))
        while at < len(hashes) and hashes[at] == wanted:
            if self._text("sample_id", int(order[at])) == sample_id:
                return int(order[at])
            at += 1
        raise KeyError(sample_id)

    @cached_property
    def _by_hash(self) -> tuple[np.ndarray, np.ndarray]:
        order = np.argsort(self.columns["sample_id.hash"], kind="stable")
        return order, self.columns["sample_id.hash"][order]

    def _where(self, column: str, name: str) -> np.ndarray:
        if name not in self.tables[column]:
            return np.empty(0, dtype=np.int64)
        return np.flatnonzero(self.columns[column] == self.tables[column].index(name))

    def _text(self, column: str, index: int) -> str:
        start, end = self.columns[f"{column}.ends"][index : index + 2]
        return self.columns[column][start:end].tobytes().decode()


class ChosenRecords(Sequence[SampleRecord]):
    """Some samples of a store. What a batch needs of them is looked up for all at once; a record is
    made only when it is asked for, since for short samples it takes as long as reading the rows."""

    def __init__(self, records: Records, indices: np.ndarray) -> None:
        if len(indices) and not 0 <= indices.min() <= indices.max() < len(records):
            raise IndexError(f"samples {indices.tolist()} of a store of {len(records)} samples")
        self._records = records
        self._indices = indices

    def __len__(self) -> int:
        return len(self._indices)

    @overload
    def __getitem__(self, index: int) -> SampleRecord: ...
    @overload
    def __getitem__(self, index: slice) -> list[SampleRecord]: ...
    def __getitem__(self, index: int | slice) -> SampleRecord | list[SampleRecord]:
        if isinstance(index, slice):
            return [self._records[i] for i in self._indices[index].tolist()]
        return self._records[int(self._indices[index])]

    def places(self) -> list[tuple[int, int]]:
        """The shard's number and the position in it, for each sample."""
        starts = self._records.shard_starts
        slots = np.searchsorted(starts, self._indices, side="right") - 1
        numbers = self._records.shard_numbers[slots].tolist()
        return list(zip(numbers, (self._indices - starts[slots]).tolist(), strict=True))

    def starts(self, count: str) -> list[int]:
        """Where each sample begins if they lie one after another, and the end. count: a column of
        COUNTS that says how long each is."""
        return [0, *np.cumsum(self._records.columns[count][self._indices], dtype=np.int64).tolist()]


def teaching(records: Records, indices: np.ndarray) -> np.ndarray:
    """Those of the samples that teach a row: with a supervised token that is not their first."""
    return indices[records.num_aux_rows[indices] > 0]


def id_hash(sample_id: bytes) -> np.int64:
    return np.frombuffer(bytes.fromhex(checksum.of(sample_id))[:8], dtype=np.int64)[0]
