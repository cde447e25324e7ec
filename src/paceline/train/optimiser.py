"""AdamW, or Muon for the matrices of the layers, on float32 weights, whatever dtype the arithmetic
has."""

import math

import torch
from torch import nn

from paceline.errors import TrainingError
from paceline.ops.adamw import AdamWStep, adamw_
from paceline.recipe import TrainOptions
from paceline.train.parallel import Alone, fill_, local


class NotFinite(TrainingError):
    """A step that moved no weight: its gradient norm, or its loss where that was given, is not
    finite. loss: this rank's part."""

    def __init__(self, norm: float, loss: float | None = None) -> None:
        self.norm, self.loss = norm, loss
        seen = f"gradient norm is {norm}" + ("" if loss is None else f", loss is {loss}")
        super().__init__(f"{seen}: no weight was moved by this step")


class MasterAdamW:
    """Keeps float32 masters of a model's trained weights and moves those.

    Gradients of several micro-batches are added up in float32; the model's own weights are rounded
    copies (or, in float32, the masters themselves). parallel: how ranks share all of it.
    """

    def __init__(
        self, model: nn.Module, options: TrainOptions, parallel: Alone | None = None
    ) -> None:
        self._trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.masters = {
            n: p if p.dtype == torch.float32 else p.detach().float().clone()
            for n, p in self._trained.items()
        }
        self._options = options
        self._parallel = parallel or Alone()
        self._moments = {
            n: (torch.zeros_like(p), torch.zeros_like(p))
            for n, p in self.masters.items()
            if self._by_adamw(n)
        }
        self._num_steps = 0
        self._gradients: dict[str, torch.Tensor] = {}
        self._last: _OnItsWay | None = None

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
    def step(self, learning_rate: float, loss: torch.Tensor | None = None) -> torch.Tensor:
        """Clip, move the masters, copy them back. Returns the gradient norm before clipping, a
        float32 scalar on the device.

        Where it, or the loss that it comes from, is not finite no weight moves, and NotFinite is
        raised, on all ranks: at once on the CPU; on a GPU by the next call, or by `check`, since
        asking now would make the GPU wait for the host.
        """
        self.check()
        if loss is not None:
            self._spoil(loss)
        gradients, self._gradients = self._parallel.summed(self._gradients), {}
        norm = self._parallel.norm(gradients)
        seen = norm[None] if loss is None else torch.stack([norm, loss.detach().float()])
        self._last = _OnItsWay(seen)
        self._check_early()
        # Not a number where the norm is none, or is infinite.
        scale = norm * 0 + (self._options.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
        self._num_steps += 1
        self._move(gradients, scale, learning_rate)
        return norm

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """Masters and moments by name, for a checkpoint; what ranks split is a DTensor."""
        self.check()
        tensors = {f"master.{name}": master.detach() for name, master in self.masters.items()}
        for name, (first, second) in self._moments.items():
            state = (torch.tensor(self._num_steps), first, second)
            tensors |= {f"adamw.{k}.{name}": v for k, v in zip(_MOMENTS, state, strict=True)}
        return tensors

    @torch.no_grad()
    def load_state_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        """Go on from whole tensors, whatever number of ranks saved them.

        Raises TrainingError where one is missing: nothing restarts from zero in silence.
        """
        missing = sorted(self.state_tensors().keys() - tensors)
        if missing:
            raise TrainingError(f"the checkpoint lacks {', '.join(missing)}")
        for name, master in self.masters.items():
            fill_(master, tensors[f"master.{name}"])
        for name, moments in self._moments.items():
            number, *values = (tensors[f"adamw.{key}.{name}"] for key in _MOMENTS)
            self._num_steps = int(number)
            for moment, value in zip(moments, values, strict=True):
                fill_(moment, value)
        for name in self.masters:
            self._copy_back(name)

    def _by_adamw(self, name: str) -> bool:
        return True

    def _move(
        self, gradients: dict[str, torch.Tensor], scale: torch.Tensor, learning_rate: float
    ) -> None:
        for name in self._moments:
            if name not in gradients:
                continue
            weight, master = self._trained[name], self.masters[name]
            decay = self._options.weight_decay if master.ndim > 1 else 0.0
            how = AdamWStep(learning_rate, self._options.betas, decay, self._num_steps)
            copy = None if weight is master else weight
            moments = map(local, self._moments[name])
            adamw_(local(master), gradients[name], *moments, copy, scale, how)

    def check(self) -> None:
        """Raises NotFinite where the last step moved no weight. Asks the device once a step."""
        last, self._last = self._last, None
        if last is not None and not math.isfinite(last.values()[0]):
            raise NotFinite(*last.values())

    def _check_early(self) -> None:
        """Where asking costs no wait."""
        if self._last is not None and not self._last.comes_late:
            self.check()

    def _spoil(self, loss: torch.Tensor) -> None:
        """A loss that is not finite may have finite gradients; then one of them gets its share, and
        the norm, which is that of all ranks, says it to all."""
        shares = (local(gradient) for gradient in self._gradients.values())
        min((s for s in shares if s.numel()), key=torch.Tensor.numel).add_(loss.detach() * 0)

    def _copy_back(self, name: str) -> None:
        if self._trained[name] is not self.masters[name]:
            self._trained[name].data.copy_(self.masters[name])


_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


class MasterMuon(MasterAdamW):
    """Muon for all matrices but the head and the embedding, AdamW for the rest. Muon's steps are
    scaled to the size of AdamW's, so one learning rate serves both."""

    def __init__(
        self, model: nn.Module, options: TrainOptions, parallel: Alone | None = None
    ) -> None:
        super().__init__(model, options, parallel)
        self._by_muon = {n: p for n, p in self.masters.items() if not self._by_adamw(n)}
        self._muon = torch.optim.Muon(
            list(self._by_muon.values()),
            weight_decay=options.weight_decay,
            adjust_lr_fn="match_rms_adamw",
        )

    def state_tensors(self) -> dict[str, torch.Tensor]:
        tensors = super().state_tensors()
        return tensors | {f"muon.{n}": self._momentum(p) for n, p in self._by_muon.items()}

    @torch.no_grad()
    def load_state_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        super().load_state_tensors(tensors)
        for name, master in self._by_muon.items():
            self._momentum(master).copy_(tensors[f"muon.{name}"])

    def _by_adamw(self, name: str) -> bool:
        is_matrix = self.masters[name].ndim == 2
        return not is_matrix or name.startswith(("lm_head.", "embed_tokens."))

    def _move(
        self, gradients: dict[str, torch.Tensor], scale: torch.Tensor, learning_rate: float
    ) -> None:
        # Momentum moves weights whatever the scale is, so this one has to wait and see.
        self.check()
        super()._move(gradients, scale, learning_rate)
        for name in self._by_muon.keys() & gradients.keys():
            self._by_muon[name].grad = gradients[name].float() * scale
        for group in self._muon.param_groups:
            group["lr"] = learning_rate
        self._muon.step()
        self._muon.zero_grad(set_to_none=True)
        for name in self._by_muon:
            self._copy_back(name)

    def _momentum(self, master: torch.Tensor) -> torch.Tensor:
        state = self._muon.state[master]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(master)
        return state["momentum_buffer"]


class _OnItsWay:
    """A few numbers on their way from the device."""

    def __init__(self, numbers: torch.Tensor) -> None:
        self._host, self._copied = numbers, None
        self.comes_late = numbers.is_cuda
        if self.comes_late:
            self._host = torch.empty(len(numbers), pin_memory=True)
            self._host.copy_(numbers, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def values(self) -> list[float]:
        """Waits for the step that made them, not for what was queued after it."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._host.tolist()


OPTIMISERS: dict[str, type[MasterAdamW]] = {"adamw": MasterAdamW, "muon": MasterMuon}
