"""vLLM's own counters of drafts, as a text page or as objects, and what they say by our definition.

They only ever grow, so a measurement is the difference of two readings.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from paceline.acceptance.counts import Counts
from paceline.errors import EvaluationError

_PREFIX = "vllm:spec_decode_num_"
_PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"
_GENERATED = "vllm:generation_tokens"
_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*?)(?:_total)?(?:\{(.*)\})?\s+([-+.\w]+)(?:\s+-?\d+)?$")
_POSITION = re.compile(r'(?:^|,)\s*position="(\d+)"')


@dataclass(frozen=True)
class DraftCounters:
    """One reading, summed over all engines behind it. per_position[i]: drafts of which more than i
    tokens were accepted; empty where the server drafts nothing. generated: tokens written."""

    drafts: int = 0
    draft_tokens: int = 0
    accepted: int = 0
    per_position: tuple[int, ...] = ()
    generated: int = 0

    @property
    def num_draft_tokens(self) -> int:
        """The chain length K that the server runs with; 0 without a draft."""
        return len(self.per_position)

    def since(self, before: "DraftCounters", written: int) -> "DraftCounters":
        """What happened between two readings of one server that wrote so many tokens for us.

        Raises EvaluationError where it counted others, or was started anew.
        """
        if len(before.per_position) != len(self.per_position) or self.drafts < before.drafts:
            raise EvaluationError(
                "the server's counters went backwards: it was started anew while it was measured"
            )
        if self.generated - before.generated != written:
            raise EvaluationError(
                f"the server counted {self.generated - before.generated} tokens as written while "
                f"it was measured, its answers have {written}: somebody else uses it, or the "
                "counters are another server's"
            )
        return DraftCounters(
            self.drafts - before.drafts,
            self.draft_tokens - before.draft_tokens,
            self.accepted - before.accepted,
            tuple(a - b for a, b in zip(self.per_position, before.per_position, strict=True)),
            self.generated - before.generated,
        )

    def counts(self) -> Counts:
        """By our definition: every draft is a verify step, the prefill token has none."""
        return Counts(self.drafts, self.accepted, np.array(self.per_position, np.int64))


def of_samples(samples: Iterable[tuple[str, str | None, float]]) -> DraftCounters:
    """samples: (name without `_total`, the position that a label says, value)."""
    sums: dict[str, int] = {}
    positions: dict[int, int] = {}
    for name, position, value in samples:
        if name == _PER_POSITION and position is not None:
            positions[int(position)] = positions.get(int(position), 0) + int(value)
        elif name.startswith(_PREFIX) or name == _GENERATED:
            sums[name] = sums.get(name, 0) + int(value)
    return DraftCounters(
        sums.get(_PREFIX + "drafts", 0),
        sums.get(_PREFIX + "draft_tokens", 0),
        sums.get(_PREFIX + "accepted_tokens", 0),
        tuple(positions.get(i, 0) for i in range(max(positions, default=-1) + 1)),
        sums.get(_GENERATED, 0),
    )


def of_page(text: str) -> DraftCounters:
    """From Prometheus' text format, as a server's /metrics has it."""
    matches = (_SAMPLE.match(line) for line in text.splitlines() if not line.startswith("#"))
    return of_samples(
        (m[1], position[1] if (position := _POSITION.search(m[2] or "")) else None, float(m[3]))
        for m in matches
        if m and m[1].startswith("vllm:")
    )
