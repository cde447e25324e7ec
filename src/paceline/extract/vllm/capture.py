"""One capture through one vLLM engine, seen from the driver: requests in, events out.

Every sample ends done or rejected. What was poisoned in a worker is run once more, alone; what
fails twice is rejected with its reason.
"""

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

from paceline.contracts import LayerPlan, TokenSample
from paceline.errors import EngineError
from paceline.extract.engine import num_needed_tokens
from paceline.extract.sink import Destination, Sink
from paceline.extract.vllm import wire
from paceline.extract.vllm.batch import request_id
from paceline.extract.vllm.sinks import StageMerger, compare_digests
from paceline.extract.vllm.wire import Message

logger = logging.getLogger(__name__)

# Steps' worth of prompt tokens kept inside vLLM: one that runs, one that is scheduled meanwhile,
# and what requests in the middle of their prompt have behind them. More would only leave one of
# several engines with work when the others have none.
_WINDOW_STEPS = 3
_EVENTS_EVERY = 8
_SUBMIT_SAMPLES = 64
_WAIT_WORTH_TELLING_S = 1.0


class Requests(Protocol):
    """What a capture needs of an engine (see `engine.VllmEngine`)."""

    settings: Message
    all_settings: list[Message]

    def add(self, request: str, prompt: list[int]) -> None: ...

    def step(self) -> list[str]: ...

    def busy(self) -> bool: ...

    def abort_all(self) -> None: ...

    def call(self, method: str, *args: Any) -> list[Message]: ...

    def next_number(self) -> int: ...


@dataclass(frozen=True)
class CaptureSetup:
    """writers: the numbers of the shard writers. spool: a folder for pipeline stages' rows."""

    plan: LayerPlan
    destination: Destination
    num_layers: int
    num_slots: int
    writers: list[int]
    spool: str
    compare_ranks: bool

    def message(self, max_num_batched_tokens: int) -> Message:
        spec = self.destination.spec
        return {
            "plan": wire.plan_message(self.plan),
            "destination": wire.destination_message(self.destination),
            "num_layers": self.num_layers,
            "hidden_size": spec.hidden_size,
            "dtype": spec.dtype,
            "num_slots": self.num_slots,
            "writers": self.writers,
            "spool": self.spool,
            "compare_ranks": self.compare_ranks,
            "max_num_batched_tokens": max_num_batched_tokens,
        }


