"""The `transformers` engine: hooks on the decoder layers of the plain model, CPU or GPU.

Batches are bucketed by length inside a token budget and padded on the right; attention is causal,
so no real row can see a padding row, and none of those is kept.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch
import transformers

from paceline.contracts import LayerPlan, TokenSample
from paceline.device import choose_device
from paceline.extract.engine import EngineInfo, num_needed_tokens
from paceline.extract.sink import Destination, Sink
from paceline.recipe import ExtractOptions
from paceline.target.model import cached, decoder_of, load_model
from paceline.target.spec import Target, long_rope_from
from paceline.target.tap import LayerTap

# Samples looked at together when batches are formed: enough that lengths within a batch agree.
_BUCKET_WINDOW = 1024


@dataclass(frozen=True)
class _Run:
    """A batch and its states [B, L, D] by k. done: on a GPU, when they are there."""

    batch: list[TokenSample]
    states: Mapping[int, torch.Tensor]
    done: torch.cuda.Event | None


class TransformersEngine:
    """See `engine.Engine`. The model stays on one device."""

    def __init__(self, options: ExtractOptions, target: Target, dtype: str) -> None:
        self._device = choose_device(options.device)
        on_gpu = self._device.type == "cuda"
        self._stream = torch.cuda.Stream(self._device) if on_gpu else None
        self._num_layers = target.num_layers
        self._max_batch_tokens = options.max_batch_tokens
        self.model = load_model(target, getattr(torch, dtype), self._device)
        self._decoder = decoder_of(self.model, self._num_layers)
        self._long_from = long_rope_from(target)
        self.info = EngineInfo(
            "transformers",
            transformers.__version__,
            dtype,
            {"attention": self.model.config._attn_implementation, "device": str(self._device)},
        )

    def capture(
        self,
        samples: Iterable[TokenSample],
        plan: LayerPlan,
        destination: Destination,
        on_tokens: Callable[[int], None],
    ) -> None:
        tap = LayerTap(self.model, plan, self._num_layers)
        try:
            with destination.open() as sink:
                runs = self._runs(samples, destination, tap)
                for run in _one_behind(runs) if self._stream else runs:
                    self._store(run, plan, sink)
                    on_tokens(sum(map(num_needed_tokens, destination.missing(run.batch))))
                    # Its states must be gone when the next forward pass makes more.
                    del run
        finally:
            tap.close()

    def _runs(
        self, samples: Iterable[TokenSample], destination: Destination, tap: LayerTap
    ) -> Iterator[_Run]:
        # Batches of all samples, also those that are done: a run that goes on makes the same
        # batches, and so rounds as one that was never stopped.
        buckets = length_buckets(samples, self._max_batch_tokens, self._long_from)
        for batch in buckets:
            if any(destination.missing(batch)):
                self._forward(batch)
                yield _Run(batch, dict(tap.states), self._event())
                tap.states.clear()

    @torch.inference_mode()
    def _forward(self, batch: list[TokenSample]) -> None:
        longest = max(map(num_needed_tokens, batch))
        # From pinned memory nothing waits for the forward pass before.
        pinned = self._stream is not None
        ids = torch.zeros(len(batch), longest, dtype=torch.int64, pin_memory=pinned)
        for row, sample in zip(ids, batch, strict=True):
            needed = num_needed_tokens(sample)
            row[:needed] = torch.from_numpy(sample.input_ids[:needed].astype(np.int64))
        self._decoder(input_ids=ids.to(self._device, non_blocking=pinned), use_cache=False)

    def _event(self) -> torch.cuda.Event | None:
        return torch.cuda.current_stream(self._device).record_event() if self._stream else None

    def _store(self, run: _Run, plan: LayerPlan, sink: Sink) -> None:
        with self._beside(run):
            for i, sample in enumerate(run.batch):
                sink.add(sample, *_rows_of(sample, i, run.states, plan))

    @contextmanager
    def _beside(self, run: _Run) -> Iterator[None]:
        """On a GPU: what follows runs beside the next forward pass."""
        if self._stream is None:
            yield
            return
        self._stream.wait_event(run.done)
        with torch.cuda.stream(self._stream):
            yield
        # The states' memory goes back to the stream that made them: none may still be read.
        self._stream.synchronize()

    @torch.inference_mode()
    def greedy(self, prompts: Sequence[np.ndarray], num_tokens: int) -> list[list[int]]:
        answers = []
        for prompt in prompts:
            ids = torch.from_numpy(np.asarray(prompt, np.int64))[None].to(self._device)
            cache, answer = None, []
            for _ in range(num_tokens):
                output = self.model(input_ids=ids, **cached(self.model, cache))
                cache, ids = output.past_key_values, output.logits[:, -1:].argmax(-1)
                answer.append(int(ids))
            answers.append(answer)
        return answers

    def close(self) -> None:
        del self.model, self._decoder


def open_engine(
    options: ExtractOptions, target: Target, dtype: str, scratch: Path
) -> TransformersEngine:
    return TransformersEngine(options, target, dtype)


def length_buckets(
    samples: Iterable[TokenSample], max_batch_tokens: int, long_from: int | None = None
) -> Iterator[list[TokenSample]]:
    """Batches of samples of like length; size x longest stays within the budget, except that a
    sample longer than the budget runs alone. Short and long batches are mixed: neighbours in a
    store are trained on together. long_from: samples of more tokens share no batch with others,
    see `long_rope_from`."""
    source = iter(samples)
    while window := list(islice(source, _BUCKET_WINDOW)):
        window.sort(key=num_needed_tokens)
        batches: list[list[TokenSample]] = [[]]
        for sample in window:
            batch, needed = batches[-1], num_needed_tokens(sample)
            turns_long = bool(batch and long_from) and (
                num_needed_tokens(batch[-1]) <= long_from < needed
            )
            if turns_long or (batch and (len(batch) + 1) * needed > max_batch_tokens):
                batches.append([])
            batches[-1].append(sample)
        random.Random(0).shuffle(batches)
        yield from batches


def _one_behind(runs: Iterable[_Run]) -> Iterator[_Run]:
    """The same, each when the one after it has begun."""
    waiting: list[_Run] = []
    for run in runs:
        waiting.append(run)
        if len(waiting) > 1:
            yield waiting.pop(0)
    yield from waiting


def _rows_of(
    sample: TokenSample, index: int, states: Mapping[int, torch.Tensor], plan: LayerPlan
) -> tuple[torch.Tensor, torch.Tensor]:
    """A sample's aux [R, A, D] and last [M, D] out of a batch's states, on their device: norms and
    8-bit codes are made there, and codes are half of the bytes to move."""
    rows = sample.num_aux_rows
    aux = torch.stack([states[k][index, :rows] for k in plan.aux], 1)
    supervised = torch.from_numpy(np.flatnonzero(sample.loss_mask))
    return aux, states[plan.last][index][supervised.to(aux.device)]
