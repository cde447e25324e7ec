"""The order in which samples are read: shuffled over the whole store, cut into batches.

The order is a function of (seed, epoch) alone, so a run can stop after any batch and go on there
without reading what came before.
"""

from collections.abc import Iterator

import numpy as np

from paceline.store.reader import Store
from paceline.store.records import teaching

# Blocks of neighbouring samples are shuffled over the whole store, then single samples within a
# window: what is read at a time lies together on the disk, and the mixing is still global.
BLOCK_SAMPLES = 64
WINDOW_SAMPLES = 8192


def iterate_packed(
    store: Store,
    split: str,
    max_tokens: int,
    *,
    seed: int,
    epoch: int = 0,
    start: int = 0,
    rank: int = 0,
    world_size: int = 1,
) -> Iterator[list[int]]:
    """Batches of sample indices of one epoch, each of at most `max_tokens` tokens.

    A sample that is longer than max_tokens is a batch of its own; samples that teach nothing are
    left out. Batch i goes to rank i % world_size; `start` counts batches over all ranks.
    """
    order = teaching(store.records, shuffled(store.split(split), seed, epoch))
    for number, batch in enumerate(cut(order, store.records.num_tokens, max_tokens)):
        if number >= start and number % world_size == rank:
            yield batch


def cut(order: np.ndarray, sizes: np.ndarray, max_tokens: int) -> Iterator[list[int]]:
    """Cut samples, in order, into batches of at most `max_tokens` tokens (a longer sample alone).

    order: int64 sample indices; sizes: the tokens of every sample of the store.
    """
    batch: list[int] = []
    num_tokens = 0
    for index, tokens in zip(order.tolist(), sizes[order].tolist(), strict=True):
        if batch and num_tokens + tokens > max_tokens:
            yield batch
            batch, num_tokens = [], 0
        batch.append(index)
        num_tokens += tokens
    if batch:
        yield batch


def shuffled(
    indices: np.ndarray,
    seed: int,
    epoch: int,
    block_samples: int = BLOCK_SAMPLES,
    window_samples: int = WINDOW_SAMPLES,
) -> np.ndarray:
    """A permutation of `indices`, the same on every machine for the same seed and epoch."""
    starts = np.arange(0, len(indices), block_samples)
    blocks = starts[np.argsort(_keys(seed, epoch, 0, len(starts)), kind="stable")]
    pieces = [indices[start : start + block_samples] for start in blocks]
    order = np.concatenate([np.empty(0, np.int64), *pieces])
    keys = _keys(seed, epoch, 1, len(order))
    window = np.arange(len(order)) // window_samples
    return order[np.lexsort((keys, window))]


def _keys(seed: int, epoch: int, purpose: int, count: int) -> np.ndarray:
    """uint64 [count]: SplitMix64 (Steele, Lea and Flood 2014) of a counter. numpy's generators may
    give other streams in other versions; an order that a resumed run repeats must not."""
    with np.errstate(over="ignore"):
        state = np.uint64(0)
        for value in (seed, epoch, purpose):
            state = _mix(state + np.uint64(value % (1 << 64)))
        return _mix(state + np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN)


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(values: np.ndarray | np.uint64) -> np.ndarray | np.uint64:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
