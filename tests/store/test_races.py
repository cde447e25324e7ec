"""What one process of a run does between two calls of another: each moment is played exactly."""

import fcntl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.store import ShardWriter, published_ids
from paceline.store import files as files_module
from paceline.store import reader as reader_module
from paceline.store import writer as writer_module
from paceline.store.budget import let_go
from paceline.store.files import (
    AsideFile,
    aside_numbers,
    remove_leftovers,
    shard_numbers,
    shard_path,
)

from .making import make_sample, make_spec, states_of, write_store

SAMPLES = [make_sample(i, num_tokens=20) for i in range(12)]
IDS = {s.sample_id for s in SAMPLES}
SPEC = make_spec(shard_bytes=9_000)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A store of several shards."""
    folder = write_store(tmp_path / "store", SPEC, SAMPLES)
    assert len(shard_numbers(folder)) >= 3
    return folder


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    (tmp_path / "shards").mkdir()
    return tmp_path


def after_listing(
    module: Any, happens: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right after `module` has listed the shards, once, something happens."""

    def listing(folder: Path) -> list[int]:
        numbers = shard_numbers(folder)
        monkeypatch.undo()
        happens()
        return numbers

    monkeypatch.setattr(module, "shard_numbers", listing)


@pytest.mark.parametrize("which", [0, -1])
def test_a_shard_let_go_after_the_listing_still_tells_its_samples(
    folder: Path, which: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = shard_numbers(folder)[which]
    after_listing(reader_module, lambda: let_go(folder, number), monkeypatch)
    assert published_ids(folder) == IDS
    assert number not in shard_numbers(folder)


def test_a_writer_that_begins_while_the_first_shard_is_let_go(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = shard_numbers(folder)[0]
    after_listing(writer_module, lambda: let_go(folder, number), monkeypatch)
    more = make_sample(99, num_tokens=20)
    with ShardWriter(folder, SPEC) as writer:
        writer.add(more, *states_of(more, SPEC))
    assert published_ids(folder) == IDS | {more.sample_id}


def at_the_lock(
    kind: int, happens: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> list[int]:
    """Right before a lock of this kind is taken, once, something happens. Returns a list that says
    so."""
    happened: list[int] = []

    def lock(descriptor: int, operation: int) -> None:
        if operation == kind and not happened:
            happened.append(operation)
            happens()
        real(descriptor, operation)

    real = fcntl.flock
    monkeypatch.setattr(files_module.fcntl, "flock", lock)
    return happened


def test_a_file_taken_for_a_dead_writers_before_its_lock_is_claimed_again(
    empty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others: list[AsideFile] = []

    def swept_and_claimed_by_another() -> None:
        assert remove_leftovers(empty) == 1
        others.append(AsideFile(empty))
        others[0].write_at(0, b"half of the other's")

    happened = at_the_lock(fcntl.LOCK_EX, swept_and_claimed_by_another, monkeypatch)
    own = AsideFile(empty)
    assert happened
    (other,) = others
    assert own.number != other.number
    own.write_at(0, b"all of its own")
    own.publish()
    assert shard_numbers(empty) == [own.number]
    assert shard_path(empty, own.number).read_bytes() == b"all of its own"
    other.write_at(0, b"all of the other's, whole")
    other.publish()
    assert shard_path(empty, other.number).read_bytes() == b"all of the other's, whole"
    assert aside_numbers(empty) == []


def test_a_file_published_before_the_sweep_has_its_lock_is_left_alone(
    empty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = AsideFile(empty)
    live.write_at(0, b"whole")
    happened = at_the_lock(
        fcntl.LOCK_EX | fcntl.LOCK_NB, lambda: live.publish() and None, monkeypatch
    )
    assert remove_leftovers(empty) == 0
    assert happened
    assert shard_path(empty, live.number).read_bytes() == b"whole"


def test_a_number_published_and_let_go_since_the_listing_is_not_used_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = shard_numbers(folder)[:-1]
    let_go(folder, shard_numbers(folder)[-1])
    monkeypatch.setattr(files_module, "shard_numbers", lambda _: before)
    receipts = files_module.receipt_numbers
    monkeypatch.setattr(files_module, "receipt_numbers", lambda _: [])
    claimed = AsideFile(folder)
    assert claimed.number not in {*before, *receipts(folder)}
    claimed.discard()
