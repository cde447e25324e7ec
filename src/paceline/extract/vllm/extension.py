"""The worker extension: what vLLM mixes into its workers (`worker_extension_cls`).

Runs inside the worker process. Every method answers with plain values; an error is an answer too.
"""

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.device import dtype_name
from paceline.errors import EngineError
from paceline.extract.sink import Sink
from paceline.extract.vllm import wire
from paceline.extract.vllm.layers import find_decoder_layers, held_here
from paceline.extract.vllm.rows import Ring
from paceline.extract.vllm.runners import view_of
from paceline.extract.vllm.sinks import BothSinks, DigestSink, SpoolSink
from paceline.extract.vllm.tap import Tap
from paceline.extract.vllm.wire import Message
from paceline.vllm_orphans import Extension


def _answering(method: Callable[..., Message]) -> Callable[..., Message]:
    """Give errors back as values: an exception in an RPC loses its type, or kills an engine."""

    @functools.wraps(method)
    def answer(self: Any, *args: Any) -> Message:
        try:
            return method(self, *args)
        except Exception as error:
            return {"error": wire.error_message(error)}

    return answer


class Ranks:
    """Where this worker stands among the others."""

    def __init__(self) -> None:
        from vllm.distributed import get_pp_group, get_tp_group

        self.tensor, self.stage = get_tp_group().rank_in_group, get_pp_group().rank_in_group
        self.num_tensor, self.num_stages = get_tp_group().world_size, get_pp_group().world_size


class PacelineTap(Extension):
    """Methods that the driver calls by name on every worker."""

    @_answering
    def paceline_settings(self: Any) -> Message:
        """The effective settings, as this worker runs them."""
        config, ranks = self.vllm_config, Ranks()
        scheduler = config.scheduler_config
        return {
            "runner": view_of(self.model_runner).name,
            "enforce_eager": bool(config.model_config.enforce_eager),
            "prefix_caching": bool(config.cache_config.enable_prefix_caching),
            "speculative": config.speculative_config is not None,
            "chunked_prefill": bool(scheduler.enable_chunked_prefill),
            "async_scheduling": bool(scheduler.async_scheduling),
            "max_num_batched_tokens": int(scheduler.max_num_batched_tokens),
            "max_num_seqs": int(scheduler.max_num_seqs),
            "max_model_len": int(config.model_config.max_model_len),
            "dtype": dtype_name(config.model_config.dtype),
            "architecture": type(self.model_runner.get_model()).__name__,
            "device": str(self.model_runner.device),
            "tensor_parallel": ranks.num_tensor,
            "pipeline_parallel": ranks.num_stages,
            "tensor_rank": ranks.tensor,
            "stage": ranks.stage,
            "kv_blocks": int(config.cache_config.num_gpu_blocks or 0),
        }

    @_answering
    def paceline_open(self: Any, setup: Message) -> Message:
        """Install the tap where there is something to capture; answers with the streams k that
        this worker holds and writes."""
        ranks = Ranks()
        nothing = {"stage": ranks.stage, "held": []}
        if ranks.tensor != 0 and not setup["compare_ranks"]:
            return nothing
        layers = find_decoder_layers(self.model_runner.get_model(), setup["num_layers"])
        if not held_here(layers, wire.read_plan(setup["plan"]).all):
            return nothing  # none of the wanted layers is on this pipeline stage
        # Pinning memory takes a second per GiB, so the ring stays for the next capture.
        ring = _ring_for(self.__dict__.get("paceline_ring"), self.model_runner, setup)
        self.paceline_ring = ring
        self.paceline_session = _Session(self.model_runner, layers, setup, ranks, ring)
        return {"stage": ranks.stage, "held": list(self.paceline_session.tap.held)}

    @_answering
    def paceline_expect(self: Any, samples: list[Message]) -> Message:
        if session := self.__dict__.get("paceline_session"):
            session.tap.expect(dict(map(wire.read_sample, samples)))
        return {}

    @_answering
    def paceline_events(self: Any, flush: bool) -> Message:
        """What was done and poisoned since the last call; with `flush`, after all is written."""
        session = self.__dict__.get("paceline_session")
        return session.events(flush) if session else {}

    @_answering
    def paceline_reject(self: Any, sample: Message, reason: str) -> Message:
        session = self.__dict__.get("paceline_session")
        if session and session.store_sinks:
            session.store_sinks[0].reject(wire.read_sample(sample)[1], reason)
        return {}

    @_answering
    def paceline_close(self: Any, publish: bool) -> Message:
        """Remove the tap; publish the last shard, or discard it."""
        session = self.__dict__.pop("paceline_session", None)
        return session.close(publish) if session else {}

    @_answering
    def paceline_settle(self: Any) -> Message:
        """Finish a step that somebody left between its two phases."""
        pending = self.model_runner.execute_model_state is not None
        if pending:
            self.sample_tokens(None)
        return {"pending": pending}


