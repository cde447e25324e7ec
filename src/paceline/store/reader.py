"""Reads a store: memory-mapped slices of published shards, decoded when they are asked for."""

import resource
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

import numpy as np
import torch

from paceline.artefact import COMPLETE, Manifest
from paceline.contracts import SampleRecord
from paceline.errors import StoreCorruption, StoreError, StreamError
from paceline.store.cache import Cache
from paceline.store.codecs import codec_of
from paceline.store.encoded import EncodedSample, read_encoded, state_parts
from paceline.store.files import (
    receipt_numbers,
    receipt_path,
    remove_leftovers,
    shard_numbers,
)
from paceline.store.index import Index, build_index, open_index
from paceline.store.records import Records, teaching
from paceline.store.remote import open_shelf
from paceline.store.shard import Shard, open_published
from paceline.store.shelf import LocalShelf, Shelf
from paceline.store.spec import StoreSpec

_MAX_OPEN_SHARDS = 256


def _max_open_shards() -> int:
    """An open shard holds two file descriptors, its own and its mapping's. Several stores may be
    read at once: an eighth of what the process may have goes to each."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return _MAX_OPEN_SHARDS
    return max(8, min(_MAX_OPEN_SHARDS, limit // 16))


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

    def __init__(
        self, folder: Path | str, spec: StoreSpec, records: Records, shelf: Shelf | None = None
    ) -> None:
        self.folder = folder
        self.shelf = shelf or LocalShelf(Path(folder))
        self.spec = spec
        self.records = records
        self.codec = codec_of(spec)
        self._shards: OrderedDict[int, Shard] = OrderedDict()
        self._max_open = _max_open_shards()
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
        self.prove(shard, record.position)
        start, stop = shard.offsets[record.position : record.position + 2, 0].tolist()
        return StoredSample(
            record=record,
            input_ids=shard.rows("input_ids", start, stop),
            loss_mask=shard.rows("loss_mask", start, stop),
            aux=self.read_states(shard, record.position, "aux"),
            last=self.read_states(shard, record.position, "last"),
        )

    def read_tokens(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """input_ids int32 [T] and loss_mask bool [T] of a sample, views of the file: its states are
        neither fetched nor decoded. A sample's checksum covers those as well, so what comes from
        far away is held against the checksums of the shard's two tensors, which are read whole."""
        record = self.records[index]
        shard = self.shard(record.shard)
        start, stop = shard.offsets[record.position : record.position + 2, 0].tolist()
        ids, mask = (shard.tensor(name)[start:stop] for name in ("input_ids", "loss_mask"))
        return ids.numpy(), mask.numpy()

    def prove(self, shard: Shard, position: int) -> None:
        """Hold a sample that comes from far away against its checksum, once. Raises StoreCorruption
        where it is wrong in the original too."""
        if not shard.is_copy or position in shard.proved_samples:
            return
        try:
            read_encoded(shard, self.codec, position).check()
        except StoreCorruption:
            shard.fetch_again()
            read_encoded(shard, self.codec, position).check()
        shard.proved_samples.add(position)

    def read_states(
        self, shard: Shard, position: int, kind: str, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """One sample's states, `aux` or `last`, decoded (into `out` where it is given)."""
        parts = state_parts(shard, self.codec, kind, position)
        column = 1 if kind == "aux" else 2
        start, stop = shard.offsets[position : position + 2, column].tolist()
        return self.codec.decode(parts, (stop - start, *self.row_shape(kind)), out)

    def read_encoded(self, index: int) -> EncodedSample:
        """One sample as its shard keeps it, by its index in `records`."""
        record = self.records[index]
        return read_encoded(self.shard(record.shard), self.codec, record.position)

    def row_shape(self, kind: str) -> tuple[int, ...]:
        """Shape of one row of `aux` (A, D) or `last` (D,)."""
        return self.spec.row_shape(kind)

    def num_taught_rows(self, index: int) -> int:
        """Rows of a sample that TTT step 0 teaches: supervised tokens, but not a first token, which
        no row comes before."""
        record = self.records[index]
        shard = self.shard(record.shard)
        start = int(shard.offsets[record.position, 0])
        return record.num_supervised - int(shard.rows("loss_mask", start, start + 1).sum())

    def release(self, num_windows: int) -> None:
        """See Follower; what is finished stays."""

    def answer_pause(self, num_windows: int) -> None:
        """See Follower; what is finished never pauses."""

    def check_writer(self) -> None:
        """See Follower; what is finished has no writer."""

    def stop(self) -> None:
        """See Follower; what is finished waits for nothing."""

    def close_shard(self, number: int) -> None:
        """Forget an open shard; its space is free once it is removed and no view is left."""
        with self._lock:
            self._shards.pop(number, None)

    def shard(self, number: int) -> Shard:
        """A published shard, opened once."""
        with self._lock:
            if number in self._shards and not self._shards[number].is_gone():
                self._shards.move_to_end(number)
                return self._shards[number]
            shard = self.shelf.open(number)
            if shard.header_checksum != self.records.shard_header(number):
                raise StoreCorruption(f"{shard.path} is another shard than the index knows")
            self._shards[number] = shard
            if len(self._shards) > self._max_open:
                # Views that callers still hold keep their mapping alive.
                self._shards.popitem(last=False)
            return shard


class Store(ShardReader):
    """A folder that `extract` wrote, or a finished one below a URL (`s3://bucket/store`).

    unfinished: also open a folder whose run is not complete; what is published then is the store.
    cache: where slices of a store below a URL are kept.
    Raises UsageError for a folder that is not a store or not finished, StoreCorruption for damage.
    """

    def __init__(
        self, folder: str | Path, unfinished: bool = False, cache: Cache | None = None
    ) -> None:
        shelf = open_shelf(folder, cache)
        self.manifest: Manifest = shelf.manifest(unfinished)
        is_complete = self.manifest.status == COMPLETE
        index = open_index(shelf, keep=is_complete)
        if is_complete:
            _check_content(shelf.folder, self.manifest, index)
        spec = _spec_of(shelf.folder, self.manifest, index)
        super().__init__(shelf.folder, spec, index.records, shelf)

    def windows(self, split: str) -> Iterator[np.ndarray]:
        """int64 sample indices of a split, those together that a training may mix: all of them.
        Raises StreamError as require_whole does."""
        self.require_whole(split)
        yield self.split(split)

    def is_whole(self, split: str | None = None) -> bool:
        """Whether all of a split (None: of the store) is here still. A training from a stream with
        a byte budget lets shards go; held-out samples stay."""
        return not self._shards_let_go(split)

    def require_whole(self, split: str | None = None) -> None:
        """For whoever takes the samples for all that there are. Raises StreamError where some were
        let go."""
        if gone := self._shards_let_go(split):
            raise StreamError(
                f"{self.folder} is not whole: {len(gone)} of its shards were let go after a "
                "training had read them. Run `paceline extract` into a new folder."
            )

    def _shards_let_go(self, split: str | None) -> list[int]:
        numbers = self.shelf.receipt_numbers()
        if split is None:
            return numbers
        return [n for n in numbers if split in self.shelf.open_receipt(n).columns["split"]]

    def expected_rows(self, split: str, at_most: int | None = None) -> int:
        """Supervised tokens of the samples of a split that teach, of each sample at most so
        many."""
        lengths = self.records.num_supervised[teaching(self.records, self.split(split))]
        return int(np.minimum(lengths, at_most or lengths.max(initial=0)).sum())

    def verify(self, advance: Callable[[int], None] = lambda num_bytes: None) -> int:
        """Compare everything with its checksums, and what all shards and receipts hold with the
        manifest of a finished store, whatever the index says. Returns the number of bytes checked.
        Of a store below a URL everything is read anew, past the cache. advance: told the bytes of
        each shard done.

        Raises StoreCorruption that names the file and the tensor.
        """
        checked: list[int] = []

        def check(shard: Shard) -> None:
            checked.append(shard.verify())
            advance(checked[-1])

        index = build_index(self.shelf, check)
        if self.manifest.status == COMPLETE:
            _check_content(self.folder, self.manifest, index)
        return sum(checked)


def _check_content(folder: Path | str, manifest: Manifest, index: Index) -> None:
    if manifest.of_content(index.content) != manifest.fingerprint:
        raise StoreCorruption(
            f"{folder} does not hold what its manifest says: shards are missing, were added or "
            "changed since it was finished"
        )


def _spec_of(folder: Path | str, manifest: Manifest, index: Index) -> StoreSpec:
    if "store" in manifest.result:
        return StoreSpec.from_dict(manifest.result["store"])
    if index.spec is None:
        raise StoreError(f"{folder} has no published shard yet")
    return index.spec


def published_ids(folder: str | Path) -> set[str]:
    """The ids of all published samples, those of shards that were let go included: what a resumed
    run need not do again.

    Call it in the run that owns the folder, whose writers may be at work: leftovers of dead writers
    are removed.
    """
    folder = Path(folder)
    remove_leftovers(folder)
    published = (open_published(folder, n) for n in shard_numbers(folder))
    ids = {sample_id for shard in published for sample_id in shard.columns["sample_id"]}
    let_go = (Shard(receipt_path(folder, n)) for n in receipt_numbers(folder))
    return ids | {sample_id for shard in let_go for sample_id in shard.columns["sample_id"]}


def content_fingerprint(folder: str | Path) -> str:
    """A fingerprint of all published samples that does not depend on their order or on the
    borders of shards. Leaves the index beside them."""
    return open_index(LocalShelf(Path(folder))).content
