"""The definition, the walk and the interval, against hand-made answers."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.acceptance.counts import (
    Answer,
    Counts,
    acceptance_length,
    definition,
    pool,
    served_quotients,
    table,
    walk,
)
from paceline.acceptance.spans import answer_spans


def counts_of(accepted_per_step, num_draft_tokens):
    counts = Counts.zero(num_draft_tokens)
    for accepted in accepted_per_step:
        counts.add_step(accepted)
    return counts


def test_A01_the_bonus_token_is_counted():
    pooled = pool([counts_of([3, 0, 1, 2], 3)], bootstrap=100, seed=0)
    assert pooled["acceptance_length"] == 2.5
    assert pooled["accepted"] / pooled["verify_steps"] == 1.5
    assert pooled["accepted"] / (3 * pooled["verify_steps"]) == 0.5
    assert pooled["per_position"] == [0.75, 0.5, 0.25]
    assert "bonus token is counted" in definition([3]) and "K = 3" in definition([3])


def test_A04_the_prefill_token_is_taken_off_and_requests_are_pooled():
    one = served_quotients([101], [40])
    assert one["completion_tokens_per_verify_step"] == 2.525
    assert one["tokens_per_verify_step"] == 2.5
    two = served_quotients([101, 11], [40, 10])
    assert two["tokens_per_verify_step"] == 2.2
    assert two["mean_of_request_ratios"] == 1.75
    assert set(served_quotients([5], [0]).values()) == {None}
    assert acceptance_length(0, 0) is None


@pytest.mark.parametrize(("matches", "length"), [([9] * 20, 4.0), ([0] * 20, 1.0), ([1] * 20, 2.0)])
def test_always_never_and_once_agreeing_drafts(matches, length):
    counts = walk([Answer(np.array(matches), np.full(20, 50))], 3)
    assert acceptance_length(counts.accepted, counts.verify_steps) == length


def test_the_walk_starts_after_the_prefill_token_and_steps_by_accepted_plus_one():
    # Points 0, 3, 4, 6: matches 2, 0, 1, 0.
    answer = Answer(np.array([2, 9, 9, 0, 1, 9, 0]), np.full(7, 99))
    counts = walk([answer], 2)
    assert (counts.verify_steps, counts.accepted) == (4, 3)
    assert counts.per_position.tolist() == [2, 1]


def test_steps_past_the_record_are_left_out_and_said():
    # Five answer tokens, none past the end: after point i there are 4 - i tokens.
    span = answer_spans(np.array([0, 0, 1, 1, 1, 1, 1], bool), 0)[0]
    assert (span.first, span.end, span.known().tolist()) == (2, 6, [4, 3, 2, 1])
    counts = walk([Answer(np.array([0, 0, 0, 1]), span.known())], 2)
    assert (counts.verify_steps, counts.left_out) == (3, 1)
    # With two tokens on record past the end nothing is left out.
    longer = answer_spans(np.array([0, 0, 1, 1, 1, 1, 1, 0, 0], bool), 2)[0]
    assert longer.known().tolist() == [6, 5, 4, 3]
    assert walk([Answer(np.array([0, 0, 0, 1]), longer.known())], 2).left_out == 0


def test_every_answer_of_a_conversation_is_walked():
    mask = np.array([0, 1, 1, 0, 0, 1, 1, 1, 0, 1], bool)
    spans = answer_spans(mask, 0)
    assert [(s.first, s.end) for s in spans] == [(1, 2), (5, 7)]
    assert answer_spans(np.array([1, 1, 0], bool), 0) == []


@given(st.lists(st.integers(0, 4), min_size=1, max_size=30), st.integers(1, 4))
def test_the_walk_is_the_obvious_simulation(matches, num_draft_tokens):
    answer = Answer(np.array(matches), np.full(len(matches), 99))
    counts = walk([answer], num_draft_tokens)
    at, steps = 0, []
    while at < len(matches):
        steps.append(min(matches[at], num_draft_tokens))
        at += steps[-1] + 1
    assert (counts.verify_steps, counts.accepted) == (len(steps), sum(steps))
    assert counts.per_position.tolist() == [
        sum(s > i for s in steps) for i in range(num_draft_tokens)
    ]


def test_the_interval_covers_the_true_ratio_and_repeats():
    generator = np.random.default_rng(5)
    hits = 0
    for _ in range(200):
        sample = [counts_of(generator.integers(0, 4, 12), 3) for _ in range(30)]
        low, high = pool(sample, bootstrap=300, seed=1)["interval"]
        hits += low <= 2.5 <= high
    # 95% of 200 with a binomial spread of 3: 170 is eight spreads below.
    assert 170 <= hits <= 200
    assert pool(sample, 300, 1) == pool(sample, 300, 1)


def test_sources_are_told_apart_in_one_go():
    """A data set whose sources are addresses of pages has as many as conversations."""

    class Names(list):
        times_read = 0

        def __iter__(self):
            self.times_read += 1
            return super().__iter__()

    names = Names(f"s{i % 40}" for i in range(80))
    found = table({3: [counts_of([i % 4], 3) for i in range(80)]}, names, bootstrap=10, seed=0)["3"]
    assert list(found["sources"]) == sorted(set(names))
    assert found["sources"]["s7"]["accepted"] == 6 and found["pooled"]["accepted"] == 120
    assert names.times_read <= 4


def test_no_verify_step_is_undefined_not_zero():
    pooled = pool([Counts.zero(3)], 100, 0)
    assert pooled["acceptance_length"] is None and pooled["interval"] is None


@pytest.mark.parametrize("others", [[], [[]], [[], []]], ids=["alone", "one empty", "two empty"])
def test_one_conversation_with_verify_steps_gives_no_interval(others):
    pooled = pool([counts_of(steps, 3) for steps in ([3, 0], *others)], bootstrap=100, seed=0)
    assert pooled["acceptance_length"] == 2.5
    assert pooled["interval"] is None and pooled["per_position_intervals"] == [None] * 3


def test_intervals_of_positions_are_those_of_the_same_resamples():
    """Against the loop: draw conversations, add up their counts, divide, take percentiles."""
    counts = [counts_of(steps, 3) for steps in ([3, 0, 1], [2, 2, 0, 0], [1], [0, 3, 3, 1, 0])]
    pooled = pool(counts, bootstrap=300, seed=4)
    drawn = np.random.default_rng(4).integers(0, 4, (300, 4))
    lengths, positions = [], []
    for draw in drawn:
        chosen = [counts[i] for i in draw]
        steps = sum(c.verify_steps for c in chosen)
        lengths.append(1 + sum(c.accepted for c in chosen) / steps)
        positions.append([sum(int(c.per_position[p]) for c in chosen) / steps for p in range(3)])
    assert pooled["interval"] == pytest.approx(np.percentile(lengths, [2.5, 97.5]).tolist())
    expected = np.percentile(np.array(positions), [2.5, 97.5], axis=0).T
    assert np.array(pooled["per_position_intervals"]) == pytest.approx(expected)


def test_resamples_are_not_in_memory_together():
    """Held-out splits have tens of thousands of conversations."""
    counts = [counts_of([3, 0, 1], 3)] * 4000
    tracemalloc.start()
    try:
        pooled = pool(counts, bootstrap=2000, seed=0)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert pooled["interval"] == pytest.approx([1 + 4 / 3] * 2)
    # All at once took 48 kB for each conversation.
    assert peak < 40e6
