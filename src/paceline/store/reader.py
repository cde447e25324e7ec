"""Reads a store: memory-mapped slices of published shards, decoded when they are asked for."""

from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

import numpy as np
import torch

from paceline.artefact import COMPLETE, Manifest, load_finished, load_manifest
from paceline.contracts import SampleRecord
from paceline.errors import StoreCorruption, StoreError
from paceline.store.codecs import codec_of
from paceline.store.encoded import EncodedSample, read_encoded, state_parts
from paceline.store.files import (
    receipt_numbers,
    receipt_path,
    remove_leftovers,
    shard_numbers,
    shard_path,
)
from paceline.store.index import Index, open_index
from paceline.store.records import Records
from paceline.store.shard import Shard
from paceline.store.spec import StoreSpec

# A mapping holds a file descriptor; the usual limit of a process is 1,024 of them.
_MAX_OPEN_SHARDS = 256


@dataclass(frozen=True)
class StoredSample:
    """One sample as it was stored.

    input_ids: int32 [T]. loss_mask: bool [T]. aux: [R, A, D], the auxiliary states of the first R
    positions. last: [M, D], the last states at the positions where loss_mask is true. With codec
    `raw` all four are views of the file: copy before you write into them or keep them for long.
    """

    record: SampleRecord
    input_ids: torch.Tensor
    loss_mask: torch.Tensor
    aux: torch.Tensor
    last: torch.Tensor


class ShardReader:
    """Reads samples out of the published shards of a folder. Opens shards as they are needed;
    safe to use from threads. What `Store` and `Follower` share."""

    def __init__(self, folder: Path, spec: StoreSpec, records: Records) -> None:
        self.folder = folder
        self.spec = spec
        self.records = records
        self.codec = codec_of(spec)
        self._shards: OrderedDict[int, Shard] = OrderedDict()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self.records)

    def split(self, name: str) -> np.ndarray:
        """int64 indices of the samples of a split, ascending."""
        return self.records.split(name)

    def read(self, index: int) -> StoredSample:
        """One sample by its index in `records`."""
        record = self.records[index]
        shard = self.shard(record.shard)
        start, stop = shard.offsets[record.position : record.position + 2, 0].tolist()
        return StoredSample(
            record=record,
            input_ids=shard.rows("input_ids", start, stop),
            loss_mask=shard.rows("loss_mask", start, stop),
            aux=self.read_states(record, "aux"),
            last=self.read_states(record, "last"),
        )

    def read_states(
        self, record: SampleRecord, kind: str, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """One sample's states, `aux` or `last`, decoded (into `out` where it is given)."""
        shard = self.shard(record.shard)
        parts = state_parts(shard, self.codec, kind, record.position)
        column = 1 if kind == "aux" else 2
        start, stop = shard.offsets[record.position : record.position + 2, column].tolist()
        return self.codec.decode(parts, (stop - start, *self.row_shape(kind)), out)

    def read_encoded(self, index: int) -> EncodedSample:
        """One sample as its shard keeps it, by its index in `records`."""
        record = self.records[index]
        return read_encoded(self.shard(record.shard), self.codec, record.position)

    def row_shape(self, kind: str) -> tuple[int, ...]:
        """Shape of one row of `aux` (A, D) or `last` (D,)."""
        return self.spec.row_shape(kind)

    def close_shard(self, number: int) -> None:
        """Forget an open shard; its space is free once it is removed and no view is left."""
        with self._lock:
            self._shards.pop(number, None)

    def shard(self, number: int) -> Shard:
        """A published shard, opened once."""
        with self._lock:
            if number in self._shards:
                self._shards.move_to_end(number)
                return self._shards[number]
            shard = Shard(shard_path(self.folder, number))
            if shard.header_checksum != self.records.shard_header(number):
                raise StoreCorruption(f"{shard.path} is another shard than the index knows")
            self._shards[number] = shard
            if len(self._shards) > _MAX_OPEN_SHARDS:
                # Views that callers still hold keep their mapping alive.
                self._shards.popitem(last=False)
            return shard


class Store(ShardReader):
    """A folder that `extract` wrote.

    unfinished: also open a folder whose run is not complete; what is published then is the store.
    Raises UsageError for a folder that is not a store or not finished, StoreCorruption for damage.
    """

    def __init__(self, folder: str | Path, unfinished: bool = False) -> None:
        folder = Path(folder)
        load = load_manifest if unfinished else load_finished
        self.manifest: Manifest = load(folder, "extract")
        index = open_index(folder, keep=self.manifest.status == COMPLETE)
        if self.manifest.status == COMPLETE:
            _check_content(folder, self.manifest, index)
        super().__init__(folder, _spec_of(folder, self.manifest, index), index.records)

    def verify(self) -> int:
        """Compare everything with its checksums. Returns the number of bytes checked.

        Raises StoreCorruption that names the shard and the tensor.
        """
        numbers = shard_numbers(self.folder)
        return sum(Shard(shard_path(self.folder, number)).verify() for number in numbers)


def _check_content(folder: Path, manifest: Manifest, index: Index) -> None:
    if manifest.of_content(index.content) != manifest.fingerprint:
        raise StoreCorruption(
            f"{folder} does not hold what its manifest says: shards are missing, were added or "
            "changed since it was finished"
        )


def _spec_of(folder: Path, manifest: Manifest, index: Index) -> StoreSpec:
    if "store" in manifest.result:
        return StoreSpec.from_dict(manifest.result["store"])
    if index.spec is None:
        raise StoreError(f"{folder} has no published shard yet")
    return index.spec


def published_ids(folder: str | Path) -> set[str]:
    """The ids of all published samples, those of shards that were let go included: what a resumed
    run need not do again.

    Call it as the folder's owner, before writers start: leftovers of dead runs are removed.
    """
    folder = Path(folder)
    remove_leftovers(folder)
    paths = [shard_path(folder, n) for n in shard_numbers(folder)]
    paths += [receipt_path(folder, n) for n in receipt_numbers(folder)]
    return {sample_id for path in paths for sample_id in Shard(path).columns["sample_id"]}


def content_fingerprint(folder: str | Path) -> str:
    """A fingerprint of all published samples that does not depend on their order or on the
    borders of shards. Leaves the index beside them."""
    return open_index(Path(folder)).content
