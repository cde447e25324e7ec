"""The tap of one worker: hooks around a step, then rows to host memory, proof, and the sinks.

Whatever fails in here stays in here: an error that left a hook would kill vLLM's engine, or leave
it with wrong keys and values. It is recorded, the step's samples are poisoned, and the driver
raises it when it next asks.
"""

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from paceline.contracts import LayerPlan, TokenSample
from paceline.errors import CaptureMismatch
from paceline.extract.guards import RowNorms
from paceline.extract.vllm.assemble import Assembler, Complete
from paceline.extract.vllm.batch import Segment, check_batch, sample_number, segments_of
from paceline.extract.vllm.layers import LayerHooks
from paceline.extract.vllm.rows import HostRows, Mover, Pick, Ring, Slot, pick_rows
from paceline.extract.vllm.runners import RunnerView

logger = logging.getLogger(__name__)


class SampleSink(Protocol):
    """Where a complete sample goes: aux [R, A, D], last [M, D] (M = 0 on a pipeline stage without
    the last layer), and the norms of their rows."""

    def add(
        self, sample: TokenSample, aux: torch.Tensor, last: torch.Tensor, norms: RowNorms
    ) -> None: ...


@dataclass
class Events:
    """What happened since the driver last asked. Each number is told of exactly once."""

    done: list[int] = field(default_factory=list)
    poisoned: list[tuple[int, str]] = field(default_factory=list)


@dataclass
class _Step:
    """A step while it runs: streams by k, and the first thing that went wrong."""

    streams: dict[int, torch.Tensor] = field(default_factory=dict)
    tokens: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    fault: Exception | None = None


@dataclass(frozen=True)
class _Captured:
    """A step whose rows are on their way."""

    segments: list[Segment]
    pick: Pick
    rows: HostRows
    samples: dict[int, TokenSample]


@dataclass(frozen=True)
class _Forget:
    numbers: list[int]


