"""Where drafts fail: for which tokens, after which tokens and in which passages the first draft
token is not what the target wrote.

Every point of every answer counts, not only those where a chain starts: a chain that starts
elsewhere tomorrow meets the same places.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.acceptance.chain import spans_of
from paceline.acceptance.counts import Answer
from paceline.errors import TargetError
from paceline.store import StoredSample
from paceline.target.spec import Target

_NUM_TOKENS, _NUM_PASSAGES = 20, 6
# Fewer tries say nothing about a token.
_FEWEST_TRIES = 5
_PASSAGE_TOKENS, _CONTEXT_TOKENS = 24, 24
_Z = 1.96  # of a 95% interval


@dataclass(frozen=True)
class _Passage:
    """A stretch of one answer. right bool [P]: the first draft token for each of `tokens`."""

    sample_id: str
    source: str
    before: np.ndarray
    tokens: np.ndarray
    right: np.ndarray

    @property
    def share(self) -> float:
        return float(self.right.mean())


class _TextOf:
    """Token ids to text; None where there is no tokenizer."""

    def __init__(self, target: Target) -> None:
        try:
            self._tokenizer = target.tokenizer
        except TargetError:
            self._tokenizer = None

    def __call__(self, ids: list[int]) -> str | None:
        if self._tokenizer is None:
            return None
        return self._tokenizer.decode(ids, skip_special_tokens=False)


class Failures:
    """Counts points as answers are walked; `told` says what stands out."""

    def __init__(self, vocab_size: int) -> None:
        self._tries = {name: np.zeros(vocab_size, np.int64) for name in ("token", "after")}
        self._right = {name: np.zeros(vocab_size, np.int64) for name in ("token", "after")}
        self._passages: list[_Passage] = []

    def add(self, sample: StoredSample, answers: Iterable[Answer]) -> None:
        """answers: of the draft, one for each answer of the sample, in order."""
        ids = sample.input_ids.numpy()
        worst: _Passage | None = None
        for span, answer in zip(spans_of(sample), answers, strict=True):
            points = np.arange(span.first, span.end)
            right = answer.match > 0
            for name, tokens in (("after", ids[points]), ("token", ids[points + 1])):
                np.add.at(self._tries[name], tokens, 1)
                np.add.at(self._right[name], tokens[right], 1)
            for start in range(0, len(points) - _PASSAGE_TOKENS + 1, _PASSAGE_TOKENS):
                found = _passage(sample, ids, points[start], right[start : start + _PASSAGE_TOKENS])
                worst = found if worst is None or found.share < worst.share else worst
        # One passage a sample, so that one odd answer does not fill the list.
        if worst is not None:
            self._passages = sorted([*self._passages, worst], key=lambda p: p.share)[:_NUM_PASSAGES]

    def told(self, target: Target, t2d: np.ndarray) -> dict[str, Any]:
        """t2d bool [V]: ids that the draft can say. Texts are None where the target has no
        tokenizer."""
        text_of = _TextOf(target)
        tries, right = self._tries["token"], self._right["token"]
        rejected = int((tries - right).sum())
        lost = int((tries - right)[~t2d].sum())
        return {
            "points": int(tries.sum()),
            "right": int(right.sum()),
            "rejected_outside_vocabulary": lost / rejected if rejected else None,
            "tokens": self._lowest("token", text_of, t2d),
            "after": self._lowest("after", text_of),
            "passages": [_told_passage(passage, text_of) for passage in self._passages],
        }

    def _lowest(
        self, name: str, text_of: _TextOf, t2d: np.ndarray | None = None
    ) -> list[dict[str, Any]]:
        """Tokens whose acceptance is surely low: by the upper end of its 95% interval."""
        tries, right = self._tries[name], self._right[name]
        often = np.flatnonzero((tries >= _FEWEST_TRIES) & (right < tries))
        bounds = {int(i): _upper_bound(int(right[i]), int(tries[i])) for i in often}
        lowest = sorted(bounds, key=lambda i: (bounds[i], -int(tries[i]), i))[:_NUM_TOKENS]
        entries = []
        for i in lowest:
            entry = {"id": i, "text": text_of([i]), "tries": int(tries[i]), "right": int(right[i])}
            entries.append(entry if t2d is None else {**entry, "reachable": bool(t2d[i])})
        return entries


def _passage(sample: StoredSample, ids: np.ndarray, start: int, right: np.ndarray) -> _Passage:
    first = int(start) + 1
    return _Passage(
        sample_id=sample.record.sample_id,
        source=sample.record.source,
        before=ids[max(first - _CONTEXT_TOKENS, 0) : first].copy(),
        tokens=ids[first : first + len(right)].copy(),
        right=right.copy(),
    )


def _told_passage(passage: _Passage, text_of: _TextOf) -> dict[str, Any]:
    pieces = [
        {"id": int(token), "text": text_of([int(token)]), "right": bool(right)}
        for token, right in zip(passage.tokens, passage.right, strict=True)
    ]
    return {
        "sample_id": passage.sample_id,
        "source": passage.source,
        "share": passage.share,
        "before": text_of(passage.before.tolist()),
        "pieces": pieces,
    }


def _upper_bound(right: int, tries: int) -> float:
    """The upper end of Wilson's 95% interval of right / tries."""
    share, z2 = right / tries, _Z * _Z
    middle = share + z2 / (2 * tries)
    around = _Z * math.sqrt(share * (1 - share) / tries + z2 / (4 * tries * tries))
    return (middle + around) / (1 + z2 / tries)
