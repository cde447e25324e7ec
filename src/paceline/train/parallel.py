"""How ranks share the weights, the gradients and the optimiser's states of one draft.

`ddp`: each rank holds all of them; gradients are summed once a step. That is not torch's
DistributedDataParallel: it reduces what lies in `.grad`, in the weights' dtype, while gradients of
micro-batches are added up in float32 outside of it (`optimiser`), and a sum over ranks has to be as
exact as one over micro-batches. `fsdp2`: torch's `fully_shard`; float32 weights, moments and summed
gradients are split between ranks, weights are gathered in the dtype of the arithmetic for a step.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from paceline.draft.losses import StepSums, distillation_loss
from paceline.draft.model import Draft
from paceline.errors import UsageError
from paceline.train.ranks import Ranks


class Alone:
    """One rank."""

    def distil(self, draft: Draft, *arguments: Any) -> tuple[torch.Tensor, StepSums]:
        """See distillation_loss. Without gradients inside `whole_draft`."""
        return distillation_loss(draft, *arguments)

    def backward(self, loss: torch.Tensor, is_last: bool) -> None:
        """Gradients of a micro-batch, the last one of its step or not."""
        loss.backward()

    def summed(self, gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The gradients of a step, over all ranks; what this rank moves of them."""
        return gradients

    def norm(self, gradients: dict[str, torch.Tensor]) -> torch.Tensor:
        """Of all gradients together, a float32 scalar on the device."""
        norms = [torch.linalg.vector_norm(g, dtype=torch.float32) for g in gradients.values()]
        return torch.linalg.vector_norm(torch.stack(norms))

    @contextmanager
    def whole_draft(self) -> Iterator[None]:
        """The draft has all its weights, for arithmetic without gradients. All ranks enter."""
        yield


class Replicas(Alone):
    """Every rank holds all."""

    def __init__(self, draft: Draft, ranks: Ranks) -> None:
        self._ranks = ranks
        self._trained = {n: p for n, p in draft.named_parameters() if p.requires_grad}
        for weight in self._trained.values():
            dist.broadcast(weight.data, src=0)

    def summed(self, gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        self._ranks.check()
        exact = {name: gradients[name].float() for name in self._trained}
        # Vectors are small and many: they go together.
        vectors = [g for g in exact.values() if g.ndim == 1]
        joined = torch.cat(vectors)
        parts = [joined, *(g for g in exact.values() if g.ndim > 1)]
        for work in [dist.all_reduce(part, async_op=True) for part in parts]:
            work.wait()
        for vector, total in zip(vectors, joined.split([len(v) for v in vectors]), strict=True):
            vector.copy_(total)
        return exact


class Shards(Alone):
    """Every rank holds its rows of each weight."""

    def __init__(self, draft: Draft, ranks: Ranks) -> None:
        self._ranks = ranks
        dtype = draft.fc.weight.dtype
        for weight in draft.parameters():
            if weight.requires_grad:
                dist.broadcast(weight.data, src=0)
                weight.data = weight.data.float()
        self._module = _LossModule(draft)
        fully_shard(
            self._module,
            mesh=ranks.mesh,
            # One group, since the draft is small: gathered once a step, however many micro-batches.
            reshard_after_forward=False,
            mp_policy=MixedPrecisionPolicy(
                param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
            ),
            ignored_params={w for w in draft.parameters() if not w.requires_grad},
        )
        # Gradients are sums: the loss is divided by the rows of the step on all ranks.
        self._module.set_gradient_divide_factor(1.0)
        self._module.set_force_sum_reduction_for_comms(True)

    def distil(self, draft: Draft, *arguments: Any) -> tuple[torch.Tensor, StepSums]:
        return self._module(*arguments)

    def backward(self, loss: torch.Tensor, is_last: bool) -> None:
        # Ranks may have different numbers of micro-batches: they meet at the last one alone.
        self._module.set_requires_gradient_sync(is_last)
        self._module.set_reshard_after_backward(is_last)
        loss.backward()

    def summed(self, gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: local(gradient) for name, gradient in gradients.items()}

    def norm(self, gradients: dict[str, torch.Tensor]) -> torch.Tensor:
        return self._ranks.sum(super().norm(gradients).square()).sqrt()

    @contextmanager
    def whole_draft(self) -> Iterator[None]:
        self._module.unshard()
        try:
            yield
        finally:
            self._module.reshard()


_PARALLEL = {"ddp": Replicas, "fsdp2": Shards}


def share_draft(draft: Draft, ranks: Ranks, how: str, optimiser: str) -> Alone:
    """Make the ranks share a draft whose weights are in the dtype of the arithmetic.

    how, optimiser: as in the options. Raises UsageError where they do not go together.
    """
    if ranks.count == 1:
        return Alone()
    if how == "fsdp2" and optimiser == "muon":
        raise UsageError("train: muon works on whole matrices, which fsdp2 splits: use ddp")
    return _PARALLEL[how](draft, ranks)


class _LossModule(nn.Module):
    """The draft and its loss as one module: FSDP gathers weights around a module's forward, and the
    unroll reads them without any module's."""

    def __init__(self, draft: Draft) -> None:
        super().__init__()
        self.draft = draft

    def forward(self, *arguments: Any) -> tuple[torch.Tensor, StepSums]:
        return distillation_loss(self.draft, *arguments)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor; shares its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor that may be split. All ranks enter."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def fill_(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """tensor = values, where the tensor may be split and the values are whole."""
    if isinstance(tensor, DTensor):
        mesh, placements = tensor.device_mesh, tensor.placements
        values = distribute_tensor(values, mesh, placements, src_data_rank=None)
    local(tensor).copy_(local(values))
