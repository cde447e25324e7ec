"""Which samples make which step."""

from itertools import islice

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.train.batches import StepPlan

rows = st.lists(st.integers(1, 40), min_size=1, max_size=30)


def make(num_rows, batch_rows=50):
    num_rows = np.array(num_rows)
    return StepPlan(np.arange(len(num_rows)), num_rows, num_rows + 3, batch_rows, seed=1)


@settings(deadline=None)
@given(rows, st.integers(1, 100), st.integers(0, 12))
def test_a_run_that_starts_later_sees_the_same_steps(num_rows, batch_rows, start):
    plan = make(num_rows, batch_rows)
    whole = list(islice(plan.steps(), start + 5))
    assert list(islice(plan.steps(start), 5)) == whole[start:]


@settings(deadline=None)
@given(rows)
def test_each_epoch_has_every_sample_once_in_an_order_of_its_own(num_rows):
    plan = make(num_rows, batch_rows=10)
    samples = []
    for step in plan.steps():
        samples += step
        if len(samples) >= 3 * len(num_rows):
            break
    size = len(num_rows)
    for epoch in range(3):
        assert sorted(samples[epoch * size : (epoch + 1) * size]) == list(range(size))


@settings(deadline=None)
@given(rows, st.integers(4, 60))
def test_micro_batches_keep_order_and_budget(num_rows, max_tokens):
    plan = make(num_rows)
    samples = list(range(len(num_rows)))
    groups = plan.micro_batches(samples, max_tokens)
    assert [s for group in groups for s in group] == samples
    for group in groups:
        assert len(group) == 1 or plan.num_tokens[group].sum() <= max_tokens


def test_steps_are_even_on_average():
    plan = make([7] * 100, batch_rows=50)
    sizes = [sum(int(plan.num_rows[s]) for s in step) for step in islice(plan.steps(), 140)]
    assert abs(np.mean(sizes) - 50) < 0.5
    assert plan.total_steps(2.0) == 28
