"""The two-phase contract of executors, without vLLM."""

from concurrent.futures import Future

import pytest

from paceline.extract.vllm import step


class Runner:
    """A step leaves state behind until it is sampled; a second step before that is an error."""

    def __init__(self) -> None:
        self.state: str | None = None
        self.samples = 0
        self.captured: list[str] = []

    def execute_model(self, scheduled: str) -> str | None:
        if self.state is not None:
            raise RuntimeError("state: sample first")
        if scheduled == "boom":
            raise MemoryError("real cause")
        if scheduled == "nothing":
            return "empty"
        self.captured.append(scheduled)  # what a hook sees during the forward pass
        self.state = scheduled
        return None

    def sample_tokens(self, grammar: str | None) -> str:
        if self.state is None:
            raise RuntimeError("no pending output")
        self.samples += 1
        result, self.state = self.state, None
        return result if grammar is None else f"{result}/{grammar}"


def test_E16_steps_are_finished_and_the_real_cause_is_told() -> None:
    runner = Runner()
    assert [step(runner, name) for name in ("a", "b")] == ["a", "b"]
    with pytest.raises(MemoryError, match="real cause"):
        step(runner, "boom")
    assert step(runner, "c") == "c"
    assert runner.samples == 3
    assert runner.captured == ["a", "b", "c"]


def test_a_step_that_returns_at_once_is_not_sampled() -> None:
    runner = Runner()
    assert step(runner, "nothing") == "empty"
    assert runner.samples == 0


def test_the_grammar_goes_to_the_second_phase() -> None:
    assert step(Runner(), "a", "json") == "a/json"


def test_futures_of_other_processes_are_waited_for() -> None:
    class Remote(Runner):
        def execute_model(self, scheduled: str) -> Future:
            return _done(super().execute_model(scheduled))

        def sample_tokens(self, grammar: str | None) -> Future:
            return _done(super().sample_tokens(grammar))

    assert step(Remote(), "a") == "a"


def _done(value: str | None) -> Future:
    future: Future = Future()
    future.set_result(value)
    return future
