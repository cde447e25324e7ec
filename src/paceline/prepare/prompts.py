"""What `generate` is to answer: conversations as turns, some given, some to be written."""

from dataclasses import dataclass
from typing import Any

from paceline.prepare.conversation import ASSISTANT, Conversation, Message, conversation
from paceline.prepare.rows import RowError, decoded, identify


@dataclass(frozen=True)
class AnswerPlan:
    """A conversation without the answers that are to be written.

    turns: messages in order; None stands for an answer to be written.
    """

    conversation: Conversation
    turns: list[Message | None]

    @property
    def num_answers(self) -> int:
        return self.turns.count(None)


def answer_plan(row: dict[str, Any], default_source: str) -> AnswerPlan:
    """What to write for a row of `messages`, `conversations`, `turns` or `prompt`. Raises RowError.

    Answers in the data are written anew; those that call tools stay, since the tools' results
    that follow belong to them, and so does an answer that no user turn asks for.
    """
    identity = identify(row, default_source)
    found = conversation(_as_messages(row), identity)
    if found is None:
        raise RowError("missing_key", "the row has no messages, conversations, turns or prompt")
    turns: list[Message | None] = []
    asked = False
    for message in found.messages:
        is_answer = message["role"] == ASSISTANT
        rewritten = is_answer and asked and "tool_calls" not in message
        turns.append(None if rewritten else message)
        asked = message["role"] in ("user", "tool") or (asked and not is_answer)
    if asked:
        turns.append(None)
    if None not in turns:
        raise RowError("no_user_turn", "no turn of the conversation asks for an answer")
    return AnswerPlan(found, turns)


def _as_messages(row: dict[str, Any]) -> dict[str, Any]:
    if "messages" in row or "conversations" in row or "conversation" in row:
        return row
    turns = row.get("turns", row.get("prompt"))
    if "turns" in row and isinstance(listed := decoded(turns), list):
        turns = listed
    if isinstance(turns, str):
        turns = [turns]
    if not isinstance(turns, list):
        return row
    if not all(isinstance(turn, str) for turn in turns):
        # `prompt` may hold messages, as preference data sets have it.
        return {**row, "messages": turns}
    answer = {"role": ASSISTANT, "content": ""}
    messages = [m for turn in turns for m in ({"role": "user", "content": turn}, answer)]
    return {**row, "messages": messages}
