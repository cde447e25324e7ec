"""A set of 64-bit hashes that costs 8 bytes each: a million rows are 8 MB, not a hundred.

Two different contents share a hash with a chance of n^2 / 2^65: 3e-8 among a million.
"""

import base64

import numpy as np

_BUFFER = 1 << 16


class SeenHashes:
    """Remembers the first 64 bits of hex digests."""

    def __init__(self) -> None:
        self._sorted = np.empty(0, np.uint64)
        self._recent: set[int] = set()
        self._since_taken: list[int] = []

    def add(self, digest: str) -> bool:
        """Remember a digest; False if it was there already."""
        value = int(digest[:16], 16)
        if value in self._recent or self._holds(value):
            return False
        self._recent.add(value)
        self._since_taken.append(value)
        if len(self._recent) >= _BUFFER:
            self._merge()
        return True

    def __len__(self) -> int:
        return len(self._sorted) + len(self._recent)

    def take_new(self) -> str:
        """What was added since the last call, as text to store; `restore` reads it."""
        values = np.array(self._since_taken, np.uint64)
        self._since_taken = []
        return base64.b64encode(values.tobytes()).decode()

    def restore(self, text: str) -> None:
        values = np.frombuffer(base64.b64decode(text), np.uint64)
        self._recent.update(values.tolist())
        if len(self._recent) >= _BUFFER:
            self._merge()

    def _holds(self, value: int) -> bool:
        if not len(self._sorted):
            return False
        at = int(np.searchsorted(self._sorted, np.uint64(value)))
        return at < len(self._sorted) and int(self._sorted[at]) == value

    def _merge(self) -> None:
        recent = np.fromiter(self._recent, np.uint64, len(self._recent))
        self._sorted = np.sort(np.concatenate([self._sorted, recent]), kind="stable")
        self._recent.clear()
