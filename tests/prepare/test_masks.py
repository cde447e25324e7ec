"""Masks of random conversations over templates of many kinds, against a hand-written oracle."""

import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from paceline.prepare.rows import RowError
from paceline.prepare.spans import TextSample
from paceline.prepare.turns import Turn
from tests.prepare.families import FAMILIES, Family
from tests.prepare.masking import Masking, oracle_tokens
from tests.prepare.toys import CHATML_PROMPT, THINK_STRIP, toy_tokenizer

# Words, space, characters of several bytes, and what would fool a search for roles in the text.
FRAGMENTS = (
    "hi",
    "x",
    " ",
    "\n",
    "\n\n",
    "\u00e9",
    "\U0001f469\u200d\U0001f4bb",
    "\u2028",
    "user",
    "assistant\n",
    "<|im_start|>assistant\n",
    "<|im_end|>",
    "<|im_end|>\n",
    "<|eot_id|>",
    "<|assistant|>",
    "<|user|>",
    "<|end|>",
    "<start_of_turn>model\n",
    "[INST]",
    "[/INST]",
    "</s>",
    "{{ x }}",
    "{% endfor %}",
)
texts = st.lists(st.sampled_from(FRAGMENTS), max_size=6).map("".join)


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, str]]:
    """Any order of roles that ends with an assistant turn of some words."""
    roles = draw(st.lists(st.sampled_from(("user", "assistant", "tool")), max_size=5))
    if draw(st.booleans()):
        roles.insert(0, "system")
    messages = [{"role": role, "content": draw(texts)} for role in ["user", *roles]]
    return [*messages, {"role": "assistant", "content": draw(texts) + "."}]


@functools.cache
def masking_of(family: Family) -> Masking:
    return Masking(toy_tokenizer(family.template, family.specials, family.end), [family.end])


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@settings(max_examples=80, deadline=None)
@given(messages=conversations())
def test_tokens_and_masks_are_the_oracles(family: Family, messages: list[dict[str, str]]) -> None:
    if family.name.startswith("chatml with a system"):
        messages = sorted(messages, key=lambda message: message["role"] != "system")
    masking = masking_of(family)
    tokenizer = masking.tokenizer
    [sample] = masking.samples(messages)
    tokens, mask = oracle_tokens(family.oracle(messages), [*family.specials, "<bos>", family.end])
    symbols = bytes_to_unicode()
    ids = [tokenizer.convert_tokens_to_ids(t if isinstance(t, str) else symbols[t]) for t in tokens]
    assert sample.input_ids.tolist() == ids == masking.one_step(messages)
    assert sample.loss_mask.tolist() == mask


think_texts = st.lists(st.sampled_from(("hi", "x ", "\n", "\u00e9", "<|im_end|>")), max_size=4)


@settings(max_examples=80, deadline=None)
@given(
    turns=st.lists(
        st.tuples(st.booleans(), think_texts.map("".join), think_texts.map("".join)),
        min_size=1,
        max_size=4,
    )
)
def test_every_answer_is_supervised_as_it_was_written(turns: list[tuple[bool, str, str]]) -> None:
    """Thinking that history drops: the fewest samples, every answer with its thinking once."""
    masking = _think_masking()
    messages, written = [], []
    for number, (thinks, thought, said) in enumerate(turns):
        answer = f"<think>{thought}</think>{said}{number}" if thinks else f"{said}{number}"
        messages += [
            {"role": "user", "content": f"q{number}"},
            {"role": "assistant", "content": answer},
        ]
        written.append(answer + "<|im_end|>")
    spans = masking.spans(messages)
    assert sorted(span for sample in spans for span in sample) == sorted(written)
    # An answer that thought is not shown so by any later text; one that did not think is.
    thinking = [i for i, (thinks, _, _) in enumerate(turns) if thinks]
    last = len(turns) - 1
    assert len(spans) == len({*thinking, last})


@functools.cache
def _think_masking() -> Masking:
    return Masking(toy_tokenizer(THINK_STRIP), ["<|im_end|>"])


@settings(max_examples=80, deadline=None)
@given(first=texts, second=texts)
def test_decoded_spans_are_the_assistants_texts(
    real_masking: Masking, first: str, second: str
) -> None:
    """On a real vocabulary, where tokens hold several characters."""
    first, second = f"a{first}b", f"c{second}d"
    messages = [
        {"role": "user", "content": second},
        {"role": "assistant", "content": first},
        {"role": "user", "content": first},
        {"role": "assistant", "content": second},
    ]
    [sample] = masking_samples = real_masking.samples(messages)
    assert len(masking_samples) == 1
    assert sample.input_ids.tolist() == real_masking.one_step(messages)
    ends = [first + "<|im_end|>", second + "<|im_end|>"]
    assert real_masking.decoded_runs(sample) == ends


