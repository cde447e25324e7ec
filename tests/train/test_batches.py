"""Which samples make which step."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import TrainingError
from paceline.recipe import TrainOptions
from paceline.store import Store
from paceline.train.balance import RankShare
from paceline.train.source import plan_of

from ..draft.tiny import tiny_config
from ..store.making import make_sample, make_spec, write_store

lengths = st.lists(st.integers(1, 40), min_size=1, max_size=30)


class Samples:
    """What a plan asks of a store: `pieces` of samples become known one after the other (None: a
    pause). Of sample 0 the first token is supervised, so that one row less is taught."""

    folder = "store"

    def __init__(self, num_rows, pieces):
        self.records = SimpleNamespace(
            num_supervised=np.array(num_rows), num_aux_rows=np.array(num_rows) + 3
        )
        self._pieces = pieces
        self.asked = []

    def windows(self, split):
        assert split == "train"
        for piece in self._pieces:
            yield None if piece is None else np.array(piece, np.int64)

    def split(self, split):
        return np.arange(len(self.records.num_supervised))

    def expected_rows(self, split, at_most):
        return sum(min(n, at_most) for n in self.records.num_supervised.tolist())

    def num_taught_rows(self, sample):
        self.asked.append(sample)
        return int(self.records.num_supervised[sample]) - (sample == 0)


def make(num_rows, batch_rows=50, max_tokens=10**6, pieces=None, share=None, **length):
    samples = Samples(num_rows, pieces or [range(len(num_rows))])
    options = TrainOptions(batch_rows=batch_rows, micro_batch_tokens=max_tokens, seed=1, **length)
    return plan_of(options, samples, share or RankShare())


def samples_of(step):
    return [sample for group in step.groups for sample in group]


@settings(deadline=None)
@given(lengths, st.integers(1, 100), st.integers(0, 12), st.integers(1, 3))
def test_a_run_that_starts_later_sees_the_same_steps(num_rows, batch_rows, start, epochs):
    plan = make(num_rows, batch_rows, epochs=epochs)
    whole = list(plan.steps(0))
    plan.store.asked.clear()
    rest = list(plan.steps(start))
    assert rest == whole[start:]
    # What the steps before it held is not even opened.
    assert plan.store.asked == [sample for step in rest for sample in samples_of(step)]


@settings(deadline=None)
@given(lengths)
def test_each_epoch_has_every_sample_once_in_an_order_of_its_own(num_rows):
    plan = make(num_rows, batch_rows=10, epochs=3)
    samples = [sample for step in plan.steps(0) for sample in samples_of(step)]
    size = len(num_rows)
    epochs = [samples[epoch * size : (epoch + 1) * size] for epoch in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(size))] * 3
    assert len(samples) == 3 * size


@settings(deadline=None)
@given(lengths, st.integers(4, 60))
def test_micro_batches_keep_order_and_budget(num_rows, max_tokens):
    one, many = make(num_rows), make(num_rows, max_tokens=max_tokens)
    for whole, cut in zip(one.steps(0), many.steps(0), strict=True):
        assert samples_of(cut) == samples_of(whole)
        assert cut.num_rows == whole.num_rows
        for group in cut.groups:
            fits = many.store.records.num_aux_rows[group].sum() <= max_tokens
            assert len(group) == 1 or fits


@settings(deadline=None)
@given(lengths, st.integers(2, 5), st.integers(4, 60))
def test_ranks_divide_the_samples_of_each_step_between_them(num_rows, num_ranks, max_tokens):
    shares = [RankShare(rank, num_ranks, supervised_cost=9) for rank in range(num_ranks)]
    of_ranks = [list(make(num_rows, max_tokens=max_tokens, share=s).steps(0)) for s in shares]
    for whole, *parts in zip(make(num_rows).steps(0), *of_ranks, strict=True):
        assert sorted(i for part in parts for i in samples_of(part)) == sorted(samples_of(whole))
        # A step without groups would be a pause.
        assert all(part.groups for part in parts)
        assert {part.num_rows for part in parts} == {whole.num_rows}
        for part in parts:
            place = [samples_of(whole).index(i) for i in samples_of(part)]
            assert place == sorted(place)


def test_ranks_get_equal_work_and_not_equal_numbers_of_samples_or_tokens():
    """Half of the tokens of one sample teach, of the others nearly none."""
    records = SimpleNamespace(
        num_supervised=np.array([500, *[5] * 8]), num_aux_rows=np.array([1000] * 9)
    )
    config = tiny_config(
        hidden_size=64, target_hidden_size=64, vocab_size=512, draft_vocab_size=512
    )
    samples = np.arange(9)
    shares = [RankShare.of_draft(config, 3, rank, 2).of(samples, records) for rank in (0, 1)]
    assert [share.tolist() for share in shares] == [[0], list(range(1, 9))]


def test_steps_are_even_and_take_all():
    sizes = [7 * len(samples_of(s)) for s in make([7] * 100, batch_rows=48, epochs=2).steps(0)]
    assert len(sizes) == 1400 // 48
    assert sum(sizes) == 1400
    assert {49 - 7, 49, 49 + 7} >= set(sizes)


def test_the_last_step_of_a_stream_with_bad_samples_takes_what_is_left():
    plan = make([10] * 20, batch_rows=40, pieces=[range(8), range(8, 13), range(13, 18)])
    sizes = [len(samples_of(step)) for step in plan.steps(0)]
    assert sizes == [4, 4, 4, 4, 2]
    assert sum(len(samples_of(step)) for step in plan.steps(3)) == 6


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 400), min_size=1, max_size=30),
    st.integers(1, 150),
    st.sampled_from([{"epochs": 0.3}, {}, {"epochs": 2.5}, {"max_steps": 1}, {"max_steps": 90}]),
)
def test_a_run_makes_the_steps_that_it_plans_however_long_its_samples_are(
    num_rows, batch_rows, length
):
    plan = make(num_rows, batch_rows, **length)
    steps = list(plan.steps(0))
    assert [step.number for step in steps] == list(range(plan.length.num_steps))
    if "max_steps" in length:
        assert len(steps) == length["max_steps"]
        wanted = batch_rows
    else:
        # Where no sample has more rows than a step, steps have batch_rows, or a little more to
        # take them all.
        counted = sum(min(rows, batch_rows) for rows in num_rows) * length.get("epochs", 1)
        assert len(steps) == max(1, int(counted) // batch_rows)
        wanted = counted / len(steps)
    # No step takes a sample that it does not need.
    for step in steps:
        *before, _ = samples_of(step)
        assert sum(min(num_rows[sample], batch_rows) for sample in before) < wanted


def test_after_a_long_sample_steps_are_as_large_as_before():
    """Its rows beyond a step's are no debt that later steps would pay, a sample each."""
    sizes = [10] * 40 + [5000] + [10] * 40
    steps = [samples_of(step) for step in make(sizes, batch_rows=100).steps(0)]
    assert len(steps) == 9
    (long,) = [number for number, samples in enumerate(steps) if 40 in samples]
    with_long = len(steps[long]) - 1
    others = [len(samples) for number, samples in enumerate(steps) if number != long]
    # What a long sample's step holds besides it counts for the step after it.
    assert sorted(others) == sorted([10] * 7 + [10 - with_long])


