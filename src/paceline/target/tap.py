"""Hooks that keep a transformers model's residual stream at chosen layers."""

import torch
from torch import nn

from paceline.contracts import LayerPlan
from paceline.target.model import decoder_layers


class LayerTap:
    """Keeps the residual stream at chosen k during a forward pass: `states[k]` is [B, L, D]."""

    def __init__(self, model: nn.Module, plan: LayerPlan, num_layers: int) -> None:
        self.states: dict[int, torch.Tensor] = {}
        layers = decoder_layers(model, num_layers)
        self._handles = [self._hook(layers, k) for k in plan.all]

    def _hook(self, layers: nn.ModuleList, k: int) -> torch.utils.hooks.RemovableHandle:
        def keep_input(_: nn.Module, args: tuple, kwargs: dict) -> None:
            self.states[0] = args[0] if args else kwargs["hidden_states"]

        def keep_output(_: nn.Module, args: tuple, output: object) -> None:
            # transformers 4 layers return tuples, transformers 5 layers the tensor itself.
            self.states[k] = output[0] if isinstance(output, tuple) else output

        if k == 0:
            return layers[0].register_forward_pre_hook(keep_input, with_kwargs=True)
        return layers[k - 1].register_forward_hook(keep_output)

    def close(self) -> None:
        """Remove the hooks and let the states go."""
        for handle in self._handles:
            handle.remove()
        self.states.clear()
