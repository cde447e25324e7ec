"""What ranks hear of each other, without collectives. Deaths: in test_ranks, of real processes."""

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from paceline.train.lifeline import Failure, Lifeline, accept_all, connect, listen

PATIENCE_S = 30.0


@pytest.fixture
def lifelines():
    """Of three ranks; a stranger knocks first. `heard` collects what their threads are told."""
    heard, listener = [], listen()
    port = listener.getsockname()[1]
    socket.create_connection(("127.0.0.1", port)).close()
    with ThreadPoolExecutor(1) as pool:
        others = pool.submit(lambda: [connect("127.0.0.1", port, rank) for rank in (1, 2)])
        first = accept_all(listener, 3)
    lines = [Lifeline(r, c, heard.append) for r, c in enumerate([first, *others.result()])]
    yield lines, heard
    for line in lines:
        if not line.closed.is_set():
            line.close()


def test_a_failure_reaches_all_others(lifelines):
    lines, _ = lifelines
    lines[2].fail("failed: two words,\nand a line")
    told = Failure(2, "failed: two words,\nand a line")
    assert [line.wait_for_failure(PATIENCE_S) for line in lines[:2]] == [told, told]
    assert lines[2].failure is None


def test_the_first_failure_is_the_one_that_counts(lifelines):
    lines, _ = lifelines
    lines[1].fail("failed: first")
    assert lines[2].wait_for_failure(PATIENCE_S) == Failure(1, "failed: first")
    lines[2].fail("failed: second")
    assert lines[0].wait_for_failure(PATIENCE_S) == Failure(1, "failed: first")


def test_who_parts_in_peace_is_not_missed(lifelines):
    lines, heard = lifelines
    lines[1].close()
    lines[0].fail("failed: later")
    assert lines[2].wait_for_failure(PATIENCE_S) == Failure(0, "failed: later")
    assert lines[0].failure is None and lines[0] not in heard
