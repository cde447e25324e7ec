"""Asks a server all questions and keeps what it wrote, what it counted and how long it took."""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Protocol

from paceline import fingerprint
from paceline.evaluate.metrics import DraftCounters
from paceline.evaluate.outputs import Key
from paceline.evaluate.prompts import Chat, Questions
from paceline.progress import progress_bar


class Server(Protocol):
    """A target that answers prompts greedily, with or without a draft."""

    describe: dict[str, Any]

    def answer(self, prompts: list[list[int]], at_a_time: int) -> list[list[int]]:
        """Token ids of each answer, the one that ended it included. Raises EngineError."""
        ...

    def counters(self, generated: int = 0) -> DraftCounters:
        """A reading; where counting lags behind, it waits a while for so many tokens in all."""
        ...

    def gap(self, prompt: list[int], own: int, other: int) -> float | None:
        """log p(own) - log p(other) after `prompt`; None where the server does not say."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Counted:
    """The drafts of one conversation, or of several that were answered at the same time."""

    name: str
    source: str
    conversations: int
    content: str  # digest of what was asked
    counters: DraftCounters


@dataclass
class Served:
    """What one server did. tokens_per_s: by requests at a time, prefill included."""

    answers: dict[Key, list[int]] = field(default_factory=dict)
    counted: list[Counted] = field(default_factory=list)
    tokens_per_s: dict[int, float] = field(default_factory=dict)


def ask(server: Server, questions: Questions, batch_sizes: list[int], label: str) -> Served:
    """Ask everything, with the first number of requests at a time; then once more with each other
    number, for the speed alone.

    One request at a time counts are of a conversation, several at a time of a source.
    """
    served = Served()
    # What is compiled or cached for the first request of all is nobody's speed. It is counted by
    # the server before the first reading, or its tokens would be taken for somebody else's.
    earlier = server.counters().generated
    [warm_up] = server.answer([questions.chats[0].prompts[0]], 1)
    server.counters(earlier + len(warm_up))
    first, *others = batch_sizes
    groups = _groups(questions.chats, alone=first == 1)
    tokens, seconds = 0, 0.0
    with progress_bar(label, len(questions.chats), "conversation") as bar:
        for name, chats in groups:
            before = server.counters()
            written, took = _answer_group(server, questions, chats, first, served.answers)
            after = server.counters(before.generated + written).since(before, written)
            conversations = len({chat.conversation for chat in chats})
            content = fingerprint.of_json(sorted(chat.content for chat in chats))
            served.counted.append(Counted(name, chats[0].source, conversations, content, after))
            tokens, seconds = tokens + written, seconds + took
            bar.advance(len(chats))
    served.tokens_per_s[first] = tokens / seconds
    for size in others:
        prompts = [prompt for chat in questions.chats for prompt in chat.prompts]
        started = time.perf_counter()
        answers = server.answer(prompts, size)
        served.tokens_per_s[size] = sum(map(len, answers)) / (time.perf_counter() - started)
    return served


def _groups(chats: Iterable[Chat], alone: bool) -> list[tuple[str, list[Chat]]]:
    if alone:
        return [(chat.conversation, [chat]) for chat in chats]
    by_source = sorted(chats, key=lambda chat: chat.source)
    return [(name, list(group)) for name, group in groupby(by_source, lambda c: c.source)]


def _answer_group(
    server: Server,
    questions: Questions,
    chats: list[Chat],
    at_a_time: int,
    answers: dict[Key, list[int]],
) -> tuple[int, float]:
    """A turn of every conversation at a time. Returns (tokens written, seconds)."""
    tokens, seconds, turn = 0, 0.0, 0
    while active := [chat for chat in chats if turn < len(chat.prompts)]:
        started = time.perf_counter()
        written = server.answer([chat.prompts[turn] for chat in active], at_a_time)
        seconds += time.perf_counter() - started
        for chat, answer in zip(active, written, strict=True):
            answers[chat.name, turn] = answer
            questions.take(chat, turn, answer)
            tokens += len(answer)
        turn += 1
    return tokens, seconds


def speed(rate: float, plain: float | None) -> dict[str, float | None]:
    """Tokens per second with and without the draft, prefill included, and their ratio."""
    return {
        "tokens_per_s": rate,
        "plain_tokens_per_s": plain,
        "ratio": rate / plain if plain else None,
    }
