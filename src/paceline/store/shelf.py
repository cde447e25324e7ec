"""Where the shards of a store stand: what a reader asks of a folder, here or far away."""

from pathlib import Path
from typing import Protocol

from paceline.artefact import Manifest, load_finished, load_manifest
from paceline.store.files import (
    INDEX_NAME,
    receipt_numbers,
    receipt_path,
    refuse_half_rewritten,
    shard_numbers,
    shard_path,
)
from paceline.store.shard import Shard

STAGE = "extract"


class Shelf(Protocol):
    """folder: as messages name it. index_path: a file of this machine, where the index lies or may
    be written."""

    folder: Path | str
    index_path: Path

    def manifest(self, unfinished: bool = False) -> Manifest:
        """Raises UsageError for a folder that is not a store or (unless allowed) not finished."""
        ...

    def shard_bytes(self) -> dict[int, int]:
        """The published shards, numbers ascending, and the bytes of each."""
        ...

    def receipt_numbers(self) -> list[int]:
        """The shards that were let go, ascending."""
        ...

    def open(self, number: int) -> Shard: ...

    def open_receipt(self, number: int) -> Shard: ...


class LocalShelf:
    """Implements `Shelf` for a folder of this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.index_path = folder / INDEX_NAME

    def manifest(self, unfinished: bool = False) -> Manifest:
        refuse_half_rewritten(self.folder)
        return (load_manifest if unfinished else load_finished)(self.folder, STAGE)

    def shard_bytes(self) -> dict[int, int]:
        return {n: shard_path(self.folder, n).stat().st_size for n in shard_numbers(self.folder)}

    def receipt_numbers(self) -> list[int]:
        return receipt_numbers(self.folder)

    def open(self, number: int) -> Shard:
        return Shard(shard_path(self.folder, number))

    def open_receipt(self, number: int) -> Shard:
        return Shard(receipt_path(self.folder, number))
