"""A call into vLLM's processes ends when one of them does: with real processes, killed."""

import multiprocessing
import os
import signal
import threading

import pytest

from paceline.errors import EngineError
from paceline.extract.vllm.liveness import call_watched
from paceline.vllm_process import children


@pytest.fixture
def process():
    """One that lives until it is killed."""
    others = children()
    context = multiprocessing.get_context("spawn")
    receiving, held = context.Pipe(duplex=False)
    process = context.Process(target=receiving.recv)
    process.start()
    assert children() - others == {process}
    yield process
    process.kill()
    process.join()
    held.close()


def test_answers_and_errors_pass_through(process):
    def refuse():
        raise ValueError("no")

    assert call_watched(lambda: [1, 2], [process]) == [1, 2]
    with pytest.raises(ValueError, match="no"):
        call_watched(refuse, [process])


def test_without_processes_the_call_stays_in_its_thread():
    assert call_watched(threading.current_thread, []) is threading.current_thread()


def test_a_call_that_is_never_answered_ends_with_the_process(process):
    never = threading.Event()
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(EngineError, match=rf"pid {process.pid}\) died with exit code -9"):
        call_watched(never.wait, [process])
    never.set()
