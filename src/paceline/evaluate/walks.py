"""What a method accepted in each conversation, on the way from single answers to the tables."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from paceline import fingerprint
from paceline.acceptance.counts import Counts, table
from paceline.recipe import EvaluateOptions


@dataclass(frozen=True)
class Measured:
    """What a mode found. result: its part of `result.json`; conversations: rows of
    `conversations.jsonl`; answers: rows of `answers.jsonl`, where answers were written."""

    result: dict[str, Any]
    conversations: list[dict[str, Any]]
    answers: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Walks:
    """Counts of each conversation for one method: (conversation id, source) -> K -> Counts. Two
    sources may number their conversations alike."""

    lengths: list[int]
    found: dict[tuple[str, str], dict[int, Counts]] = field(default_factory=dict)
    contents: dict[tuple[str, str], set[str]] = field(default_factory=dict)

    def add(self, conversation: str, source: str, counts: dict[int, Counts], content: str) -> None:
        """Answers of one conversation are resampled together, so their counts are added up.

        content: a digest of what was walked or asked; ids alone do not say that two measurements
        are of the same conversations.
        """
        known = self.found.setdefault((conversation, source), {})
        self.contents.setdefault((conversation, source), set()).add(content)
        for k, more in counts.items():
            if k in known:
                known[k].add(more)
            else:
                known[k] = more

    def table(self, options: EvaluateOptions) -> dict[str, Any]:
        per_length = {k: [counts[k] for counts in self.found.values()] for k in self.lengths}
        sources = [source for _, source in self.found]
        return table(per_length, sources, options.bootstrap, options.seed)

    def rows(self) -> Iterator[dict[str, Any]]:
        """One record for each conversation and chain length."""
        for (conversation, source), by_length in self.found.items():
            content = fingerprint.of_json(sorted(self.contents[conversation, source]))
            for k, counts in by_length.items():
                yield {
                    "conversation": conversation,
                    "source": source,
                    "content": content,
                    "num_draft_tokens": k,
                    "verify_steps": counts.verify_steps,
                    "accepted": counts.accepted,
                    "per_position": counts.per_position.tolist(),
                    "left_out": counts.left_out,
                }
