"""Where captured samples go: through the guards into a shard, or into quarantine with a reason."""

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from paceline.artefact import disk_errors
from paceline.contracts import TokenSample
from paceline.extract.guards import Guards, RowNorms, row_norms
from paceline.store import ShardWriter, StoreSpec
from paceline.store.writer import spare_lanes

QUARANTINE_PATTERN = "quarantine-{worker}.jsonl"
FLAGS_PATTERN = "flags-{worker}.jsonl"


class Sink:
    """One worker's way into the store. Each sample is added or rejected once."""

    def __init__(self, destination: "Destination", writer: ShardWriter, worker: int) -> None:
        self._writer = writer
        self._guards = destination.guards
        self._done = destination.done
        self._quarantine = destination.folder / QUARANTINE_PATTERN.format(worker=worker)
        self._flags = destination.folder / FLAGS_PATTERN.format(worker=worker)

    def add(
        self,
        sample: TokenSample,
        aux: torch.Tensor,
        last: torch.Tensor,
        norms: RowNorms | None = None,
    ) -> None:
        """aux [>= num_aux_rows, A, D], last [M, D], on any device. A sample that fails a guard is
        rejected; one that an earlier run has done is left as it is.

        norms: of these rows, where the engine has computed them beside the states.
        """
        if sample.sample_id in self._done:
            return
        norms = norms or row_norms(aux[: sample.num_aux_rows], last).cpu()
        fault = self._guards.fault(sample, aux, last, norms)
        if fault:
            self.reject(sample, fault)
            return
        flags = self._guards.flags(sample, norms)
        if flags:
            append_line(self._flags, {"sample_id": sample.sample_id, "flags": flags})
        self._writer.add(sample, aux, last)

    def reject(self, sample: TokenSample, reason: str) -> None:
        """Quarantine a sample: it is never stored as good."""
        append_line(self._quarantine, {"sample_id": sample.sample_id, "reason": reason})


@dataclass(frozen=True)
class Destination:
    """A store in the making, as a value that can be sent to a worker process.

    done: ids of the samples that earlier runs stored; `capture` need not run them.
    """

    folder: Path
    spec: StoreSpec
    guards: Guards
    done: frozenset[str] = frozenset()

    def missing(self, samples: Iterable[TokenSample]) -> Iterator[TokenSample]:
        """The samples that are not done."""
        return (sample for sample in samples if sample.sample_id not in self.done)

    @contextmanager
    def open(self, worker: int = 0) -> Iterator[Sink]:
        """A sink of its own for each worker; its last shard is published on a clean exit."""
        with ShardWriter(self.folder, self.spec, worker, spare_lanes()) as writer:
            yield Sink(self, writer, worker)


def read_lines(folder: Path, pattern: str) -> list[dict[str, Any]]:
    """What all workers wrote to their quarantine or flag files; the last word on each sample."""
    entries: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob(pattern.format(worker="*"))):
        for line in path.read_bytes().split(b"\n"):
            try:
                entry = json.loads(line)
            except ValueError:
                # Cut off by a kill or a full disk: its sample is not published and runs again.
                continue
            entries[entry["sample_id"]] = entry
    return list(entries.values())


def append_line(path: Path, entry: dict[str, Any]) -> None:
    """One JSON object a line. Raises DiskFullError."""
    line = json.dumps(entry, ensure_ascii=False).encode() + b"\n"
    with disk_errors(path), path.open("a+b") as file:
        # A line that a full disk or a power cut left half must not spoil this one.
        if file.tell() and not _ends_a_line(file):
            line = b"\n" + line
        file.write(line)


def _ends_a_line(file: BinaryIO) -> bool:
    file.seek(-1, os.SEEK_END)
    return file.read(1) == b"\n"
