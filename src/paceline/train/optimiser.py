"""AdamW on float32 weights, whatever dtype the arithmetic has."""

import torch
from torch import nn

from paceline.errors import TrainingError
from paceline.ops.adamw import AdamWStep, adamw_
from paceline.recipe import TrainOptions

_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


class MasterAdamW:
    """Keeps float32 masters of a model's trained weights and moves those.

    Gradients of several micro-batches are added up in float32; the model's own weights are rounded
    copies (or, in float32, the masters themselves).
    """

    def __init__(self, model: nn.Module, options: TrainOptions) -> None:
        self._trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.masters = {
            n: p if p.dtype == torch.float32 else p.detach().float().clone()
            for n, p in self._trained.items()
        }
        zeros = lambda: {n: torch.zeros_like(p) for n, p in self.masters.items()}
        self._first, self._second, self._num_steps = zeros(), zeros(), 0
        self._gradients: dict[str, torch.Tensor] = {}
        self._options = options

    @torch.no_grad()
    def accumulate(self) -> None:
        """Take over the gradients of one backward pass."""
        for name, weight in self._trained.items():
            new, weight.grad = weight.grad, None
            if new is None:
                continue
            total = self._gradients.get(name)
            # One micro-batch alone stays in its own dtype: nothing is gained by widening it.
            self._gradients[name] = new if total is None else total.float().add_(new)

    @torch.no_grad()
    def step(self, learning_rate: float) -> float:
        """Clip, move the masters, copy them back. Returns the gradient norm before clipping.

        A norm that is not finite raises TrainingError; no weight has moved then.
        """
        gradients, self._gradients = self._gradients, {}
        norms = [torch.linalg.vector_norm(g, dtype=torch.float32) for g in gradients.values()]
        norm = torch.linalg.vector_norm(torch.stack(norms))
        scale = norm * 0 + (self._options.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
        for name, gradient in gradients.items():
            weight, master = self._trained[name], self.masters[name]
            decay = self._options.weight_decay if master.ndim > 1 else 0.0
            how = AdamWStep(learning_rate, self._options.betas, decay, self._num_steps + 1)
            copy = None if weight is master else weight
            adamw_(master, gradient, self._first[name], self._second[name], copy, scale, how)
        if not float(norm) < float("inf"):
            raise TrainingError(f"gradient norm is {float(norm)}: no weight was moved by this step")
        self._num_steps += 1
        return float(norm)

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """Masters and moments by name, for a checkpoint."""
        tensors = {}
        for name, master in self.masters.items():
            state = (torch.tensor(self._num_steps), self._first[name], self._second[name])
            tensors[f"master.{name}"] = master.detach()
            tensors |= {f"adamw.{k}.{name}": v for k, v in zip(_MOMENTS, state, strict=True)}
        return tensors

    @torch.no_grad()
    def load_state_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        """Raises TrainingError where a tensor is missing: nothing restarts from zero in silence."""
        for name, master in self.masters.items():
            keys = [f"adamw.{key}.{name}" for key in _MOMENTS]
            missing = [key for key in (f"master.{name}", *keys) if key not in tensors]
            if missing:
                raise TrainingError(f"the checkpoint lacks {', '.join(missing)}")
            master.copy_(tensors[f"master.{name}"])
            self._num_steps = int(tensors[keys[0]])
            self._first[name].copy_(tensors[keys[1]])
            self._second[name].copy_(tensors[keys[2]])
        self._copy_back()

    @torch.no_grad()
    def _copy_back(self) -> None:
        for name, weight in self._trained.items():
            if weight is not self.masters[name]:
                weight.copy_(self.masters[name])