class _Session:
    """One capture in one worker: ring, tap and sinks."""

    def __init__(
        self, runner: Any, layers: nn.ModuleList, setup: Message, ranks: Ranks, ring: Ring
    ) -> None:
        self._stores: list[AbstractContextManager[Sink]] = []
        self.store_sinks: list[Sink] = []
        self.spool: SpoolSink | None = None
        self.digest = DigestSink() if setup["compare_ranks"] else None
        # Ranks that only compare must not tell that a sample is done: nothing of it is stored.
        self.writes = ranks.tensor == 0
        sinks = self._open_sinks(setup, ranks)
        plan = wire.read_plan(setup["plan"])
        self.tap = Tap(runner, view_of(runner), layers, plan, ring, sinks)

    def events(self, flush: bool) -> Message:
        if flush:
            self.tap.flush()
        events = self.tap.take_events()
        answer: Message = {"poisoned": [list(p) for p in events.poisoned]}
        if self.writes:
            answer["done"] = events.done
        if self.spool and (path := self.spool.hand_over()):
            answer["spool"] = {"stage": self.spool.stage, "path": path}
        if self.tap.error is not None:
            answer["error"] = wire.error_message(self.tap.error)
        return answer

    def close(self, publish: bool) -> Message:
        self.tap.close()
        answer = self.events(flush=False)
        answer["waited_s"] = self.tap.waited_s
        if self.digest is not None:
            answer["digests"] = self.digest.digests
        self._close_stores(None if publish else EngineError("the capture was given up"))
        return answer

    def _close_stores(self, error: Exception | None) -> None:
        """Publish, or for an error discard, the last shard of each: all at once, since each waits
        for the disk."""
        kind = None if error is None else type(error)
        with ThreadPoolExecutor(max(1, len(self._stores))) as pool:
            closing = [pool.submit(store.__exit__, kind, error, None) for store in self._stores]
        for closed in closing:
            closed.result()

    def _open_sinks(self, setup: Message, ranks: Ranks) -> list[Any]:
        if ranks.tensor != 0:
            return [self.digest]
        if ranks.num_stages > 1:
            self.spool = SpoolSink(Path(setup["spool"]), ranks.stage)
            return [BothSinks(self.spool, self.digest) if self.digest else self.spool]
        destination = wire.read_destination(setup["destination"])
        for writer in setup["writers"]:
            self._stores.append(destination.open(writer))
            self.store_sinks.append(self._stores[-1].__enter__())
        if self.digest is None:
            return list(self.store_sinks)
        return [BothSinks(sink, self.digest) for sink in self.store_sinks]


def _ring_for(ring: Ring | None, runner: Any, setup: Message) -> Ring:
    """The ring of an earlier capture where it fits, else a new one: room in a slot for a step
    whose every row is picked from every layer, its norms, tokens and positions."""
    num_layers = len(setup["plan"]["aux"]) + 1
    row_bytes = num_layers * (setup["hidden_size"] * getattr(torch, setup["dtype"]).itemsize + 4)
    slot_bytes = setup["max_num_batched_tokens"] * (row_bytes + 16) + (1 << 16)
    shape = (setup["num_slots"], slot_bytes, torch.device(runner.device).type == "cuda")
    if ring is not None and ring.shape == shape and ring.whole:
        return ring
    if ring is not None:
        ring.close()
    return Ring(*shape)
