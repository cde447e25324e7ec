"""Which samples make which optimiser step: a pure function of seed, step and the order in which the
store's windows came, so that resuming in mid-epoch replays nothing."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby, islice
from operator import itemgetter

import numpy as np

from paceline.contracts import TRAIN_SPLIT
from paceline.errors import TrainingError
from paceline.store import Follower, Store
from paceline.store.packing import cut, shuffled
from paceline.store.records import teaching
from paceline.train.balance import RankShare
from paceline.train.length import RunLength


@dataclass(frozen=True)
class Step:
    """What one optimiser step reads on one rank.

    groups: the sample indices of each micro-batch; one empty group where all samples of the step
    went to other ranks. num_rows: rows supervised at TTT step 0 in the whole step, over all ranks.
    num_windows: that many first windows of the store no later step reads. Without groups it is a
    pause before step `number`: the store's writer waits for room.
    """

    number: int
    groups: list[list[int]]
    num_rows: int
    num_windows: int


@dataclass(frozen=True)
class StepPlan:
    """Cuts the samples of a store into optimiser steps.

    A step takes samples until it has its part of the run's rows; `share` of them is this rank's, in
    micro-batches of at most `micro_batch_tokens` rows with states. num_epochs: passes over the
    samples, at least as many as the run needs; they follow each other without a border.
    """

    store: Store | Follower
    length: RunLength
    micro_batch_tokens: int
    num_epochs: int
    seed: int
    share: RankShare = field(default_factory=RankShare)

    def steps(self, start: int) -> Iterator[Step]:
        """Optimiser steps start, start + 1, ... to the end of the run, pauses in between. Nothing
        of the steps before is read. Of a stream that has less than it announced the last step takes
        what is left, and steps are missing only where nothing is."""
        if start >= self.length.num_steps:
            return
        number, samples, num_rows, num_windows = 0, [], 0, 0
        for window, sample in self._order():
            if sample is None:
                if number >= start:
                    yield Step(number, [], 0, num_windows if samples else window)
                continue
            samples.append(sample)
            num_windows = window if len(samples) == 1 else num_windows
            supervised = int(self.store.records.num_supervised[sample])
            num_rows += min(supervised, self.length.batch_rows)
            # Counted from the first step on: what one has too many of, the next one has less of.
            if num_rows >= self.length.end(number):
                if number >= start:
                    yield self._step(number, samples, window)
                number, samples = number + 1, []
                if number == self.length.num_steps:
                    return
        if samples and number >= start:
            yield self._step(number, samples, window)

    def groups(self, samples: list[int]) -> list[list[int]]:
        """This rank's share of samples, in order, in groups that fit into a micro-batch (a longer
        one goes alone)."""
        records = self.store.records
        own = self.share.of(np.array(samples, np.int64), records)
        return list(cut(own, records.num_aux_rows, self.micro_batch_tokens))

    def rows_per_step(self) -> float:
        """Mean supervised rows of a step: more than `batch_rows` where samples have more."""
        expected, at_most = self.store.expected_rows, self.length.batch_rows
        return self.length.rows_per_step(expected(TRAIN_SPLIT, at_most), expected(TRAIN_SPLIT))

    def num_samples(self) -> int:
        """Samples to learn from, as far as they are known."""
        return len(teaching(self.store.records, self.store.split(TRAIN_SPLIT)))

    def first_samples(self, count: int) -> list[int]:
        """The samples that training reads first, of one window: a stream may not hold more. Raises
        TrainingError where there is none."""
        samples = (pair for pair in self._order() if pair[1] is not None)
        for _, of_window in groupby(samples, key=itemgetter(0)):
            return [sample for _, sample in islice(of_window, count)]
        raise TrainingError(
            f"{self.store.folder} ended without a sample of the training split to learn from"
        )

    def _step(self, number: int, samples: list[int], window: int) -> Step:
        num_rows = sum(map(self.store.num_taught_rows, samples))
        return Step(number, self.groups(samples) or [[]], num_rows, window)

    def _order(self) -> Iterator[tuple[int, int | None]]:
        """Samples in the order of training, each with the number of its window; None: a pause."""
        number = 0
        for window in self.store.windows(TRAIN_SPLIT):
            if window is None:
                yield number, None
                continue
            for sample in self._shuffled(window, number):
                yield number, sample
            number += 1
        for epoch in range(1, self.num_epochs):
            for sample in self._shuffled(self.store.split(TRAIN_SPLIT), number - 1 + epoch):
                yield number, sample

    def _shuffled(self, samples: np.ndarray, epoch: int) -> list[int]:
        return shuffled(teaching(self.store.records, samples), self.seed, epoch).tolist()