class Capture:
    """Use once: `run`."""

    def __init__(
        self, engine: Requests, setup: CaptureSetup, on_tokens: Callable[[int], None]
    ) -> None:
        self._engine = engine
        self._setup = setup
        self._on_tokens = on_tokens
        self._step_tokens = engine.settings["max_num_batched_tokens"]
        self._open: dict[int, TokenSample] = {}  # submitted, neither done nor poisoned
        self._running: dict[str, int] = {}  # request id -> tokens, inside vLLM
        self._poisoned: list[tuple[TokenSample, str]] = []
        self._stack = ExitStack()
        self._merger: StageMerger | None = None
        self._sink: Sink | None = None

    def run(self, samples: Iterable[TokenSample]) -> None:
        """Every sample is stored or rejected; raises what failed in a worker, with its cause."""
        with self._stack:
            try:
                self._open_tap()
                self._stream(iter(samples))
                self._retry()
            except BaseException:
                self._give_up()
                raise
            self._close_tap()

    def _open_tap(self) -> None:
        answers = self._call("paceline_open", self._setup.message(self._step_tokens))
        if self._engine.settings["pipeline_parallel"] > 1:
            held = {a["stage"]: a["held"] for a in answers if a["held"]}
            self._merger = StageMerger(self._setup.plan, held)
            writer = self._setup.writers[0]
            self._sink = self._stack.enter_context(self._setup.destination.open(writer))

    def _stream(self, source: Iterator[TokenSample]) -> None:
        exhausted = False
        for steps in itertools.count(1):
            if not exhausted:
                exhausted = self._refill(source)
            if not self._engine.busy():
                if exhausted:
                    break
                continue
            self._advance()
            if steps % _EVENTS_EVERY == 0:
                self._take_events(flush=False)
        self._take_events(flush=True)
        self._poison_lost()

    def _refill(self, source: Iterator[TokenSample]) -> bool:
        """Submit until the window is full; True when the source has no more."""
        while (room := _WINDOW_STEPS * self._step_tokens - self._waiting()) > 0:
            batch: list[TokenSample] = []
            while room > 0 and len(batch) < _SUBMIT_SAMPLES:
                sample = next(source, None)
                if sample is None:
                    self._submit(batch)
                    return True
                batch.append(sample)
                room -= num_needed_tokens(sample)
            self._submit(batch)
        return False

    def _waiting(self) -> int:
        return sum(self._running.values())

    def _submit(self, samples: list[TokenSample]) -> None:
        longest = self._engine.settings["max_model_len"] - 1
        fitting = [s for s in samples if num_needed_tokens(s) <= longest]
        for sample in samples:
            if num_needed_tokens(sample) > longest:
                self._reject(sample, f"needs more than the engine's {longest} positions")
        numbered = {self._engine.next_number(): sample for sample in fitting}
        if not numbered:
            return
        self._call("paceline_expect", [wire.sample_message(n, s) for n, s in numbered.items()])
        self._open.update(numbered)
        for number, sample in numbered.items():
            needed = num_needed_tokens(sample)
            self._engine.add(request_id(number), sample.input_ids[:needed].tolist())
            self._running[request_id(number)] = needed

    def _advance(self) -> None:
        for finished in self._engine.step():
            self._running.pop(finished, None)

    def _take_events(self, flush: bool) -> None:
        answers = self._call("paceline_events", flush)
        for answer in answers:
            for number, reason in answer.get("poisoned", ()):
                self._poison(number, reason)
            if self._merger is None:
                self._done(answer.get("done", ()))
        if self._merger is not None:
            self._merge(answers)

    def _merge(self, answers: list[Message]) -> None:
        for answer in answers:
            if spool := answer.get("spool"):
                self._merger.take(spool["stage"], spool["path"])
        numbers = {sample.sample_id: number for number, sample in self._open.items()}
        for sample_id, aux, last in self._merger.complete():
            if sample_id in numbers:
                self._sink.add(self._open[numbers[sample_id]], aux, last)
                self._done([numbers[sample_id]])

    def _done(self, numbers: Iterable[int]) -> None:
        done = [self._open.pop(number) for number in numbers if number in self._open]
        if done:
            self._on_tokens(sum(map(num_needed_tokens, done)))

    def _poison(self, number: int, reason: str) -> None:
        # Several pipeline stages may tell of the same sample.
        if (sample := self._open.pop(number, None)) is not None:
            logger.warning("sample %s will be run again alone: %s", sample.sample_id, reason)
            self._poisoned.append((sample, reason))
            if self._merger is not None:
                self._merger.drop(sample.sample_id)

    def _poison_lost(self) -> None:
        """What vLLM finished and the tap did not: rows that no hook saw."""
        for number in list(self._open):
            self._poison(number, "vLLM finished the request, but not all of its rows were seen")

    def _retry(self) -> None:
        again, self._poisoned = self._poisoned, []
        for sample, first_reason in again:
            self._submit([sample])
            while self._engine.busy():
                self._advance()
            self._take_events(flush=True)
            self._poison_lost()
            for failed, reason in self._poisoned:
                self._reject(failed, f"{reason} (run alone; before: {first_reason})")
            self._poisoned.clear()

    def _reject(self, sample: TokenSample, reason: str) -> None:
        if self._sink is not None:
            self._sink.reject(sample, reason)
        else:
            self._call("paceline_reject", wire.sample_message(0, sample), reason)
        self._on_tokens(num_needed_tokens(sample))

    def _close_tap(self) -> None:
        answers = self._call("paceline_close", True)
        waited = max(answer.get("waited_s", 0.0) for answer in answers)
        if waited > _WAIT_WORTH_TELLING_S:
            logger.info("the engine stood still for %.1f s until its rows were written", waited)
        if self._setup.compare_ranks:
            self._compare(answers)

    def _compare(self, answers: list[Message]) -> None:
        stages: dict[int, list[dict]] = {}
        for settings, answer in zip(self._engine.all_settings, answers, strict=True):
            stages.setdefault(settings["stage"], []).append(answer.get("digests", {}))
        for digests in stages.values():
            compare_digests(digests)

    def _give_up(self) -> None:
        """Leave the engine usable after an error: nothing runs, no hook is left. Complete samples
        are published all the same."""
        try:
            self._engine.abort_all()
            self._engine.call("paceline_close", True)
        except Exception as error:  # the first error is what must be told; the engine may be dead
            logger.warning("after the error below, vLLM could not be cleaned up: %r", error)

    def _call(self, method: str, *args: Any) -> list[Message]:
        answers = self._engine.call(method, *args)
        for answer in answers:
            if "error" in answer:
                wire.raise_error(answer["error"])
        return answers


def slot_count(host_memory_bytes: int, slot_bytes: int) -> int:
    """Slots of the ring: two at least (one fills while one empties), four at most."""
    if 2 * slot_bytes > host_memory_bytes:
        raise EngineError(
            f"two steps' rows need {2 * slot_bytes / 2**30:.1f} GiB of host memory, "
            f"{host_memory_bytes / 2**30:.1f} GiB are allowed: lower `max_batch_tokens`"
        )
    return min(4, host_memory_bytes // slot_bytes)
