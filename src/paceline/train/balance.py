"""Which samples of an optimiser step each rank gets: equal work, so that ranks wait little."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from paceline.draft.config import DraftConfig
from paceline.store.records import Records
from paceline.train.flops import flops_of_rows


@dataclass(frozen=True)
class RankShare:
    """One rank's part of every step. Costs of a sample, in any unit: of each row with states, of
    each supervised one, and of each pair of the two (attention)."""

    rank: int = 0
    num_ranks: int = 1
    row_cost: int = 1
    supervised_cost: int = 0
    pair_cost: int = 0

    @classmethod
    def of_draft(cls, config: DraftConfig, ttt_steps: int, rank: int, num_ranks: int) -> Self:
        """Costs in floating-point operations of a forward and a backward pass."""
        row = flops_of_rows(config, 1, [0] * ttt_steps, 0)
        heads = config.num_layers * config.num_attention_heads * config.head_dim
        return cls(
            rank=rank,
            num_ranks=num_ranks,
            row_cost=int(row),
            supervised_cost=int(flops_of_rows(config, 1, [1] * ttt_steps, 1) - row),
            # Two products forward and five backward, over half of the rows on average.
            pair_cost=7 * ttt_steps * heads,
        )

    def of(self, samples: np.ndarray, records: Records) -> np.ndarray:
        """The samples, int64 indices, that are this rank's; their order is kept."""
        if self.num_ranks == 1:
            return samples
        rows, supervised = records.num_aux_rows[samples], records.num_supervised[samples]
        costs = [
            self.row_cost * t + self.supervised_cost * r + self.pair_cost * t * r
            for t, r in zip(rows.tolist(), supervised.tolist(), strict=True)
        ]
        return samples[divide(costs, self.num_ranks)[self.rank]]


def divide(costs: Sequence[int], num_parts: int) -> list[list[int]]:
    """Indices of the costs in parts of nearly equal sums: the dearest first, each to the part that
    has least so far. The same everywhere for the same costs."""
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    least = [(0, part) for part in range(num_parts)]
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        total, part = least[0]
        parts[part].append(index)
        heapq.heapreplace(least, (total + costs[index], part))
    return [sorted(part) for part in parts]
