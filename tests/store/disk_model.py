"""A model of what a power cut leaves: only what was fsynced is sure to be there.

A shim over the calls of `os` looks at the real folder before and after each call. The bytes of a
file are durable as of its last fsync, the names in a folder as of the folder's last fsync.
"""

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import RLock
from typing import Any

_CALLS = ("open", "pwrite", "fsync", "rename", "replace", "unlink", "makedirs", "close")

# What a disk may do with all that was not fsynced: forget both names and bytes; keep the names but
# not the bytes; keep the bytes but not the names.
FATES = ("forget all", "keep names", "keep bytes")


@dataclass(frozen=True)
class Instant:
    """The folder's files after a call: path -> file number, as they are and as they are durable;
    file number -> bytes, likewise."""

    call: str
    names: dict[str, int]
    durable_names: dict[str, int]
    contents: dict[int, bytes]
    durable_contents: dict[int, bytes]

    def rebuild(self, folder: Path, fate: str) -> None:
        """Make the folder as it is found after a power cut at this instant."""
        names = self.names if fate == "keep names" else self.durable_names
        contents = self.contents if fate == "keep bytes" else self.durable_contents
        folder.mkdir(parents=True)
        for name, number in names.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(contents.get(number, b""))


class DiskModel:
    """Records an Instant after each call of `os` while `watch` runs."""

    def __init__(self, folder: Path, is_deaf_to_fsync: bool = False) -> None:
        self.folder = folder
        self._is_deaf = is_deaf_to_fsync
        self._one_at_a_time = RLock()
        self.instants: list[Instant] = []
        self._numbers: dict[int, int] = {}  # inode -> file number
        self._next = 0
        self._names: dict[str, int] = {}
        self._durable_names: dict[str, int] = {}
        self._contents: dict[int, bytes] = {}
        self._durable_contents: dict[int, bytes] = {}

    @contextmanager
    def watch(self) -> Iterator[None]:
        real = {name: getattr(os, name) for name in _CALLS}
        try:
            for name, call in real.items():
                setattr(os, name, self._wrap(name, call))
            yield
        finally:
            for name, call in real.items():
                setattr(os, name, call)

    def _wrap(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            with self._one_at_a_time:
                return observed(*args, **kwargs)

        def observed(*args: Any, **kwargs: Any) -> Any:
            self._look()
            if name == "fsync" and not self._is_deaf:
                self._make_durable(args[0])
            result = call(*args, **kwargs)
            self._look()
            self.instants.append(
                Instant(
                    name,
                    dict(self._names),
                    dict(self._durable_names),
                    dict(self._contents),
                    dict(self._durable_contents),
                )
            )
            return result

        return wrapper

    def _look(self) -> None:
        """Take in the real folder. An inode that went and came back is a new file."""
        found = {}
        for root, _, files in os.walk(self.folder):
            for file in files:
                path = Path(root, file)
                found[str(path.relative_to(self.folder))] = (path, path.stat().st_ino)
        inodes = {inode for _, inode in found.values()}
        self._numbers = {i: n for i, n in self._numbers.items() if i in inodes}
        self._names = {}
        for name, (path, inode) in found.items():
            if inode not in self._numbers:
                self._numbers[inode] = self._next
                self._next += 1
            number = self._numbers[inode]
            self._names[name] = number
            with path.open("rb", buffering=0) as file:
                self._contents[number] = file.read()

    def _make_durable(self, descriptor: int) -> None:
        status = os.fstat(descriptor)
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if stat.S_ISDIR(status.st_mode):
            parent = "" if path == self.folder else f"{path.relative_to(self.folder)}/"
            inside = lambda name: name.startswith(parent) and "/" not in name[len(parent) :]
            kept = {n: f for n, f in self._durable_names.items() if not inside(n)}
            self._durable_names = kept | {n: f for n, f in self._names.items() if inside(n)}
        elif status.st_ino in self._numbers:
            number = self._numbers[status.st_ino]
            self._durable_contents[number] = self._contents[number]