class Tap:
    """Captures samples that `expect` names; `runner.execute_model` is shadowed until `close`."""

    def __init__(
        self,
        runner: Any,
        view: RunnerView,
        layers: nn.ModuleList,
        plan: LayerPlan,
        ring: Ring,
        sinks: Sequence[SampleSink],
    ) -> None:
        self._runner = runner
        self._view = view
        self._samples: dict[int, TokenSample] = {}
        self._step: _Step | None = None
        self._events = Events()
        self._lock = threading.Lock()
        self.error: Exception | None = None
        self._mover = Mover(torch.device(runner.device), ring)
        self._ring, self._waited_before = ring, ring.waited_s
        self._hooks = LayerHooks(layers, plan.all, self._on_stream)
        self.held = tuple(self._hooks.held)
        self._aux = [k for k in plan.aux if k in self.held]
        self._last = plan.last if plan.last in self.held else None
        self._input_hook = runner.get_model().register_forward_pre_hook(
            self._on_inputs, with_kwargs=True
        )
        self._execute = runner.execute_model
        runner.execute_model = self._execute_model
        self._captured: queue.Queue[_Captured | _Forget | None] = queue.Queue()
        self._complete: queue.Queue[tuple[Complete, Slot] | None] = queue.Queue()
        self._threads = [threading.Thread(target=self._harvest, name="tap-harvest", daemon=True)]
        for sink in sinks:
            self._threads.append(
                threading.Thread(target=self._write, args=(sink,), name="tap-write", daemon=True)
            )
        for thread in self._threads:
            thread.start()

    # --- what the driver asks, on the worker's main thread ---

    def expect(self, samples: dict[int, TokenSample]) -> None:
        """Capture these when their requests run."""
        self._samples.update(samples)

    def take_events(self) -> Events:
        with self._lock:
            events, self._events = self._events, Events()
        return events

    @property
    def waited_s(self) -> float:
        """Seconds that the engine waited for the writers in this capture."""
        return self._ring.waited_s - self._waited_before

    def flush(self) -> None:
        """Return when every step captured so far is with the sinks."""
        self._captured.join()
        self._complete.join()

    def close(self) -> None:
        """Leave the runner as it was found; the sinks are the caller's to close."""
        self._hooks.remove()
        self._input_hook.remove()
        del self._runner.execute_model
        self.flush()
        self._captured.put(None)
        for _ in self._threads[1:]:
            self._complete.put(None)
        for thread in self._threads:
            thread.join()

    # --- around and inside a step, on the worker's main thread ---

    def _execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        self._safely(self._begin, scheduler_output)
        try:
            output = self._execute(scheduler_output, *args, **kwargs)
        except BaseException as error:
            if self._step is not None:
                self._poison(scheduler_output, f"the engine's step failed: {error!r}")
                self._step = None
            raise
        self._safely(self._finish, scheduler_output)
        self._step = None
        return output

    def _begin(self, scheduler_output: Any) -> None:
        self._step = None
        if self.error is None and self._numbers(scheduler_output):
            self._step = _Step()

    def _on_inputs(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        step = self._step
        if step is not None:
            self._within(step, lambda: self._note_inputs(step, args, kwargs))

    def _note_inputs(self, step: _Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tokens = kwargs.get("input_ids", args[0] if args else None)
        positions = kwargs.get("positions", args[1] if len(args) > 1 else None)
        # The runner writes its next step into the same memory, so what was fed is kept by copy.
        step.tokens = None if tokens is None else tokens.clone()
        if positions is not None:
            # Rotary positions of several axes are alike for text.
            step.positions = (positions if positions.ndim == 1 else positions[0]).clone()

    def _on_stream(self, k: int, read: Callable[[], torch.Tensor]) -> None:
        step = self._step
        if step is not None:
            self._within(step, lambda: self._note_stream(step, k, read))

    def _note_stream(self, step: _Step, k: int, read: Callable[[], torch.Tensor]) -> None:
        if k in step.streams:
            raise CaptureMismatch(
                f"layer k = {k} ran twice in one step (micro-batches of vLLM cannot be captured)"
            )
        step.streams[k] = read()

    def _finish(self, scheduler_output: Any) -> None:
        step = self._step
        if step is None:
            return
        try:
            if step.fault is not None:
                raise step.fault
            self._launch(step, scheduler_output)
        except CaptureMismatch as mismatch:
            self._poison(scheduler_output, str(mismatch))
        except Exception:
            self._poison(scheduler_output, "the tap failed in this sample's step")
            raise

    def _launch(self, step: _Step, scheduler_output: Any) -> None:
        batch = self._view.describe(self._runner, scheduler_output)
        check_batch(batch, scheduler_output.num_scheduled_tokens)
        self._check_streams(step, batch.num_rows)
        known = {n: self._samples.get(n) for n in self._numbers(scheduler_output)}
        samples = {number: sample for number, sample in known.items() if sample is not None}
        segments = segments_of(batch, samples)
        if not segments:
            return
        pick = pick_rows(segments, samples, self._last is not None)
        aux = [step.streams[k] for k in self._aux]
        last = None if self._last is None else step.streams[self._last]
        fed = self._fed(step, batch.num_rows)
        rows = self._mover.move(pick, aux, last, fed, lambda: self.error is not None)
        self._captured.put(_Captured(segments, pick, rows, samples))

    def _fed(self, step: _Step, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and positions [N] of the step; from the runner where the model got embeddings or
        another stage's states instead."""
        tokens, positions = step.tokens, step.positions
        if tokens is None:
            tokens = self._view.fed_tokens(self._runner, num_rows).clone()
        if positions is None:
            positions = self._view.fed_positions(self._runner, num_rows).clone()
        return tokens[:num_rows], positions[:num_rows]

    def _check_streams(self, step: _Step, num_rows: int) -> None:
        missing = [k for k in self.held if k not in step.streams]
        if missing:
            raise CaptureMismatch(
                f"layers k = {missing} did not run their hooks in this step (eager mode off?)"
            )
        for k, states in step.streams.items():
            if states.ndim != 2 or len(states) < num_rows:
                raise CaptureMismatch(
                    f"layer k = {k} gave {list(states.shape)} for {num_rows} rows: its rows are "
                    "spread over ranks (sequence-parallel experts?), which is not captured"
                )

    # --- on threads of our own ---

    def _harvest(self) -> None:
        _work_alone()
        assembler = Assembler(has_last=self._last is not None)
        while (item := self._captured.get()) is not None:
            self._safely(self._harvest_one, assembler, item)
            self._captured.task_done()
        self._captured.task_done()

    def _harvest_one(self, assembler: Assembler, item: _Captured | _Forget) -> None:
        if isinstance(item, _Forget):
            for number in item.numbers:
                assembler.drop(number)
            return
        try:
            item.rows.wait()
            if self.error is not None:
                return
            for complete in assembler.take(
                item.segments, item.pick, item.rows, item.samples, self._samples.__contains__
            ):
                # Rows that were joined lie in memory of their own, and hold the slot all the same:
                # nothing else bounds how many of them wait for the disk.
                item.rows.slot.hold()
                self._complete.put((complete, item.rows.slot))
        except CaptureMismatch as mismatch:
            for segment in item.segments:
                assembler.drop(segment.number)
                self._tell_poisoned(segment.number, str(mismatch))
        finally:
            item.rows.slot.release()

    def _write(self, sink: SampleSink) -> None:
        _work_alone()
        while (item := self._complete.get()) is not None:
            self._safely(self._write_one, sink, *item)
            self._complete.task_done()
        self._complete.task_done()

    def _write_one(self, sink: SampleSink, complete: Complete, slot: Slot) -> None:
        try:
            if self.error is None and self._samples.pop(complete.number, None) is not None:
                sink.add(
                    complete.sample, complete.rows.aux, complete.rows.last, complete.rows.norms
                )
                with self._lock:
                    self._events.done.append(complete.number)
        finally:
            slot.release()

    # --- what went wrong ---

    def _within(self, step: _Step, action: Callable[[], None]) -> None:
        """Run a hook's work; its error waits in the step until the step is over."""
        if step.fault is None:
            try:
                action()
            except Exception as error:
                step.fault = error

    def _safely(self, action: Callable[..., None], *args: Any) -> None:
        """Run a part of the tap; its error is kept for the driver, never raised in the worker."""
        try:
            action(*args)
        except Exception as error:
            logger.exception("the tap failed; the driver will raise this")
            if self.error is None:
                self.error = error

    def _numbers(self, scheduler_output: Any) -> list[int]:
        found = map(sample_number, scheduler_output.num_scheduled_tokens)
        return [number for number in found if number is not None and number in self._samples]

    def _poison(self, scheduler_output: Any, reason: str) -> None:
        numbers = self._numbers(scheduler_output)
        self._captured.put(_Forget(numbers))
        for number in numbers:
            self._tell_poisoned(number, reason)

    def _tell_poisoned(self, number: int, reason: str) -> None:
        # Whoever takes the sample out tells of it: it cannot also become done.
        if self._samples.pop(number, None) is not None:
            with self._lock:
                self._events.poisoned.append((number, reason))


def _work_alone() -> None:
    """Let this thread's copies use no further threads: torch would give each of ours a team as
    large as the machine, whose members spin beside the engine's own thread."""
    torch.set_num_threads(1)
