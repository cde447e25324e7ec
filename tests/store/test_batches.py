"""Batches read ahead hold what single reads give, in order, however they are read."""

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from threading import Event

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import StoreCorruption
from paceline.store import PackedReader, PackedSamples, Store, iterate_packed
from paceline.store.packing import shuffled

from .making import make_sample, make_spec, same_bytes, write_store

SAMPLES = [make_sample(i, split="heldout" if i % 7 == 0 else "train") for i in range(40)]
# Samples without a supervised token and with only the first one supervised have no rows.
SAMPLES += [make_sample(i, num_tokens=1) for i in range(40, 46)]


@pytest.fixture(scope="module", params=["raw", "lossless", "int8", "fp8"])
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Store:
    folder = tmp_path_factory.mktemp("batches") / request.param
    return Store(write_store(folder, make_spec(request.param), SAMPLES))


def assert_is(batch: PackedSamples, store: Store, group: list[int]) -> None:
    alone = [store.read(i) for i in group]
    assert [r.sample_id for r in batch.records] == [s.record.sample_id for s in alone]
    for name in ("input_ids", "loss_mask", "aux", "last"):
        assert same_bytes(getattr(batch, name), torch.cat([getattr(s, name) for s in alone]))
    for i, sample in enumerate(alone):
        assert same_bytes(batch.aux[batch.aux_starts[i] : batch.aux_starts[i + 1]], sample.aux)
        assert same_bytes(batch.last[batch.last_starts[i] : batch.last_starts[i + 1]], sample.last)
        assert batch.token_starts[i + 1] - batch.token_starts[i] == sample.record.num_tokens


@pytest.mark.parametrize("num_threads", [1, 3])
def test_batches_hold_their_samples_in_order(store: Store, num_threads: int) -> None:
    groups = list(iterate_packed(store, "train", 90, seed=3))
    count = 0
    for group, batch in zip(groups, PackedReader(store, groups, num_threads=num_threads)):
        assert_is(batch, store, group)
        count += 1
    assert count == len(groups) > 8


def test_the_newest_batches_stay_valid(store: Store) -> None:
    groups = [[i, i + 1] for i in range(0, 40, 2)]
    newest: list[PackedSamples] = []
    for number, batch in enumerate(PackedReader(store, groups, keep=3)):
        newest = [*newest, batch][-3:]
        for offset, kept in enumerate(reversed(newest)):
            assert_is(kept, store, groups[number - offset])


def test_memory_is_used_again(store: Store) -> None:
    places = {batch.aux.data_ptr() for batch in PackedReader(store, [[1, 2]] * 30)}
    # Two that are read, one that is out, one in between.
    assert len(places) <= 4


def test_an_error_in_a_reading_thread_reaches_the_consumer(tmp_path: Path) -> None:
    folder = write_store(tmp_path / "store", make_spec(), SAMPLES)
    store = Store(folder)
    path = folder / "shards/00003.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    groups = [[i] for i in range(len(store))]
    seen = []
    with pytest.raises(StoreCorruption, match="00003"):
        for batch in PackedReader(store, groups):
            seen.append(batch.records[0].shard)
    assert set(seen) == {0, 1, 2}


def test_an_error_in_the_groups_reaches_the_consumer(store: Store) -> None:
    def groups() -> Iterator[list[int]]:
        yield [0]
        raise ZeroDivisionError

    reader = iter(PackedReader(store, groups()))
    assert_is(next(reader), store, [0])
    with pytest.raises(ZeroDivisionError):
        next(reader)


def test_a_batch_at_hand_does_not_wait_for_the_next_group(store: Store) -> None:
    may_go_on = Event()

    def groups() -> Iterator[list[int]]:
        yield [1]
        assert may_go_on.wait(300)
        yield [2]

    reader = iter(PackedReader(store, groups()))
    assert_is(next(reader), store, [1])
    may_go_on.set()
    assert_is(next(reader), store, [2])


