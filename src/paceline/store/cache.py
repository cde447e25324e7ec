"""The local cache of remote stores: where copies lie, and which must go when they are too many."""

from dataclasses import dataclass
from pathlib import Path

from paceline import fingerprint
from paceline.cache import cache_folder
from paceline.store.blocks import digests_path

SPARSE_SUFFIX = ".sparse"
DEFAULT_BYTES = 64 << 30


@dataclass(frozen=True)
class Cache:
    """folder: None for that of `paceline.cache`. max_bytes: copies that were opened longest ago
    are removed beyond it."""

    folder: str | Path | None = None
    max_bytes: int = DEFAULT_BYTES

    def folder_of(self, *key: str) -> Path:
        """The folder of one store, one for each content that a URL ever had."""
        return self._stores / fingerprint.of_json(key)

    def make_room(self, num_bytes: int) -> None:
        """Remove copies until `num_bytes` more fit. A copy that is open still reads as before."""
        found = []
        for path in self._stores.glob(f"*/*{SPARSE_SUFFIX}"):
            try:
                status = path.stat()
            except FileNotFoundError:  # Another process makes room as well.
                continue
            found.append((status.st_mtime_ns, path, status.st_blocks * 512))
        used = sum(size for _, _, size in found)
        for _, path, size in sorted(found):
            if used + num_bytes <= self.max_bytes:
                return
            path.unlink(missing_ok=True)
            digests_path(path).unlink(missing_ok=True)
            used -= size

    @property
    def _stores(self) -> Path:
        return Path(self.folder or cache_folder()) / "stores"
