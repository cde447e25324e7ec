"""The store of hidden states: shards that appear whole or not at all, and what reads them."""

from paceline.store.batches import PackedReader, PackedSamples
from paceline.store.budget import stream_writer
from paceline.store.follow import Follower, follow
from paceline.store.packing import iterate_packed
from paceline.store.pair import run_pair
from paceline.store.reader import Store, StoredSample, content_fingerprint, published_ids
from paceline.store.spec import StoreSpec
from paceline.store.writer import ShardWriter

__all__ = [
    "Follower",
    "PackedReader",
    "PackedSamples",
    "ShardWriter",
    "Store",
    "StoreSpec",
    "StoredSample",
    "content_fingerprint",
    "follow",
    "iterate_packed",
    "published_ids",
    "run_pair",
    "stream_writer",
]
