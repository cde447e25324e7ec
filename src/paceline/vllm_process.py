"""What everybody who starts vLLM in this process must do before and after."""

import contextlib
import multiprocessing
import os
import sys
from collections.abc import Collection, Iterator
from multiprocessing.process import BaseProcess
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
