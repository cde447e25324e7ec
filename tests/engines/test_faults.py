"""An error inside the tap never leaves the worker; the driver raises it and the engine goes on."""

from pathlib import Path

import pytest

from paceline.errors import EngineError
from paceline.extract.vllm.engine import VllmEngine
from paceline.extract.vllm.wire import WorkerError
from tests.engines.common import Reference, assert_all_right, capture, mixed_samples
from tests.engines.faulty import POINTS

pytestmark = pytest.mark.engine_vllm


@pytest.mark.parametrize("point", POINTS)
def test_an_error_at_every_hook_is_raised_by_the_driver(
    point: str, engine: VllmEngine, reference: Reference, tmp_path: Path
) -> None:
    samples = mixed_samples(6, longest=200)
    before = engine.greedy([samples[0].input_ids[:30]], 4)
    engine.call("paceline_plant", point, 3)
    with pytest.raises(EngineError, match=f"Planted: planted at {point}") as caught:
        capture(engine, samples, tmp_path / "failed")
    assert isinstance(caught.value.__cause__, WorkerError)
    assert "faulty.py" in str(caught.value.__cause__)
    for state in engine.call("paceline_runner_state"):
        assert state == {"shadowed": False, "hooks": 0}
    assert engine.greedy([samples[0].input_ids[:30]], 4) == before
    few = samples[:3]
    assert_all_right(capture(engine, few, tmp_path / "again"), few, reference)


def test_a_consumer_that_stops_leaves_the_engine_usable(
    engine: VllmEngine, reference: Reference, tmp_path: Path
) -> None:
    samples = mixed_samples(6, longest=200)

    def interrupted():
        yield from samples[:3]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        capture(engine, interrupted(), tmp_path / "stopped")
    assert_all_right(capture(engine, samples, tmp_path / "again"), samples, reference)
