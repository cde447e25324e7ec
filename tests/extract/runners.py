"""Model runners of both kinds, written here after what vLLM's look like."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from paceline.contracts import TokenSample

WIDTH, NUM_LAYERS, VOCAB = 8, 3, 50


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
    def __init__(self, num_layers: int = NUM_LAYERS) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(num_layers))

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
