"""What needs no training: a bigram table of the training answers, and prompt lookup.

Each gives, for every verify point of an answer, how many leading tokens it would have right.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from paceline.acceptance.counts import Answer
from paceline.acceptance.spans import Span

_LOOKUP_LENGTHS = (3, 2, 1)
_FEWEST_TO_MERGE = 1 << 22


class BigramTable:
    """The most frequent supervised successor of each token; -1 where none was seen."""

    def __init__(self, samples: Iterable[tuple[np.ndarray, np.ndarray]], vocab_size: int) -> None:
        """samples: (input_ids [T], loss_mask [T]) of the training split. Ties: the lower id."""
        found = _PairCounts()
        for ids, mask in samples:
            ids = ids.astype(np.int64)
            found.add((ids[:-1] * vocab_size + ids[1:])[mask[1:]])
        found.merge()
        pairs, counts = found.pairs, found.counts
        order = np.lexsort((-pairs, counts))  # the last write of a token wins: highest count
        self.successor = np.full(vocab_size + 1, -1, np.int64)
        self.successor[pairs[order] // vocab_size] = pairs[order] % vocab_size

    def answer(self, ids: np.ndarray, span: Span, longest: int) -> Answer:
        points = np.arange(span.first, span.end)
        known = span.known()
        proposed = ids[points].astype(np.int64)
        match = np.zeros(len(points), np.int64)
        alive = np.ones(len(points), bool)
        for step in range(longest):
            # The slot after the last id holds -1, so that "no successor" leads to itself.
            proposed = self.successor[proposed]
            actual = ids[np.minimum(points + 1 + step, len(ids) - 1)]
            alive &= (step < known) & (proposed == actual)
            match += alive
        return Answer(match, known)


class _PairCounts:
    """How often each pair was there: `pairs`, ascending, and their `counts`, after `merge`. Of all
    supervised tokens of a store, which are many times as many as their different pairs."""

    def __init__(self) -> None:
        self.pairs = self.counts = np.empty(0, np.int64)
        self._waiting: list[np.ndarray] = []
        self._num_waiting = 0

    def add(self, pairs: np.ndarray) -> None:
        self._waiting.append(pairs)
        self._num_waiting += len(pairs)
        # As many as are known already, so that merging costs no more than sorting all at once.
        if self._num_waiting >= max(_FEWEST_TO_MERGE, len(self.pairs)):
            self.merge()

    def merge(self) -> None:
        new = np.concatenate([self.pairs[:0], *self._waiting])
        new, more = np.unique(new, return_counts=True)
        known, self.pairs = self.pairs, np.union1d(self.pairs, new)
        before, self.counts = self.counts, np.zeros(len(self.pairs), np.int64)
        self.counts[np.searchsorted(self.pairs, known)] = before
        self.counts[np.searchsorted(self.pairs, new)] += more
        self._waiting, self._num_waiting = [], 0


def prompt_lookup_answer(ids: np.ndarray, span: Span, longest: int) -> Answer:
    """Drafts are what followed the latest earlier occurrence of the last 3, else 2, else 1 tokens;
    only tokens that stand before the point can be copied."""
    tokens = ids.tolist()
    latest: dict[tuple[int, ...], int] = {}
    match = np.zeros(span.num_points, np.int64)
    known = span.known()
    for at in range(span.end):
        if at >= span.first:
            source = _latest_match(tokens, at, latest)
            if source is not None:
                copied = tokens[source + 1 : min(source + 1 + longest, at + 1)]
                match[at - span.first] = _common_length(
                    copied, tokens[at + 1 : at + 1 + known[at - span.first]]
                )
        for n in _LOOKUP_LENGTHS:
            if at + 1 >= n:
                latest[tuple(tokens[at + 1 - n : at + 1])] = at
    return Answer(match, known)


def _latest_match(tokens: Sequence[int], at: int, latest: dict[tuple[int, ...], int]) -> int | None:
    for n in _LOOKUP_LENGTHS:
        if at + 1 >= n:
            found = latest.get(tuple(tokens[at + 1 - n : at + 1]))
            if found is not None:
                return found
    return None


def _common_length(a: Sequence[int], b: Sequence[int]) -> int:
    length = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        length += 1
    return length
