"""The decoder layers of a model as vLLM builds it, and the residual stream that they return.

Hooks fire only in eager mode. vLLM's layers return `(hidden, residual)` not yet added, and the
next layer changes the residual in place, so the sum is taken inside the hook, at once.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from paceline.errors import TargetError

# Layers that return the finished stream, and beside it a residual that only pads the tuple (read in
# vLLM 0.16 to 0.32); the sum would count what the layer added it to twice. Classes and not modules:
# Molmo's has layers of both kinds.
FINISHED_STREAM = (
    "ChameleonSwinDecoderLayer",
    "Cohere2MoeDecoderLayer",
    "CohereCompassDecoderLayer",
    "CohereDecoderLayer",
    "Exaone4DecoderLayer",
    "GraniteMoeHybridAttentionDecoderLayer",
    "GraniteMoeHybridMambaDecoderLayer",
    "HyperCLOVAXDecoderLayer",
    "Molmo2DecoderNormAfterLayer",
    "MolmoDecoderNormAfterLayer",
    "MuseGlimmerDecoderLayer",
    "PhiMoEDecoderLayer",
    "StablelmDecoderLayer",
)
_FOREIGN_TOWERS = ("vision", "visual", "audio", "encoder", "mtp", "draft", "projector")
# Stands in for layers that another pipeline stage holds.
_MISSING_LAYER = "PPMissingLayer"


def find_decoder_layers(model: nn.Module, num_layers: int) -> nn.ModuleList:
    """The list of the language model's decoder layers, in dense, MoE, hybrid and wrapped models.

    Raises TargetError where no list, or more than one, has `num_layers` entries.
    """
    found = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        and len(module) == num_layers
        and not any(tower in name for tower in _FOREIGN_TOWERS)
        and name.count(".layers.") == 0
    }
    # Gemma 4 holds the layers whose keys are their own, which may be all, in a second list.
    distinct = {tuple(map(id, layers)): layers for layers in found.values()}
    if len(distinct) != 1:
        lists = {n: len(m) for n, m in model.named_modules() if isinstance(m, nn.ModuleList)}
        raise TargetError(
            f"{type(model).__name__}: {len(distinct)} lists of {num_layers} decoder layers "
            f"({', '.join(found) or 'none'}); all lists by length: {lists}"
        )
    return next(iter(distinct.values()))


def held_here(layers: nn.ModuleList, wanted: Sequence[int]) -> list[int]:
    """Of the streams k of `wanted` those whose layer this pipeline stage runs; may be none."""
    return [k for k in wanted if type(_layer_of(layers, k)).__name__ != _MISSING_LAYER]


def _layer_of(layers: nn.ModuleList, k: int) -> nn.Module:
    """The layer that gives stream k; k = 0 is what the first one gets."""
    return layers[max(k - 1, 0)]


def stream_of(layer: nn.Module, output: Any) -> torch.Tensor:
    """The residual stream [N, D] after a layer, as a tensor of its own."""
    if isinstance(output, torch.Tensor):
        return _flat(output).clone()
    hidden, *rest = output
    residual = rest[0] if rest else None
    if residual is None or type(layer).__name__ in FINISHED_STREAM:
        return _flat(hidden).clone()
    return _flat(hidden) + _flat(residual)


def stream_into(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """The residual stream [N, D] that the first layer gets: the embedding output, k = 0."""
    hidden = kwargs.get("hidden_states")
    if hidden is None:
        # positions are integers; the first floating tensor is the stream
        tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
        floating = [a for a in tensors if a.is_floating_point()]
        if not floating:
            raise TargetError(f"{type(layer).__name__}: its call carries no hidden states")
        hidden = floating[0]
    return _flat(hidden).clone()


def _flat(states: torch.Tensor) -> torch.Tensor:
    """vLLM's Transformers backend keeps a batch axis of one."""
    return states[0] if states.ndim == 3 and states.shape[0] == 1 else states


class LayerHooks:
    """Hooks that hand over the streams k of `wanted` that this stage holds.

    on_stream(k, states) is called from inside the forward pass; it must not raise.
    """

    def __init__(
        self,
        layers: nn.ModuleList,
        wanted: Sequence[int],
        on_stream: Callable[[int, Callable[[], torch.Tensor]], None],
    ) -> None:
        self.held = held_here(layers, wanted)
        self._handles = [self._attach(_layer_of(layers, k), k, on_stream) for k in self.held]

    def _attach(
        self,
        layer: nn.Module,
        k: int,
        on_stream: Callable[[int, Callable[[], torch.Tensor]], None],
    ) -> Any:
        if k == 0:

            def before(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
                on_stream(k, lambda: stream_into(module, args, kwargs))

            return layer.register_forward_pre_hook(before, with_kwargs=True)

        def after(module: nn.Module, _: tuple, output: Any) -> None:
            on_stream(k, lambda: stream_of(module, output))

        return layer.register_forward_hook(after)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
