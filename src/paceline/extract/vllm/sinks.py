"""Sinks of a tap besides the store's own: a spool for pipeline stages, a digest of each rank."""

from collections.abc import Iterator
from pathlib import Path
from threading import Lock

import torch
from safetensors.torch import load_file, save_file

from paceline.contracts import LayerPlan, TokenSample
from paceline.errors import EngineError
from paceline.extract.guards import RowNorms
from paceline.extract.sink import Sink

# Ranks of one tensor-parallel group end each layer with the same all-reduced sum; what differs is
# rounding at most.
_RANK_TOLERANCE = 1e-3


class SpoolSink:
    """A pipeline stage's rows, handed to the driver as files: one file for all samples between two
    questions of the driver, so that neither memory nor the number of files grows."""

    def __init__(self, folder: Path, stage: int) -> None:
        self._folder = folder
        self.stage = stage
        self._number = 0
        self._held: dict[str, torch.Tensor] = {}
        self._lock = Lock()

    def add(
        self, sample: TokenSample, aux: torch.Tensor, last: torch.Tensor, norms: RowNorms
    ) -> None:
        with self._lock:
            self._held[f"aux/{sample.sample_id}"] = aux.clone()
            if len(last):
                self._held[f"last/{sample.sample_id}"] = last.clone()

    def hand_over(self) -> str | None:
        """Write what came since the last call; the file's path, None where nothing came."""
        with self._lock:
            held, self._held = self._held, {}
        if not held:
            return None
        path = self._folder / f"stage{self.stage}-{self._number:06d}.safetensors"
        self._number += 1
        save_file({name: tensor.contiguous() for name, tensor in held.items()}, path)
        return str(path)


class StageMerger:
    """Joins what the pipeline stages spooled, sample by sample.

    layers: by the stage's number the indices k that it holds; a stage without any has no entry.
    """

    def __init__(self, plan: LayerPlan, layers: dict[int, list[int]]) -> None:
        self._plan = plan
        self._layers = layers
        self._parts: dict[str, dict[int, torch.Tensor]] = {}
        self._last: dict[str, torch.Tensor] = {}
        held = sorted(k for stage in layers.values() for k in stage)
        if held != sorted(plan.all):
            raise EngineError(
                f"the pipeline stages hold layers {layers}; asked for {list(plan.all)}"
            )

    def take(self, stage: int, path: str) -> None:
        """Read one spool file and remove it."""
        for name, tensor in load_file(path).items():
            kind, _, sample_id = name.partition("/")
            if kind == "aux":
                self._parts.setdefault(sample_id, {})[stage] = tensor
            else:
                self._last[sample_id] = tensor
        Path(path).unlink()

    def complete(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """Sample id, aux [R, A, D], last [M, D] of every sample that all stages have given."""
        ready = [
            sample_id
            for sample_id, parts in self._parts.items()
            if len(parts) == len(self._layers) and sample_id in self._last
        ]
        for sample_id in ready:
            parts = self._parts.pop(sample_id)
            columns = {}
            for stage, held in self._layers.items():
                aux = [k for k in held if k in self._plan.aux]
                columns.update({k: parts[stage][:, i] for i, k in enumerate(aux)})
            yield (
                sample_id,
                torch.stack([columns[k] for k in self._plan.aux], 1),
                self._last.pop(sample_id),
            )

    def drop(self, sample_id: str) -> None:
        """Forget a sample that will be run again."""
        self._parts.pop(sample_id, None)
        self._last.pop(sample_id, None)


class DigestSink:
    """Norms of each sample's states per layer, to compare the ranks of a tensor-parallel group."""

    def __init__(self) -> None:
        self.digests: dict[str, list[float]] = {}

    def add(
        self, sample: TokenSample, aux: torch.Tensor, last: torch.Tensor, norms: RowNorms
    ) -> None:
        by_layer = [*norms.aux.unbind(1), norms.last]
        self.digests[sample.sample_id] = [float(n.double().norm()) for n in by_layer]


class BothSinks:
    """Store and digest: what the writing rank does while ranks are compared."""

    def __init__(self, first: Sink | SpoolSink, digest: DigestSink) -> None:
        self._first = first
        self._digest = digest

    def add(
        self, sample: TokenSample, aux: torch.Tensor, last: torch.Tensor, norms: RowNorms
    ) -> None:
        self._digest.add(sample, aux, last, norms)
        self._first.add(sample, aux, last, norms)


def compare_digests(by_rank: list[dict[str, list[float]]]) -> None:
    """All ranks saw the same states, within rounding; else EngineError that names the rank."""
    reference = by_rank[0]
    for rank, digests in enumerate(by_rank[1:], 1):
        if digests.keys() != reference.keys():
            raise EngineError(
                f"tensor-parallel rank {rank} captured {len(digests)} samples, rank 0 "
                f"{len(reference)}: the ranks do not run the same rows"
            )
        for sample_id, norms in digests.items():
            for i, (found, expected) in enumerate(zip(norms, reference[sample_id], strict=True)):
                if abs(found - expected) > _RANK_TOLERANCE * abs(expected):
                    raise EngineError(
                        f"tensor-parallel rank {rank} has other states than rank 0 (sample "
                        f"{sample_id}, captured layer number {i}: norm {found:.6g}, not "
                        f"{expected:.6g}): rank 0's rows are not the whole stream"
                    )
