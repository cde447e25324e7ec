"""How long a step of the target and of the draft takes here, with so many requests together.

A target step reads 1 .. K + 1 tokens of each request over a cache of random keys and values: what
they hold does not change the time. A draft step reads one token of each.
Legend: B requests, C tokens of context, A auxiliary states, D target width.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import DynamicCache, PreTrainedModel

from paceline.device import free_host_bytes
from paceline.draft.model import Draft
from paceline.draft.unroll import Unroll
from paceline.target.model import cached

_REPEATS = 3
# Of the memory that is free, the share that caches and states may take.
_MEMORY_SHARE = 0.5


@dataclass(frozen=True)
class StepTimes:
    """Seconds. target[n]: a step in which the target reads n + 1 tokens of each request; draft: one
    draft step of all requests."""

    target: tuple[float, ...]
    draft: float


class StepTimer:
    """Times steps of a target and a draft that are on one device."""

    def __init__(self, model: PreTrainedModel, draft: Draft, longest: int) -> None:
        """longest: draft tokens of the longest chain."""
        self._model = model
        self._draft = draft
        self._longest = longest
        self._device = draft.fc.weight.device
        cache = DynamicCache()
        with torch.inference_mode():
            model(input_ids=self._ids(1, 1), **cached(model, cache))
        # Keys and values of one token, a layer each: [1, G, 1, K].
        self._entries = [(layer.keys, layer.values) for layer in cache.layers]

    def fits(self, batch_size: int, context: int) -> bool:
        """Whether caches and states of that size fit into the memory that is free now."""
        entries = sum(k.numel() + v.numel() for k, v in self._entries)
        config = self._draft.config
        states = config.num_aux * config.target_hidden_size + 8 * config.hidden_size
        needed = batch_size * context * (entries + states) * self._draft.fc.weight.element_size()
        free = (
            torch.cuda.mem_get_info(self._device)[0]
            if self._device.type == "cuda"
            else free_host_bytes()
        )
        return free is None or needed < _MEMORY_SHARE * free

    @torch.inference_mode()
    def measure(self, batch_size: int, context: int) -> StepTimes:
        cache = self._cache(batch_size, context)

        def step(num_tokens: int) -> None:
            ids = self._ids(batch_size, num_tokens)
            self._model(input_ids=ids, **cached(self._model, cache))
            cache.crop(-num_tokens)

        target = [self._seconds(lambda n=n: step(n)) for n in range(1, self._longest + 2)]
        return StepTimes(tuple(target), self._draft_step(batch_size, context))

    def _draft_step(self, batch_size: int, context: int) -> float:
        """Mean of the steps after the first of a chain, the choice of the token included."""
        config, dtype = self._draft.config, self._draft.fc.weight.dtype
        num_rows = batch_size * context
        aux = torch.randn(
            context, config.num_aux, config.target_hidden_size, dtype=dtype, device=self._device
        ).repeat(batch_size, 1, 1)
        rows = torch.arange(num_rows, device=self._device)
        positions = rows % context
        unroll = Unroll(self._draft, aux, self._ids(1, num_rows)[0], positions, rows - positions)
        state = unroll.first(rows[context - 1 :: context])
        seconds = []
        for _ in range(_REPEATS + 1):
            ids = self._draft.propose(state)
            self._synchronise()
            started = time.perf_counter()
            state = unroll.next(ids)
            self._draft.propose(state)
            self._synchronise()
            seconds.append(time.perf_counter() - started)
        return statistics.median(seconds[1:])

    def _cache(self, batch_size: int, context: int) -> DynamicCache:
        cache = DynamicCache()
        for layer, (k, v) in enumerate(self._entries):
            cache.update(
                *(torch.randn(batch_size, x.shape[1], context, x.shape[3]).to(x) for x in (k, v)),
                layer,
            )
        return cache

    def _ids(self, rows: int, columns: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(self._draft.config.vocab_size, (rows, columns), generator=generator)
        return ids.to(self._device)

    def _seconds(self, work: Callable[[], None]) -> float:
        work()
        seconds = []
        for _ in range(_REPEATS):
            self._synchronise()
            started = time.perf_counter()
            work()
            self._synchronise()
            seconds.append(time.perf_counter() - started)
        return statistics.median(seconds)

    def _synchronise(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
