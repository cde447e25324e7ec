"""Reads a store: memory-mapped slices of published shards, decoded when they are asked for."""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

import numpy as np
import torch

from paceline import fingerprint
from paceline.artefact import Manifest, load_finished, load_manifest
from paceline.contracts import SampleRecord
from paceline.errors import StoreError
from paceline.store.codecs import codec_of
from paceline.store.files import remove_leftovers, shard_numbers, shard_path
from paceline.store.index import open_index
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


class Store:
    """A folder that `extract` wrote. Opens shards as they are needed; safe to use from threads.

    unfinished: also open a folder whose run is not complete; what is published then is the store.
    Raises UsageError for a folder that is not a store or not finished, StoreCorruption for damage.
    """

    def __init__(self, folder: str | Path, unfinished: bool = False) -> None:
        self.folder = Path(folder)
        load = load_manifest if unfinished else load_finished
        self.manifest: Manifest = load(self.folder, "extract")
        self.records = open_index(self.folder)
        self._shards: OrderedDict[int, Shard] = OrderedDict()
        self._lock = Lock()
        self.spec = self._find_spec()
        self._codec = codec_of(self.spec)

    def __len__(self) -> int:
        return len(self.records)

    def split(self, name: str) -> np.ndarray:
        """int64 indices of the samples of a split, ascending."""
        return self.records.split(name)

    def read(self, index: int) -> StoredSample:
        """One sample by its index in `records`."""
        record = self.records[index]
        shard = self._shard(record.shard)
        (token, aux, last), (token_end, aux_end, last_end) = shard.offsets[
            record.position : record.position + 2
        ].tolist()
        return StoredSample(
            record=record,
            input_ids=shard.rows("input_ids", token, token_end),
            loss_mask=shard.rows("loss_mask", token, token_end),
            aux=self._states(shard, "aux", record.position, aux, aux_end),
            last=self._states(shard, "last", record.position, last, last_end),
        )

    def verify(self) -> int:
        """Compare everything with its checksums. Returns the number of bytes checked.

        Raises StoreCorruption that names the shard and the tensor.
        """
        return sum(shard.verify() for shard in _all_shards(self.folder))

    def _states(
        self, shard: Shard, kind: str, position: int, start: int, stop: int
    ) -> torch.Tensor:
        shape = (self.spec.hidden_size,)
        if kind == "aux":
            shape = (self.spec.num_aux, *shape)
        parts = []
        for part in self._codec.parts(shape):
            name = kind + part.suffix
            if part.row_shape is None:
                ends = shard.tensor(f"{name}.offsets")[position : position + 2].tolist()
                parts.append(shard.rows(name, *ends))
            else:
                parts.append(shard.rows(name, start, stop))
        return self._codec.decode(parts, (stop - start, *shape))

    def _shard(self, number: int) -> Shard:
        with self._lock:
            if number in self._shards:
                self._shards.move_to_end(number)
                return self._shards[number]
            shard = self._shards[number] = Shard(shard_path(self.folder, number))
            if len(self._shards) > _MAX_OPEN_SHARDS:
                # Views that callers still hold keep their mapping alive.
                self._shards.popitem(last=False)
            return shard

    def _find_spec(self) -> StoreSpec:
        if "store" in self.manifest.result:
            return StoreSpec.from_dict(self.manifest.result["store"])
        if not len(self.records.shard_numbers):
            raise StoreError(f"{self.folder} has no published shard yet")
        return self._shard(int(self.records.shard_numbers[0])).spec


def published_ids(folder: str | Path) -> set[str]:
    """The ids of all published samples: what a resumed run need not do again.

    Call it as the folder's owner, before writers start: leftovers of dead runs are removed.
    """
    folder = Path(folder)
    remove_leftovers(folder)
    return {sample_id for shard in _all_shards(folder) for sample_id in shard.columns["sample_id"]}


def content_fingerprint(folder: str | Path) -> str:
    """A fingerprint of all published samples that does not depend on their order or on the
    borders of shards: of the spec and of the samples' sorted checksums."""
    spec, checksums = None, [np.empty((0, 16), np.uint8)]
    for shard in _all_shards(Path(folder)):
        spec = shard.spec.identity()
        checksums.append(shard.tensor("sample_checksums").numpy())
    halves = np.concatenate(checksums).view(">u8")
    in_order = halves[np.lexsort((halves[:, 1], halves[:, 0]))]
    return fingerprint.of_json([spec, fingerprint.of_bytes(in_order.tobytes())])


def _all_shards(folder: Path) -> Iterator[Shard]:
    return (Shard(shard_path(folder, number)) for number in shard_numbers(folder))
