"""A stream inside one process: the writer in a thread, the reader beside it."""

import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TypeVar

from paceline.errors import StreamError
from paceline.store.presence import READER, RUNNING, STREAM_FOLDER, WRITER, look, say_failed

Written = TypeVar("Written")
Read = TypeVar("Read")

_POLL_S = 0.05


def run_pair(
    folder: str | Path, write: Callable[[], Written], read: Callable[[], Read]
) -> tuple[Written, Read]:
    """Do both, and return what they return. The writer must keep a byte budget, however large: that
    is what makes it end when its reader fails. Raises what went wrong first, where it did."""
    folder = Path(folder)
    with ThreadPoolExecutor(1, thread_name_prefix="store-writer") as pool:
        writing = pool.submit(write)
        try:
            _wait_for_presence(folder, writing)
            found = read()
        except BaseException as error:
            # Not every failure of a reader happens where its writer can see it.
            if (folder / STREAM_FOLDER).is_dir():
                say_failed(folder, READER, error)
            if isinstance(error, StreamError):
                _raise_own(writing)
            raise
        return writing.result(), found


def _wait_for_presence(folder: Path, writing: Future) -> None:
    while not writing.done():
        writer = look(folder, WRITER)
        if writer and (writer.pid, writer.state) == (os.getpid(), RUNNING):
            return
        time.sleep(_POLL_S)
    writing.result()


def _raise_own(writing: Future) -> None:
    """What a writer failed of says more than its reader's hearsay."""
    wait([writing])
    own = writing.exception()
    if own is not None and not isinstance(own, StreamError):
        raise own
