"""Training from a store while it is written, under a byte budget, in two real processes."""

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib import import_module
from itertools import count
from pathlib import Path

import pytest
import torch

from paceline.artefact import open_stage
from paceline.contracts import TokenSample
from paceline.errors import LockedError, StoreError, StreamError, UsageError
from paceline.store import (
    Follower,
    PackedReader,
    ShardWriter,
    Store,
    content_fingerprint,
    follow,
    published_ids,
    stream_writer,
)
from paceline.store.budget import consumed_numbers, let_go, mark_consumed
from paceline.store.files import shard_numbers
from paceline.store.packing import cut, shuffled
from paceline.store.presence import DEAD, READER, look, present

from ..presence import wait_until_present
from ..small_disk import small_disk
from .children import in_child, wait, with_fuse
from .making import make_sample, make_spec, same_bytes, states_of, write_store
from .working import run

SAMPLES = [make_sample(i, num_tokens=30) for i in range(120)]
# Four samples a shard.
SPEC = make_spec(shard_bytes=25_000)
BUDGET = 6 * SPEC.shard_bytes
MAX_TOKENS = 70
TRAINED = {s.sample_id for s in SAMPLES if s.num_supervised}


def write(
    folder: Path,
    budget_bytes: int | None = BUDGET,
    before: Callable[[int], None] = lambda number: None,
    samples: Sequence[TokenSample] = SAMPLES,
    num_workers: int = 1,
) -> None:
    """As `extract` does it. before: called before each sample with its number."""
    said = {"store": SPEC.to_dict(), "planned": {}}
    with open_stage(folder, "extract", {}, {}) as stage:
        if stage.done:
            return
        published = published_ids(folder)
        stage.announce(said)

        def work(worker: int) -> None:
            with ShardWriter(folder, SPEC, worker) as writer:
                for number, sample in list(enumerate(samples))[worker::num_workers]:
                    before(number)
                    if sample.sample_id not in published:
                        writer.add(sample, *states_of(sample, SPEC))

        with stream_writer(folder, SPEC, budget_bytes):
            with ThreadPoolExecutor(num_workers) as pool:
                list(pool.map(work, range(num_workers)))
            stage.finish(said, content_fingerprint(folder))


def dying_at(fatal: int, folder: Path) -> Callable[[int], None]:
    def die(number: int) -> None:
        if number == fatal:
            wait_until_present(folder, READER)
            os.kill(os.getpid(), signal.SIGKILL)

    return die


def order_of(folder: Path) -> Path:
    """Where a training on this store keeps its order of reading."""
    return folder.with_name(f"{folder.name}-order.json")


def batches(store: Follower | Store, start: int = 0) -> Iterator[tuple[list[int], int]]:
    """A training's groups of samples, and how many windows are done after each. An empty group:
    a pause."""
    number = 0
    windows = 0
    for window in store.windows("train"):
        if window is None:
            yield [], windows
            continue
        order = shuffled(window[store.records.num_supervised[window] > 0], seed=1, epoch=windows)
        groups = list(cut(order, store.records.num_tokens, MAX_TOKENS))
        windows += 1
        for group in groups:
            number += 1
            if number > start:
                yield group, windows - (group is not groups[-1])


def checkpoint(store: Follower, group: list[int], windows: int) -> None:
    """What a training does that checkpoints after every group."""
    (store.release if group else store.answer_pause)(windows)


def read_ids(
    folder: Path,
    start: int = 0,
    limit: int | None = None,
    max_bytes: int = 1 << 30,
    rank: int = 0,
) -> list[list[str]]:
    """A training's way with a stream: the ids of each batch, each checked against its states.
    Checkpoints, and so releases, after every batch."""
    seen: list[list[str]] = []
    done: list[int] = []

    def groups(store: Follower) -> Iterator[list[int]]:
        for group, windows in batches(store, start):
            done.append(windows)
            yield group

    with follow(folder, order_of(folder), wait_s=300, rank=rank) as store:
        for number, batch in enumerate(PackedReader(store, groups(store), on_close=store.stop)):
            assert _size(folder) <= max_bytes
            for i, record in enumerate(batch.records):
                aux, _ = states_of(sample_of(record.sample_id), SPEC)
                rows = slice(*batch.aux_starts[i : i + 2])
                assert same_bytes(batch.aux[rows], aux[: record.num_aux_rows])
            if batch.records:
                seen.append([r.sample_id for r in batch.records])
            checkpoint(store, batch.records, done[number])
            if len(seen) == limit:
                break
    return seen


