"""What a foreign file's sample is called, which split it is in, which tokens are supervised."""

import numpy as np

from paceline import fingerprint
from paceline.contracts import HELDOUT_SPLIT, TRAIN_SPLIT, TokenSample
from paceline.dataset import TokenDataset
from paceline.errors import DataError
from paceline.store.foreign.layouts import ForeignFile, ForeignSample
from paceline.store.foreign.reading import ForeignFileError


class SkippedSample(DataError):
    """A file whose sample is whole, but of no use here. The message is the reason."""


class OwnNames:
    """Samples are called as their files; the split is by a hash of the prompt's tokens, so that
    answers to one prompt fall on one side."""

    def __init__(self, heldout_share: float) -> None:
        self._heldout_share = heldout_share

    def sample(self, file: ForeignFile, found: ForeignSample) -> TokenSample:
        """Raises ForeignFileError for a file without a mask."""
        if found.loss_mask is None:
            raise ForeignFileError(
                file.path, "has no loss_mask", "pass `data`, a folder of `prepare` with its ids"
            )
        supervised = np.flatnonzero(found.loss_mask)
        prompt = found.input_ids[: supervised[0]] if len(supervised) else found.input_ids
        unit = int(fingerprint.of_bytes(prompt.tobytes())[:8], 16) / 16**8
        return TokenSample(
            sample_id=file.name,
            input_ids=found.input_ids,
            loss_mask=found.loss_mask,
            split=HELDOUT_SPLIT if unit < self._heldout_share else TRAIN_SPLIT,
            conversation_id=file.name,
        )


class DatasetNames:
    """Samples are those of a token data set, found by their exact tokens."""

    def __init__(self, data: TokenDataset) -> None:
        self._known = {_key(sample.input_ids): sample for sample in data}

    def sample(self, file: ForeignFile, found: ForeignSample) -> TokenSample:
        """Raises SkippedSample for tokens that the data set does not have, ForeignFileError for
        another mask than its own."""
        known = self._known.get(_key(found.input_ids))
        if known is None:
            raise SkippedSample("not in the data set")
        if found.loss_mask is not None and not np.array_equal(known.loss_mask, found.loss_mask):
            raise ForeignFileError(file.path, "its loss_mask is not the data set's")
        return known


def _key(input_ids: np.ndarray) -> str:
    return fingerprint.of_bytes(input_ids.tobytes())
