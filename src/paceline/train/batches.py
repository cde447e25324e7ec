"""Which samples make which optimiser step: a pure function of seed and step, so that resuming in
mid-epoch replays nothing."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

import numpy as np

from paceline.store.packing import cut, shuffled


@dataclass(frozen=True)
class StepPlan:
    """Samples of a run in the order of training, cut into optimiser steps.

    samples: int64 indices into the store; num_rows, num_tokens: for each sample of the store its
    supervised rows and its rows with states. A step takes samples until it holds `batch_rows`
    rows; epochs follow each other without a border.
    """

    samples: np.ndarray
    num_rows: np.ndarray
    num_tokens: np.ndarray
    batch_rows: int
    seed: int

    def total_steps(self, epochs: float) -> int:
        """Optimiser steps that `epochs` passes over the rows make."""
        return max(1, round(float(self.num_rows[self.samples].sum()) * epochs / self.batch_rows))

    def steps(self, start: int = 0) -> Iterator[list[int]]:
        """Sample numbers of optimiser steps start, start + 1, ... without end."""
        step, samples, rows = 0, [], 0
        for sample in self._order():
            samples.append(sample)
            rows += int(self.num_rows[sample])
            # Rows beyond a step's share count for the next one, so that steps are even on average.
            if rows >= self.batch_rows:
                rows -= self.batch_rows
                if step >= start:
                    yield samples
                step, samples = step + 1, []

    def micro_batches(self, samples: list[int], max_tokens: int) -> list[list[int]]:
        """A step's samples in groups of at most max_tokens tokens (a longer sample goes alone)."""
        return list(cut(np.array(samples, np.int64), self.num_tokens, max_tokens))

    def _order(self) -> Iterator[int]:
        for epoch in count():
            yield from shuffled(self.samples, self.seed, epoch).tolist()
