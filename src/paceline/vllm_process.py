"""What everybody who starts vLLM in this process must do before and after."""

import contextlib
import importlib.util
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any

from paceline.errors import UsageError
from paceline.vllm_orphans import EXTENSION, Driver, ending_with, this_process


def require_vllm(who: str) -> None:
    """Raises UsageError, before anything is begun, where vLLM is not installed."""
    if sys.modules.get("vllm") is None and importlib.util.find_spec("vllm") is None:
        raise UsageError(f"{who}: vLLM is not installed here: pip install 'paceline[vllm]'")


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


def start(
    arguments: Mapping[str, Any], driver: Driver | None = None
) -> tuple[Any, list[BaseProcess]]:
    """vLLM's `LLM`, and the processes that it has started, which end with this one and with
    `driver`; raises what vLLM raises."""
    import vllm

    others, drivers = children(), [this_process(), *([driver] if driver else [])]
    with interruptible(), stdout_to_stderr(), ending_with(drivers):
        llm = vllm.LLM(**{"worker_extension_cls": EXTENSION, **arguments})
    return llm, sorted(children() - others, key=lambda process: process.pid)


def children() -> set[BaseProcess]:
    """The processes that this one has started by multiprocessing, as vLLM does, and that live."""
    return set(multiprocessing.active_children())


def free_memory() -> None:
    """Once an engine in this process is shut down and nobody holds it: its memory is free again,
    that of the GPU too. What is left of an engine in other processes would wait for ever."""
    from vllm.distributed import cleanup_dist_env_and_memory

    _forget_models()
    cleanup_dist_env_and_memory()  # and garbage


def _forget_models() -> None:
    """vLLM 0.16 keeps every model that it has loaded, as the owner of a method, in a cache."""
    functions = sys.modules.get("vllm.utils.func_utils")
    cached = getattr(functions, "supports_kw", None)
    if hasattr(cached, "cache_clear"):
        cached.cache_clear()
