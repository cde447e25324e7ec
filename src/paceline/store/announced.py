"""What a store that is still written says of its samples before it has them: in the manifest's
result, `planned`."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import numpy as np

from paceline.contracts import TokenSample


def announcement(samples: Iterable[TokenSample]) -> dict[str, dict[str, Any]]:
    """For each split the samples and supervised tokens that are to be stored. `supervised_capped`:
    how many of the tokens there are if each sample counts at most 1, 2, 4, ... of its own; the last
    number is all of them."""
    of_split: dict[str, list[int]] = defaultdict(list)
    for sample in samples:
        of_split[sample.split].append(sample.num_supervised)
    return {split: _described(np.array(lengths)) for split, lengths in of_split.items()}


def announced_rows(described: dict[str, Any], at_most: int | None) -> int:
    """Supervised tokens of a split that `announcement` describes, of each sample at most `at_most`:
    exact for a power of two, else at most as many as there are and nearly so."""
    capped = described.get("supervised_capped")
    # Stores that were begun before this was told have no more to say.
    if at_most is None or not capped:
        return described.get("supervised", 0)
    # The sum is concave in the cap, so a straight line between two of them never says too many.
    return int(np.interp(at_most, 1 << np.arange(len(capped)), capped))


def _described(lengths: np.ndarray) -> dict[str, Any]:
    caps = 1 << np.arange(int(lengths.max() - 1).bit_length() + 1)
    return {
        "samples": len(lengths),
        "supervised": int(lengths.sum()),
        "supervised_capped": [int(np.minimum(lengths, cap).sum()) for cap in caps],
    }
