"""AdamW on float32 weights, whatever dtype the arithmetic has."""

import torch
from torch import nn

from paceline.errors import TrainingError
from paceline.recipe import TrainOptions


class MasterAdamW:
    """Keeps float32 masters of a model's trained weights and moves those.

    Gradients of micro-batches are added up in float32; the model's own weights are rounded copies
    (or, in float32, the masters themselves).
    """

    def __init__(self, model: nn.Module, options: TrainOptions) -> None:
        self._trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.masters = {
            n: p if p.dtype == torch.float32 else p.detach().float().clone()
            for n, p in self._trained.items()
        }
        decayed = [p for p in self.masters.values() if p.ndim > 1]
        plain = [p for p in self.masters.values() if p.ndim <= 1]
        self._adamw = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": options.weight_decay},
                {"params": plain, "weight_decay": 0.0},
            ],
            lr=options.learning_rate,
            betas=options.betas,
            fused=True,
        )
        self._max_grad_norm = options.max_grad_norm

    def accumulate(self) -> None:
        """Add the gradients of one backward pass to the masters' and clear them."""
        for name, weight in self._trained.items():
            master = self.masters[name]
            if weight is master or weight.grad is None:
                continue
            if master.grad is None:
                master.grad = weight.grad.float()
            else:
                master.grad += weight.grad
            weight.grad = None

    def step(self, learning_rate: float) -> float:
        """Clip, move the masters, copy them back. Returns the gradient norm before clipping.

        A norm that is not finite raises TrainingError before any weight has moved.
        """
        norm = float(
            torch.nn.utils.clip_grad_norm_(list(self.masters.values()), self._max_grad_norm)
        )
        if not norm < float("inf"):
            raise TrainingError(f"gradient norm is {norm}: no weight was moved by this step")
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate
        self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)
        self._copy_back()
        return norm

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """Masters and moments by name, for a checkpoint."""
        tensors = {f"master.{n}": p.detach() for n, p in self.masters.items()}
        for name, master in self.masters.items():
            for key, value in self._adamw.state.get(master, {}).items():
                tensors[f"adamw.{key}.{name}"] = value
        return tensors

    @torch.no_grad()
    def load_state_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        """Raises TrainingError where a tensor is missing: nothing restarts from zero in silence."""
        for name, master in self.masters.items():
            missing = [
                key
                for key in (f"master.{name}", *(f"adamw.{k}.{name}" for k in _MOMENTS))
                if key not in tensors
            ]
            if missing:
                raise TrainingError(f"the checkpoint lacks {', '.join(missing)}")
            master.copy_(tensors[f"master.{name}"])
            self._adamw.state[master] = {
                key: tensors[f"adamw.{key}.{name}"].clone() for key in _MOMENTS
            }
        self._copy_back()

    @torch.no_grad()
    def _copy_back(self) -> None:
        for name, weight in self._trained.items():
            if weight is not self.masters[name]:
                weight.copy_(self.masters[name])


_MOMENTS = ("step", "exp_avg", "exp_avg_sq")
