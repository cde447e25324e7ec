"""A conversation through templates, spans and tokens in memory, as `prepare` does it on files."""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from paceline.prepare.conversation import conversation
from paceline.prepare.masks import MaskedTokens, Masker
from paceline.prepare.rows import Identity
from paceline.prepare.spans import MaskedConversation, SpanFinder
from paceline.prepare.template import ChatTemplate
from paceline.prepare.tokens import TextTokenizer


class Masking:
    """Masks conversations of one tokenizer and its template."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, end: Sequence[str], **variables: Any
    ) -> None:
        self.tokenizer = tokenizer
        self.template = ChatTemplate(tokenizer.chat_template, tokenizer, variables)
        special = [token.content for token in tokenizer.added_tokens_decoder.values()]
        self.finder = SpanFinder(self.template, special, end)
        self.masker = Masker(TextTokenizer(tokenizer), 1)
        self.found: MaskedConversation | None = None

    def samples(self, messages: Sequence[dict[str, Any]], tools: Any = None) -> list[MaskedTokens]:
        """Tokens and masks of a conversation's samples. Raises RowError."""
        row = {"messages": list(messages)} | ({"tools": tools} if tools else {})
        self.found = self.finder.find(conversation(row, Identity("", "", "")))
        self.masker.put(self.found.samples)
        results = list(self.masker.results())
        for result in results:
            if isinstance(result, Exception):
                raise result
        return results

    def spans(self, messages: Sequence[dict[str, Any]], tools: Any = None) -> list[list[str]]:
        """The decoded runs of supervised tokens of each sample."""
        return [self.decoded_runs(sample) for sample in self.samples(messages, tools)]

    def decoded_runs(self, sample: MaskedTokens) -> list[str]:
        edges = np.flatnonzero(np.diff(np.concatenate([[0], sample.loss_mask, [0]])))
        return [
            self.tokenizer.decode(sample.input_ids[a:b].tolist())
            for a, b in zip(edges[::2], edges[1::2], strict=True)
        ]

    def one_step(self, messages: Sequence[dict[str, Any]], **arguments: Any) -> list[int]:
        """Ids as transformers' own tokenising render gives them."""
        ids = self.tokenizer.apply_chat_template(list(messages), tokenize=True, **arguments)
        return list(ids["input_ids"] if hasattr(ids, "keys") else ids)


def oracle_tokens(
    pieces: Sequence[tuple[str, bool]], specials: Sequence[str]
) -> tuple[list[str | int], list[bool]]:
    """Tokens (special texts, else UTF-8 bytes) and mask of flagged pieces of a text.

    The text is cut as a whole, as tokenizers do; a token is supervised where all its characters
    are.
    """
    text = "".join(piece for piece, _ in pieces)
    flags = [written for piece, written in pieces for _ in piece]
    pattern = "|".join(re.escape(s) for s in sorted(specials, key=len, reverse=True))
    tokens: list[str | int] = []
    mask: list[bool] = []
    for found in re.finditer(f"{pattern}|.", text, re.DOTALL):
        written = all(flags[found.start() : found.end()])
        if found[0] in specials:
            tokens.append(found[0])
            mask.append(written)
        else:
            tokens += found[0].encode()
            mask += [written] * len(found[0].encode())
    return tokens, mask
