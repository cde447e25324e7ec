"""What everybody who starts vLLM in this process must do before and after."""

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Collection, Iterator
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any


def set_environment(wanted: dict[str, str]) -> None:
    """Variables that vLLM reads at import; what the user has set stays."""
    defaults = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_LOGGING_STREAM": "ext://sys.stderr"}
    for name, value in {**defaults, **wanted}.items():
        os.environ.setdefault(name, value)


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """vLLM, its libraries and the processes that it starts print; stdout belongs to results."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


class _Interrupted(BaseException):
    """SIGINT while vLLM starts."""


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """SIGINT ends a start of vLLM: its handshake with the engine's process swallows a
    KeyboardInterrupt and goes on, or waits ten minutes for a process that the signal has ended."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        # A second one ends whatever the first could not.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        raise _Interrupted

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    except _Interrupted:
        raise KeyboardInterrupt from None
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def children() -> set[BaseProcess]:
    """The processes that this one has started by multiprocessing, as vLLM does, and that live."""
    return set(multiprocessing.active_children())


def shut_down(engine: Any, processes: Collection[BaseProcess]) -> None:
    """Let go of vLLM's engine: the processes that it has started end, and without such ones the
    GPU memory of this one is free again."""
    engine.engine_core.shutdown()
    if not processes:
        from vllm.distributed import cleanup_dist_env_and_memory

        # It collects garbage. What is left of an engine in other processes waits for ever then.
        cleanup_dist_env_and_memory()
