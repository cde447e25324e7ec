"""In which order samples are captured, and in shards of which size."""

from collections.abc import Sequence

from paceline.contracts import TRAIN_SPLIT, TokenSample
from paceline.recipe import ExtractOptions
from paceline.store import StoreSpec
from paceline.store.records import id_hash
from paceline.store.sizes import store_size

# Shards in a byte budget: two that are trained on, two that come next, and some in work.
_STREAM_SHARDS = 8


def capture_order(samples: Sequence[TokenSample]) -> list[list[TokenSample]]:
    """Groups to be captured one after the other: held-out samples first, so that they stand in
    shards of their own, which stay; then the training's, mixed by a hash of their ids, so that
    what is read together is not all of one source."""
    heldout = [s for s in samples if s.split != TRAIN_SPLIT]
    training = [s for s in samples if s.split == TRAIN_SPLIT]
    training.sort(key=lambda s: id_hash(s.sample_id.encode()))
    return [group for group in (heldout, training) if group]


def shard_bytes_of(options: ExtractOptions) -> int:
    """The size of a shard, so that enough of them fit into the byte budget."""
    if options.stream_bytes is None:
        return options.shard_bytes
    return min(options.shard_bytes, max(1, options.stream_bytes // _STREAM_SHARDS))


def least_budget(options: ExtractOptions, num_kept_bytes: int) -> int:
    """The smallest byte budget that holds what stays and two shards, which are a share of it."""
    shares = -(-num_kept_bytes * _STREAM_SHARDS // (_STREAM_SHARDS - 2))
    return min(num_kept_bytes + 2 * options.shard_bytes, max(num_kept_bytes + 2, shares))


def kept_bytes(spec: StoreSpec, samples: Sequence[TokenSample]) -> int:
    """Bytes of the shards that no training lets go, about."""
    heldout = [s for s in samples if s.split != TRAIN_SPLIT]
    return round(store_size(spec, heldout).total) if heldout else 0
