"""Answers that begin beyond `max_length`, told without tokenising the texts that lead up to them.

A template that strips thinking makes a text of its own for every answer of a conversation, each
with all that was said before: to tokenise those of 400 turns only to drop nearly all of them would
take minutes.
"""

from bisect import bisect_left

from paceline.prepare.spans import TextSample
from paceline.prepare.tokens import TextTokenizer

# Fewer texts are tokenised as they are.
_FEWEST = 8
# Tokens that the end of a shared beginning may have less in one text than in another.
_MARGIN = 64


def split_late(
    samples: list[TextSample], tokenizer: TextTokenizer, max_length: int
) -> tuple[list[TextSample], list[TextSample]]:
    """The samples of one conversation that may have a supervised token among their first
    max_length ones, and those that have none for sure. The first is always among the former."""
    longest = samples[-1].text
    if len(samples) < _FEWEST or len(longest) <= max_length:
        return samples, []
    encoded, limit = tokenizer.encode([longest])[0], max_length + _MARGIN
    if len(encoded.ids) <= limit:
        return samples, []
    beyond = bisect_left(range(len(longest)), limit, key=lambda char: encoded.token_at(char)[0])
    shared = longest[:beyond]
    is_late = lambda sample: sample.spans[0].start >= beyond and sample.text.startswith(shared)
    early, late = [samples[0]], []
    for sample in samples[1:]:
        (late if is_late(sample) else early).append(sample)
    return early, late


def count_supervised(samples: list[TextSample], tokenizer: TextTokenizer) -> int:
    """Tokens of the samples' spans."""
    texts = [sample.text[span.start : span.end] for sample in samples for span in sample.spans]
    begin = len(tokenizer.begin_ids)
    return sum(len(encoded.ids) - begin for encoded in tokenizer.encode(texts))
