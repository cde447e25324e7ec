"""A conversation as the fewest texts that show every answer as it was written, with its spans."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from paceline.errors import TargetError
from paceline.prepare.conversation import ASSISTANT, Conversation, Message
from paceline.prepare.rows import RowError
from paceline.prepare.template import ChatTemplate
from paceline.prepare.turns import SUREST_FIRST, Span, Turn, TurnFinder


@dataclass(frozen=True)
class TextSample:
    """A rendered text and the spans in it, in order. finished: of the last span's answer; False: it
    was cut, None: unknown."""

    text: str
    spans: tuple[Span, ...]
    finished: bool | None = None


@dataclass
class MaskedConversation:
    """The samples of one conversation. method: the least sure way that was needed."""

    samples: list[TextSample]
    method: str
    notes: Counter[str] = field(default_factory=Counter)


class SpanFinder:
    """Finds the assistant's spans in conversations of one template.

    Raises TargetError for a template that defeats every way.
    """

    def __init__(
        self, template: ChatTemplate, special_texts: Iterable[str], end_texts: Iterable[str]
    ) -> None:
        self.template = template
        self.turns = TurnFinder(template, special_texts, end_texts)
        self._refuse_hopeless()

    @property
    def end_token(self) -> str | None:
        """The special token with which the template ends an answer."""
        return self.turns.last_special(self.turns.end_marker)

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
        last = self.turns.find(messages[: numbers[-1] + 1], tools)
        turns = [_in_text_of(last, self.turns.find(messages[: i + 1], tools)) for i in numbers[:-1]]
        turns.append(last)
        found = [turn for turn in turns if turn is not None]
        if len(found) < len(turns):
            found = [self.turns.find_last(messages[: numbers[-1] + 1], tools)]
            notes["turns_not_supervised"] += len(turns) - 1
        notes["prompt_differs_from_history"] += sum(turn.prompt_differs for turn in found)
        # Asked of each turn: templates print it in some turns and not in others.
        answers = zip(numbers[-len(found) :], found, strict=True)
        notes["reasoning_not_rendered"] += any(_lacks_reasoning(messages[i], t) for i, t in answers)
        method = max((turn.method for turn in found), key=SUREST_FIRST.index)
        samples = self._compose(found, conversation.finished)
        samples = [sample for sample in samples if sample.spans]
        if not samples:
            raise RowError("empty_answer", "the assistant's turns are empty")
        return MaskedConversation(samples, method, +notes)

    def _compose(self, turns: list[Turn], finished: bool | None) -> list[TextSample]:
        """The fewest texts that show every turn as it was written, in order. finished: whether the
        last turn was."""
        samples: list[TextSample] = []
        cut = turns[-1] if finished is False else None
        waiting = turns
        while waiting:
            text = waiting[-1].text
            shown = [turn for turn in waiting if _shows(text, turn)]
            spans = [span for turn in shown for span in self._spans_in(text, turn, turn is cut)]
            spans = [span for span in spans if span.end > span.start]
            # The text with the last turn comes first.
            samples.append(TextSample(text, tuple(spans), None if samples else finished))
            waiting = [turn for turn in waiting if turn not in shown]
        return samples[::-1]

    def _spans_in(self, text: str, turn: Turn, is_cut: bool) -> list[Span]:
        """The turn's spans in a text that shows it. A later text may end the turn otherwise: a
        marker that the target did not write there is left out, and one that it ends turns with
        but that only the next turn prints (GLM's role tokens) is taken in. The target ended no
        turn that was cut."""
        *before, last = turn.spans
        end = last.end
        if is_cut or text[last.text_end : last.end] != turn.text[last.text_end : last.end]:
            end = last.text_end
        elif end == last.text_end:
            marker = self.turns.marker_of(text[end : end + 100])
            if marker.strip() in self.turns.end_texts:
                end += len(marker)
        return [*before, Span(last.start, last.text_end, end)]

    def _refuse_hopeless(self) -> None:
        """A template on which nothing works is refused before any row is read."""
        question = {"role": "user", "content": "What is it?"}
        answer = {"role": ASSISTANT, "content": "It is a test."}
        try:
            if self.turns.find([question, answer], None) is None:
                self.turns.find_last([question, answer], None)
        except RowError as error:
            if error.reason == "mask_not_proved":
                raise TargetError(
                    "the chat template is refused: it has no generation markers, and what it "
                    "prints for an assistant turn can be found by no other way. Give a template "
                    "with {% generation %} markers as `chat_template`."
                ) from error


def _lacks_reasoning(message: Message, turn: Turn) -> bool:
    return message.get("reasoning_content", "").strip() not in turn.text


def _in_text_of(last: Turn | None, turn: Turn | None) -> Turn | None:
    """The turn, without a text of its own where the last one's shows it: a text for every turn
    would be as large as the conversation squared."""
    if last is None or turn is None:
        return turn
    end = turn.spans[-1].end
    return replace(turn, text=last.text) if last.text[:end] == turn.text[:end] else turn


def _shows(text: str, turn: Turn) -> bool:
    return text.startswith(turn.text[: turn.spans[-1].text_end])
