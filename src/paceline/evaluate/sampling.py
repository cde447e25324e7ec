"""How a draft token is chosen and how the target takes or refuses it: greedy, or sampled.

Sampled: a draft token x of probability q(x) is taken with probability min(1, p(x) / q(x)), p the
target's; where one is refused, a token of the residual max(p - q, 0) takes its place, and after
the last taken one comes a token of p. What is written is then distributed as the target's own.
Legend: K draft tokens, V target vocabulary, W draft vocabulary.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from paceline.draft.model import Draft


@dataclass(frozen=True)
class Drafted:
    """One draft token. q [V]: the distribution that it was drawn from; None: it was not drawn."""

    token: int
    q: torch.Tensor | None = None


class Rule(Protocol):
    def draft(self, draft: Draft, state_RE: torch.Tensor) -> Drafted:
        """A token from the draft's residual stream of one row [1, E]."""
        ...

    def write(self, logits_V: torch.Tensor) -> int:
        """The target's own next token."""
        ...

    def verify(self, drafted: list[Drafted], logits_KV: torch.Tensor) -> list[int]:
        """What is written: the accepted draft tokens and one of the target's. logits [K + 1, V]:
        the target's, after the last written token and after each draft token."""
        ...


class Greedy:
    """A draft token is taken if it is the target's most likely one."""

    def draft(self, draft: Draft, state_RE: torch.Tensor) -> Drafted:
        return Drafted(int(draft.propose(state_RE)))

    def write(self, logits_V: torch.Tensor) -> int:
        return int(logits_V.argmax())

    def verify(self, drafted: list[Drafted], logits_KV: torch.Tensor) -> list[int]:
        own = logits_KV.argmax(-1).tolist()
        accepted = 0
        while accepted < len(drafted) and drafted[accepted].token == own[accepted]:
            accepted += 1
        return own[: accepted + 1]


class Sampled:
    """Speculative sampling at a temperature, with a generator of its own."""

    def __init__(self, temperature: float, seed: int) -> None:
        self._temperature = temperature
        self._generator = torch.Generator().manual_seed(seed)

    def draft(self, draft: Draft, state_RE: torch.Tensor) -> Drafted:
        q_W = self._distribution(draft.logits(state_RE)[0])
        q_V = torch.zeros(draft.config.vocab_size, dtype=q_W.dtype)
        q_V[draft.target_ids(torch.arange(len(q_W), device=draft.d2t.device)).cpu()] = q_W
        return Drafted(self._draw(q_V), q_V)

    def write(self, logits_V: torch.Tensor) -> int:
        return self._draw(self._distribution(logits_V))

    def verify(self, drafted: list[Drafted], logits_KV: torch.Tensor) -> list[int]:
        written = []
        for (token, q_V), logits_V in zip(_pairs(drafted), logits_KV, strict=False):
            p_V = self._distribution(logits_V)
            if self._uniform() * q_V[token] >= p_V[token]:
                return [*written, self._draw((p_V - q_V).clamp(min=0))]
            written.append(token)
        return [*written, self.write(logits_KV[-1])]

    def _distribution(self, logits: torch.Tensor) -> torch.Tensor:
        """In float64, so that a ratio of small probabilities keeps its digits."""
        return (logits.double().cpu() / self._temperature).softmax(-1)

    def _draw(self, weights: torch.Tensor) -> int:
        return int(torch.multinomial(weights, 1, generator=self._generator))

    def _uniform(self) -> float:
        return float(torch.rand((), dtype=torch.float64, generator=self._generator))


def _pairs(drafted: list[Drafted]) -> list[tuple[int, torch.Tensor]]:
    return [(d.token, d.q) for d in drafted if d.q is not None]


def rule_of(temperature: float, seed: int) -> Rule:
    """Greedy at temperature 0."""
    return Sampled(temperature, seed) if temperature else Greedy()
