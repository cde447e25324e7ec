"""The two-phase contract on a real executor, driven by hand as others do it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.contracts import TokenSample
from paceline.errors import EngineError
from paceline.extract.vllm import step
from paceline.extract.vllm.engine import VllmEngine
from tests.engines.common import Reference, assert_all_right, capture, mixed_samples

pytestmark = [
    pytest.mark.engine_vllm,
    # Only there does the executor live where a test can reach it.
    pytest.mark.parametrize("engine", ["one process"], indirect=True, scope="session"),
]


class Phases:
    """An executor that counts the calls of its two phases."""

    def __init__(self, executor: Any) -> None:
        self._executor = executor
        self.pending = self.sampled = 0

    def execute_model(self, scheduler_output: Any) -> Any:
        output = self._executor.execute_model(scheduler_output)
        self.pending += output is None
        return output

    def sample_tokens(self, grammar_output: Any) -> Any:
        self.sampled += 1
        return self._executor.sample_tokens(grammar_output)


@pytest.fixture
def core(engine: VllmEngine) -> Any:
    """vLLM's scheduler and executor."""
    return engine._engine.engine_core.engine_core


@pytest.fixture
def phases(core: Any, monkeypatch: pytest.MonkeyPatch) -> Phases:
    """vLLM's own loop replaced by one of three lines around `step`."""
    phases = Phases(core.model_executor)

    def by_hand() -> tuple[Any, bool]:
        scheduled = core.scheduler.schedule()
        output = step(phases, scheduled)
        return core.scheduler.update_from_output(scheduled, output), True

    monkeypatch.setattr(core, "step_fn", by_hand)
    return phases


@pytest.fixture(scope="module")
def samples() -> list[TokenSample]:
    return mixed_samples(8, longest=200)


def test_E16_every_pending_step_is_sampled_once_and_rows_come_from_the_hooks(
    engine: VllmEngine,
    phases: Phases,
    samples: list[TokenSample],
    reference: Reference,
    tmp_path: Path,
) -> None:
    assert_all_right(capture(engine, samples, tmp_path), samples, reference)
    assert phases.sampled == phases.pending >= 4


def test_E16_the_cause_of_a_failed_pass_is_told_and_the_engine_goes_on(
    engine: VllmEngine,
    phases: Phases,
    core: Any,
    samples: list[TokenSample],
    reference: Reference,
    tmp_path: Path,
) -> None:
    model = core.model_executor.driver_worker.worker.model_runner.get_model()
    passes: Iterator[int] = iter(range(1, 1000))

    def boom(*_: Any) -> None:
        if next(passes) == 3:
            raise MemoryError("real cause")

    handle = model.register_forward_pre_hook(boom)
    with pytest.raises(EngineError, match=r"MemoryError\('real cause'\)"):
        capture(engine, samples, tmp_path / "failed")
    handle.remove()
    assert phases.sampled == phases.pending
    assert_all_right(capture(engine, samples, tmp_path / "again"), samples, reference)


def test_a_step_left_between_its_phases_is_settled(
    engine: VllmEngine,
    core: Any,
    samples: list[TokenSample],
    reference: Reference,
    tmp_path: Path,
) -> None:
    engine.add("somebody-elses", samples[0].input_ids.tolist())
    scheduled = core.scheduler.schedule()
    assert core.model_executor.execute_model(scheduled) is None
    with pytest.raises(RuntimeError, match=r"sample_tokens\(\) must be called"):
        core.model_executor.execute_model(scheduled)
    assert engine.call("paceline_settle") == [{"pending": True}]
    assert engine.call("paceline_settle") == [{"pending": False}]
    engine.abort_all()
    assert_all_right(capture(engine, samples, tmp_path), samples, reference)
