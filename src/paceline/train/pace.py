"""What the steps between two records of the log took and did."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_COUNTED = ("rows", "tokens", "needed_flops", "wait_s")


class Pace:
    """Adds up steps of this rank. A GPU works behind the host, which cannot time one step without
    making both wait; the time of all steps until the host has read from the device is theirs."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self._steps, self._began = 0, time.perf_counter()
        self._sums = dict.fromkeys(_COUNTED, 0)

    def add(self, record: dict[str, Any]) -> None:
        self._steps += 1
        for name in _COUNTED:
            self._sums[name] += record[name]

    def means(self) -> dict[str, float]:
        """Of a step: supervised rows, rows with states, floating-point operations, seconds in which
        it waited for data."""
        return {name: total / self._steps for name, total in self._sums.items()}

    def seconds(self) -> float:
        """Of a step, on average, now."""
        return (time.perf_counter() - self._began) / self._steps

    @contextmanager
    def aside(self) -> Iterator[None]:
        """For work that belongs to no step."""
        began = time.perf_counter()
        yield
        self._began += time.perf_counter() - began