def test_a_sample_of_which_only_the_first_token_is_supervised_is_in_no_step(tmp_path):
    spec = make_spec()
    samples = [
        replace(sample, loss_mask=np.isin(np.arange(9), supervised))
        for sample, supervised in zip(
            (make_sample(i, num_tokens=9) for i in range(4)), ([0], [0, 4], [], [5, 6]), strict=True
        )
    ]
    write_store(tmp_path / "store", spec, samples)
    store = Store(tmp_path / "store")
    plan = plan_of(TrainOptions(batch_rows=1), store, RankShare())
    steps = list(plan.steps(0))
    assert sorted(samples_of(step) for step in steps) == [[1], [3]]
    assert sorted(step.num_rows for step in steps) == [1, 2]
    assert plan.num_samples() == 2
    assert plan.rows_per_step() == 2


def test_a_stream_that_ends_without_a_sample_is_told():
    for pieces in ([[]], [None, [], []]):
        with pytest.raises(TrainingError, match="store ended without a sample of the training"):
            make([5], pieces=pieces).first_samples(3)


def test_rows_are_those_that_step_0_teaches():
    taught = [step.num_rows for step in make([7, 5, 3], batch_rows=100).steps(0)]
    assert taught == [7 - 1 + 5 + 3]


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=6), min_size=1, max_size=6))
def test_what_a_step_says_to_be_done_is_read_no_more(windows):
    num_rows = [n for window in windows for n in window]
    ends = np.cumsum([len(window) for window in windows])
    pieces = [list(range(e - len(w), e)) for w, e in zip(windows, ends, strict=True)]
    plan = make(num_rows, batch_rows=30, pieces=pieces)
    steps = list(plan.steps(0))
    for number, step in enumerate(steps):
        later = {sample for after in steps[number + 1 :] for sample in samples_of(after)}
        done = {sample for piece in pieces[: step.num_windows] for sample in piece}
        assert not later & done
    # Samples of one window are together.
    order = [sample for step in steps for sample in samples_of(step)]
    assert [sorted(order[p[0] : p[-1] + 1]) for p in pieces] == pieces


def test_a_pause_stands_where_it_came_and_says_what_is_done():
    pieces = [[0, 1], [2], None, [3], None, [4, 5]]
    steps = list(make([10] * 6, batch_rows=20, pieces=pieces).steps(0))
    assert [(s.number, len(samples_of(s)), s.num_windows) for s in steps] == [
        (0, 2, 0),
        (1, 0, 1),  # sample 2 waits for a step
        (1, 2, 2),
        (2, 0, 3),
        (2, 2, 3),
    ]
    assert [s.number for s in make([10] * 6, 20, pieces=pieces).steps(2)] == [2, 2]
