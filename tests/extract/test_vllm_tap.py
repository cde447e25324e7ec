"""The tap around runners of both kinds, written here after what vLLM's look like. No vLLM."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from paceline.contracts import LayerPlan, TokenSample
from paceline.errors import EngineError
from paceline.extract.guards import RowNorms
from paceline.extract.vllm.batch import request_id
from paceline.extract.vllm.layers import find_decoder_layers
from paceline.extract.vllm.rows import Ring
from paceline.extract.vllm.runners import view_of
from paceline.extract.vllm.tap import Tap

WIDTH, NUM_LAYERS, VOCAB = 8, 3, 50
PLAN = LayerPlan((0, 1, 2), NUM_LAYERS)


class Layer(nn.Module):
    """Returns (hidden, residual) not yet added, and changes its residual in place afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(
        self, positions: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if residual is None:
            residual = hidden.clone()
        else:
            residual.add_(hidden)
        return self.linear(residual) + positions[:, None] * 0.01, residual


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(NUM_LAYERS))

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden, residual = self.embed(input_ids), None
        for layer in self.layers:
            hidden, residual = layer(positions, hidden, residual)
        return hidden + residual

    def plain(self, sample: TokenSample) -> dict[int, torch.Tensor]:
        """Streams k = 0 .. n, added up the obvious way."""
        positions = torch.arange(sample.num_tokens)
        stream = self.embed(torch.from_numpy(sample.input_ids.astype(np.int64)))
        streams = {0: stream}
        for k, layer in enumerate(self.layers, 1):
            stream = stream + layer.linear(stream) + positions[:, None] * 0.01
            streams[k] = stream
        return streams


@dataclass
class Scheduled:
    """What a scheduler puts out: for each request its first position and its rows."""

    chunks: dict[str, tuple[int, int]]

    @property
    def num_scheduled_tokens(self) -> dict[str, int]:
        return {name: count for name, (_, count) in self.chunks.items()}

    @property
    def scheduled_new_reqs(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(req_id=n, num_computed_tokens=0) for n in self._of(new=True)]

    @property
    def scheduled_cached_reqs(self) -> SimpleNamespace:
        names = self._of(new=False)
        return SimpleNamespace(
            req_ids=names, num_computed_tokens=[self.chunks[n][0] for n in names]
        )

    def _of(self, new: bool) -> list[str]:
        return [name for name, (start, _) in self.chunks.items() if (start == 0) == new]


class RunnerBase:
    """Runs chunks of known prompts; like vLLM's it keeps what it fed in one buffer."""

    def __init__(self) -> None:
        self.model = Model()
        self.device = torch.device("cpu")
        self.prompts: dict[str, np.ndarray] = {}
        self.buffer = torch.zeros(64, dtype=torch.int64)
        self.execute_model_state: Any = None

    def get_model(self) -> nn.Module:
        return self.model

    @torch.inference_mode()
    def run(self, scheduled: Scheduled, order: list[str]) -> tuple[np.ndarray, torch.Tensor]:
        spans = [(n, *scheduled.chunks[n]) for n in order]
        ids = np.concatenate([self.prompts[n][start : start + c] for n, start, c in spans])
        positions = np.concatenate([np.arange(start, start + c) for _, start, c in spans])
        self.buffer[: len(ids)] = torch.from_numpy(ids.astype(np.int64))
        fed = self.buffer[: len(ids)]
        self.model(input_ids=fed, positions=torch.from_numpy(positions))
        return np.asarray([c for _, _, c in spans]), fed


class RunnerV1(RunnerBase):
    def __init__(self) -> None:
        super().__init__()
        self.query_start_loc = SimpleNamespace(np=np.zeros(64, np.int32))
        self.input_batch = SimpleNamespace(req_ids=[], num_reqs=0)

    def execute_model(self, scheduled: Scheduled, *_: Any) -> None:
        order = list(scheduled.chunks)
        counts, _ = self.run(scheduled, order)
        starts = np.asarray([scheduled.chunks[n][0] for n in order])
        self.input_batch = SimpleNamespace(
            req_ids=order, num_reqs=len(order), num_computed_tokens_cpu=starts
        )
        self.query_start_loc.np[1 : len(order) + 1] = np.cumsum(counts)


class RunnerV2(RunnerBase):
    """Its rows run in another order than the scheduler's; its batch is there only afterwards."""

    req_states = None

    def execute_model(self, scheduled: Scheduled, *_: Any) -> None:
        order = list(scheduled.chunks)[::-1]
        counts, fed = self.run(scheduled, order)
        self.execute_model_state = SimpleNamespace(
            input_batch=SimpleNamespace(
                req_ids=order,
                num_reqs=len(order),
                num_scheduled_tokens=counts,
                query_start_loc_np=np.concatenate([[0], np.cumsum(counts)]),
                input_ids=fed,
            )
        )


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

    def __init__(self, runner: RunnerBase, lengths: list[int]) -> None:
        self.runner = runner
        self.sink = Kept()
        rng = np.random.default_rng(0)
        self.samples = {}
        for number, length in enumerate(lengths):
            ids = rng.integers(0, VOCAB, length).astype(np.int32)
            self.samples[number] = TokenSample(f"s{number}", ids, np.arange(length) >= length // 2)
            runner.prompts[self.name(number)] = ids
        layers = find_decoder_layers(runner.model, NUM_LAYERS)
        self.tap = Tap(runner, view_of(runner), layers, PLAN, Ring(2, 0, False), [self.sink])
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


def test_an_unknown_runner_is_refused_with_what_was_looked_for() -> None:
    with pytest.raises(EngineError, match=r"object is not known.*input_batch.*req_states"):
        view_of(object())


def _failing(*_: Any, **__: Any) -> None:
    raise MemoryError("planted")
