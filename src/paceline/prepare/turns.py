"""Where, in the text that ends with an assistant turn, that turn lies. For any chat template.

Four ways, the surest first: the template's own generation markers; the text after the generation
prompt; a sentinel in the turn's place; the last turn alone, by its words. Every find is held
against the message it is of.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from paceline.prepare.conversation import ASSISTANT, Message
from paceline.prepare.rows import RowError
from paceline.prepare.template import SENTINEL, ChatTemplate, Tools

MARKERS, PREFIX, SENTINELS, LAST_TURN = (
    "generation_markers",
    "rendered_prefix",
    "sentinel",
    "last_turn_only",
)
SUREST_FIRST = (MARKERS, PREFIX, SENTINELS, LAST_TURN)

# Special tokens are looked for this far around a place in the text.
_NEAR = 100


@dataclass(frozen=True)
class Span:
    """Characters [start, end) that the assistant wrote; the turn's own text ends at text_end, and
    the marker that ends the turn, if any, lies between text_end and end."""

    start: int
    text_end: int
    end: int


@dataclass(frozen=True)
class Turn:
    """An assistant turn in the text that ends with it. prompt_differs: the text does not begin
    with the generation prompt, so history shows the turn otherwise than it was written."""

    text: str
    spans: tuple[Span, ...]
    method: str
    prompt_differs: bool = False


@dataclass(frozen=True)
class _Frame:
    """What a template puts around an answer: `lead` between the generation prompt and the answer
    (None: the text does not begin with the prompt), `trail` after the answer. has_prompt: the
    template prints a generation prompt."""

    lead: str | None
    trail: str
    has_prompt: bool


class TurnFinder:
    """Finds turns for one template.

    special_texts: the texts of the tokenizer's special tokens; end_texts: of those that end a turn.
    """

    def __init__(
        self, template: ChatTemplate, special_texts: Iterable[str], end_texts: Iterable[str]
    ) -> None:
        self.template = template
        self.end_texts = tuple(text for text in end_texts if text)
        longest_first = sorted({t for t in special_texts if t}, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._frame = self._learn_frame()
        self.end_marker = self.marker_of(self._frame.trail)

    def find(self, messages: list[Message], tools: Tools) -> Turn | None:
        """The last of the messages, an assistant's; None where its place cannot be proved.

        Raises RowError with the template's own message where it refuses the conversation.
        """
        prompt = self._prompt(messages[:-1], tools)
        turn = None
        if self.template.has_markers:
            turn = self._by_markers(messages, tools, prompt)
        if turn is None:
            text = self.template.render(messages, tools)
            turn = self._by_prefix(text, messages[-1], prompt)
            turn = turn or self._by_sentinel(text, messages, tools)
        if turn is None or prompt is None or turn.text.startswith(prompt):
            return turn
        return Turn(turn.text, turn.spans, turn.method, prompt_differs=self._frame.has_prompt)

    def find_last(self, messages: list[Message], tools: Tools) -> Turn:
        """The last message where its words stand right before the end. Raises RowError."""
        text = self.template.render(messages, tools)
        content = messages[-1]["content"].strip()
        start = text.rfind(content) if content else -1
        trail = text[start + len(content) :]
        before = self._prompt(messages[:-1], tools) or ""
        # The same words at the same place without this turn are somebody else's.
        said_before = _num_shared(text, before) >= start + len(content)
        if start < 0 or said_before or self._special.sub("", trail).strip():
            raise RowError(
                "mask_not_proved",
                "the assistant's turns cannot be found in what the chat template prints",
            )
        return self._turn(text, start, trail, LAST_TURN)

    def marker_of(self, trail: str) -> str:
        """The end marker at the beginning of what follows an answer: its first special token with
        the space before it, and those right behind it up to one that ends turns."""
        first = self._special.search(trail)
        if first is None or trail[: first.start()].strip():
            return ""
        last = first
        while last is not None and last[0] not in self.end_texts:
            last = self._special.match(trail, last.end())
        return trail[: (last or first).end()]

    def last_special(self, text: str) -> str | None:
        """The special token at the very end of a text."""
        found = [m[0] for m in self._special.finditer(text) if m.end() == len(text)]
        return found[0] if found else None

    # The ways.

    def _by_markers(self, messages: list[Message], tools: Tools, prompt: str | None) -> Turn | None:
        text, marked = self.template.render_with_markers(messages, tools)
        candidates = [marked]
        if any(message["role"] == ASSISTANT for message in messages[:-1]):
            before, earlier = self.template.render_with_markers(messages[:-1], tools)
            shared = self._shared(text, before)
            # Earlier turns' spans come first; where turns melt together, place decides.
            candidates = [marked[len(earlier) :], [m for m in marked if m[0] >= shared]]
        floor = self._shared(text, prompt) if prompt is not None and self._frame.has_prompt else 0
        for candidate in candidates:
            # Some templates mark the header, which the generation prompt has, or a last newline.
            clipped = [(max(start, floor), end) for start, end in candidate]
            spans = [self._marked(text, start, end) for start, end in clipped if end > start]
            said = "".join(text[span.start : span.end] for span in spans)
            if spans and all(piece in said for piece in _pieces(messages[-1])):
                return Turn(text, tuple(spans), MARKERS)
        return None

    def _marked(self, text: str, start: int, end: int) -> Span:
        """A marked span up to its last special token, or with the end marker right behind it."""
        stripped = text[start:end].rstrip()
        if special := self.last_special(stripped):
            end = start + len(stripped)
            return Span(start, end - len(special), end)
        for marker in self.end_texts:
            if text.startswith(marker, end):
                return Span(start, end, end + len(marker))
        return Span(start, end, end)

    def _by_prefix(self, text: str, message: Message, prompt: str | None) -> Turn | None:
        if prompt is None:
            return None
        start = len(prompt)
        if not text.startswith(prompt):
            # A prompt may end in more space than history has there (after an opened thinking).
            start = _num_shared(text, prompt)
            if prompt[start:].strip() or not self._frame.has_prompt:
                return None
        lead, trail = self._frame.lead or "", self._frame.trail
        body, trail = self._split_trail(text[start:], trail)
        if body.startswith(lead):
            # Space in front of an answer is the answer's; other text there the template invented.
            start += len(lead) if lead.strip() else 0
        elif not self._frame.has_prompt or (_is_plain(message) and message["content"].strip()):
            return None
        if not _says(text[start : len(text) - len(trail)], message, lead):
            return None
        return self._turn(text, start, trail, PREFIX)

    def _by_sentinel(self, text: str, messages: list[Message], tools: Tools) -> Turn | None:
        stand_in = {"role": ASSISTANT, "content": SENTINEL}
        try:
            other = self.template.render([*messages[:-1], stand_in], tools)
        except RowError:
            return None
        lead, found, trail = other.partition(SENTINEL)
        start = len(lead)
        if not found:
            return None
        if not text.startswith(lead) or not text[len(lead) :].endswith(trail):
            if _is_plain(messages[-1]):
                return None
            # Thinking and calls are laid out otherwise than words: what both texts begin with
            # comes before the turn.
            start = self._shared(text, lead)
            trail = self._split_trail(text[start:], trail)[1]
        if not _says(text[start : len(text) - len(trail)], messages[-1]):
            return None
        return self._turn(text, start, trail, SENTINELS)

    # Their parts.

    def _turn(self, text: str, start: int, trail: str, method: str) -> Turn:
        text_end = len(text) - len(trail)
        end = text_end + len(self.marker_of(trail))
        return Turn(text, (Span(start, text_end, end),), method)

    def _prompt(self, messages: list[Message], tools: Tools) -> str | None:
        try:
            return self.template.render(messages, tools, generation_prompt=True)
        except RowError:
            return None  # such as an answer that comes first

    def _split_trail(self, written: str, trail: str) -> tuple[str, str]:
        """What the turn says and what the template puts after it. Turns of other kinds (calls)
        may end otherwise than plain ones: with a special token of their own, then only space."""
        shared = _num_shared(written[-len(trail) :][::-1], trail[::-1]) if trail else 0
        at = self._not_inside(written, len(written) - shared)
        if shared < len(trail) and not self._special.search(written, at):
            stripped = written.rstrip()
            at = len(stripped) - len(self.last_special(stripped[-_NEAR:]) or "")
        return written[:at], written[at:]

    def _shared(self, text: str, other: str) -> int:
        """How far two texts agree, no special token cut through."""
        at = _num_shared(text, other)
        inside = self._around(text, at)
        return inside.start() if inside else at

    def _not_inside(self, text: str, at: int) -> int:
        """The place, or the end of the special token that it cuts through."""
        inside = self._around(text, at)
        return inside.end() if inside else at

    def _around(self, text: str, at: int) -> re.Match[str] | None:
        nearby = self._special.finditer(text, max(at - _NEAR, 0), at + _NEAR)
        return next((found for found in nearby if found.start() < at < found.end()), None)

    def _learn_frame(self) -> _Frame:
        question = {"role": "user", "content": "u"}
        answer = {"role": ASSISTANT, "content": SENTINEL}
        try:
            before = self.template.render([question])
            prompt = self.template.render([question], generation_prompt=True)
            whole = self.template.render([question, answer])
        except RowError:
            return _Frame(None, "", has_prompt=False)
        head, found, trail = whole.partition(SENTINEL)
        if not found or not head.startswith(prompt):
            return _Frame(None, trail, has_prompt=prompt != before)
        lead = head[len(prompt) :]
        return _Frame(lead, trail, has_prompt=prompt != before or not lead.strip())


def _is_plain(message: Message) -> bool:
    """Whether the message is words alone, which templates print as they are."""
    return (
        not message.get("reasoning_content")
        and "tool_calls" not in message
        and "</think>" not in message["content"]
    )


def _pieces(message: Message) -> list[str]:
    """What a template prints of a message in any case: its words after thinking, names called."""
    names = [call["function"]["name"] for call in message.get("tool_calls", ())]
    return [message["content"].rpartition("</think>")[2].strip(), *names]


def _says(body: str, message: Message, lead: str = "") -> bool:
    """Whether a piece of text is this message as a template may print it."""
    if _is_plain(message):
        content = message["content"].strip()
        return body.strip() == content or (not content and body.strip() == lead.strip())
    return all(piece in body for piece in _pieces(message))


def _num_shared(a: str, b: str) -> int:
    """Length of the common beginning; by halves, since comparing slices is fast."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