def test_leaving_early_stops_groups_that_wait(store: Store) -> None:
    stopped = Event()

    def groups() -> Iterator[list[int]]:
        yield [1]
        assert stopped.wait(300)

    reader = iter(PackedReader(store, groups(), on_close=stopped.set))
    next(reader)
    reader.close()
    assert stopped.is_set()


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 5),
    epoch=st.integers(0, 3),
    max_tokens=st.integers(1, 300),
    start=st.integers(0, 60),
    world=st.integers(1, 4),
)
def test_resuming_anywhere_equals_an_uninterrupted_epoch(
    plain_store: Store, seed: int, epoch: int, max_tokens: int, start: int, world: int
) -> None:
    one = list(iterate_packed(plain_store, "train", max_tokens, seed=seed, epoch=epoch))
    again = list(
        iterate_packed(plain_store, "train", max_tokens, seed=seed, epoch=epoch, start=start)
    )
    assert again == one[start:]
    records = plain_store.records
    # The first token of a document has no row before it that could be taught.
    teaches = lambda index: bool(plain_store.read(index).loss_mask[1:].any())
    wanted = list(filter(teaches, plain_store.split("train").tolist()))
    assert sorted(chain.from_iterable(one)) == wanted
    for batch in one:
        assert len(batch) == 1 or records.num_tokens[batch].sum() <= max_tokens
    by_rank = [
        list(
            iterate_packed(
                plain_store, "train", max_tokens, seed=seed, epoch=epoch, rank=r, world_size=world
            )
        )
        for r in range(world)
    ]
    assert [by_rank[i % world][i // world] for i in range(len(one))] == one


@pytest.fixture(scope="module")
def plain_store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store(write_store(tmp_path_factory.mktemp("plain") / "s", make_spec(), SAMPLES))


def test_the_order_is_that_of_splitmix64() -> None:
    """Keys by an independent SplitMix64 in Python's own integers."""

    def mix(z: int) -> int:
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
        return z ^ (z >> 31)

    def keys(seed: int, epoch: int, purpose: int, count: int) -> list[int]:
        state = 0
        for value in (seed, epoch, purpose):
            state = mix((state + value) % 2**64)
        return [mix((state + (i + 1) * 0x9E3779B97F4A7C15) % 2**64) for i in range(count)]

    seed, epoch, total = 7, 2, 1000
    blocks = [list(range(a, min(a + 64, total))) for a in range(0, total, 64)]
    by_key = keys(seed, epoch, 0, len(blocks))
    line = [i for b in sorted(range(len(blocks)), key=by_key.__getitem__) for i in blocks[b]]
    by_key = keys(seed, epoch, 1, total)
    windows = [list(range(a, min(a + 300, total))) for a in range(0, total, 300)]
    order = [line[p] for w in windows for p in sorted(w, key=by_key.__getitem__)]
    assert shuffled(np.arange(total), seed, epoch, window_samples=300).tolist() == order
    # SplitMix64's published first output for state 0.
    assert mix(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF


def test_epochs_and_seeds_differ_and_mix_the_whole_store() -> None:
    order = shuffled(np.arange(50_000), seed=1, epoch=0)
    assert not np.array_equal(order, shuffled(np.arange(50_000), seed=1, epoch=1))
    assert not np.array_equal(order, shuffled(np.arange(50_000), seed=2, epoch=0))
    assert np.array_equal(np.sort(order), np.arange(50_000))
    # Where the first tenth of the samples lands: everywhere, about evenly.
    places = np.flatnonzero(order < 5_000) * 10 // 50_000
    assert np.bincount(places, minlength=10).min() > 150


def test_chosen_records_are_those_of_the_store(plain_store: Store) -> None:
    records = plain_store.records
    indices = [41, 0, 7, 7, len(records) - 1]
    chosen = records.choose(indices)
    assert list(chosen) == [records[i] for i in indices]
    assert chosen[-1] == records[-1] and chosen[1:3] == [records[0], records[7]]
    assert chosen.places() == [(records[i].shard, records[i].position) for i in indices]
    for wrong in ([0, len(records)], [-1]):
        with pytest.raises(IndexError, match=f"a store of {len(records)} samples"):
            records.choose(wrong)
