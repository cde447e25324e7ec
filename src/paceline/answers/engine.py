"""What `generate` asks of an engine, the same for all of them, and the table of engines.

In: prompts as token ids. Out: the answers' token ids and why they ended.
"""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from paceline.recipe import GenerateOptions
from paceline.target.spec import Target

# Engines by name, imported only when asked for: vLLM and httpx load for those who use them.
_ENGINES = {
    "transformers": "paceline.answers.transformers_engine:open_engine",
    "vllm": "paceline.extract.vllm.answers:open_engine",
    "openai": "paceline.answers.openai_engine:open_engine",
}

# Why an answer ended: at an end-of-turn token, at the length limit, with calls of tools.
STOP, LENGTH, TOOL_CALLS = "stop", "length", "tool_calls"
# Older servers' and other makers' words for the same.
_OTHER_WORDS = {
    "eos": STOP,
    "eos_token": STOP,
    "end_turn": STOP,
    "stop_sequence": STOP,
    "max_tokens": LENGTH,
    "function_call": TOOL_CALLS,
}
# What else vLLM and others say of an answer that was cut.
_CUT = (LENGTH, "content_filter", "abort", "error", "repetition")
_WHOLE = {STOP: True, TOOL_CALLS: True, **dict.fromkeys(_CUT, False)}


@dataclass(frozen=True)
class Prompt:
    """What is to be continued. `key` names it among those given at one time; `seed` is its own, so
    that a sampled answer does not depend on what else is in the batch.

    messages, tools: the same prompt as the chat API takes it, for servers that want no ids.
    """

    key: str
    ids: list[int]
    seed: int = 0
    messages: list[dict[str, Any]] = field(default_factory=list)
    tools: list[dict[str, Any]] | None = None


@dataclass(frozen=True)
class Sampling:
    """How answers are written. temperature 0: greedy. end_ids: tokens that end an answer.

    num_past_end: tokens recorded past the answer's end, end of turn ignored.
    """

    max_new_tokens: int
    end_ids: tuple[int, ...]
    temperature: float = 0.0
    top_p: float = 1.0
    num_past_end: int = 0


@dataclass(frozen=True)
class Answer:
    """ids: the answer's token ids, the one that ended it included, then num_past_end more; None
    where the engine gives no ids, then `message` holds the answer as the chat API says it.

    prompt_ids: the prompt as the engine read it, where that may differ from what was given.
    refusal: why there is no answer at all (a prompt that the engine will not take).
    """

    key: str
    ids: list[int] | None
    finish_reason: str
    num_past_end: int = 0
    message: dict[str, Any] | None = None
    prompt_ids: list[int] | None = None
    refusal: str | None = None


class AnswerEngine(Protocol):
    """Continues prompts. `describe`: name, version, dtype, for the manifest."""

    describe: dict[str, Any]

    def answer(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        on_answer: Callable[[Answer], None],
    ) -> None:
        """Call on_answer once for every prompt, in any order, as soon as each is done.

        Raises EngineError; answers that were handed over before stay valid.
        """
        ...

    def close(self) -> None: ...


def common_reason(finish_reason: str) -> str:
    """The reason by its common word, where it has one."""
    return _OTHER_WORDS.get(finish_reason, finish_reason)


def is_whole(finish_reason: str | None) -> bool | None:
    """Whether an answer that ended so ended by itself; None where the reason does not say."""
    return None if finish_reason is None else _WHOLE.get(common_reason(finish_reason))


def open_engine(options: GenerateOptions, target: Target) -> AnswerEngine:
    """The engine that the options name."""
    module_name, _, function = _ENGINES[options.engine].partition(":")
    return getattr(importlib.import_module(module_name), function)(options, target)
