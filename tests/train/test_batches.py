"""Which samples make which step."""

from types import SimpleNamespace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.train.balance import RankShare
from paceline.train.batches import StepPlan

from ..draft.tiny import tiny_config

NO_END = 10**9
lengths = st.lists(st.integers(1, 40), min_size=1, max_size=30)


class Samples:
    """What a plan asks of a store: `pieces` of samples become known one after the other (None: a
    pause). Of sample 0 the first token is supervised, so that one row less is taught."""

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

    def num_taught_rows(self, sample):
        self.asked.append(sample)
        return int(self.records.num_supervised[sample]) - (sample == 0)


def make(num_rows, batch_rows=50, max_tokens=10**6, epochs=1, pieces=None, share=None):
    samples = Samples(num_rows, pieces or [range(len(num_rows))])
    return StepPlan(samples, batch_rows, max_tokens, epochs, 1, share or RankShare())


def samples_of(step):
    return [sample for group in step.groups for sample in group]


@settings(deadline=None)
@given(lengths, st.integers(1, 100), st.integers(0, 12), st.integers(1, 3))
def test_a_run_that_starts_later_sees_the_same_steps(num_rows, batch_rows, start, epochs):
    plan = make(num_rows, batch_rows, epochs=epochs)
    whole = list(plan.steps(0, NO_END))
    plan.store.asked.clear()
    rest = list(plan.steps(start, NO_END))
    assert rest == whole[start:]
    # What the steps before it held is not even opened.
    assert plan.store.asked == [sample for step in rest for sample in samples_of(step)]
    assert list(plan.steps(0, start)) == whole[:start]


@settings(deadline=None)
@given(lengths)
def test_each_epoch_has_every_sample_once_in_an_order_of_its_own(num_rows):
    plan = make(num_rows, batch_rows=10, epochs=3)
    samples = [sample for step in plan.steps(0, NO_END) for sample in samples_of(step)]
    size = len(num_rows)
    epochs = [samples[epoch * size : (epoch + 1) * size] for epoch in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(size))] * 3
    assert len(samples) == 3 * size


@settings(deadline=None)
@given(lengths, st.integers(4, 60))
def test_micro_batches_keep_order_and_budget(num_rows, max_tokens):
    one, many = make(num_rows), make(num_rows, max_tokens=max_tokens)
    for whole, cut in zip(one.steps(0, NO_END), many.steps(0, NO_END), strict=True):
        assert samples_of(cut) == samples_of(whole)
        assert cut.num_rows == whole.num_rows
        for group in cut.groups:
            fits = many.store.records.num_aux_rows[group].sum() <= max_tokens
            assert len(group) == 1 or fits


@settings(deadline=None)
@given(lengths, st.integers(2, 5), st.integers(4, 60))
def test_ranks_divide_the_samples_of_each_step_between_them(num_rows, num_ranks, max_tokens):
    shares = [RankShare(rank, num_ranks, supervised_cost=9) for rank in range(num_ranks)]
    of_ranks = [
        list(make(num_rows, max_tokens=max_tokens, share=s).steps(0, NO_END)) for s in shares
    ]
    for whole, *parts in zip(make(num_rows).steps(0, NO_END), *of_ranks, strict=True):
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


def test_steps_are_even_on_average_and_the_last_takes_what_is_left():
    *steps, last = make([7] * 100, batch_rows=48, epochs=2).steps(0, NO_END)
    sizes = [7 * len(samples_of(step)) for step in steps]
    assert len(sizes) == 1400 // 48
    assert abs(np.mean(sizes) - 48) < 0.5
    assert sum(sizes) + 7 * len(samples_of(last)) == 1400


def test_rows_are_those_that_step_0_teaches():
    taught = [step.num_rows for step in make([7, 5, 3], batch_rows=100).steps(0, NO_END)]
    assert taught == [7 - 1 + 5 + 3]


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=6), min_size=1, max_size=6))
def test_what_a_step_says_to_be_done_is_read_no_more(windows):
    num_rows = [n for window in windows for n in window]
    ends = np.cumsum([len(window) for window in windows])
    pieces = [list(range(e - len(w), e)) for w, e in zip(windows, ends, strict=True)]
    plan = make(num_rows, batch_rows=30, pieces=pieces)
    steps = list(plan.steps(0, NO_END))
    for number, step in enumerate(steps):
        later = {sample for after in steps[number + 1 :] for sample in samples_of(after)}
        done = {sample for piece in pieces[: step.num_windows] for sample in piece}
        assert not later & done
    # Samples of one window are together.
    order = [sample for step in steps for sample in samples_of(step)]
    assert [sorted(order[p[0] : p[-1] + 1]) for p in pieces] == pieces


def test_a_pause_stands_where_it_came_and_says_what_is_done():
    pieces = [[0, 1], [2], None, [3], None]
    steps = list(make([10, 10, 10, 10], batch_rows=20, pieces=pieces).steps(0, NO_END))
    assert [(s.number, len(samples_of(s)), s.num_windows) for s in steps] == [
        (0, 2, 0),
        (1, 0, 1),  # sample 2 waits for a step
        (1, 2, 2),
        (2, 0, 3),
    ]
    assert [s.number for s in make([10] * 4, 20, pieces=pieces).steps(2, NO_END)] == [2]
