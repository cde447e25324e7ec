"""Captured states against a plain transformers forward of the target, row by row.

How far two right computations in half precision lie apart depends on the model: rounding grows with
depth, and some weights amplify it. States that lie beyond the usual bounds are therefore judged by
the model's own rounding: the same forward in the next wider dtype is the truth, the plain forward's
distance to it the unit. Legend: R rows with auxiliary states, M supervised rows, A layers, D width.
"""

import logging
import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from paceline.contracts import TokenSample
from paceline.device import free_host_bytes
from paceline.errors import ProbeFailure
from paceline.store import StoreSpec
from paceline.target.model import final_norm_of, load_model, num_parameters
from paceline.target.spec import Target

logger = logging.getLogger(__name__)

# Of free memory that the plain forward's weights may take, and the layers that it runs where they
# would take more.
_MEMORY_SHARE = 0.8
_FEW_LAYERS = 4


class Errors(NamedTuple):
    """Of many rows, each relative to the row's norm."""

    median: float
    p99: float
    max: float


# Bounds on |captured - reference| / |reference| of a row. float32 engines differ by at most 1.2e-4
# and bfloat16 ones by some percent; a row shifted by one position is off by at least 0.13.
_BOUNDS = {
    "float32": Errors(5e-5, 5e-4, 5e-4),
    "bfloat16": Errors(0.03, 0.08, math.inf),
    "float16": Errors(0.01, 0.03, math.inf),
}
# The same of |captured - truth| in units of the plain forward's own |reference - truth|, and what
# the median may never be, however much a model amplifies rounding.
_UNITS = Errors(4.0, 4.0, 10.0)
_LARGEST_MEDIAN = 0.1
_WIDER = {"float32": torch.float64, "bfloat16": torch.float32, "float16": torch.float32}
_BLAME = "The engine runs another target than the folder holds, or captures another layer."


class States(Protocol):
    """aux [R, A, D] and last [M, D] of a sample; `store.StoredSample` is one."""

    aux: torch.Tensor
    last: torch.Tensor


def choose_reference_layers(target: Target, dtype: str, wanted: int | None) -> int:
    """Decoder layers of the plain forward: `wanted`, else all of them where they fit into this
    machine's free memory, else the first few: a dense layer and, where it has them, MoE layers."""
    if wanted is not None:
        return min(wanted, target.num_layers)
    needed, free = num_parameters(target) * getattr(torch, dtype).itemsize, free_host_bytes()
    if _fits(needed, free):
        return target.num_layers
    few = min(_FEW_LAYERS, target.num_layers)
    logger.warning(
        "the target's %.0f GB of weights do not fit into the %.0f GB of free memory: the probe "
        "compares with a plain forward of its first %d layers",
        needed / 1e9,
        free / 1e9,
        few,
    )
    return few


@torch.inference_mode()
def compare_with_plain_forward(
    target: Target,
    spec: StoreSpec,
    samples: Sequence[TokenSample],
    captured: Sequence[States],
    blame: str = _BLAME,
    num_layers: int | None = None,
) -> dict[str, dict[str, float]]:
    """Every captured row against transformers' own forward, one sample at a time, no padding.

    num_layers: of the plain forward, None for all; layers beyond it are not compared. Returns the
    errors of each k. Raises ProbeFailure, which names the layer and ends with `blame`.
    """
    plain = _PlainForward(target, spec, num_layers or target.num_layers)
    given = [_by_layer(spec, states) for states in captured]
    reference = [plain.states(sample) for sample in samples]
    errors = {k: _errors(k, given, reference) for k in reference[0]}
    beyond = [k for k, found in errors.items() if not _within(found, _BOUNDS[spec.dtype])]
    if beyond and not plain.widen():
        raise ProbeFailure(f"{_differs(beyond[0], errors[beyond[0]], spec.dtype)}. {blame}")
    truth = [plain.states(sample) for sample in samples] if beyond else []
    for k in beyond:
        differs = _differs(k, errors[k], spec.dtype)
        _judge_by_rounding(differs, _errors(k, given, truth), _errors(k, reference, truth), blame)
    return {f"k={k}": found._asdict() for k, found in errors.items()}


