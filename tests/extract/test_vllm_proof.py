"""Rows to samples: the description of a batch, its proof, and joining chunks. No vLLM."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.contracts import TokenSample
from paceline.errors import CaptureMismatch
from paceline.extract.vllm.assemble import Assembler, Complete
from paceline.extract.vllm.batch import (
    Segment,
    StepBatch,
    check_batch,
    prove,
    request_id,
    sample_number,
    segments_of,
)
from paceline.extract.vllm.rows import HostRows, Ring, pick_rows

AUX, WIDTH = 2, 4


def sample_of(name: str, length: int, supervised_from: int | None = None) -> TokenSample:
    mask = np.zeros(length, bool)
    mask[length - 1 if supervised_from is None else supervised_from :] = True
    base = sum(map(ord, name))
    return TokenSample(name, np.arange(base, base + length, dtype=np.int32), mask)


def batch_of(rows: list[tuple[str, int, int]]) -> StepBatch:
    """(worker's request id, first position, count) in row order."""
    counts = np.asarray([count for _, _, count in rows], np.int64)
    return StepBatch(
        [name for name, _, _ in rows],
        counts,
        np.concatenate([[0], np.cumsum(counts)]),
        np.asarray([start for _, start, _ in rows], np.int64),
    )


def state(number: int, position: int) -> float:
    """A payload that says whose row it is."""
    return 1000.0 * (number + 1) + position


class Steps:
    """A model that runs scheduled chunks: every row carries (sample number, position)."""

    def __init__(self, samples: dict[int, TokenSample]) -> None:
        self.samples = samples
        self.assembler = Assembler(has_last=True)

    def run(
        self, chunks: list[tuple[int, int, int]], batch: StepBatch | None = None
    ) -> list[Complete]:
        """chunks: (number, first position, count) in row order, as they really ran. batch: what is
        said of them, if not the truth."""
        ran = [(n, p) for n, start, count in chunks for p in range(start, start + count)]
        tokens = torch.tensor([int(self.samples[n].input_ids[p]) for n, p in ran])
        positions = torch.tensor([p for _, p in ran])
        states = torch.tensor([state(n, p) for n, p in ran])[:, None].expand(-1, WIDTH)
        batch = batch or batch_of(
            [(f"{request_id(n)}-0a1b2c3d", start, count) for n, start, count in chunks]
        )
        segments = segments_of(batch, self.samples)
        pick = pick_rows(segments, self.samples, has_last=True)
        aux = torch.stack([states[pick.aux]] * AUX, 1)
        last = states[pick.last]
        norms = aux.norm(dim=-1), last.norm(dim=-1)
        slot = Ring(1, 0, pinned=False).take(lambda: False)
        rows = HostRows(slot, aux, last, *norms, tokens, positions)
        taken = self.assembler.take(segments, pick, rows, self.samples, lambda _: True)
        # What shares a step's memory must be used before the next step.
        return [replace(c, rows=replace(c.rows, aux=c.rows.aux.clone())) for c in taken]


def assert_rows(complete: Complete) -> None:
    sample, number = complete.sample, complete.number
    aux = [state(number, p) for p in range(sample.num_aux_rows)]
    last = [state(number, p) for p in np.flatnonzero(sample.loss_mask)]
    assert complete.rows.aux[:, 0, 0].tolist() == aux
    assert complete.rows.aux.shape == (len(aux), AUX, WIDTH)
    assert complete.rows.last[:, 0].tolist() == last


def test_E01_chunks_of_several_requests_are_joined_by_request_and_position() -> None:
    samples = {0: sample_of("A", 5), 1: sample_of("B", 3), 2: sample_of("C", 4)}
    steps = Steps(samples)
    done = [
        *steps.run([(0, 0, 4), (1, 0, 2)]),
        *steps.run([(1, 2, 1), (2, 0, 2)]),
        *steps.run([(0, 4, 1), (2, 2, 2)]),
    ]
    assert [c.sample.sample_id for c in done] == ["B", "A", "C"]
    for complete in done:
        assert_rows(complete)
    again = Steps({3: samples[2], 4: samples[0]})
    for complete in again.run([(3, 0, 4), (4, 0, 5)]):
        assert_rows(complete)


def test_E03_rows_that_a_cache_kept_from_running_are_noticed() -> None:
    first = TokenSample("p1", np.arange(20, dtype=np.int32), np.arange(20) >= 18)
    tail = np.array([90, 91, 92, 93], np.int32)
    second = TokenSample(
        "p2", np.concatenate([np.arange(16, dtype=np.int32), tail]), np.arange(20) >= 18
    )
    steps = Steps({0: first, 1: second})
    assert len(steps.run([(0, 0, 20)])) == 1
    with pytest.raises(CaptureMismatch, match=r"sample p2: 0 rows .* position 16.*prefix cache"):
        steps.run([(1, 16, 4)])
    assert len(steps.run([(1, 0, 20)])) == 1


def test_a_preempted_request_starts_over() -> None:
    steps = Steps({0: sample_of("A", 6, 3)})
    assert steps.run([(0, 0, 4)]) == []
    assert steps.run([(0, 0, 2)]) == []
    (complete,) = steps.run([(0, 2, 4)])
    assert_rows(complete)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_any_schedule_gives_every_row_once_and_in_order(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(2, 9), min_size=1, max_size=5))
    samples = {
        i: sample_of(chr(65 + i), n, data.draw(st.integers(1, n - 1), label="supervised from"))
        for i, n in enumerate(lengths)
    }
    steps, position, done = Steps(samples), dict.fromkeys(samples, 0), []
    while any(position[i] < samples[i].num_tokens for i in samples):
        left = [i for i in samples if position[i] < samples[i].num_tokens]
        order = data.draw(st.permutations(left))
        chosen = order[: data.draw(st.integers(1, len(order)))]
        chunks = []
        for i in chosen:
            count = data.draw(st.integers(1, samples[i].num_tokens - position[i]))
            chunks.append((i, position[i], count))
            position[i] += count
        done += steps.run(chunks)
    assert sorted(c.number for c in done) == sorted(samples)
    for complete in done:
        assert_rows(complete)


