"""Training from a store while it is written, under a byte budget, in two real processes."""

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from paceline.artefact import open_stage
from paceline.errors import LockedError, StreamError, UsageError
from paceline.store import (
    Follower,
    PackedReader,
    ShardWriter,
    Store,
    content_fingerprint,
    published_ids,
    stream_writer,
)
from paceline.store.budget import consumed_numbers, let_go
from paceline.store.files import shard_numbers

from .children import in_child, wait, with_fuse
from .making import make_sample, make_spec, same_bytes, states_of, write_store
from .working import run

SAMPLES = [make_sample(i, num_tokens=30) for i in range(120)]
# Four samples a shard.
SPEC = make_spec(shard_bytes=25_000)
BUDGET = 4 * SPEC.shard_bytes
MAX_TOKENS = 70
TRAINED = {s.sample_id for s in SAMPLES if s.num_supervised}


def write(folder: Path, budget_bytes: int | None = BUDGET, die_at: int | None = None) -> None:
    """As `extract` does it."""
    with open_stage(folder, "extract", {}, {}) as stage:
        if stage.done:
            return
        published = published_ids(folder)
        with stream_writer(folder, SPEC, budget_bytes):
            with ShardWriter(folder, SPEC) as writer:
                for number, sample in enumerate(SAMPLES):
                    if number == die_at:
                        os.kill(os.getpid(), signal.SIGKILL)
                    if sample.sample_id not in published:
                        writer.add(sample, *states_of(sample, SPEC))
            stage.finish({"store": SPEC.to_dict()}, content_fingerprint(folder))


def read_ids(
    folder: Path,
    start: int = 0,
    limit: int | None = None,
    max_bytes: int = 1 << 30,
    **options: int,
) -> list[list[str]]:
    """A training's way with a stream: the ids of each batch, each checked against its states.
    Checkpoints, and so releases, after every batch. Empty lists where it was asked to."""
    seen: list[list[str]] = []
    number = start
    with Follower(folder, wait_s=60, **options) as store:
        groups = store.groups("train", MAX_TOKENS, seed=1, start=start)
        for batch in PackedReader(store, groups, on_close=store.stop):
            assert _size(folder) <= max_bytes
            for i, record in enumerate(batch.records):
                aux, _ = states_of(SAMPLES[int(record.sample_id[7:])], SPEC)
                rows = slice(*batch.aux_starts[i : i + 2])
                assert same_bytes(batch.aux[rows], aux[: record.num_aux_rows])
            seen.append([r.sample_id for r in batch.records])
            number += bool(batch.records)
            store.release(number)
            if number == limit:
                break
    return seen


def _size(folder: Path) -> int:
    sizes = []
    for entry in os.scandir(folder / "shards"):
        try:
            sizes.append(entry.stat().st_size)
        except FileNotFoundError:
            continue
    return sum(sizes)