def sample_of(sample_id: str) -> TokenSample:
    return SAMPLES[int(sample_id[7:])]


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
def shm(tmp_path: Path) -> Iterator[Path]:
    """Memory, as /dev/shm is; too small for the whole store."""
    with small_disk(tmp_path / "shm", "480k") as folder:
        yield folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return write_store(tmp_path_factory.mktemp("whole") / "store", SPEC, SAMPLES)


def test_a_store_larger_than_its_disk_is_trained_on_in_two_processes(
    shm: Path, whole: Path
) -> None:
    folder = shm / "store"
    child = in_child(lambda _: write(folder))
    seen = read_ids(folder, max_bytes=BUDGET)
    assert wait(*child) == 0
    assert sorted(flat(seen)) == sorted(TRAINED)
    store = Store(folder)
    store.verify()
    assert len(store) < len(SAMPLES)
    assert published_ids(folder) == {s.sample_id for s in SAMPLES}
    assert content_fingerprint(folder) == content_fingerprint(whole)
    with pytest.raises(StreamError, match="is not whole"):
        next(store.windows("train"))


def test_a_stream_that_fits_stays_and_is_read_in_the_same_order_again(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    child = in_child(lambda _: write(folder, budget_bytes=None))
    seen = read_ids(folder)
    assert wait(*child) == 0
    assert sorted(flat(seen)) == sorted(TRAINED)
    assert len(Store(folder)) == len(SAMPLES)
    # The training's own order holds, whatever has been finished since.
    assert read_ids(folder) == seen


def test_the_order_depends_on_no_clock(tmp_path: Path) -> None:
    """One writer's shards are read in their order, however slow either side and however small the
    room: a training's steps are then the same."""
    orders = []
    for name, budget in (("wide", None), ("tight", 3 * SPEC.shard_bytes), ("wider", BUDGET)):
        folder = tmp_path / name
        child = in_child(lambda _, folder=folder, budget=budget: write(folder, budget))
        orders.append(read_ids(folder))
        assert wait(*child) == 0
    assert orders[0] == orders[1] == orders[2]


def test_workers_share_a_budget(tmp_path: Path, whole: Path) -> None:
    folder = tmp_path / "store"
    child = in_child(lambda _: write(folder, 4 * SPEC.shard_bytes, num_workers=3))
    seen = read_ids(folder, max_bytes=4 * SPEC.shard_bytes)
    assert wait(*child) == 0
    assert sorted(flat(seen)) == sorted(TRAINED)
    assert content_fingerprint(folder) == content_fingerprint(whole)


def test_a_finished_store_is_one_window_for_those_who_follow_no_stream(whole: Path) -> None:
    store = Store(whole)
    (window,) = store.windows("train")
    assert window.tolist() == list(range(len(SAMPLES)))
    assert store.expected_rows("train") == sum(s.num_supervised for s in SAMPLES)


def test_resuming_at_any_batch_replays_nothing_and_reads_the_rest(whole: Path) -> None:
    one = read_ids(whole)
    for start in range(0, len(one) + 1, 4):
        assert read_ids(whole, start=start) == one[start:]


def test_ranks_read_the_same_order(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    write(folder, budget_bytes=None)
    assert read_ids(folder, rank=0) == read_ids(folder, rank=1)


def test_a_writer_that_is_killed_is_told_and_the_pair_goes_on(tmp_path: Path, whole: Path) -> None:
    folder = tmp_path / "store"
    pid, reading = in_child(lambda _: write(folder, before=dying_at(30, folder)))
    seen: list[list[str]] = []
    with (
        pytest.raises(StreamError, match=rf"the writer \(pid {pid} on .*\) died"),
        follow(folder, order_of(folder), wait_s=300) as store,
    ):
        for group, done in batches(store):
            if group:
                seen.append([store.records[i].sample_id for i in group])
            checkpoint(store, group, done)
    assert wait(pid, reading) == -signal.SIGKILL
    # The reader starts first: what the dead writer left behind must not end it at once.
    child = in_child(lambda _: write(folder))
    rest = read_ids(folder, start=len(seen))
    assert wait(*child) == 0
    assert sorted(flat(seen + rest)) == sorted(TRAINED)
    assert content_fingerprint(folder) == content_fingerprint(whole)


def test_a_reader_that_has_work_hears_of_its_writers_death(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    pid, reading = in_child(lambda _: write(folder, None, dying_at(60, folder)))
    with follow(folder, order_of(folder), wait_s=300) as store:
        next(batches(store))
        assert wait(pid, reading) == -signal.SIGKILL
        with pytest.raises(StreamError, match=rf"the writer \(pid {pid} on .*\) died"):
            until_it_raises(store.check_writer)


def until_it_raises(check: Callable[[], None], seconds: float = 300.0) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        check()


@pytest.mark.parametrize("budget", [1 << 30, BUDGET], ids=["with room", "without"])
def test_a_reader_that_is_killed_is_told_and_the_pair_goes_on(
    tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch, budget: int
) -> None:
    monkeypatch.setattr("paceline.store.budget._LOOK_S", 0.0)
    folder = tmp_path / "store"

    def read_and_die(writing: int) -> None:
        with follow(folder, order_of(folder), wait_s=300) as store:
            for number, (group, done) in enumerate(batches(store), start=1):
                checkpoint(store, group, done)
                if number == 6:
                    os.kill(os.getpid(), signal.SIGKILL)

    def wait_for_death(number: int) -> None:
        while number == 60 and not ((reader := look(folder, READER)) and reader.state == DEAD):
            os.sched_yield()

    pid, reading = in_child(read_and_die)
    with pytest.raises(StreamError, match=rf"the reader \(pid {pid} on .*\) died"):
        write(folder, budget, wait_for_death)
    assert wait(pid, reading) == -signal.SIGKILL
    assert len(published_ids(folder)) < len(SAMPLES)
    child = in_child(lambda _: write(folder))
    rest = read_ids(folder, start=6)
    assert wait(*child) == 0
    undisturbed = read_ids(whole)
    assert rest == undisturbed[6:]
    assert content_fingerprint(folder) == content_fingerprint(whole)


def test_each_side_hears_why_the_other_failed(tmp_path: Path) -> None:
    folder = tmp_path / "a"

    def fail(writing: int) -> None:
        with follow(folder, order_of(folder), wait_s=300) as store:
            next(store.windows("train"))
            raise ZeroDivisionError("loss is not finite")

    child = in_child(fail)
    with pytest.raises(StreamError, match="ZeroDivisionError: loss is not finite"):
        write(folder)
    assert wait(*child) == 1
    folder = tmp_path / "b"

    def fail_to_write(number: int) -> None:
        if number == 1:
            wait_until_present(folder, READER)
            raise ZeroDivisionError("engine fell over")

    child = in_child(lambda _: write(folder, before=fail_to_write))
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
    num_asked = 0
    with follow(folder, order_of(folder), wait_s=300) as store:
        for group, done in batches(store):
            # A training that checkpoints only when it is asked to.
            if not group:
                num_asked += 1
                store.answer_pause(done)
    assert wait(*child) == 0
    assert 2 <= num_asked <= len(SAMPLES) / 8


def test_a_budget_that_nothing_can_leave_is_an_error(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    child = in_child(lambda _: write(folder))
    with (
        pytest.raises(StreamError, match="Raise `stream_bytes` of extract"),
        follow(folder, order_of(folder), wait_s=300) as store,
    ):
        for window in store.windows("train"):
            if window is None:
                store.answer_pause(0)
    # The writer hears of it too.
    assert wait(*child) == 1


def test_shards_with_held_out_samples_stay(tmp_path: Path) -> None:
    heldout = [replace(s, split="heldout") for s in SAMPLES[:6]]
    folder = tmp_path / "store"
    samples = [*heldout, *SAMPLES[6:]]
    child = in_child(lambda _: write(folder, samples=samples))
    with follow(folder, order_of(folder), wait_s=300) as store:
        for group, done in batches(store):
            checkpoint(store, group, done)
            kept = [store.read(i).record.sample_id for i in store.split("heldout")]
            assert kept == [s.sample_id for s in heldout]
    assert wait(*child) == 0
    finished = Store(folder)
    assert len(finished) < len(SAMPLES)
    assert [finished.records[i].sample_id for i in finished.split("heldout")] == kept


def test_a_stream_has_one_reader(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    folder.mkdir()
    with (
        open_stage(folder, "extract", {}, {}) as stage,
        present(folder, READER),
        pytest.raises(LockedError, match=f"a reader already .pid {os.getpid()}"),
    ):
        stage.announce({"store": SPEC.to_dict(), "planned": {}})
        with follow(folder, order_of(folder)):
            pass


def test_a_sample_that_comes_twice_is_refused_when_it_comes(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    with open_stage(folder, "extract", {}, {}) as stage:
        stage.announce({"store": SPEC.to_dict(), "planned": {}})
        for worker, samples in enumerate((SAMPLES[:2], SAMPLES[2:4], SAMPLES[1:2])):
            with ShardWriter(folder, SPEC, worker) as writer:
                for sample in samples:
                    writer.add(sample, *states_of(sample, SPEC))
    with follow(folder, order_of(folder)) as store:
        windows = store.windows("train")
        assert [next(windows).tolist() for _ in range(2)] == [[0, 1], [2, 3]]
        with pytest.raises(StoreError, match="'sample-1' is in the store twice"):
            next(windows)


def test_a_shard_is_released_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long stream has thousands of checkpoints and tens of thousands of shards."""
    folder, marked = tmp_path / "store", []

    def mark(folder: Path, number: int) -> None:
        marked.append(number)
        mark_consumed(folder, number)

    monkeypatch.setattr(import_module("paceline.store.follow"), "mark_consumed", mark)
    with open_stage(folder, "extract", {}, {}) as stage:
        stage.announce({"store": SPEC.to_dict(), "planned": {}})
        with ShardWriter(folder, SPEC) as writer:
            for sample in SAMPLES[:24]:
                writer.add(sample, *states_of(sample, SPEC))
    numbers = shard_numbers(folder)
    with follow(folder, order_of(folder)) as store:
        for num_windows, _ in zip(range(1, len(numbers) + 1), store.windows("train"), strict=False):
            store.release(num_windows - 1)
            store.release(num_windows)
    assert len(numbers) > 3 and marked == consumed_numbers(folder) == numbers


def test_a_finished_store_has_as_many_readers_as_want_and_nothing_is_written(whole: Path) -> None:
    before = sorted(whole.rglob("*"))
    with (
        follow(whole, order_of(whole).with_name("a.json")) as one,
        follow(whole, order_of(whole).with_name("b.json")) as two,
    ):
        assert [w.tolist() for w in one.windows("train")] == [
            w.tolist() for w in two.windows("train")
        ]
        one.release(9)
    assert sorted(whole.rglob("*")) == before


def test_a_writer_that_never_comes_is_not_waited_for_without_end(tmp_path: Path) -> None:
    with (
        pytest.raises(StreamError, match="nobody has written to it for 0 s"),
        follow(tmp_path / "store", tmp_path / "order.json", wait_s=0.0),
    ):
        pass


def test_shards_that_went_too_early_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    write(folder, budget_bytes=None)
    one = read_ids(folder)
    let_go(folder, 1)
    with pytest.raises(StreamError, match="shard 1 is to be read, and was let go"):
        read_ids(folder)
    # A checkpoint that has passed them needs them no more.
    assert read_ids(folder, start=9) == one[9:]
    order_of(folder).unlink()
    with pytest.raises(StreamError, match=r"shards \[1\] were let go by another training"):
        read_ids(folder)


def test_a_budget_too_small_for_what_stays_and_two_shards_is_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(UsageError, match="Give 57,000 or more, or smaller shards"),
        stream_writer(tmp_path, SPEC, 56_999, kept_bytes=7000),
    ):
        pass


def test_a_kill_while_a_shard_is_let_go_loses_no_id(tmp_path: Path) -> None:
    made = tmp_path / "made"
    run(made, SAMPLES[:12], SPEC)
    content, ids = content_fingerprint(made), published_ids(made)
    for n in count():
        folder = Path(shutil.copytree(made, tmp_path / str(n)))
        status = wait(*in_child(with_fuse(lambda folder=folder: let_go(folder, 1), n)))
        assert published_ids(folder) == ids
        assert content_fingerprint(folder) == content
        assert consumed_numbers(folder) == []
        Store(folder).verify()
        if status == 0:
            break
    assert shard_numbers(folder) == [0, 2]
    assert n >= 5