def relative_error(rows: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """|row - reference| / |reference| per row, float32: [R, D] -> [R]. Relative to the row's norm:
    activations reach 2.7e4, so an absolute error says nothing."""
    wide = torch.promote_types(torch.float32, reference.dtype)
    reference = reference.to(wide)
    distance = (rows.to(wide) - reference).norm(dim=-1) / reference.norm(dim=-1)
    return distance.float()


class _PlainForward:
    """The target's first `depth` decoder layers on the CPU, in the dtype of the stored states."""

    def __init__(self, target: Target, spec: StoreSpec, depth: int) -> None:
        self._spec, self._depth = spec, depth
        self._whole = depth == target.num_layers
        dtype = getattr(torch, spec.dtype)
        self._model = load_model(target, dtype, "cpu", None if self._whole else depth)
        self._final_norm = final_norm_of(self._model, depth)
        self._final_norm.register_forward_pre_hook(self._keep_input)

    def _keep_input(self, _: torch.nn.Module, args: tuple) -> None:
        self._pre_norm = args[0]

    def states(self, sample: TokenSample) -> dict[int, torch.Tensor]:
        """By k: [R, D], and [M, D] of the last."""
        ids = torch.from_numpy(sample.input_ids.astype(np.int64))[None]
        hidden = self._model(ids, output_hidden_states=True, use_cache=False).hidden_states
        found = {}
        for k in self._spec.layers.aux:
            if k <= self._depth:
                plain = self._pre_norm if k == self._depth else hidden[k]
                found[k] = plain[0][: sample.num_aux_rows]
        if self._whole:
            is_normed = self._spec.last_is_normed
            last = self._final_norm(self._pre_norm) if is_normed else self._pre_norm
            found = _with_last(found, self._spec, last[0][torch.from_numpy(sample.loss_mask)])
        return found

    def widen(self) -> bool:
        """Compute in the next wider dtype from now on; False where memory does not allow it, or
        quantised weights have none."""
        wide = _WIDER[self._spec.dtype]
        needed = wide.itemsize * sum(weight.numel() for weight in self._model.parameters())
        is_quantised = getattr(self._model, "is_quantized", False)
        if is_quantised or not _fits(needed, free_host_bytes()):
            return False
        self._model.to(wide)
        return True


def _fits(num_bytes: int, free: int | None) -> bool:
    return free is None or num_bytes <= _MEMORY_SHARE * free


def _by_layer(spec: StoreSpec, states: States) -> dict[int, torch.Tensor]:
    found = {k: states.aux[:, i] for i, k in enumerate(spec.layers.aux)}
    return _with_last(found, spec, states.last)


def _with_last(found: dict[int, torch.Tensor], spec: StoreSpec, last: torch.Tensor) -> dict:
    """The last state may be among the auxiliary ones too: its rows come behind theirs."""
    k = spec.layers.last
    return found | {k: torch.cat([found[k], last]) if k in found else last}


def _errors(k: int, rows: Sequence[dict], reference: Sequence[dict]) -> Errors:
    """Of layer k over all samples."""
    found = torch.cat([relative_error(a[k], b[k]) for a, b in zip(rows, reference, strict=True)])
    return Errors(float(found.median()), float(found.quantile(0.99)), float(found.max()))


def _within(errors: Errors, bounds: Errors) -> bool:
    return all(error <= bound for error, bound in zip(errors, bounds, strict=True))


def _differs(k: int, errors: Errors, dtype: str) -> str:
    return (
        f"probe: layer k = {k} differs from a plain transformers forward: median, 99th percentile "
        f"and maximum of the error relative to the row's norm {_told(errors)}, usual in {dtype} "
        f"{_told(_BOUNDS[dtype])}"
    )


def _told(errors: Errors) -> str:
    return " / ".join("any" if math.isinf(error) else f"{error:.3g}" for error in errors)


def _judge_by_rounding(differs: str, off: Errors, rounding: Errors, blame: str) -> None:
    """off, rounding: distances of the captured rows and of the plain forward's to the truth."""
    bounds = Errors(*(factor * unit for factor, unit in zip(_UNITS, rounding, strict=True)))
    bounds = bounds._replace(median=min(bounds.median, _LARGEST_MEDIAN))
    if not _within(off, bounds):
        raise ProbeFailure(f"{differs}; rounding alone makes {_told(rounding)}. {blame}")
    logger.info("%s: as much as this model makes of rounding (%s)", differs, _told(rounding))
