"""What surrounds a vLLM in this process: signals while it starts."""

import os
import signal
import sys
import time

import pytest

import paceline
from paceline.errors import UsageError
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


def test_a_stage_without_vllm_is_refused_and_leaves_its_folder_free(
    tiny_run, tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, "vllm", None)
    target, out = str(tiny_run.parent / "target"), tmp_path / "out"
    prompts = [str(tiny_run.parent / "prompts.jsonl")]
    for verb, options in (
        ("extract", {"data": str(tiny_run / "prepare")}),
        ("generate", {"target": target, "data": prompts, "max_new_tokens": 2}),
    ):
        says = rf"{verb}: vLLM is not installed here: pip install 'paceline\[vllm\]'"
        with pytest.raises(UsageError, match=says):
            getattr(paceline, verb)(engine="vllm", out=out / verb, **options)
        # The corrected command may write there.
        getattr(paceline, verb)(engine="transformers", out=out / verb, **options)
