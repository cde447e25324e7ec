"""From rendered texts with character spans to token ids with a loss mask, proved by decoding."""

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from paceline.prepare.rows import RowError
from paceline.prepare.spans import TextSample
from paceline.prepare.tokens import Encoded, TextTokenizer
from paceline.prepare.turns import Span

# Texts tokenised at a time by one thread: the tokenizer's own records are large, ids are not.
_GROUP_CHARS = 1 << 19


@dataclass(frozen=True)
class MaskedTokens:
    """input_ids int32 [T], loss_mask bool [T]; notes count what was odd."""

    input_ids: np.ndarray
    loss_mask: np.ndarray
    notes: Counter[str] = field(default_factory=Counter)


class Masker:
    """Tokenises texts in threads and turns spans into masks, while the caller renders on."""

    def __init__(self, tokenizer: TextTokenizer, num_threads: int) -> None:
        self.tokenizer = tokenizer
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="tokenize")
        self._waiting: list[TextSample] = []
        self._waiting_chars = 0
        self._groups: deque[Future[list[MaskedTokens | RowError]]] = deque()

    def put(self, samples: Iterable[TextSample]) -> None:
        """Hand texts over; `results` gives their tokens in the same order."""
        for sample in samples:
            self._waiting.append(sample)
            self._waiting_chars += len(sample.text)
            if self._waiting_chars >= _GROUP_CHARS:
                self._flush()

    def results(self) -> Iterator[MaskedTokens | RowError]:
        """For every text put in since the last call its tokens and mask, or why there are none."""
        self._flush()
        while self._groups:
            yield from self._groups.popleft().result()

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)

    def _flush(self) -> None:
        if self._waiting:
            self._groups.append(self._threads.submit(self._mask_group, self._waiting))
        self._waiting, self._waiting_chars = [], 0

    def _mask_group(self, samples: list[TextSample]) -> list[MaskedTokens | RowError]:
        encoded = self.tokenizer.encode([sample.text for sample in samples])
        places = [
            [_place(entry, sample.text, span) for span in sample.spans]
            for entry, sample in zip(encoded, samples, strict=True)
        ]
        pieces = [
            entry.ids[place.first : place.last]
            for entry, of_sample in zip(encoded, places, strict=True)
            for place in of_sample
        ]
        decoded = iter(self.tokenizer.decode_all(pieces))
        results: list[MaskedTokens | RowError] = []
        for entry, sample, of_sample in zip(encoded, samples, places, strict=True):
            texts = [next(decoded) for _ in of_sample]
            results.append(self._mask(entry, sample, of_sample, texts))
        return results

    def _mask(
        self, encoded: Encoded, sample: TextSample, places: list["_Place"], decoded: list[str]
    ) -> MaskedTokens | RowError:
        mask = np.zeros(len(encoded.ids), bool)
        notes: Counter[str] = Counter()
        for span, place, text in zip(sample.spans, places, decoded, strict=True):
            wanted = sample.text[span.start : span.end]
            if not self._proved(text, wanted, place):
                return RowError(
                    "mask_not_proved",
                    f"the supervised tokens decode to {_short(text)}, not to {_short(wanted)}",
                )
            notes["fused_with_neighbour"] += place.fused
            mask[place.first : place.last] = True
        return MaskedTokens(encoded.ids, mask, +notes)

    def _proved(self, decoded: str, wanted: str, place: "_Place") -> bool:
        if decoded == wanted or decoded.strip() == wanted.strip():
            return True
        if place.fused:
            return decoded.strip() in wanted
        # A tokenizer that normalises text gives the same only for the same way there and back.
        alone = self.tokenizer.encode([wanted])[0].ids[len(self.tokenizer.begin_ids) :]
        return self.tokenizer.decode(alone).split() == decoded.split()


@dataclass(frozen=True)
class _Place:
    """Tokens [first, last) of a span; fused: a token at its border holds other text too and is
    left out."""

    first: int
    last: int
    fused: bool


def _place(encoded: Encoded, text: str, span: Span) -> _Place:
    first, open_start = encoded.token_at(span.start)
    last, open_end = encoded.token_at(span.end)
    if open_start and text[span.start - 1 : span.start] == " ":
        # SentencePiece writes the space before a word into the word's token.
        previous, still_open = encoded.token_at(span.start - 1)
        if not still_open and previous == first - 1:
            first, open_start = previous, False
    if open_end:
        last -= 1
    return _Place(first, max(first, last), open_start or open_end)


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:28]} ... {text[-28:]}")
