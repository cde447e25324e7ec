"""The arithmetic of a predicted speed-up, by hand, and times of real tiny steps."""

import pytest

from paceline.evaluate.speedup import acceptance_lengths, best_length, predict, speedups
from paceline.evaluate.step_times import StepTimer, StepTimes
from paceline.recipe import SpeedupOptions
from tests.evaluate.tiny_pair import tiny_pair

RESULTS = {
    "1": {"pooled": {"acceptance_length": 1.6, "per_position": [0.6]}},
    "3": {"pooled": {"acceptance_length": 2.25, "per_position": [0.625, 0.375, 0.25]}},
}


def test_lengths_are_measured_ones_else_the_longest_chains_positions():
    assert acceptance_lengths(RESULTS) == {1: 1.6, 2: 2.0, 3: 2.25}


def test_a_step_costs_its_drafts_and_one_longer_target_step():
    # Reading more tokens costs nothing up to 2, then doubles the step.
    times = StepTimes(target=(10.0, 10.0, 20.0, 40.0), draft=2.0)
    predicted = speedups({1: 1.6, 2: 2.0, 3: 2.25}, times)
    assert predicted == pytest.approx({1: 16 / 12, 2: 20 / 24, 3: 22.5 / 46})
    assert best_length(predicted) == 1
    # A draft as slow as its target is worth nothing.
    slow = speedups({1: 1.6, 2: 2.0}, StepTimes((10.0, 10.0, 10.0), 10.0))
    assert slow == pytest.approx({1: 0.8, 2: 2 / 3})
    assert best_length(slow) == 0


def test_a_free_draft_gives_the_acceptance_length():
    lengths = {1: 1.6, 2: 2.0}
    assert speedups(lengths, StepTimes((1.0, 1.0, 1.0), 0.0)) == lengths


def test_steps_of_a_real_pair_are_timed(tmp_path):
    pair = tiny_pair(tmp_path)
    options = SpeedupOptions(predict=True, batch_sizes=[1, 3], contexts=[5, 9])
    found = predict(options, pair.draft, pair.target, RESULTS)
    places = [(entry["context"], entry["batch_size"]) for entry in found["table"]]
    assert places == [(5, 1), (5, 3), (9, 1), (9, 3)]
    for entry in found["table"]:
        assert len(entry["target_step_s"]) == 4
        assert min(*entry["target_step_s"], entry["draft_step_s"]) > 0
        times = StepTimes(tuple(entry["target_step_s"]), entry["draft_step_s"])
        again = speedups({1: 1.6, 2: 2.0, 3: 2.25}, times)
        assert entry["predicted"] == {str(k): v for k, v in again.items()}
        assert entry["best"] == best_length(again)
    assert found["left_out"] == []


def test_what_does_not_fit_into_memory_is_left_out(tmp_path):
    pair = tiny_pair(tmp_path)
    timer = StepTimer(pair.model, pair.draft, 1)
    assert timer.fits(2, 100)
    assert not timer.fits(1 << 20, 1 << 20)
