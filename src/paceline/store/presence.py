"""Who is at work on a stream, and how it ended: seen across processes and machines.

Each side holds a lock that its kernel drops when it dies, however it dies, and keeps a small file
about itself. No clocks and no heartbeats, so a long pause is never taken for a death.
"""

import fcntl
import json
import os
import socket
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any

from paceline.artefact import write_json
from paceline.errors import LockedError, StoreError

STREAM_FOLDER = "stream"
WRITER, READER = "writer", "reader"
RUNNING, DONE, FAILED, DEAD = "running", "done", "failed", "dead"
# A peer that looks whether we live holds our lock for an instant; that is no second owner.
_TRIES = 200


@dataclass(frozen=True)
class Peer:
    """What is known of one side. run: differs from start to start. budget_bytes, shard_bytes: of a
    writer that keeps a byte budget; reader_before: the run of a reader that had ended before it."""

    run: str
    pid: int
    host: str
    state: str
    error: str | None = None
    budget_bytes: int | None = None
    shard_bytes: int = 0
    reader_before: str | None = None

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host}"


@contextmanager
def present(folder: Path, role: str, **about: Any) -> Iterator[None]:
    """Be the writer or the reader of a stream for the time of the `with` block.

    about: fields of Peer that a writer tells. Raises LockedError where another process is that
    already.
    """
    (folder / STREAM_FOLDER).mkdir(parents=True, exist_ok=True)
    me = Peer(
        run=uuid.uuid4().hex,
        pid=os.getpid(),
        host=socket.gethostname(),
        state=RUNNING,
        **about,
    )
    with _lock_path(folder, role).open("a") as lock:
        _own(lock, folder, role)
        _tell(folder, role, me)
        try:
            yield
        except BaseException as error:
            words = f"{type(error).__name__}: {error}".rstrip(".: ")
            # On a full disk the lock that we lose still says that we are gone.
            with suppress(StoreError):
                _tell(folder, role, replace(me, state=FAILED, error=words))
            raise
        _tell(folder, role, replace(me, state=DONE))


def ended_before(folder: Path, role: str) -> str | None:
    """The run of a side that has ended: it says nothing about one that is still to come."""
    peer = look(folder, role)
    return peer.run if peer and peer.state != RUNNING else None


def say_failed(folder: Path, role: str, error: BaseException) -> None:
    """Say that a side failed which may never have been present; one that is present stays."""
    with suppress(LockedError, type(error)), present(folder, role):
        raise error


def look(folder: Path, role: str) -> Peer | None:
    """The other side as it is now; None where it never was. State DEAD: it ended without a word."""
    try:
        peer = Peer(**json.loads(_state_path(folder, role).read_text()))
    except FileNotFoundError:
        return None
    if peer.state == RUNNING and not _is_locked(folder, role):
        # It may have ended in good order between our two looks.
        after = Peer(**json.loads(_state_path(folder, role).read_text()))
        if after == peer:
            return replace(peer, state=DEAD)
        return after
    return peer


def _own(lock: IO[str], folder: Path, role: str) -> None:
    for _ in range(_TRIES):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            os.sched_yield()
    owner = look(folder, role)
    raise LockedError(f"{folder} has a {role} already ({owner}): wait for it or stop it")


def _is_locked(folder: Path, role: str) -> bool:
    # NFS grants a shared lock only on a file that can be read.
    with _lock_path(folder, role).open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


def _tell(folder: Path, role: str, peer: Peer) -> None:
    write_json(_state_path(folder, role), asdict(peer))


def _state_path(folder: Path, role: str) -> Path:
    return folder / STREAM_FOLDER / f"{role}.json"


def _lock_path(folder: Path, role: str) -> Path:
    return folder / STREAM_FOLDER / f"{role}.lock"
