"""The learning rate is a function of the step alone."""

import math

import pytest

from paceline.errors import UsageError
from paceline.recipe import TrainOptions, build
from paceline.train.schedule import learning_rate


def test_T04_the_rate_after_a_resume_is_that_of_the_unbroken_run():
    rate = learning_rate(3000, 10000, 1.0, 100, "linear")
    assert rate == pytest.approx(7000 / 9900) == pytest.approx(0.7071, abs=1e-4)


def test_warm_up_rises_to_the_peak_and_decays_to_the_floor():
    rates = [learning_rate(s, 50, 2.0, 10, "cosine", 0.1) for s in range(51)]
    assert rates[0] == pytest.approx(0.2)
    assert rates[9] == rates[10] == 2.0
    assert rates[30] == pytest.approx(2.0 * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 0.5))))
    assert rates[50] == pytest.approx(0.2)
    assert learning_rate(80, 50, 2.0, 10, "cosine", 0.1) == pytest.approx(0.2)
    assert {learning_rate(s, 50, 2.0, 0, "constant") for s in range(50)} == {2.0}


def test_a_warm_up_below_one_is_a_share_of_all_steps():
    rates = [learning_rate(s, 50, 2.0, 0.15, "constant") for s in range(50)]
    # 7.5 steps of 50, rounded up.
    assert rates == pytest.approx([2.0 * min(s + 1, 8) / 8 for s in range(50)])
    assert learning_rate(0, 50, 2.0, 1, "constant") == 2.0


@pytest.mark.parametrize("steps", [-1, 20.5, math.inf, math.nan])
def test_what_is_no_warm_up_is_refused(steps):
    with pytest.raises(UsageError, match="warmup_steps"):
        build(TrainOptions, {"warmup_steps": steps})
