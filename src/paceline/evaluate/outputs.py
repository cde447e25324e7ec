"""Whether decoding with a draft wrote what the target writes alone, and how close a call it was."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

# Two float32 forward passes in other batch shapes differ by about 1e-4 in a log probability.
NEAR_TIE = 1e-3
_LISTED = 100

Key = tuple[str, int]  # name of a chat, turn


def answer_rows(num_draft_tokens: int, answers: Mapping[Key, list[int]]) -> list[dict[str, Any]]:
    """Rows of `answers.jsonl`; num_draft_tokens 0: of the target alone."""
    return [
        {"conversation": name, "turn": turn, "num_draft_tokens": num_draft_tokens, "ids": ids}
        for (name, turn), ids in answers.items()
    ]


@dataclass(frozen=True)
class Difference:
    """Where an answer leaves the target's own. gap: how much more likely the target's own token is
    than the other one, as a difference of log probabilities (natural); None: not known, or the
    other token is not among the likely ones."""

    conversation: str
    turn: int
    num_draft_tokens: int
    position: int
    own: int | None
    other: int | None
    gap: float | None


def first_difference(own: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first token that differs; None for equal answers."""
    for at, (a, b) in enumerate(zip(own, other, strict=False)):
        if a != b:
            return at
    return None if len(own) == len(other) else min(len(own), len(other))


def compare(
    own: Mapping[Key, list[int]],
    others: Mapping[Key, list[int]],
    num_draft_tokens: int,
    gap_of: Callable[[Key, list[int], int, int], float | None],
) -> list[Difference]:
    """gap_of(key, tokens before, own token, other token) is asked for each answer that differs."""
    found = []
    for key, answer in others.items():
        at = first_difference(own[key], answer)
        if at is None:
            continue
        a, b = (tokens[at] if at < len(tokens) else None for tokens in (own[key], answer))
        gap = gap_of(key, own[key][:at], a, b) if a is not None and b is not None else None
        found.append(Difference(*key, num_draft_tokens, at, a, b, gap))
    return found


def summary(differences: Sequence[Difference], num_outputs: int) -> dict[str, Any]:
    """{"equal_outputs", "outputs", "near_ties", "differences"}; near_ties: answers that differ
    where the two tokens are as likely as rounding can tell."""
    near = sum(d.gap is not None and abs(d.gap) <= NEAR_TIE for d in differences)
    return {
        "equal_outputs": num_outputs - len(differences),
        "outputs": num_outputs,
        "near_ties": near,
        "differences": [asdict(d) for d in differences[:_LISTED]],
    }
