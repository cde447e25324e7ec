"""Text to token ids, with what is needed to find a span of characters among the tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from tokenizers import Encoding
from transformers import PreTrainedTokenizerBase

from paceline.contracts import TOKEN_DTYPE


class Encoded(Protocol):
    """A tokenised text. `ids`: int32 [T]."""

    ids: np.ndarray

    def token_at(self, char: int) -> tuple[int, bool]:
        """(token, straddled): the first token that begins at `char` or later (T at the end), and
        whether the token before it reaches over `char`."""
        ...


class TextTokenizer:
    """The target's tokenizer over whole texts; special tokens in the text are recognised.

    begin_ids: what the tokenizer itself puts in front of a text (a begin token, mostly); a
    template that prints it already gets no second one, one that does not gets it once. Empty with
    `add_begin` false: then a text begins as it begins.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, add_begin: bool = True) -> None:
        self.tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer if tokenizer.is_fast else None
        if self._backend is not None:
            # Settings of whoever saved the tokenizer; they would cut or pad in silence.
            self._backend.no_truncation()
            self._backend.no_padding()
        self.begin_ids = self._learn_begin() if add_begin else []

    def encode(self, texts: Sequence[str]) -> list[Encoded]:
        """Token ids of texts, as a one-step tokenising render of the same text gives them."""
        begin = self.begin_ids
        if self._backend is not None:
            encodings = self._backend.encode_batch(list(texts), add_special_tokens=False)
            return [_FastEncoded.of(encoding, begin) for encoding in encodings]
        return [self._encode_slowly(text) for text in texts]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of ids, special tokens included, nothing tidied up."""
        return self.tokenizer.decode(
            [int(i) for i in ids], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def decode_all(self, pieces: Sequence[np.ndarray]) -> list[str]:
        """Like decode, for many."""
        if self._backend is None:
            return [self.decode(piece) for piece in pieces]
        lists = [piece.tolist() for piece in pieces]
        return self._backend.decode_batch(lists, skip_special_tokens=False)

    def _encode_slowly(self, text: str) -> "_SlowEncoded":
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        prefix = missing_begin(ids, self.begin_ids)
        return _SlowEncoded(np.array([*prefix, *ids], TOKEN_DTYPE), len(prefix), text, self)

    def _learn_begin(self) -> list[int]:
        plain = self.tokenizer("a", add_special_tokens=False)["input_ids"]
        whole = self.tokenizer("a", add_special_tokens=True)["input_ids"]
        at = next((i for i in range(len(whole)) if whole[i : i + len(plain)] == plain), 0)
        return list(whole[:at])


def missing_begin(ids: Sequence[int], begin: list[int]) -> list[int]:
    """What must still be put in front of ids so that they begin as the tokenizer begins texts."""
    return [] if list(ids[: len(begin)]) == begin else begin


@dataclass(frozen=True)
class _FastEncoded:
    """With the offsets of the tokenizers library, asked for one place at a time."""

    ids: np.ndarray
    shift: int
    encoding: Encoding

    @classmethod
    def of(cls, encoding: Encoding, begin: list[int]) -> "_FastEncoded":
        prefix = missing_begin(encoding.ids[: len(begin)], begin)
        ids = np.array([*prefix, *encoding.ids] if prefix else encoding.ids, TOKEN_DTYPE)
        return cls(ids, len(prefix), encoding)

    def token_at(self, char: int) -> tuple[int, bool]:
        token = self.encoding.char_to_token(char)
        if token is None:
            return self._search(char)
        start, end = self.encoding.token_to_chars(token)
        if start >= char:
            return token + self.shift, False
        while token < len(self.encoding) and self.encoding.token_to_chars(token)[0] < char:
            token += 1
        return token + self.shift, end > char

    def _search(self, char: int) -> tuple[int, bool]:
        # The text's end, or characters that belong to no token (dropped by a normaliser).
        offsets = np.array(self.encoding.offsets, np.int64).reshape(-1, 2)
        at = int(np.searchsorted(offsets[:, 0], char, side="left"))
        straddled = at > 0 and int(offsets[at - 1, 1]) > char
        return at + self.shift, straddled


@dataclass(frozen=True)
class _SlowEncoded:
    """Without offsets (Python tokenizers): tokens are counted by decoding prefixes."""

    ids: np.ndarray
    shift: int
    text: str
    owner: TextTokenizer

    def token_at(self, char: int) -> tuple[int, bool]:
        low, high = self.shift, len(self.ids)
        while low < high:
            middle = (low + high) // 2
            if len(self._decoded(middle)) < char:
                low = middle + 1
            else:
                high = middle
        return low, self._decoded(low) != self.text[:char]

    def _decoded(self, num_tokens: int) -> str:
        # An unfinished character decodes to U+FFFD; it counts as not there yet.
        return self.owner.decode(self.ids[self.shift : num_tokens]).rstrip("\ufffd")
