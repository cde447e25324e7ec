"""Which characters of a rendered conversation the assistant wrote, for any chat template.

A turn's span is found in the text as it stands when the turn has just been written, then looked
for in the texts of later turns. Four ways, the surest first: the template's own generation markers;
the text after the generation prompt; a sentinel in the turn's place; the last turn alone.
"""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from paceline.errors import TargetError
from paceline.prepare.conversation import ASSISTANT, Conversation, Message
from paceline.prepare.rows import RowError
from paceline.prepare.template import SENTINEL, ChatTemplate, Tools

MARKERS, PREFIX, SENTINELS, LAST_TURN = (
    "generation_markers",
    "rendered_prefix",
    "sentinel",
    "last_turn_only",
)
_SUREST_FIRST = (MARKERS, PREFIX, SENTINELS, LAST_TURN)


@dataclass(frozen=True)
class Span:
    """Characters [start, end) that the assistant wrote; the turn's own text ends at text_end, and
    the marker that ends the turn, if any, lies between text_end and end."""

    start: int
    text_end: int
    end: int


@dataclass(frozen=True)
class TextSample:
    """A rendered text and the spans in it, in order."""

    text: str
    spans: tuple[Span, ...]


@dataclass
class MaskedConversation:
    """The samples of one conversation: as few as show every answer in the context in which it was
    written. method: the least sure way that was needed."""

    samples: list[TextSample]
    method: str
    notes: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class _Turn:
    """An assistant turn in the text that ends with it."""

    text: str
    spans: tuple[Span, ...]
    method: str


@dataclass(frozen=True)
class _Frame:
    """What a template puts around an answer: `lead` after the generation prompt, `trail` after
    the answer. has_prompt: whether the template prints a generation prompt at all."""

    lead: str
    trail: str
    has_prompt: bool


