"""Where the answers of a sample lie, and how many tokens are on record after each point."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Span:
    """One answer: supervised positions first .. end, end included. recorded_end: the last position
    on record; past `end` only where tokens past the answer's end were recorded."""

    first: int
    end: int
    recorded_end: int

    @property
    def num_points(self) -> int:
        """Verify points: after each answer token but the last."""
        return self.end - self.first

    def rows(self, start: int) -> slice:
        """The rows of a batch from which its points are drafted, the sample's own beginning at
        `start`: a point after token t is drafted from row t - 1."""
        return slice(start + self.first - 1, start + self.end - 1)

    def known(self) -> np.ndarray:
        """Tokens on record after each verify point, int64 [num_points]."""
        return self.recorded_end - np.arange(self.first, self.end)


def answer_spans(loss_mask: np.ndarray, num_past_end: int) -> list[Span]:
    """The answers of a sample. Tokens past the end belong to the last one."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], loss_mask.astype(np.int8), [0]])))
    spans = [Span(int(a), int(b) - 1, int(b) - 1) for a, b in edges.reshape(-1, 2)]
    if spans and num_past_end:
        last = spans[-1]
        spans[-1] = Span(last.first, last.end, last.end + num_past_end)
    # The first token of a sample has no row before it from which to draft.
    return [span for span in spans if span.num_points > 0 and span.first > 0]
