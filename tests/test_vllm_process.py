"""What surrounds a vLLM in this process: signals while it starts."""

import os
import signal
import time

import pytest

from paceline.vllm_process import interruptible


def swallows_an_interrupt() -> None:
    """As vLLM's handshake with its engine does."""
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)
    except KeyboardInterrupt:
        pass


@pytest.mark.usefixtures("heeds_interrupts")
def test_an_interrupt_ends_a_start_that_swallows_it() -> None:
    with pytest.raises(KeyboardInterrupt), interruptible():
        swallows_an_interrupt()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("heeds_interrupts")
def test_who_handles_interrupts_otherwise_goes_on_doing_so() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with interruptible():
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
