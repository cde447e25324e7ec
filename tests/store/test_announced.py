"""What a stream announces of the lengths of its samples, against the lengths themselves."""

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from paceline.store.announced import announced_rows, announcement

from .making import make_sample


def samples_of(lengths, split="train"):
    for number, length in enumerate(lengths):
        sample = make_sample(number, num_tokens=length + 5, split=split)
        yield replace(sample, loss_mask=np.arange(length + 5) < length)


@given(st.lists(st.integers(1, 300), min_size=1, max_size=20), st.integers(1, 1000))
def test_capped_sums_are_exact_at_powers_of_two_and_never_too_many(lengths, at_most):
    described = announcement(samples_of(lengths))["train"]
    truth = lambda cap: sum(min(length, cap) for length in lengths)
    for power in range(11):
        assert announced_rows(described, 2**power) == truth(2**power)
    # Nearly so: what one sample counts too little is at most a quarter of the power below.
    below = 2 ** (at_most.bit_length() - 1)
    found = announced_rows(described, at_most)
    assert truth(at_most) - len(lengths) * below / 4 - 1 <= found <= truth(at_most)


def test_each_split_is_told_of_alone():
    told = announcement([*samples_of([3, 9]), *samples_of([4], "heldout")])
    assert told["train"] == {"samples": 2, "supervised": 12, "supervised_capped": [2, 4, 7, 11, 12]}
    assert told["heldout"] == {"samples": 1, "supervised": 4, "supervised_capped": [1, 2, 4]}


def test_a_store_that_tells_only_its_sums_is_read_as_before():
    assert announced_rows({"samples": 2, "supervised": 12}, 4) == 12
    assert announced_rows({}, 4) == 0
