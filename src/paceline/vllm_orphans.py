"""Processes of vLLM's that end when the one that started vLLM is gone.

On their own they load the model to the end and stay, with their memory of the GPU. A worker that is
spawned imports this module before it loads anything (`EXTENSION`), one that is forked has it; each
finds in its environment whom it works for.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# For vLLM's `worker_extension_cls`, where no other is set that imports this module.
EXTENSION = "paceline.vllm_orphans.Extension"

_DRIVERS = "PACELINE_VLLM_DRIVERS"
_LOOK_EVERY_S = 0.2

Driver = dict[str, Any]


class Extension:
    """Has this module imported in a worker; adds no method."""


def this_process() -> Driver:
    """What another process needs to know of this one to end with it."""
    pid = os.getpid()
    return {"pid": pid, "host": socket.gethostname(), "started": _started(pid)}


@contextmanager
def ending_with(drivers: list[Driver]) -> Iterator[None]:
    """Processes of vLLM's that start within end as soon as one of `drivers` is gone."""
    os.environ[_DRIVERS] = json.dumps(drivers)
    try:
        yield
    finally:
        del os.environ[_DRIVERS]


def end_with(drivers: list[Driver]) -> None:
    """End this process, from now on, when one of `drivers` is gone: an orphan must not publish what
    the next run, which knows nothing of it, makes again, nor hold a GPU."""
    host, own = socket.gethostname(), os.getpid()
    watched = [d for d in drivers if d["host"] == host and d["pid"] != own]
    if watched:
        threading.Thread(target=_watch, args=(watched,), name="driver-watch", daemon=True).start()


def _watch(drivers: list[Driver]) -> None:
    while all(_started(driver["pid"]) == driver["started"] for driver in drivers):
        time.sleep(_LOOK_EVERY_S)
    os._exit(1)


def _started(pid: int) -> int | None:
    """When a process started, in clock ticks since boot: with its pid, who it is. None: gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def _end_with_those_of_the_environment() -> None:
    end_with(json.loads(os.environ.get(_DRIVERS, "[]")))


os.register_at_fork(after_in_child=_end_with_those_of_the_environment)
_end_with_those_of_the_environment()
