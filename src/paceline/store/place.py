"""A folder on any file system that fsspec knows: an object store, most of the time.

Small steps that are tried again: a network fails now and then, and what reads terabytes through it
must not fail with it.
"""

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import fsspec

from paceline.errors import StoreError, UsageError

logger = logging.getLogger(__name__)

T = TypeVar("T")

# The file systems try again by themselves for some seconds; these tries are for what they give up.
_NUM_TRIES = 4
_FIRST_PAUSE_S = 0.5


def is_remote(path: str | Path) -> bool:
    """Whether a path is a URL of fsspec (`s3://bucket/store`), not a folder of this machine."""
    return "://" in str(path)


@dataclass(frozen=True)
class RemoteFile:
    """num_bytes; etag: what the server says of the content, where it says something."""

    num_bytes: int
    etag: str | None


class Place:
    """The files below a URL, by their names relative to it (`shards/00000.safetensors`).

    Safe to use from threads. What a server refuses for good, or fails at again and again, is a
    StoreError that names the file; a file that is not there is a FileNotFoundError.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        try:
            # Listings must be fresh: other processes, and our own uploads, change them.
            self._fs, self._root = fsspec.core.url_to_fs(self.url, use_listings_cache=False)
        except (ImportError, ValueError) as error:
            raise UsageError(
                f"{url} cannot be used: {error}. For s3:// install `paceline[s3]`; other "
                "protocols need the package that fsspec names."
            ) from error

    def __str__(self) -> str:
        return self.url

    def name_of(self, name: str) -> str:
        return f"{self.url}/{name}"

    def files(self) -> dict[str, RemoteFile]:
        """All files by name; none where the folder is not there."""
        try:
            found = self._again("", lambda: self._fs.find(self._root, detail=True))
        except FileNotFoundError:
            return {}
        cut = len(self._root.rstrip("/")) + 1
        return {
            path[cut:]: RemoteFile(info["size"], _etag(info))
            for path, info in found.items()
            if path[cut:]
        }

    def read(self, name: str) -> bytes:
        """A small file, whole."""
        return self._again(name, lambda: self._fs.cat_file(self._path(name)))

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        """Bytes [start, stop) of a file, all of them."""

        def read() -> bytes:
            data = self._fs.cat_file(self._path(name), start=start, end=stop)
            if len(data) != stop - start:
                raise OSError(f"{len(data)} bytes came of {stop - start}")
            return data

        return self._again(name, read)

    def write(self, name: str, data: bytes) -> None:
        self._make_parent(name)
        self._again(name, lambda: self._fs.pipe_file(self._path(name), data))

    def send(self, local: Path, name: str) -> RemoteFile:
        """Copy a local file there. Returns what the server then has."""
        self._make_parent(name)
        self._again(name, lambda: self._fs.put_file(str(local), self._path(name)))
        info = self._again(name, lambda: self._fs.info(self._path(name)))
        return RemoteFile(info["size"], _etag(info))

    def remove(self, names: Iterable[str]) -> None:
        """Remove files in their order; those that are not there are no error."""
        for name in names:
            try:
                self._again(name, lambda name=name: self._fs.rm_file(self._path(name)))
            except FileNotFoundError:
                continue

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _make_parent(self, name: str) -> None:
        # Object stores (fsspec speaks to them asynchronously) have no folders, and where the bucket
        # is missing, makedirs would make one of a misspelt name.
        if not self._fs.async_impl:
            parent = self._path(name).rpartition("/")[0]
            self._again(name, lambda: self._fs.makedirs(parent, exist_ok=True))

    def _again(self, name: str, call: Callable[[], T]) -> T:
        where = self.name_of(name)
        for number in range(_NUM_TRIES):
            try:
                return call()
            except FileNotFoundError:
                raise
            except PermissionError as error:
                raise StoreError(f"{where}: access is refused ({error})") from error
            except Exception as error:  # Each file system has errors of its own kinds.
                if number + 1 == _NUM_TRIES:
                    raise StoreError(
                        f"{where}: tried {_NUM_TRIES} times, last {type(error).__name__}: {error}. "
                        "Run the same command again to go on."
                    ) from error
                logger.warning("%s: %s: %s; trying again", where, type(error).__name__, error)
                time.sleep(_FIRST_PAUSE_S * 2**number)
        raise AssertionError("the last try returns or raises")


def _etag(info: dict) -> str | None:
    return str(info["ETag"]).strip('"') if info.get("ETag") else None
