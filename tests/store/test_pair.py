"""A writer and its reader in one process: each ends when the other does not come to its end."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.artefact import COMPLETE, load_manifest
from paceline.errors import StreamError
from paceline.store import run_pair
from paceline.store.presence import FAILED, READER, look

from .test_stream import BUDGET, TRAINED, flat, read_ids, write


def end_of(errors: list[BaseException], work: Callable[..., object], *arguments: object) -> None:
    """Do the work; what it raised is kept too."""
    try:
        work(*arguments)
    except BaseException as error:
        errors.append(error)
        raise


def test_both_sides_come_to_their_end(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    written, read = run_pair(folder, lambda: write(folder, BUDGET), lambda: read_ids(folder))
    assert written is None
    assert sorted(flat(read)) == sorted(TRAINED)
    assert load_manifest(folder).status == COMPLETE


@pytest.mark.parametrize("budget", [BUDGET, 1 << 30], ids=["without room", "with room"])
def test_a_reader_that_fails_before_it_reads_ends_its_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, budget: int
) -> None:
    monkeypatch.setattr("paceline.store.budget._LOOK_S", 0.0)
    folder, errors = tmp_path / "store", []

    def before(number: int) -> None:
        # With room it would be done before anybody could fail.
        while number == 8 and budget != BUDGET and not has_failed():
            os.sched_yield()

    def has_failed() -> bool:
        reader = look(folder, READER)
        return reader is not None and reader.state == FAILED

    def fail() -> None:
        raise ZeroDivisionError("no such vocabulary")

    with pytest.raises(ZeroDivisionError):
        run_pair(folder, lambda: end_of(errors, write, folder, budget, before), fail)
    assert isinstance(errors[0], StreamError)
    assert "ZeroDivisionError: no such vocabulary" in str(errors[0])
    # What the dead reader said holds for its own run alone.
    run_pair(folder, lambda: write(folder, budget), lambda: read_ids(folder))


def test_a_writer_that_fails_is_what_is_told(tmp_path: Path) -> None:
    folder, errors = tmp_path / "store", []

    def fail(number: int) -> None:
        if number == 30:
            raise ZeroDivisionError("engine fell over")

    with pytest.raises(ZeroDivisionError, match="engine fell over"):
        run_pair(
            folder, lambda: write(folder, BUDGET, fail), lambda: end_of(errors, read_ids, folder)
        )
    assert isinstance(errors[0], StreamError)


def test_a_writer_that_fails_before_it_writes_is_not_waited_for(tmp_path: Path) -> None:
    def fail() -> None:
        raise ZeroDivisionError("no such target")

    with pytest.raises(ZeroDivisionError, match="no such target"):
        run_pair(tmp_path / "store", fail, lambda: pytest.fail("nothing to read"))
    assert not (tmp_path / "store").exists()


def test_a_writer_that_is_done_at_once_is_read_all_the_same(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    write(folder, budget_bytes=None)
    _, read = run_pair(folder, lambda: write(folder), lambda: read_ids(folder))
    assert sorted(flat(read)) == sorted(TRAINED)
