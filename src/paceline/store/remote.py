"""Reads a finished store below a URL: only the slices that are needed, through a local cache."""

import os
from pathlib import Path
from threading import Lock

from paceline.artefact import (
    Manifest,
    load_finished,
    parse_manifest,
    require_finished,
    write_atomically,
)
from paceline.contracts import MANIFEST_NAME
from paceline.errors import StoreCorruption, StoreError, UsageError
from paceline.store.blocks import BlockFile
from paceline.store.cache import SPARSE_SUFFIX, Cache
from paceline.store.files import INDEX_NAME, RECEIPTS_FOLDER, SHARDS_FOLDER, numbered
from paceline.store.place import Place, RemoteFile, is_remote
from paceline.store.shard import Shard
from paceline.store.shelf import STAGE, LocalShelf, Shelf

# Room is made for this share of the cache at a time, since each time looks at every copy.
_SHARE = 16


def open_shelf(folder: str | Path, cache: Cache | None = None) -> Shelf:
    """The shelf of a folder of this machine, or of a URL of fsspec."""
    if is_remote(folder):
        return RemoteShelf(str(folder), cache or Cache())
    return LocalShelf(Path(folder))


def read_manifest(place: Place, unfinished: bool = False) -> Manifest:
    """The manifest of a store below a URL. Raises UsageError where there is none."""
    try:
        text = place.read(MANIFEST_NAME)
    except FileNotFoundError as error:
        raise UsageError(
            f"{place} is not a store: it has no {MANIFEST_NAME}. The manifest is uploaded last: "
            "if an upload was cut, run the same command again."
        ) from error
    manifest = parse_manifest(text, place.name_of(MANIFEST_NAME), STAGE)
    if not unfinished:
        require_finished(manifest, place.url)
    return manifest


def finished_manifest(folder: str | Path) -> Manifest:
    """The manifest of a finished store, here or below a URL. Raises UsageError."""
    if is_remote(folder):
        return read_manifest(Place(str(folder)))
    return load_finished(folder, STAGE)


class RemoteShelf:
    """Implements `Shelf` for a URL. What the store was when it was opened is what is read: one
    that is replaced meanwhile is refused by its checksums."""

    def __init__(self, url: str, cache: Cache) -> None:
        self.place = Place(url)
        self.folder = self.place.url
        self._cache = cache
        self._manifest = read_manifest(self.place, unfinished=True)
        self._copies = cache.folder_of(self.place.url, str(self._manifest.checksum))
        self.index_path = self._copies / INDEX_NAME
        self._files = self.place.files()
        self._receipts = numbered(self._files, RECEIPTS_FOLDER)
        shards = numbered(self._files, SHARDS_FOLDER)
        self._shards = {n: name for n, name in shards.items() if n not in self._receipts}
        self._lock = Lock()
        self._room = 0
        self._copies.mkdir(parents=True, exist_ok=True)
        self._bring_index()

    def manifest(self, unfinished: bool = False) -> Manifest:
        if not unfinished:
            require_finished(self._manifest, self.folder)
        return self._manifest

    def shard_bytes(self) -> dict[int, int]:
        return {n: self._files[name].num_bytes for n, name in self._shards.items()}

    def receipt_numbers(self) -> list[int]:
        return list(self._receipts)

    def open(self, number: int) -> Shard:
        return self._open(self._shards, number)

    def open_receipt(self, number: int) -> Shard:
        return self._open(self._receipts, number)

    def _open(self, names: dict[int, str], number: int) -> Shard:
        if number not in names:
            raise StoreError(f"{self.folder} has no shard {number} any more")
        name = names[number]
        file: RemoteFile = self._files[name]
        path = self._copies / (name.replace("/", "-") + SPARSE_SUFFIX)
        if path.exists():
            os.utime(path)
        copy = BlockFile(path, file.num_bytes, lambda start, stop: self._fetch(name, start, stop))
        try:
            return Shard(path, copy, self.place.name_of(name))
        except StoreCorruption:
            copy.fetch_again()
            return Shard(path, copy, self.place.name_of(name))

    def _fetch(self, name: str, start: int, stop: int) -> bytes:
        self._make_room(stop - start)
        try:
            return self.place.read_range(name, start, stop)
        except FileNotFoundError as error:
            raise StoreError(
                f"{self.place.name_of(name)} was removed while the store was open"
            ) from error

    def _make_room(self, num_bytes: int) -> None:
        with self._lock:
            made = 0
            if num_bytes > self._room:
                made = self._room = max(num_bytes, self._cache.max_bytes // _SHARE)
            self._room -= num_bytes
        if made:
            self._cache.make_room(made)

    def _bring_index(self) -> None:
        """The index is read whole, and held against its own checksums when it is opened."""
        file = self._files.get(INDEX_NAME)
        if file is None:
            return
        if not self.index_path.is_file() or self.index_path.stat().st_size != file.num_bytes:
            write_atomically(self.index_path, self.place.read(INDEX_NAME))
