"""A capture by the driver, over workers that hold a pipeline stage each. No vLLM."""

from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from paceline.artefact import open_stage
from paceline.contracts import LayerPlan, TokenSample
from paceline.extract.guards import Guards
from paceline.extract.sink import QUARANTINE_PATTERN, Destination, read_lines
from paceline.extract.vllm import extension
from paceline.extract.vllm.capture import Capture, CaptureSetup
from paceline.store import Store, StoreSpec
from tests.extract.runners import VOCAB, WIDTH, Model, RunnerV1, Scheduled

NUM_STAGES, STAGE_LAYERS = 4, 2
NUM_LAYERS = NUM_STAGES * STAGE_LAYERS
STEP_TOKENS = 8


class PPMissingLayer(nn.Module):
    """What vLLM puts in the place of another stage's layer, under this name."""


class StageModel(nn.Module):
    """The layers of one stage; what came before them is computed past their hooks."""

    def __init__(self, whole: Model, stage: int) -> None:
        super().__init__()
        own = range(stage * STAGE_LAYERS, (stage + 1) * STAGE_LAYERS)
        self.layers = nn.ModuleList(
            layer if i in own else PPMissingLayer() for i, layer in enumerate(whole.layers)
        )
        self._first = own.start
        self._earlier = [layer.forward for layer in whole.layers[: own.start]]
        self._embed = [whole.embed]  # in a list: not a module of this stage

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> None:
        streams = self._embed[0](input_ids), None
        for layer in [*self._earlier, *self.layers[self._first : self._first + STAGE_LAYERS]]:
            streams = layer(positions, *streams)


class Worker(extension.PacelineTap):
    def __init__(self, whole: Model, stage: int) -> None:
        self.ranks = SimpleNamespace(tensor=0, stage=stage, num_tensor=1, num_stages=NUM_STAGES)
        self.model_runner = RunnerV1()
        self.model_runner.model = StageModel(whole, stage)


class Pipeline:
    """See capture.Requests: runs one request after the other, in chunks of a step."""

    def __init__(self, whole: Model, monkeypatch: pytest.MonkeyPatch) -> None:
        self.settings = {
            "max_num_batched_tokens": STEP_TOKENS,
            "max_model_len": 64,
            "pipeline_parallel": NUM_STAGES,
        }
        self.all_settings: list[dict[str, Any]] = []
        self._workers = [Worker(whole, stage) for stage in range(NUM_STAGES)]
        self._waiting: deque[tuple[str, int]] = deque()
        self._position = self._number = 0
        self._patch = monkeypatch

    def add(self, request: str, prompt: list[int]) -> None:
        for worker in self._workers:
            worker.model_runner.prompts[request] = np.asarray(prompt, np.int32)
        self._waiting.append((request, len(prompt)))

    def step(self) -> list[str]:
        request, length = self._waiting[0]
        count = min(STEP_TOKENS, length - self._position)
        for worker in self._workers:
            worker.model_runner.execute_model(Scheduled({request: (self._position, count)}))
        self._position += count
        if self._position < length:
            return []
        self._position = 0
        return [self._waiting.popleft()[0]]

    def busy(self) -> bool:
        return bool(self._waiting)

    def abort_all(self) -> None:
        self._waiting.clear()

    def call(self, method: str, *args: Any) -> list[dict[str, Any]]:
        answers = []
        for worker in self._workers:
            self._patch.setattr(extension, "Ranks", lambda ranks=worker.ranks: ranks)
            answers.append(getattr(worker, method)(*args))
        return answers

    def next_number(self) -> int:
        self._number += 1
        return self._number


@pytest.mark.parametrize(
    "aux",
    [
        pytest.param((2, 4, 5), id="every stage holds one"),
        pytest.param((0, 2, 4), id="the third of four holds none"),
        pytest.param((5,), id="only the last two hold any"),
        pytest.param((7,), id="only the last holds any"),
    ],
)
def test_stages_without_a_wanted_layer_have_nothing_to_say(
    aux: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Model(NUM_LAYERS)
    plan = LayerPlan(aux, NUM_LAYERS)
    destination = Destination(
        tmp_path / "store", StoreSpec(plan, WIDTH, "float32"), Guards(plan, WIDTH)
    )
    spool = tmp_path / "spool"
    spool.mkdir()
    rng = np.random.default_rng(0)
    samples = [
        TokenSample(f"s{i}", rng.integers(0, VOCAB, n).astype(np.int32), np.arange(n) >= n // 2)
        for i, n in enumerate([12, 5, 20, 8])
    ]
    setup = CaptureSetup(plan, destination, NUM_LAYERS, 2, [0], str(spool), compare_ranks=False)
    told: list[int] = []
    with open_stage(destination.folder, "extract", inputs={}, options={}):
        Capture(Pipeline(whole, monkeypatch), setup, told.append).run(samples)
    assert read_lines(destination.folder, QUARANTINE_PATTERN) == []
    store = Store(destination.folder, unfinished=True)
    assert len(store) == len(samples)
    assert sum(told) == sum(s.num_tokens for s in samples)
    assert list(spool.iterdir()) == []
    for sample in samples:
        stored = store.read(store.records.find(sample.sample_id))
        streams = {k: s.detach() for k, s in whole.plain(sample).items()}
        expected = torch.stack([streams[k] for k in aux], 1)[: sample.num_aux_rows]
        torch.testing.assert_close(stored.aux, expected, rtol=1e-5, atol=1e-5)
        expected_last = streams[NUM_LAYERS][torch.from_numpy(sample.loss_mask)]
        torch.testing.assert_close(stored.last, expected_last, rtol=1e-5, atol=1e-5)
