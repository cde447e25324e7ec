"""The draft vocabulary on disk and in memory: which target ids the draft can say.

A library: `align` makes it, `train` and the page read it. W draft vocabulary, V logit width.
"""

import io
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from paceline import fingerprint
from paceline.artefact import load_finished, write_atomically
from paceline.errors import VocabularyError

VOCABULARY_FILE = "vocab.npz"


@dataclass(frozen=True)
class DraftVocabulary:
    """d2t int64 [W]: offsets, target id = draft id + d2t[draft id]; t2d bool [V]: ids it says."""

    d2t: np.ndarray
    t2d: np.ndarray

    @property
    def selected(self) -> np.ndarray:
        """Target ids, ascending, int64 [W]."""
        return np.arange(len(self.d2t)) + self.d2t

    @classmethod
    def from_selected(cls, selected: np.ndarray, vocab_size: int) -> "DraftVocabulary":
        selected = np.sort(np.asarray(selected, np.int64))
        t2d = np.zeros(vocab_size, bool)
        t2d[selected] = True
        return cls(selected - np.arange(len(selected)), t2d)

    @classmethod
    def from_offsets(cls, d2t: np.ndarray, vocab_size: int) -> "DraftVocabulary":
        """With the t2d that a stored d2t asks for; ids that are no target's are left to `check`."""
        targets = np.arange(len(d2t)) + d2t
        t2d = np.zeros(vocab_size, bool)
        t2d[targets[(targets >= 0) & (targets < vocab_size)]] = True
        return cls(d2t, t2d)

    def check(self) -> None:
        """Raises VocabularyError unless both maps say the same: a file of absolute ids does not."""
        targets = self.selected
        if len(targets) and (targets.min() < 0 or targets.max() >= len(self.t2d)):
            raise VocabularyError(
                f"d2t points outside 0 .. {len(self.t2d) - 1}: it must hold offsets (target id = "
                "draft id + d2t[draft id]); absolute ids look like this"
            )
        if np.any(np.diff(targets) <= 0):
            raise VocabularyError("d2t does not give ascending, distinct target ids")
        if self.t2d.sum() != len(targets) or not self.t2d[targets].all():
            raise VocabularyError(
                f"d2t and t2d do not agree: d2t names {len(targets)} ids, t2d marks "
                f"{int(self.t2d.sum())}, {int(self.t2d[targets].sum())} of them in common"
            )

    def content(self) -> str:
        """The fingerprint of both maps."""
        return fingerprint.of_bytes(self.d2t.tobytes() + self.t2d.tobytes())

    def save(self, folder: Path) -> None:
        buffer = io.BytesIO()
        np.savez(buffer, d2t=self.d2t, t2d=self.t2d)
        write_atomically(folder / VOCABULARY_FILE, buffer.getvalue())


def load_vocabulary(folder: str | Path) -> DraftVocabulary:
    """The vocabulary that `align` left in a finished folder, checked. Raises VocabularyError."""
    load_finished(folder, "align")
    path = Path(folder) / VOCABULARY_FILE
    try:
        with np.load(path, allow_pickle=False) as arrays:
            vocabulary = DraftVocabulary(arrays["d2t"], arrays["t2d"])
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise VocabularyError(
            f"{path} cannot be read ({error}): run `paceline align` again with --overwrite"
        ) from error
    vocabulary.check()
    return vocabulary
