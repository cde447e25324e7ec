"""Every stored row against transformers; what would be wrong is caught."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from paceline.contracts import TokenSample
from paceline.extract.vllm.engine import VllmEngine
from tests.engines.common import (
    ROW_BOUND,
    Reference,
    assert_all_right,
    capture,
    mixed_samples,
)

pytestmark = pytest.mark.engine_vllm


@pytest.fixture(scope="session")
def samples() -> list[TokenSample]:
    return mixed_samples(12, longest=200)


def test_every_row_of_100_mixed_prompts(
    engine: VllmEngine, reference: Reference, tmp_path: Path
) -> None:
    samples = mixed_samples()
    result = capture(engine, samples, tmp_path)
    assert_all_right(result, samples, reference)
    # The comparison itself can tell: rows of one position further on, rows of another sample.
    shifted = [reference.error(result.store, s, shift=1) for s in samples[:20]]
    assert min(shifted) > 100 * ROW_BOUND
    swapped = replace(samples[0], input_ids=samples[0].input_ids[::-1].copy())
    assert reference.error(result.store, swapped) > 100 * ROW_BOUND


def test_E01_interleaved_chunks_and_a_second_call(
    engine: VllmEngine, samples: list[TokenSample], reference: Reference, tmp_path: Path
) -> None:
    # Steps of 128 tokens cut and mix prompts of up to 200; the second call has other neighbours.
    first = capture(engine, samples, tmp_path / "first")
    second = capture(engine, samples[::-1], tmp_path / "second")
    assert_all_right(first, samples, reference)
    assert_all_right(second, samples, reference)


def test_E03_shared_prefixes_and_repeats_run_whole(
    engine: VllmEngine, reference: Reference, tmp_path: Path
) -> None:
    assert engine.settings["prefix_caching"] is False
    shared = np.arange(100, 164, dtype=np.int32)
    samples = []
    for i, tail in enumerate(([7, 8, 9, 10], [90, 91, 92, 93], [7, 8, 9, 10])):
        ids = np.concatenate([shared, np.asarray(tail, np.int32)])
        mask = np.zeros(68, bool)
        mask[32:] = True
        samples.append(TokenSample(f"twin-{i}", ids, mask))
    result = capture(engine, samples, tmp_path)
    assert result.published == {"twin-0", "twin-1", "twin-2"}
    rows = {name: result.store.read(result.store.records.find(name)) for name in result.published}
    assert all(len(r.aux) == 67 and len(r.last) == 36 for r in rows.values())
    difference = (rows["twin-0"].aux - rows["twin-2"].aux).norm() / rows["twin-0"].aux.norm()
    assert float(difference) < 1e-5


def test_greedy_tokens_are_the_targets_own(
    engine: VllmEngine, samples: list[TokenSample], reference: Reference
) -> None:
    chosen = samples[:6]
    answers = engine.greedy([s.input_ids for s in chosen], 3)
    assert [a[0] for a in answers] == [reference.greedy(s) for s in chosen]
    assert [len(a) for a in answers] == [3] * 6


@pytest.mark.parametrize("fault", ["swapped", "off by one"])
def test_a_wrong_description_is_caught_and_run_again_alone(
    fault: str, engine: VllmEngine, reference: Reference, tmp_path: Path
) -> None:
    # Prompts of one length, so that labels can be swapped without any count being wrong.
    rng = np.random.default_rng(3)
    alike = [
        TokenSample(f"alike-{i}", rng.integers(5, 49000, 40).astype(np.int32), np.arange(40) >= 20)
        for i in range(6)
    ]
    engine.call("paceline_plant", fault, 1)
    assert_all_right(capture(engine, alike, tmp_path), alike, reference)
    assert engine.call("paceline_lies") == [{"told": 1}]


def test_what_is_wrong_twice_is_quarantined_with_its_reason(
    engine: VllmEngine, samples: list[TokenSample], tmp_path: Path
) -> None:
    few = samples[:3]
    engine.call("paceline_plant", "off by one", 1_000)
    result = capture(engine, few, tmp_path)
    assert result.published == set()
    assert result.rejected.keys() == {s.sample_id for s in few}
    assert all("run alone" in reason for reason in result.rejected.values())


def test_a_sample_longer_than_the_context_is_rejected(
    engine: VllmEngine, samples: list[TokenSample], tmp_path: Path
) -> None:
    ids = np.full(1500, 17, np.int32)
    long = TokenSample("long", ids, np.arange(1500) >= 100)
    result = capture(engine, [samples[0], long], tmp_path)
    assert result.published == {samples[0].sample_id}
    assert "1023 positions" in result.rejected["long"]
