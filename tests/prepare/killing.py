"""Runs a stage in a process of its own and kills it in the middle, again and again.

A fork server imports everything once, so that a process starts in no time; nothing runs in the
server itself, so forking it is safe.
"""

import importlib
import multiprocessing
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import paceline
import paceline.prepare.answering
import paceline.prepare.generate
import paceline.prepare.run

_POLL_S = 0.002


def _run(verb: str, options: dict[str, Any], part_rows: int) -> None:
    for module in ("paceline.prepare.run", "paceline.prepare.answering"):
        importlib.import_module(module).PART_ROWS = part_rows
    getattr(paceline, verb)(**options)


class Killer:
    """`progress`: a number that grows while the stage works (parts and lines that are there)."""

    def __init__(self, verb: str, part_rows: int, progress: Callable[[Path], int]) -> None:
        self.verb = verb
        self.part_rows = part_rows
        self.progress = progress
        self.kills = 0
        self._random = random.Random(0)
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([__name__])

    def run_once(self, options: dict[str, Any], most_steps: int) -> bool:
        """Start the stage and kill it after some steps of progress; True if it ended before."""
        out = Path(options["out"])
        process = self._context.Process(target=_run, args=(self.verb, options, self.part_rows))
        process.start()
        goal = self.progress(out) + self._random.randint(0, most_steps)
        while process.is_alive() and self.progress(out) < goal:
            process.join(_POLL_S)
        process.join(self._random.uniform(0, 20 * _POLL_S))
        if not process.is_alive():
            assert process.exitcode == 0
            return True
        process.kill()
        process.join()
        self.kills += 1
        return False