def test_a_token_over_the_border_is_left_out(real_masking: Masking) -> None:
    """The header's newline and the answer's are one token: nobody wrote it alone."""
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "\n\nWell."}]
    [sample] = real_masking.samples(messages)
    assert sample.input_ids.tolist() == real_masking.one_step(messages)
    [run] = real_masking.decoded_runs(sample)
    assert run == "\nWell.<|im_end|>"
    assert sample.notes == {"fused_with_neighbour": 1}


def test_content_parts_reasoning_and_aliases_are_one_conversation() -> None:
    masking = Masking(toy_tokenizer(CHATML_PROMPT), ["<|im_end|>"])
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "human", "content": parts}, {"role": "gpt", "content": parts}]
    [sample] = masking.samples(messages)
    plain = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "ab"}]
    assert sample.input_ids.tolist() == masking.one_step(plain)
    assert masking.decoded_runs(sample) == ["ab<|im_end|>"]
    assert np.count_nonzero(sample.loss_mask) == 3


class OwnRender(PreTrainedTokenizerFast):
    """As some targets' tokenizers do: the template gets a variable that nobody else gives it."""

    def apply_chat_template(self, conversation: list, **settings: object) -> str:
        return super().apply_chat_template(conversation, mood="glad", **settings)


def test_a_tokenizers_own_rendering_counts() -> None:
    plain = toy_tokenizer("{{ mood }}" + CHATML_PROMPT)
    tokenizer = OwnRender(tokenizer_object=plain.backend_tokenizer, eos_token="<|im_end|>")
    tokenizer.chat_template = plain.chat_template
    masking = Masking(tokenizer, ["<|im_end|>"])
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    [sample] = masking.samples(messages)
    assert tokenizer.decode(sample.input_ids.tolist()).startswith("glad<|im_start|>user")
    assert masking.decoded_runs(sample) == ["a<|im_end|>"]


def test_turns_share_the_last_ones_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text for every turn would be as large as the conversation squared."""
    masking = Masking(toy_tokenizer(CHATML_PROMPT), ["<|im_end|>"])
    compose = masking.finder._compose
    turns = []

    def seen(found: list[Turn], finished: bool | None) -> list[TextSample]:
        turns.extend(found)
        return compose(found, finished)

    monkeypatch.setattr(masking.finder, "_compose", seen)
    messages = [
        {"role": role, "content": f"{role[0]}{i}"}
        for i in range(4)
        for role in ("user", "assistant")
    ]
    assert masking.spans(messages) == [[f"a{i}<|im_end|>" for i in range(4)]]
    assert len(turns) == 4
    assert all(turn.text is turns[-1].text for turn in turns)


def last_turn_of(template: str, messages: list[dict[str, str]]) -> list[list[str]]:
    masking = Masking(toy_tokenizer(template), ["<|im_end|>"])
    spans = masking.spans(messages)
    assert masking.found.method == "last_turn_only"
    assert masking.found.notes["turns_not_supervised"] == 1
    return spans


def test_a_turn_that_cannot_be_found_leaves_the_last_one() -> None:
    """A template that shouts earlier answers when they are short: only the last is told by its
    words."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{{ m.content | upper if 'odd' in m.content and m.role == 'assistant' else m.content }}"
        "<|im_end|>\n{% endfor %}"
    )
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "an odd one"},
        {"role": "user", "content": "r"},
        {"role": "assistant", "content": "the last"},
    ]
    assert last_turn_of(template, messages) == [["the last<|im_end|>"]]


def test_words_of_the_user_are_never_taken_for_the_last_turn() -> None:
    """The template hides odd answers; the user's turn before ends in the very same words."""
    template = (
        "{% for m in messages if 'odd' not in m.content or m.role == 'user' %}"
        "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    )
    masking = Masking(toy_tokenizer(template), ["<|im_end|>"])
    messages = [
        {"role": "user", "content": "this is odd"},
        {"role": "assistant", "content": "this is odd"},
    ]
    with pytest.raises(RowError, match="cannot be found"):
        masking.samples(messages)