def flat(batches: list[list[str]]) -> list[str]:
    return [sample_id for batch in batches for sample_id in batch]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Memory, as /dev/shm is; too small for the whole store."""
    folder = tmp_path / "shm"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=480k", "tmpfs", folder], check=True)
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return write_store(tmp_path_factory.mktemp("whole") / "store", SPEC, SAMPLES)


def test_a_store_larger_than_its_disk_is_trained_on_in_two_processes(
    small_disk: Path, whole: Path
) -> None:
    folder = small_disk / "store"
    child = in_child(lambda _: write(folder))
    batches = read_ids(folder, max_bytes=BUDGET)
    assert wait(*child) == 0
    assert sorted(flat(batches)) == sorted(TRAINED)
    store = Store(folder)
    store.verify()
    assert len(store) < len(SAMPLES)
    assert published_ids(folder) == {s.sample_id for s in SAMPLES}
    assert content_fingerprint(folder) == content_fingerprint(whole)


def test_a_stream_that_fits_stays_and_gives_the_batches_of_a_finished_store(
    tmp_path: Path, whole: Path
) -> None:
    folder = tmp_path / "store"
    child = in_child(lambda _: write(folder, budget_bytes=None))
    with Follower(folder, wait_s=60) as store:
        streamed = [
            [store.records[i].sample_id for i in group]
            for group in store.groups("train", MAX_TOKENS, seed=1)
        ]
        assert store.is_whole
    assert wait(*child) == 0
    assert len(Store(folder)) == len(SAMPLES)
    assert streamed == read_ids(whole)


def test_resuming_at_any_batch_replays_nothing_and_reads_the_rest(
    tmp_path: Path, whole: Path
) -> None:
    one = read_ids(whole)
    for start in range(0, len(one) + 1, 4):
        assert read_ids(whole, start=start) == one[start:]


def test_ranks_share_the_batches(tmp_path: Path, whole: Path) -> None:
    one = read_ids(whole)
    folder = tmp_path / "store"
    write(folder, budget_bytes=None)
    by_rank = [
        read_ids(folder, rank=0, world_size=2),
        read_ids(folder, rank=1, world_size=2),
    ]
    assert [by_rank[i % 2][i // 2] for i in range(len(one))] == one


def test_a_writer_that_is_killed_is_told_and_the_pair_goes_on(tmp_path: Path, whole: Path) -> None:
    folder = tmp_path / "store"
    pid, reading = in_child(lambda _: write(folder, die_at=25))
    seen: list[list[str]] = []
    with (
        pytest.raises(StreamError, match=rf"the writer \(pid {pid} on .*\) died"),
        Follower(folder, wait_s=60) as store,
    ):
        for group in store.groups("train", MAX_TOKENS, seed=1):
            seen.append([store.records[i].sample_id for i in group])
            store.release(len(seen))
    assert wait(pid, reading) == -signal.SIGKILL
    # The reader starts first: what the dead writer left behind must not end it at once.
    child = in_child(lambda _: write(folder))
    rest = read_ids(folder, start=len(seen))
    assert wait(*child) == 0
    assert sorted(flat(seen + rest)) == sorted(TRAINED)
    assert content_fingerprint(folder) == content_fingerprint(whole)


def test_a_reader_that_is_killed_is_told_and_the_pair_goes_on(tmp_path: Path, whole: Path) -> None:
    folder = tmp_path / "store"

    def read_and_die(writing: int) -> None:
        with Follower(folder, wait_s=60) as store:
            for number, _ in enumerate(store.groups("train", MAX_TOKENS, seed=1), start=1):
                store.release(number)
                if number == 6:
                    os.kill(os.getpid(), signal.SIGKILL)

    pid, reading = in_child(read_and_die)
    with pytest.raises(StreamError, match=rf"the reader \(pid {pid} on .*\) died"):
        write(folder)
    assert wait(pid, reading) == -signal.SIGKILL
    child = in_child(lambda _: write(folder))
    rest = read_ids(folder, start=6)
    assert wait(*child) == 0
    full = read_ids(whole)
    assert set(flat(rest)) == TRAINED - set(flat(full)[: len(TRAINED) - len(flat(rest))])
    assert content_fingerprint(folder) == content_fingerprint(whole)


def test_each_side_hears_why_the_other_failed(tmp_path: Path) -> None:
    folder = tmp_path / "a"

    def fail(writing: int) -> None:
        with Follower(folder, wait_s=60) as store:
            next(store.groups("train", MAX_TOKENS, seed=1))
            raise ZeroDivisionError("loss is not finite")

    child = in_child(fail)
    with pytest.raises(StreamError, match="ZeroDivisionError: loss is not finite"):
        write(folder)
    assert wait(*child) == 1
    folder = tmp_path / "b"

    def fail_to_write(writing: int) -> None:
        with open_stage(folder, "extract", {}, {}), stream_writer(folder, SPEC, None):
            with ShardWriter(folder, SPEC) as writer:
                writer.add(SAMPLES[0], *states_of(SAMPLES[0], SPEC))
            raise ZeroDivisionError("engine fell over")

    child = in_child(fail_to_write)
    with pytest.raises(StreamError, match="ZeroDivisionError: engine fell over"):
        read_ids(folder)
    assert wait(*child) == 1


def test_a_reader_that_leaves_early_is_told_to_a_writer_that_needs_room(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    child = in_child(lambda _: read_ids(folder, limit=3) and None)
    with pytest.raises(StreamError, match="is done, so nobody makes room"):
        write(folder)
    assert wait(*child) == 0
    # Without a budget the rest is written.
    write(folder, budget_bytes=None)
    assert published_ids(folder) == {s.sample_id for s in SAMPLES}


def test_a_full_budget_asks_for_a_release(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    child = in_child(lambda _: write(folder))
    with Follower(folder, wait_s=60) as store:
        number, asked = 0, 0
        for group in store.groups("train", MAX_TOKENS, seed=1):
            if not group:
                # Only now does this training checkpoint.
                asked += 1
                store.release(number)
            number += bool(group)
    assert wait(*child) == 0
    assert 2 <= asked <= len(SAMPLES)


def test_a_stream_has_one_reader(tmp_path: Path, whole: Path) -> None:
    with Follower(whole), pytest.raises(LockedError, match=f"a reader already .pid {os.getpid()}"):
        Follower(whole).__enter__()


def test_a_writer_that_never_comes_is_not_waited_for_without_end(tmp_path: Path) -> None:
    with pytest.raises(StreamError, match="nobody has written to it for 0 s"):
        Follower(tmp_path / "store", wait_s=0.0).__enter__()


def test_shards_that_went_too_early_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    run(folder, SAMPLES, SPEC)
    one = read_ids(folder)
    let_go(folder, 1)
    with pytest.raises(StreamError, match=r"batch 0 needs shards \[1\], which were let go"):
        read_ids(folder)
    # A checkpoint that has passed them needs them no more.
    assert read_ids(folder, start=9) == one[9:]
    (folder / "stream/order.json").unlink()
    with pytest.raises(StreamError, match=r"shards \[1\] were let go by another reader"):
        read_ids(folder)


def test_a_budget_too_small_for_two_shards_is_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(UsageError, match="does not hold two shards"),
        stream_writer(tmp_path, SPEC, 49_999),
    ):
        pass


def test_a_kill_while_a_shard_is_let_go_loses_no_id(tmp_path: Path) -> None:
    n = 0
    while True:
        folder = tmp_path / str(n)
        run(folder, SAMPLES[:12], SPEC)
        content, ids = content_fingerprint(folder), published_ids(folder)
        status = wait(*in_child(with_fuse(lambda folder=folder: let_go(folder, 1), n)))
        assert published_ids(folder) == ids
        assert content_fingerprint(folder) == content
        assert consumed_numbers(folder) == []
        Store(folder).verify()
        if status == 0:
            assert shard_numbers(folder) == [0, 2]
            break
        n += 1
    assert n >= 5
