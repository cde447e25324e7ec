"""Places of characters among tokens: fast and slow tokenizers, normalisers, begin tokens."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast

from paceline.prepare.masks import MaskedTokens, Masker
from paceline.prepare.spans import TextSample
from paceline.prepare.tokens import TextTokenizer
from paceline.prepare.turns import Span
from paceline.target.spec import Target
from tests.prepare.toys import toy_tokenizer

TEXT = "a \u00e9\U0001f469\u200d\U0001f4bb<|im_end|>\nend"


class SlowBytes(PreTrainedTokenizer):
    """A tokenizer in Python, without offsets, as some targets bring along: bytes and pairs."""

    def __init__(self, **kwargs: object) -> None:
        self.pairs = [b"en", b"\n\n", "\u00e9".encode()]
        super().__init__(eos_token="<|im_end|>", **kwargs)

    @property
    def vocab_size(self) -> int:
        return 256 + len(self.pairs)

    def get_vocab(self) -> dict[str, int]:
        return {f"t{i}": i for i in range(self.vocab_size)} | self.added_tokens_encoder

    def _tokenize(self, text: str, **_: object) -> list[str]:
        data, tokens = text.encode(), []
        while data:
            pair = next((i for i, p in enumerate(self.pairs) if data.startswith(p)), None)
            tokens.append(f"t{data[0] if pair is None else 256 + pair}")
            data = data[1 if pair is None else len(self.pairs[pair]) :]
        return tokens

    def _convert_token_to_id(self, token: str) -> int:
        return int(token[1:])

    def _convert_id_to_token(self, index: int) -> str:
        return f"t{index}"

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return b"".join(map(self._bytes_of, tokens)).decode(errors="replace")

    def _bytes_of(self, token: str) -> bytes:
        if not token.startswith("t"):
            return token.encode()
        number = int(token[1:])
        return bytes([number]) if number < 256 else self.pairs[number - 256]


@pytest.mark.parametrize("make", [lambda: toy_tokenizer(None), SlowBytes], ids=["fast", "slow"])
def test_places_of_characters(make: object) -> None:
    tokenizer = TextTokenizer(make())
    [encoded] = tokenizer.encode([TEXT])
    for char in range(len(TEXT) + 1):
        token, straddled = encoded.token_at(char)
        before = tokenizer.decode(encoded.ids[:token])
        assert straddled == (before != TEXT[:char])
        # The first token that begins at the place or later: one token less shows less.
        assert len(before.rstrip("\ufffd")) >= char
        if token:
            shorter = tokenizer.decode(encoded.ids[: token - 1]).rstrip("\ufffd")
            assert len(shorter) < char


def test_slow_and_fast_tokenizers_mask_alike() -> None:
    sample = TextSample("q\u00e9<|im_end|>\n\u00e9 end<|im_end|>\n", (Span(13, 18, 28),))
    results = []
    for tokenizer in (toy_tokenizer(None), SlowBytes()):
        masker = Masker(TextTokenizer(tokenizer), 1)
        masker.put([sample])
        [result] = masker.results()
        assert isinstance(result, MaskedTokens)
        results.append(tokenizer.decode(result.input_ids[result.loss_mask].tolist()))
    assert results == [sample.text[13:28]] * 2 == ["\u00e9 end<|im_end|>"] * 2


def sentencepiece_like(lower: bool = False) -> PreTrainedTokenizerFast:
    """Words with the space before them in one token, as Llama 2's tokenizer has it."""
    words = ["\u2581Hello", "\u2581you", ".", "\u2581[", "INST", "]", "\u2581", "q", "\u2581hello"]
    vocabulary = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0)] + [(word, -1.0) for word in words]
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=0))
    if lower:
        tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


@pytest.mark.parametrize("start", [6, 7])
def test_the_space_before_a_word_belongs_to_its_token(start: int) -> None:
    """Whether the template's space counts as the answer's or not, the word's token is in."""
    text = "<s>q q Hello you.</s>"
    tokenizer = TextTokenizer(sentencepiece_like())
    masker = Masker(tokenizer, 1)
    masker.put([TextSample(text, (Span(start, 17, 21),))])
    [result] = masker.results()
    assert isinstance(result, MaskedTokens)
    supervised = tokenizer.tokenizer.convert_ids_to_tokens(
        result.input_ids[result.loss_mask].tolist()
    )
    assert supervised == ["\u2581Hello", "\u2581you", ".", "</s>"]


def test_a_normaliser_that_changes_the_text_is_no_reason_to_refuse() -> None:
    masker = Masker(TextTokenizer(sentencepiece_like(lower=True)), 1)
    masker.put([TextSample("<s>q Hello you.</s>", (Span(4, 15, 19),))])
    [result] = masker.results()
    assert isinstance(result, MaskedTokens)
    assert result.loss_mask.sum() == 4


def test_a_span_that_is_not_what_it_says_is_refused() -> None:
    """The proof by decoding can fail: here the tokens are of another text."""
    tokenizer = TextTokenizer(toy_tokenizer(None))
    masker = Masker(tokenizer, 1)
    [other] = tokenizer.encode(["abcX<|im_end|>"])
    right = tokenizer.encode
    tokenizer.encode = lambda texts: [other] if texts == ["abcd<|im_end|>"] else right(texts)
    masker.put([TextSample("abcd<|im_end|>", (Span(1, 4, 14),))])
    [result] = masker.results()
    assert not isinstance(result, MaskedTokens)
    assert result.reason == "mask_not_proved"


@settings(max_examples=100, deadline=None)
@given(pieces=st.lists(st.sampled_from(("hi", " ", "\n", "\n\n", "\u00e9", "<|im_end|>", "x9"))))
def test_ids_are_those_of_the_tokenizer_itself(smollm2: Target, pieces: list[str]) -> None:
    text = "".join(pieces)
    [encoded] = TextTokenizer(smollm2.tokenizer).encode([text])
    wanted = smollm2.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert encoded.ids.dtype == np.int32
    assert encoded.ids.tolist() == wanted


def test_settings_saved_with_a_tokenizer_neither_cut_nor_pad() -> None:
    saved = toy_tokenizer(None)
    saved.backend_tokenizer.enable_truncation(4)
    saved.backend_tokenizer.enable_padding(length=50)
    [encoded] = TextTokenizer(saved).encode(["abcdefgh"])
    assert len(encoded.ids) == 8


def test_begin_tokens_can_be_left_to_the_template() -> None:
    tokenizer = toy_tokenizer(None, adds_bos=True)
    for add_begin, count in ((True, 1), (False, 0)):
        [encoded] = TextTokenizer(tokenizer, add_begin).encode(["abc"])
        assert encoded.ids.tolist().count(tokenizer.bos_token_id) == count
    [encoded] = TextTokenizer(tokenizer, True).encode(["<bos>abc"])
    assert encoded.ids.tolist().count(tokenizer.bos_token_id) == 1
