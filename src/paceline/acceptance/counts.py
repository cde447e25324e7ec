"""The one definition of acceptance length, the walk over verify points, and its interval.

acceptance length = 1 + accepted draft tokens / verify steps (ratio of sums over conversations): the
bonus token is counted, the prefill token is not; for a chain of K it lies in 1 .. K + 1.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.contracts import ACCEPTANCE_DEFINITION

_INTERVAL = (2.5, 97.5)
# Rows that resamples draw together.
_DRAWN_AT_ONCE = 1 << 17


@dataclass(frozen=True)
class Answer:
    """What a method would draft at every verify point of one answer.

    Point i stands after answer token i (0 is the prefill token). match int [L]: leading draft
    tokens that equal what the target wrote, up to the longest chain asked for. known int [L]: how
    many tokens after the point are on record.
    """

    match: np.ndarray
    known: np.ndarray


@dataclass
class Counts:
    """Sums over the verify steps of one conversation.

    per_position[i]: steps that accepted more than i draft tokens. left_out: steps that would need
    tokens past the record's end. conversations: how many share these sums, where they were
    counted together. Whole numbers, but of `expected`, which counts steps by their chance.
    """

    verify_steps: float
    accepted: float
    per_position: np.ndarray
    left_out: float = 0
    conversations: int = 1

    @classmethod
    def zero(cls, num_draft_tokens: int) -> "Counts":
        return cls(0, 0, np.zeros(num_draft_tokens, np.int64))

    def add_step(self, accepted: int) -> None:
        self.verify_steps += 1
        self.accepted += accepted
        self.per_position[:accepted] += 1

    def add(self, other: "Counts") -> None:
        self.verify_steps += other.verify_steps
        self.accepted += other.accepted
        self.per_position = self.per_position + other.per_position
        self.left_out += other.left_out


def walk(answers: Iterable[Answer], num_draft_tokens: int) -> Counts:
    """Walk one conversation's answers with chains of K: the next point is accepted + 1 further.

    A step is counted only where all K tokens that it could accept are on record, whatever it then
    accepts: leaving out only the successful ones would bias the figure.
    """
    counts = Counts.zero(num_draft_tokens)
    for answer in answers:
        point = 0
        while point < len(answer.match):
            accepted = min(int(answer.match[point]), num_draft_tokens)
            if answer.known[point] < num_draft_tokens:
                counts.left_out += 1
            else:
                counts.add_step(accepted)
            point += accepted + 1
    return counts


def acceptance_length(accepted: float, verify_steps: float) -> float | None:
    """1 + accepted / verify_steps; None where there was no verify step."""
    return 1.0 + accepted / verify_steps if verify_steps else None


def pool(counts: Sequence[Counts], bootstrap: int, seed: int) -> dict[str, Any]:
    """Pooled figures of several conversations with a 95% percentile bootstrap interval.

    Conversations are resampled, and the ratio of sums is taken anew each time. Where several were
    counted together there is nothing to resample, and no interval.
    """
    steps = np.array([c.verify_steps for c in counts])
    accepted = np.array([c.accepted for c in counts])
    per_position = np.stack([c.per_position for c in counts])
    total_steps, total_accepted = steps.sum().item(), accepted.sum().item()
    numerators = np.column_stack([accepted, per_position])
    together = any(c.conversations > 1 for c in counts)
    length_interval, *position_intervals = (
        [None] * numerators.shape[1] if together else _intervals(numerators, steps, bootstrap, seed)
    )
    return {
        "acceptance_length": acceptance_length(total_accepted, total_steps),
        "interval": length_interval and [1.0 + bound for bound in length_interval],
        "per_position": (per_position.sum(0) / (total_steps or 1)).tolist(),
        "per_position_intervals": position_intervals,
        "verify_steps": total_steps,
        "accepted": total_accepted,
        "left_out": sum(c.left_out for c in counts),
        "conversations": sum(c.conversations for c in counts),
    }


def served_quotients(completion_tokens: Sequence[int], verify_steps: Sequence[int]) -> dict:
    """The two quotients that servers report of requests, each under its own name (None: no steps).

    The first completion token comes from the prefill, so only `tokens_per_verify_step` is an
    acceptance length; `completion_tokens_per_verify_step` is biased upward on short answers.
    """
    steps = sum(verify_steps)
    pairs = [(n, s) for n, s in zip(completion_tokens, verify_steps, strict=True) if s]
    if not steps:
        return dict.fromkeys(
            (
                "completion_tokens_per_verify_step",
                "tokens_per_verify_step",
                "mean_of_request_ratios",
            )
        )
    return {
        "completion_tokens_per_verify_step": sum(completion_tokens) / steps,
        "tokens_per_verify_step": sum(n - 1 for n in completion_tokens) / steps,
        "mean_of_request_ratios": sum((n - 1) / s for n, s in pairs) / len(pairs),
    }


def table(
    per_conversation: dict[int, list[Counts]], sources: Sequence[str], bootstrap: int, seed: int
) -> dict[str, Any]:
    """{K: {pooled, sources}} from the counts of each conversation, for each chain length."""
    found = {}
    for num_draft_tokens, counts in per_conversation.items():
        by_source = defaultdict(list)
        for name, of_conversation in zip(sources, counts, strict=True):
            by_source[name].append(of_conversation)
        found[str(num_draft_tokens)] = {
            "pooled": pool(counts, bootstrap, seed),
            "sources": {name: pool(by_source[name], bootstrap, seed) for name in sorted(by_source)},
        }
    return found


def definition(num_draft_tokens: Sequence[int]) -> str:
    return f"{ACCEPTANCE_DEFINITION}; K = {', '.join(map(str, num_draft_tokens))}"


def _intervals(
    numerators: np.ndarray, steps: np.ndarray, bootstrap: int, seed: int
) -> list[list[float] | None]:
    """95% percentile intervals of sum(numerator) / sum(steps) for each column of numerators
    [conversations, columns]; the same resamples of conversations serve all columns."""
    # One conversation alone says nothing of how conversations differ.
    if np.count_nonzero(steps) < 2:
        return [None] * numerators.shape[1]
    sums = resampled_sums(np.column_stack([steps, numerators]), bootstrap, seed)
    sums = sums[sums[:, 0] > 0]
    ratios = sums[:, 1:] / sums[:, :1]
    return np.percentile(ratios, _INTERVAL, axis=0).T.tolist()


def resampled_sums(values: np.ndarray, resamples: int, seed: int) -> np.ndarray:
    """Sums over resamples of the rows of values [rows, columns]: float64 [resamples, columns]."""
    generator = np.random.default_rng(seed)
    num_rows, sums = len(values), np.empty((resamples, values.shape[1]))
    # Some resamples at a time: all at once would take tens of kilobytes for each row.
    at_once = max(1, _DRAWN_AT_ONCE // max(num_rows, 1))
    for start in range(0, resamples, at_once):
        count = min(at_once, resamples - start)
        chosen = generator.integers(0, num_rows, (count, num_rows))
        # How often each resample has each row: sums over a resample are then a product.
        places = chosen + num_rows * np.arange(count)[:, None]
        weights = np.bincount(places.ravel(), minlength=places.size).reshape(places.shape)
        sums[start : start + count] = weights.astype(float) @ values
    return sums
