"""The learning rate is a function of the step alone."""

import math

import pytest

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