class SpanFinder:
    """Finds spans for one template.

    special_texts: the texts of the tokenizer's special tokens; end_texts: of those that end a turn.
    Raises TargetError for a template that defeats every way.
    """

    def __init__(
        self, template: ChatTemplate, special_texts: Iterable[str], end_texts: Iterable[str]
    ) -> None:
        self.template = template
        longest_first = sorted({t for t in special_texts if t}, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._end_texts = tuple(t for t in end_texts if t)
        self._frame = self._learn_frame()
        self.end_marker = self._marker_of(self._frame.trail if self._frame else "")
        self._refuse_hopeless()

    def find(self, conversation: Conversation) -> MaskedConversation:
        """Raises RowError: no assistant turn, the template's refusal, spans that are not proved."""
        messages, tools = conversation.messages, conversation.tools
        numbers = conversation.assistant_turns
        if not numbers:
            raise RowError("no_assistant_turn", "no message is the assistant's")
        if self.template.form.arguments == "unsupported" and any(
            "tool_calls" in m for m in messages
        ):
            raise RowError("template_error", "the chat template does not print tool calls")
        notes: Counter[str] = Counter()
        if numbers[-1] != len(messages) - 1:
            self.template.render(messages, tools)  # a refusal of the whole counts
            notes["trailing_turns_dropped"] += 1
        if (
            any(m.get("reasoning_content") for m in messages)
            and not self.template.form.reasoning_key
        ):
            notes["reasoning_not_rendered"] += 1
        turns = [self._turn(messages[: i + 1], tools) for i in numbers]
        found = [turn for turn in turns if turn is not None]
        if len(found) < len(turns):
            last = self._last_turn(messages[: numbers[-1] + 1], tools)
            notes["turns_not_supervised"] += len(turns) - 1
            found = [last]
        method = max((turn.method for turn in found), key=_SUREST_FIRST.index)
        return MaskedConversation(self._compose(found), method, notes)

    def _compose(self, turns: list[_Turn]) -> list[TextSample]:
        """The fewest texts that show every turn as it was written, in order."""
        samples: list[TextSample] = []
        waiting = list(turns)
        while waiting:
            text = waiting[-1].text
            shown = [turn for turn in waiting if self._shows(text, turn)]
            spans = [span for turn in shown for span in self._spans_in(text, turn)]
            samples.append(TextSample(text, tuple(spans)))
            waiting = [turn for turn in waiting if turn not in shown]
        return samples[::-1]

    @staticmethod
    def _shows(text: str, turn: _Turn) -> bool:
        return text.startswith(turn.text[: turn.spans[-1].text_end])

    def _spans_in(self, text: str, turn: _Turn) -> list[Span]:
        """The turn's spans in a text that shows it. A later text may end the turn otherwise; a
        marker that the target did not write there is left out, one that it ends turns with and
        that only the next turn prints (GLM's role tokens) is taken in."""
        *before, last = turn.spans
        end = last.end
        if text[last.text_end : last.end] != turn.text[last.text_end : last.end]:
            end = last.text_end
        elif end == last.text_end:
            marker = self._marker_of(text[end:])
            if marker.strip() in self._end_texts:
                end += len(marker)
        return [*before, Span(last.start, last.text_end, end)]

    # One turn, in the text that ends with it.

    def _turn(self, messages: list[Message], tools: Tools) -> _Turn | None:
        if self.template.has_markers and (turn := self._by_markers(messages, tools)):
            return turn
        text = self.template.render(messages, tools)
        return self._by_prefix(text, messages, tools) or self._by_sentinel(text, messages, tools)

    def _by_markers(self, messages: list[Message], tools: Tools) -> _Turn | None:
        text, spans = self.template.render_with_markers(messages, tools)
        if any(message["role"] == ASSISTANT for message in messages[:-1]):
            earlier = self.template.render_with_markers(messages[:-1], tools)[1]
            spans = spans[len(earlier) :]
        spans = [(start, end) for start, end in spans if end > start]
        if not spans:
            return None
        return _Turn(text, tuple(self._with_marker(text, s, e) for s, e in spans), MARKERS)

    def _with_marker(self, text: str, start: int, end: int) -> Span:
        """A marked span with the end-of-turn marker, which templates mark or leave out."""
        for marker in self._end_texts:
            if text.endswith(marker, start, end):
                return Span(start, end - len(marker), end)
        for marker in self._end_texts:
            if text.startswith(marker, end):
                return Span(start, end, end + len(marker))
        return Span(start, end, end)

    def _by_prefix(self, text: str, messages: list[Message], tools: Tools) -> _Turn | None:
        frame = self._frame
        if frame is None:
            return None
        try:
            prompt = self.template.render(messages[:-1], tools, generation_prompt=True)
        except RowError:
            return None  # such as an answer that comes first
        if not text.startswith(prompt):
            return None
        written = text[len(prompt) :]
        body, trail = self._split_trail(written, frame.trail)
        lead = frame.lead if body.startswith(frame.lead) else ""
        if not frame.has_prompt and len(lead) < len(frame.lead):
            return None
        if not self._is_turn(body[len(lead) :], messages[-1]):
            return None
        # Space in front of the answer is the answer's; other text there the template invented.
        start = len(prompt) + (len(lead) if lead.strip() else 0)
        return self._make_turn(text, start, trail, PREFIX)

    def _by_sentinel(self, text: str, messages: list[Message], tools: Tools) -> _Turn | None:
        stand_in = {"role": ASSISTANT, "content": SENTINEL}
        try:
            other = self.template.render([*messages[:-1], stand_in], tools)
        except RowError:
            return None
        lead, found, trail = other.partition(SENTINEL)
        if not found or not text.startswith(lead) or not text[len(lead) :].endswith(trail):
            return None
        if not self._is_turn(text[len(lead) : len(text) - len(trail)], messages[-1]):
            return None
        return self._make_turn(text, len(lead), trail, SENTINELS)

    def _last_turn(self, messages: list[Message], tools: Tools) -> _Turn:
        """The last answer where its text stands right before the end of everything."""
        text = self.template.render(messages, tools)
        content = messages[-1]["content"].strip()
        start = text.rfind(content) if content else -1
        trail = text[start + len(content) :]
        if start < 0 or self._special.sub("", trail).strip():
            raise RowError(
                "mask_not_proved",
                "the assistant's turns cannot be found in what the chat template prints",
            )
        return self._make_turn(text, start, trail, LAST_TURN)

    def _make_turn(self, text: str, start: int, trail: str, method: str) -> _Turn:
        text_end = len(text) - len(trail)
        end = text_end + len(self._marker_of(trail))
        return _Turn(text, (Span(start, text_end, end),), method)

    def _split_trail(self, written: str, trail: str) -> tuple[str, str]:
        """What the turn says and what the template puts after it. Turns of other kinds (calls)
        may end otherwise than plain ones: with a special token of their own, then only space."""
        if written.endswith(trail):
            return written[: len(written) - len(trail)], trail
        stripped = written.rstrip()
        at = len(stripped)
        for found in self._special.finditer(stripped):
            if found.end() == len(stripped):
                at = found.start()
        return written[:at], written[at:]

    @staticmethod
    def _is_turn(body: str, message: Message) -> bool:
        """Whether a piece of text is this message as a template may print it."""
        content = message["content"].strip()
        if not message.get("reasoning_content") and "tool_calls" not in message:
            if body.strip() == content:
                return True
            # Thinking inside the content may be laid out anew, or left out.
            thought, closed, said = content.rpartition("</think>")
            said = said.strip()
            return bool(closed) and body.rstrip().endswith(said) and SENTINEL not in thought
        names = [call["function"]["name"] for call in message.get("tool_calls", ())]
        wanted = [content.rpartition("</think>")[2].strip(), *names]
        return all(piece in body for piece in wanted)

    def _marker_of(self, trail: str) -> str:
        """The end marker at the beginning of what follows an answer: its first special token,
        with the space before it; empty where there is none."""
        found = self._special.search(trail)
        return trail[: found.end()] if found and not trail[: found.start()].strip() else ""

    def _learn_frame(self) -> _Frame | None:
        question = {"role": "user", "content": "u"}
        answer = {"role": ASSISTANT, "content": SENTINEL}
        try:
            before = self.template.render([question])
            prompt = self.template.render([question], generation_prompt=True)
            whole = self.template.render([question, answer])
        except RowError:
            return None
        if SENTINEL not in whole or not whole.startswith(prompt):
            return None
        lead, _, trail = whole[len(prompt) :].partition(SENTINEL)
        return _Frame(lead, trail, has_prompt=prompt != before or not lead.strip())

    def _refuse_hopeless(self) -> None:
        """A template on which nothing works is refused before any row is read."""
        question = {"role": "user", "content": "What is it?"}
        answer = {"role": ASSISTANT, "content": "It is a test."}
        messages = [question, answer]
        try:
            if self._turn(messages, None) is None:
                self._last_turn(messages, None)
        except RowError as error:
            if error.reason == "mask_not_proved":
                raise TargetError(
                    "the chat template is refused: it has no generation markers, and what it "
                    "prints for an assistant turn can be found by no other way. Give a template "
                    "with {% generation %} markers as `chat_template`."
                ) from error
