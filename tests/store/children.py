"""Forked children that are killed, or kill themselves at a given call to the file system."""

import os
import signal
import traceback
from collections.abc import Callable
from typing import Any

import torch

_CALLS = ("open", "pwrite", "fsync", "rename", "replace", "unlink", "close", "makedirs")
_CALLS += ("mkdir", "rmdir")


def in_child(work: Callable[[int], None]) -> tuple[int, int]:
    """Fork; the child does work(pipe to write to) and exits with 0, or 1 if it raised. Returns its
    pid and a pipe to read."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return pid, reading
    code = 1
    try:
        os.close(reading)
        # torch renews its thread pool when it is first used after a fork; were that in several
        # threads at once, one would find none.
        torch.set_num_threads(1)
        work(writing)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def wait(pid: int, reading: int) -> int:
    """The child's exit status; negative: the signal that ended it."""
    os.close(reading)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def with_fuse(work: Callable[[], None], burn_at: int, after: bool = False) -> Callable[[int], None]:
    """Work for a child that kills itself right before (or after) its burn_at-th call."""

    def run(_: int) -> None:
        count = 0

        def fused(call: Callable[..., Any]) -> Callable[..., Any]:
            def wrapper(*args: Any, **kwargs: Any) -> Any:
                nonlocal count
                mine, count = count, count + 1
                if mine == burn_at and not after:
                    os.kill(os.getpid(), signal.SIGKILL)
                try:
                    return call(*args, **kwargs)
                finally:
                    if mine == burn_at:
                        os.kill(os.getpid(), signal.SIGKILL)

            return wrapper

        for name in _CALLS:
            setattr(os, name, fused(getattr(os, name)))
        work()

    return run
