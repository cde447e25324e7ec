"""The tap around runners of both kinds. No vLLM."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from paceline.contracts import LayerPlan, TokenSample
from paceline.errors import EngineError, TargetError
from paceline.extract.guards import RowNorms
from paceline.extract.vllm.batch import request_id
from paceline.extract.vllm.layers import find_decoder_layers
from paceline.extract.vllm.rows import Ring, Slot
from paceline.extract.vllm.runners import view_of
from paceline.extract.vllm.tap import Tap
from tests.extract.runners import (
    NUM_LAYERS,
    VOCAB,
    Model,
    RunnerBase,
    RunnerV1,
    RunnerV2,
    Scheduled,
)

PLAN = LayerPlan((0, 1, 2), NUM_LAYERS)


class Kept:
    """A sink that keeps copies."""

    def __init__(self) -> None:
        self.rows: dict[str, tuple[torch.Tensor, torch.Tensor, RowNorms]] = {}

    def add(
        self, sample: TokenSample, aux: torch.Tensor, last: torch.Tensor, norms: RowNorms
    ) -> None:
        assert sample.sample_id not in self.rows
        self.rows[sample.sample_id] = aux.clone(), last.clone(), norms


class Bench:
    """A runner with a tap on it, and samples under their numbers."""

    def __init__(
        self,
        runner: RunnerBase,
        lengths: list[int],
        ring: Ring | None = None,
        sink: Kept | None = None,
    ) -> None:
        self.runner = runner
        self.sink = sink or Kept()
        rng = np.random.default_rng(0)
        self.samples = {}
        for number, length in enumerate(lengths):
            ids = rng.integers(0, VOCAB, length).astype(np.int32)
            self.samples[number] = TokenSample(f"s{number}", ids, np.arange(length) >= length // 2)
            runner.prompts[self.name(number)] = ids
        layers = find_decoder_layers(runner.model, NUM_LAYERS)
        ring = ring or Ring(2, 0, False)
        self.tap = Tap(runner, view_of(runner), layers, PLAN, ring, [self.sink])
        self.tap.expect(self.samples)

    def name(self, number: int) -> str:
        return f"{request_id(number)}-00ff00ff"

    def step(self, **chunks: tuple[int, int]) -> None:
        named = {self.name(int(key[1:])): chunk for key, chunk in chunks.items()}
        self.runner.execute_model(Scheduled(named))

    def assert_right(self, *numbers: int) -> None:
        assert self.sink.rows.keys() == {f"s{n}" for n in numbers}
        for number in numbers:
            sample = self.samples[number]
            aux, last, norms = self.sink.rows[sample.sample_id]
            streams = self.runner.model.plain(sample)
            expected = torch.stack([streams[k] for k in PLAN.aux], 1)[: sample.num_aux_rows]
            torch.testing.assert_close(aux, expected.detach(), rtol=1e-5, atol=1e-5)
            expected_last = streams[NUM_LAYERS][torch.from_numpy(sample.loss_mask)].detach()
            torch.testing.assert_close(last, expected_last, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(norms.aux, aux.norm(dim=-1))
            torch.testing.assert_close(norms.last, last.norm(dim=-1))


@pytest.fixture(params=[RunnerV1, RunnerV2])
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    bench = Bench(request.param(), [6, 9, 4])
    yield bench
    if "execute_model" in vars(bench.runner):
        bench.tap.close()


def test_chunks_mixed_in_any_row_order(bench: Bench) -> None:
    bench.step(n0=(0, 4), n1=(0, 3))
    bench.step(n0=(4, 2), n2=(0, 4), n1=(3, 2))
    bench.step(n1=(5, 4))
    bench.tap.flush()
    bench.assert_right(0, 1, 2)
    assert sorted(bench.tap.take_events().done) == [0, 1, 2]
    assert bench.tap.take_events().done == []


def test_a_closed_tap_leaves_the_runner_as_it_was(bench: Bench) -> None:
    model = bench.runner.model
    bench.step(n0=(0, 6))
    bench.tap.close()
    assert "execute_model" not in vars(bench.runner)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    bench.step(n1=(0, 9))
    bench.assert_right(0)


def test_rows_of_strangers_are_left_alone(bench: Bench) -> None:
    bench.runner.prompts["someone-else"] = np.arange(5, dtype=np.int32)
    bench.runner.execute_model(Scheduled({"someone-else": (0, 5), bench.name(2): (0, 4)}))
    bench.runner.execute_model(Scheduled({"someone-else": (0, 5)}))
    bench.tap.flush()
    bench.assert_right(2)


def test_other_tokens_than_the_samples_poison_the_step(bench: Bench) -> None:
    bench.runner.prompts[bench.name(0)] = bench.samples[0].input_ids[::-1].copy()
    bench.step(n0=(0, 6), n2=(0, 4))
    bench.step(n1=(0, 9))
    bench.tap.flush()
    bench.assert_right(1)
    events = bench.tap.take_events()
    assert events.done == [1]
    assert sorted(number for number, _ in events.poisoned) == [0, 2]
    assert "was fed token" in events.poisoned[0][1]


def test_a_layer_that_runs_twice_poisons_the_step(bench: Bench) -> None:
    layer = bench.runner.model.layers[1]
    plain_forward = layer.forward

    def twice(*args: Any) -> Any:
        layer.forward = plain_forward
        layer(*[a.clone() for a in args])
        return plain_forward(*args)

    layer.forward = twice
    bench.step(n0=(0, 6))
    bench.step(n2=(0, 4))
    bench.tap.flush()
    bench.assert_right(2)
    ((number, reason),) = bench.tap.take_events().poisoned
    assert number == 0 and "layer k = 2 ran twice" in reason


@pytest.mark.parametrize("method", ["_begin", "_note_inputs", "_note_stream", "_launch"])
def test_no_error_leaves_a_step(bench: Bench, method: str, monkeypatch) -> None:
    monkeypatch.setattr(bench.tap, method, _failing)
    bench.step(n0=(0, 6))
    monkeypatch.undo()
    bench.step(n1=(0, 9))
    bench.tap.flush()
    assert isinstance(bench.tap.error, MemoryError)
    assert bench.sink.rows == {}
    bench.tap.close()


@pytest.mark.parametrize("method", ["_harvest_one", "_write_one"])
def test_no_error_of_a_thread_stops_the_steps(bench: Bench, method: str, monkeypatch) -> None:
    monkeypatch.setattr(bench.tap, method, _failing)
    for _ in range(4):
        # More steps than the ring has slots: a step must not wait for ever for a free one.
        bench.step(n0=(0, 6))
    bench.tap.flush()
    assert isinstance(bench.tap.error, MemoryError | EngineError)
    bench.tap.close()


class WatchedRing(Ring):
    """Says when an engine finds no slot that only the disk can free. settle: returns when all rows
    captured so far are assigned."""

    settle: Callable[[], None]

    def __init__(self, num_slots: int) -> None:
        super().__init__(num_slots, 0, False)
        self.no_slot = threading.Event()

    def take(self, broken: Callable[[], bool]) -> Slot:
        def looked_again() -> bool:
            self.settle()
            if self._free.empty():
                self.no_slot.set()
            return broken()

        return super().take(looked_again)


class StoppedDisk(Kept):
    def __init__(self) -> None:
        super().__init__()
        self.go_on = threading.Event()

    def add(self, *sample: Any) -> None:
        assert self.go_on.wait(300)
        super().add(*sample)


@pytest.mark.parametrize(
    "chunks",
    [
        pytest.param([(0, 12)], id="whole samples"),
        pytest.param([(0, 8), (8, 4)], id="two steps a sample"),
        pytest.param([(0, 3), (3, 3), (6, 3), (9, 3)], id="more steps than slots"),
    ],
)
def test_an_engine_waits_while_the_disk_stands_still(chunks: list[tuple[int, int]]) -> None:
    ring, disk = WatchedRing(2), StoppedDisk()
    bench = Bench(RunnerV1(), [12] * 10, ring, disk)
    ring.settle = bench.tap._captured.join
    ran: list[int] = []

    def engine() -> None:
        for number in bench.samples:
            for chunk in chunks:
                bench.step(**{f"n{number}": chunk})
            ran.append(number)
        ring.no_slot.set()

    thread = threading.Thread(target=engine, daemon=True)
    thread.start()
    assert ring.no_slot.wait(300)
    # One sample a slot is held for the disk, whether a step ran all of it or its end only.
    assert ran == [0, 1]
    disk.go_on.set()
    thread.join(300)
    bench.tap.close()
    bench.assert_right(*range(10))
    assert bench.tap.error is None
    assert ring.whole


def test_an_error_of_the_engine_comes_out_as_it_is(bench: Bench) -> None:
    embed: Callable[..., Any] = bench.runner.model.embed.forward
    bench.runner.model.embed.forward = _failing
    with pytest.raises(MemoryError, match="planted"):
        bench.step(n0=(0, 6))
    bench.runner.model.embed.forward = embed
    bench.step(n2=(0, 4))
    bench.tap.flush()
    bench.assert_right(2)
    assert bench.tap.error is None
    assert bench.tap.take_events().poisoned[0][0] == 0


def test_a_second_list_of_the_same_layers_is_no_second_list() -> None:
    model = Model()
    model.self_decoder = nn.Module()
    model.self_decoder.decoder_layers = model.layers[:]
    assert list(find_decoder_layers(model, NUM_LAYERS)) == list(model.layers)


def test_lists_of_different_layers_are_refused() -> None:
    model = Model()
    model.other = nn.ModuleList(nn.Linear(1, 1) for _ in range(NUM_LAYERS))
    with pytest.raises(TargetError, match=rf"2 lists of {NUM_LAYERS} decoder layers"):
        find_decoder_layers(model, NUM_LAYERS)


def test_an_unknown_runner_is_refused_with_what_was_looked_for() -> None:
    with pytest.raises(EngineError, match=r"object is not known.*input_batch.*req_states"):
        view_of(object())


def _failing(*_: Any, **__: Any) -> None:
    raise MemoryError("planted")
