"""How bytes reach a disk: claim a name, write aside, fsync, rename, fsync the folder.

A shard is written under a name that starts with a dot, `.NNNNN.part`, and is renamed to its final
name when whole. The aside file is also the claim on the number: it is made exclusively, and from
then on either it or the final file exists. Its writer holds a lock on it that dies with the
process, so that leftovers of dead runs can be told from files in work.
"""

import fcntl
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from paceline.artefact import disk_errors, fsync_folder
from paceline.errors import StoreError

INDEX_NAME = "index.safetensors"
SHARDS_FOLDER = "shards"
# What is left of shards that were consumed and let go: all but their states.
RECEIPTS_FOLDER = "receipts"
# Shards that are to take the place of others, and the plan that decides it.
REWRITE_FOLDER = ".rewrite"
REWRITE_PLAN_NAME = "plan.json"
_FINAL = re.compile(r"^(\d{5,})\.safetensors$")
_ASIDE = re.compile(r"^\.(\d{5,})\.part$")
# One write call moves at most about 2 GiB on Linux.
_WRITE_BYTES = 1 << 30


def shard_path(folder: Path, number: int) -> Path:
    return folder / SHARDS_FOLDER / f"{number:05d}.safetensors"


def aside_path(folder: Path, number: int) -> Path:
    return folder / SHARDS_FOLDER / f".{number:05d}.part"


def receipt_path(folder: Path, number: int) -> Path:
    return folder / RECEIPTS_FOLDER / f"{number:05d}.safetensors"


def shard_numbers(folder: Path) -> list[int]:
    """Numbers of the published shards, ascending."""
    gone = set(receipt_numbers(folder))
    return [n for n in _numbers(folder / SHARDS_FOLDER, _FINAL) if n not in gone]


def published_bytes(folder: Path) -> int:
    """What the published shards take on the disk."""
    return sum(shard_path(folder, n).stat().st_size for n in shard_numbers(folder))


def receipt_numbers(folder: Path) -> list[int]:
    """Numbers of the shards that were let go, ascending."""
    return _numbers(folder / RECEIPTS_FOLDER, _FINAL)


def aside_numbers(folder: Path) -> list[int]:
    """Numbers of the shards in work, ascending."""
    return _numbers(folder / SHARDS_FOLDER, _ASIDE)


def numbered(names: Iterable[str], folder: str) -> dict[int, str]:
    """Of names relative to a store, those of shards or receipts in `folder`: number -> name."""
    found = {}
    for name in names:
        parent, _, last = name.rpartition("/")
        if parent == folder and (match := _FINAL.match(last)):
            found[int(match[1])] = name
    return dict(sorted(found.items()))


def _numbers(folder: Path, pattern: re.Pattern[str]) -> list[int]:
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    return sorted(int(match[1]) for name in names if (match := pattern.match(name)))


def write_all(descriptor: int, data: memoryview | bytes, offset: int) -> None:
    """Write all of `data` at a byte offset."""
    view = memoryview(data)
    while view:
        done = os.pwrite(descriptor, view[:_WRITE_BYTES], offset)
        view, offset = view[done:], offset + done


def refuse_half_rewritten(folder: Path) -> None:
    """Raises StoreError where shards are being replaced, or were when that run died."""
    if (folder / REWRITE_FOLDER / REWRITE_PLAN_NAME).is_file():
        raise StoreError(
            f"{folder}: a change of its samples is not finished. Wait for it, or run the same "
            "command again (`paceline delete-samples` or `upgrade-store`)."
        )


class AsideFile:
    """A shard in work: owned by this writer, invisible to readers until `publish`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._make_folder()
        with disk_errors(folder / SHARDS_FOLDER):
            self.number, self._descriptor = _claim(folder)
        self.path = aside_path(folder, self.number)

    def write_at(self, offset: int, data: memoryview | bytes) -> None:
        """Write all of `data` at a byte offset; the disk begins with it at once."""
        with disk_errors(self.path):
            write_all(self._descriptor, data, offset)
            if hasattr(os, "posix_fadvise"):
                # Linux writes pages back that it is told are not needed. Else all of a shard would
                # wait for `publish`, while the disk has nothing to do.
                os.posix_fadvise(self._descriptor, offset, len(data), os.POSIX_FADV_DONTNEED)

    def publish(self) -> Path:
        """Make the file durable, then visible, then make its name durable."""
        final = shard_path(self.folder, self.number)
        with disk_errors(self.path):
            os.fsync(self._descriptor)
            os.rename(self.path, final)
            fsync_folder(final.parent)
            os.close(self._descriptor)
        return final

    def discard(self) -> None:
        """Give the file up; nothing of it was ever visible."""
        with suppress(FileNotFoundError):
            os.unlink(self.path)
        os.close(self._descriptor)

    def _make_folder(self) -> None:
        shards = self.folder / SHARDS_FOLDER
        if not shards.is_dir():
            with disk_errors(shards):
                os.makedirs(shards, exist_ok=True)
                fsync_folder(self.folder)


def _claim(folder: Path) -> tuple[int, int]:
    """The lowest number above all that are taken, and a descriptor of its new aside file."""
    taken = [*shard_numbers(folder), *receipt_numbers(folder), *aside_numbers(folder)]
    number = max(taken, default=-1) + 1
    while True:
        path = aside_path(folder, number)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            number += 1
            continue
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if not _is_at(descriptor, path):
            # Until the lock was there, the file looked like one whose writer is dead.
            os.close(descriptor)
            continue
        # Another worker may have published this number between the listing and the claim, and a
        # training may have consumed it since.
        if shard_path(folder, number).exists() or receipt_path(folder, number).exists():
            os.unlink(path)
            os.close(descriptor)
            number += 1
            continue
        return number, descriptor


def remove_leftovers(folder: Path) -> int:
    """Remove aside files whose writer is dead, and shards that were just being let go. Returns how
    many there were. Live writers are not disturbed."""
    removed = 0
    for number in receipt_numbers(folder):
        with suppress(FileNotFoundError):
            os.unlink(shard_path(folder, number))
            removed += 1
    for number in aside_numbers(folder):
        path = aside_path(folder, number)
        try:
            descriptor = os.open(path, os.O_RDWR)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A live writer may have published the file between the opening and the lock.
            if _is_at(descriptor, path):
                os.unlink(path)
                removed += 1
        except BlockingIOError:
            pass
        finally:
            os.close(descriptor)
    return removed


def _is_at(descriptor: int, path: Path) -> bool:
    """The open file still has this name."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False
