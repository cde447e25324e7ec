"""Reads what optimiser steps need, ahead of them and one micro-batch at a time."""

import time
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import chain, islice
from queue import SimpleQueue

import torch

from paceline.draft.batch import PackedBatch, from_packed
from paceline.store import Follower, PackedReader, PackedSamples, Store
from paceline.train.batches import Step


@dataclass
class ReadStep:
    """A step and its micro-batches, which are to be taken one after the other, each valid until the
    next is. began: when the first was asked for, of the performance counter; wait_s: how long the
    taking has waited for data so far."""

    step: Step
    packed: Iterator[PackedSamples]
    began: float
    wait_s: float = 0.0

    def batches(self) -> Iterator[tuple[PackedBatch, bool]]:
        """Each with whether it is the last one."""
        asked, left = self.began, len(self.step.groups)
        while (packed := next(self.packed, None)) is not None:
            self.wait_s += time.perf_counter() - asked
            left -= 1
            yield from_packed(packed), not left
            asked = time.perf_counter()


def read_steps(
    store: Store | Follower, steps: Iterable[Step], device: torch.device
) -> Iterator[ReadStep]:
    """The steps with their data, states on `device`. A step's batches must be taken before the
    next step is."""
    planned: SimpleQueue[Step] = SimpleQueue()

    def groups() -> Iterator[list[int]]:
        for step in steps:
            planned.put(step)
            yield from step.groups or [[]]

    packed = PackedReader(store, groups(), device=device, on_close=store.stop)
    with closing(iter(packed)) as reader:
        while True:
            began = time.perf_counter()
            first = next(reader, None)
            if first is None:
                return
            step = planned.get()
            rest = islice(reader, max(len(step.groups) - 1, 0))
            yield ReadStep(step, chain([first], rest), began)
