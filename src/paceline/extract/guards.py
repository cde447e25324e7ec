"""Checks on every captured sample. Legend: R aux rows, A layers, D width, M supervised rows."""

import math
from dataclasses import dataclass

import torch

from paceline.contracts import LayerPlan, TokenSample
from paceline.target.spec import Target

# How far outside the probe's range a layer's RMS may lie before it is flagged.
_RMS_SLACK = 4.0


@dataclass(frozen=True)
class RowNorms:
    """Euclidean norms of a sample's rows, float32: aux [R, A], last [M]."""

    aux: torch.Tensor
    last: torch.Tensor

    def cpu(self) -> "RowNorms":
        """The same on the CPU: many looks at them are then one wait for a GPU."""
        return RowNorms(self.aux.cpu(), self.last.cpu())


@dataclass(frozen=True)
class Guards:
    """plan: the layers captured. rms_ranges: for each k of plan.all the lowest and highest RMS of a
    row seen in the probe, first tokens apart (massive activations sit there); empty before it."""

    plan: LayerPlan
    hidden_size: int
    rms_ranges: tuple[tuple[float, float], ...] = ()

    def fault(
        self,
        sample: TokenSample,
        aux: torch.Tensor,
        last: torch.Tensor,
        norms: RowNorms | None = None,
    ) -> str | None:
        """Why a sample must not be stored, or None. norms: of the rows, where they are known."""
        rows, wanted = sample.num_aux_rows, sample.num_supervised
        if aux.ndim != 3 or len(aux) < rows or tuple(aux.shape[1:]) != self._aux_shape:
            return f"aux states are {list(aux.shape)}, not [>= {rows}, {list(self._aux_shape)}]"
        if tuple(last.shape) != (wanted, self.hidden_size):
            return f"last states are {list(last.shape)}, not [{wanted}, {self.hidden_size}]"
        norms = norms or row_norms(aux[:rows], last)
        for k, of_layer in self._by_layer(norms.aux[:rows], norms.last):
            # A norm is finite only if every element of its row is.
            if not bool(of_layer.isfinite().all()):
                return f"states of layer k = {k} are not finite"
            if not bool(of_layer.all()):
                return f"layer k = {k} has an all-zero row"
        return None

    def flags(self, sample: TokenSample, norms: RowNorms) -> list[str]:
        """What looks odd without being wrong: a layer's RMS far outside the probe's range."""
        found = []
        rows = past_first_token(sample, norms.aux, norms.last)
        for (k, of_layer), (low, high) in zip(self._by_layer(*rows), self.rms_ranges, strict=False):
            if not len(of_layer):
                continue
            rms = of_layer / math.sqrt(self.hidden_size)
            lowest, highest = float(rms.min()), float(rms.max())
            if lowest < low / _RMS_SLACK or highest > high * _RMS_SLACK:
                found.append(
                    f"k = {k}: RMS {lowest:.3g} to {highest:.3g}, probe {low:.3g} to {high:.3g}"
                )
        return found

    @property
    def _aux_shape(self) -> tuple[int, int]:
        return len(self.plan.aux), self.hidden_size

    def _by_layer(self, aux: torch.Tensor, last: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
        """aux [R, A], last [M] -> for each k its column."""
        layers = [(k, aux[:, i]) for i, k in enumerate(self.plan.aux)]
        return [*layers, (self.plan.last, last)]


def num_positions(target: Target) -> int | None:
    """The most tokens that a sample of this target may have; None: its config knows no limit."""
    return getattr(target.text_config, "max_position_embeddings", None)


def past_first_token(
    sample: TokenSample, aux: torch.Tensor, last: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """A sample's aux [R, ...] and last [M, ...] without the rows of its first token, where massive
    activations sit; `last` has such a row only where that token is supervised."""
    return aux[1:], last[int(sample.loss_mask[0]) :]


def unusable(sample: TokenSample, target: Target) -> str | None:
    """Why nothing can be learnt from a sample of this target, or None."""
    longest = num_positions(target)
    if not sample.num_aux_rows:
        return "no supervised token after the first"
    if longest and sample.num_tokens > longest:
        return f"longer than the target's {longest} positions"
    if int(sample.input_ids.max()) >= target.vocab_size:
        return f"token id outside the target's {target.vocab_size}"
    return None


def row_norms(aux: torch.Tensor, last: torch.Tensor) -> RowNorms:
    """aux [R, A, D], last [M, D] -> their rows' norms, computed where the states are."""
    return RowNorms(_norms(aux), _norms(last))


def _norms(states: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(states, dim=-1, dtype=torch.float32)


def row_rms(states: torch.Tensor) -> torch.Tensor:
    """Root mean square of each row, float32: [R, D] -> [R]."""
    return states.float().pow(2).mean(-1).sqrt()
