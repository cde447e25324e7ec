"""How many optimiser steps a training has: known before the first one, from sums alone."""

import math
from dataclasses import dataclass
from typing import Self

from paceline.recipe import TrainOptions


@dataclass(frozen=True)
class RunLength:
    """A whole run: its optimiser steps, and the supervised rows that they share evenly.

    A step takes whole samples, and a sample counts at most `batch_rows` of its rows, which is no
    more than a step's part: so none ends more than one step, and every step gets its samples, in
    whatever order they come.
    """

    num_steps: int
    num_rows: int
    batch_rows: int

    @classmethod
    def of(cls, options: TrainOptions, epoch_rows: float) -> Self:
        """epoch_rows: supervised rows of one pass over the samples, of each at most batch_rows."""
        batch_rows, num_steps = options.batch_rows, options.max_steps
        if num_steps:
            return cls(num_steps, num_steps * batch_rows, batch_rows)
        num_rows = max(1, int(epoch_rows * options.epochs))
        return cls(max(1, num_rows // batch_rows), num_rows, batch_rows)

    def end(self, step: int) -> int:
        """Counted rows since the start of the run with which a step is full."""
        return -(-(step + 1) * self.num_rows // self.num_steps)

    def rows_per_step(self, epoch_rows: float, all_rows: float) -> float:
        """Supervised rows of a step on average; all_rows: of one pass, each sample's in full."""
        part = self.num_rows / self.num_steps
        return part * all_rows / epoch_rows if epoch_rows else part

    def num_epochs(self, epoch_rows: int) -> int:
        """Passes over the samples that hold all rows."""
        return math.ceil(self.num_rows / epoch_rows)
