"""One step of an executor in two phases, for whoever drives a vLLM executor by hand.

Since vLLM 0.16 `execute_model` returns None and leaves state behind; `sample_tokens` must follow
before the next step, also when only what a hook captured is wanted.
"""

from concurrent.futures import Future
from typing import Any, Protocol


class TwoPhaseExecutor(Protocol):
    """What `step` needs of an executor (or of a model runner)."""

    def execute_model(self, scheduler_output: Any) -> Any: ...

    def sample_tokens(self, grammar_output: Any) -> Any: ...


def step(executor: TwoPhaseExecutor, scheduler_output: Any, grammar_output: Any = None) -> Any:
    """Run one scheduled step to its end and return its output.

    None from `execute_model` means "pending": `sample_tokens` is then called exactly once. An
    error of `execute_model` comes out as it is: there is no pending output then, and asking for
    one would only put a state error in front of the real cause.
    """
    output = _settled(executor.execute_model(scheduler_output))
    if output is None:
        output = _settled(executor.sample_tokens(grammar_output))
    return output


def _settled(output: Any) -> Any:
    """Executors in other processes may answer with a future."""
    return output.result() if isinstance(output, Future) else output
