"""What everybody who starts vLLM in this process must do first; nothing of vLLM is imported."""

import contextlib
import os
import sys
from collections.abc import Iterator


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