TWO = {0: sample_of("A", 4), 1: sample_of("B", 4)}


def test_swapped_labels_are_caught_by_the_tokens() -> None:
    said = batch_of([(request_id(1), 0, 4), (request_id(0), 0, 4)])
    with pytest.raises(CaptureMismatch, match="was fed token 65 at position 0, the sample has 66"):
        Steps(TWO).run([(0, 0, 4), (1, 0, 4)], said)


def test_positions_off_by_one_are_caught() -> None:
    said = batch_of([(request_id(0), 1, 3), (request_id(1), 0, 4)])
    with pytest.raises(CaptureMismatch, match="other positions"):
        Steps(TWO).run([(0, 0, 3), (1, 0, 4)], said)


def test_a_mismatch_gives_nothing_of_the_step() -> None:
    steps = Steps(TWO)
    said = batch_of([(request_id(0), 0, 4), (request_id(1), 0, 3), (request_id(1), 0, 1)])
    said = StepBatch(said.request_ids[:2], said.counts[:2], said.query_starts[:3], said.starts[:2])
    with pytest.raises(CaptureMismatch):
        steps.run([(0, 0, 4), (1, 1, 3)], said)
    assert len(steps.assembler) == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"counts": np.array([3, 1])}, "the scheduler had asked for"),
        ({"query_starts": np.array([0, 2, 4])}, "they should begin at"),
        ({"request_ids": ["x", "x"]}, "twice"),
        ({"computed": np.array([0, 1])}, "had computed"),
    ],
)
def test_a_description_that_contradicts_itself(change: dict, message: str) -> None:
    batch = StepBatch(
        ["x", "y"], np.array([1, 3]), np.array([0, 1, 4]), np.array([0, 0]), np.array([0, 0])
    )
    check_batch(batch, {"y": 3, "x": 1})
    fields = {**vars(batch), **change}
    with pytest.raises(CaptureMismatch, match=message):
        check_batch(StepBatch(**fields), {"y": 3, "x": 1})


def test_request_ids_come_back_from_what_vllm_makes_of_them() -> None:
    assert sample_number(request_id(17)) == 17
    assert sample_number(request_id(17) + "-0a1b2c3d") == 17
    assert sample_number("paceline-text-3-0a1b2c3d") is None
    assert sample_number("chatcmpl-17") is None


def test_rows_past_the_needed_ones_belong_to_nobody() -> None:
    sample = sample_of("A", 6, 3)
    mask = sample.loss_mask.copy()
    mask[5] = False  # the last supervised position is 4: five tokens are needed
    short = TokenSample("A", sample.input_ids, mask)
    assert segments_of(batch_of([(request_id(0), 0, 6)]), {0: short}) == [Segment(0, 0, 5, 0)]
    assert segments_of(batch_of([(request_id(0), 5, 1)]), {0: short}) == []


def test_proof_names_the_sample_and_the_place() -> None:
    sample = sample_of("A", 4)
    tokens, positions = sample.input_ids.copy(), np.arange(4)
    prove(Segment(0, 0, 4, 0), sample, tokens, positions)
    tokens[2] = 9
    with pytest.raises(CaptureMismatch, match=r"sample A, positions 0 to 3: .* at position 2"):
        prove(Segment(0, 0, 4, 0), sample, tokens, positions)
