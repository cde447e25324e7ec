"""A folder on any file system that fsspec knows: an object store, most of the time.

Small steps that are tried again: a network fails now and then, and what reads terabytes through it
must not fail with it.
"""

import hashlib
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
_PIECE_BYTES = 16 << 20
# The part size of s3fs, of which the ETag of a large object is made.
_PART_BYTES = 50 << 20


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
        self._again(name, lambda: self._fs.pipe_file(self._path(name), data), is_there=False)

    def send(self, local: Path, name: str) -> RemoteFile:
        """Copy a local file there. Returns what the server then has."""
        self._make_parent(name)
        self._again(name, lambda: self._fs.put_file(str(local), self._path(name)), is_there=False)
        info = self._again(name, lambda: self._fs.info(self._path(name)))
        return RemoteFile(info["size"], _etag(info))

    def holds(self, local: Path, name: str, found: RemoteFile) -> bool:
        """Whether a file there is that of this machine: by size and the server's checksum, or where
        it gives none that we know, by reading it back."""
        if found.num_bytes != local.stat().st_size:
            return False
        if found.etag and found.etag == _etag_of(local, is_in_parts="-" in found.etag):
            return True
        with local.open("rb") as file:
            for start in range(0, found.num_bytes, _PIECE_BYTES):
                piece = file.read(_PIECE_BYTES)
                if self.read_range(name, start, start + len(piece)) != piece:
                    return False
        return True

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
            self._again(name, lambda: self._fs.makedirs(parent, exist_ok=True), is_there=False)

    def _again(self, name: str, call: Callable[[], T], is_there: bool = True) -> T:
        """is_there: the file should be, and if not so, another try will not find it."""
        where = self.name_of(name)
        for number in range(_NUM_TRIES):
            try:
                return call()
            except PermissionError as error:
                raise StoreError(f"{where}: access is refused ({error})") from error
            except Exception as error:  # Each file system has errors of its own kinds.
                if is_there and isinstance(error, FileNotFoundError):
                    raise
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


def _etag_of(path: Path, is_in_parts: bool) -> str:
    """What S3 makes of a file: the MD5 of its bytes, or that of the MD5s of its parts."""
    digest = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as file:
        if not is_in_parts:
            return hashlib.file_digest(file, lambda: digest).hexdigest()
        num_parts = 0
        while part := file.read(_PART_BYTES):
            digest.update(hashlib.md5(part, usedforsecurity=False).digest())
            num_parts += 1
    return f"{digest.hexdigest()}-{num_parts}"
