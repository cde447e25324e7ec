"""Layer indices: the one table that converts between conventions, by name.

paceline's own index is k: the residual stream after k decoder layers. k = 0 is the embedding
output, k = n the output of the last of n layers, before the final norm.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.contracts import LayerPlan
from paceline.errors import LayerError

HIDDEN_STATE_INDEX = "hidden_state_index"


@dataclass(frozen=True)
class Convention:
    """How someone else counts: their id = k + offset, with ids below `lowest_id` impossible."""

    name: str
    offset: int
    lowest_id: int = 0
    last_needs_pre_norm: bool = False


CONVENTIONS = {
    c.name: c
    for c in (
        Convention(HIDDEN_STATE_INDEX, 0),
        # transformers' output_hidden_states: its last entry is after the final norm.
        Convention("transformers", 0, last_needs_pre_norm=True),
        # vLLM >= 0.18 counts k; its 0.16 captures before a layer runs, so it lacks k = n.
        Convention("vllm", 0),
        # "output of layer X", X from 0: SGLang, and speculators 0.3.
        Convention("layer_output", -1),
        Convention("sglang", -1),
        Convention("speculators_0.3", -1),
        Convention("speculators_0.9", 0),
    )
}


def _convention(name: str) -> Convention:
    try:
        return CONVENTIONS[name]
    except KeyError:
        known = ", ".join(CONVENTIONS)
        raise LayerError(f"unknown layer convention {name!r}; known: {known}") from None


def from_convention(ids: Sequence[int], name: str, num_layers: int) -> tuple[int, ...]:
    """Layer ids in a named convention -> hidden-state indices k, order kept.

    Raises LayerError for an id that the convention cannot say, or k outside 0 .. num_layers.
    """
    convention = _convention(name)
    indices = []
    for layer_id in ids:
        if layer_id < convention.lowest_id:
            raise LayerError(f"layer id {layer_id} does not exist in convention {name!r}")
        indices.append(layer_id - convention.offset)
    check_indices(indices, num_layers)
    if convention.last_needs_pre_norm and num_layers in indices:
        raise LayerError(
            f"id {num_layers} of {name!r} is after the final norm; k = {num_layers} is before it"
        )
    return tuple(indices)


def to_convention(indices: Sequence[int], name: str, num_layers: int) -> tuple[int, ...]:
    """Hidden-state indices k -> ids in a named convention; LayerError where it cannot say one."""
    convention = _convention(name)
    check_indices(indices, num_layers)
    ids = []
    for k in indices:
        layer_id = k + convention.offset
        if layer_id < convention.lowest_id:
            raise LayerError(f"k = {k} cannot be said in convention {name!r}")
        if convention.last_needs_pre_norm and k == num_layers:
            raise LayerError(f"k = {k} is before the final norm; {name!r} only has it after")
        ids.append(layer_id)
    return tuple(ids)


def check_indices(indices: Sequence[int], num_layers: int) -> None:
    for k in indices:
        if not 0 <= k <= num_layers:
            raise LayerError(
                f"layer index k = {k} is outside 0 .. {num_layers}: this target has {num_layers} "
                f"decoder layers (k = 0 is the embedding output, k = {num_layers} the last layer)"
            )
    if len(set(indices)) != len(indices):
        raise LayerError(f"layer indices {list(indices)} are not distinct")


def default_aux_layers(num_layers: int) -> tuple[int, ...]:
    """k = 2, n // 2, n - 3 (EAGLE-3's own choice, and vLLM's and SGLang's default)."""
    layers = (2, num_layers // 2, num_layers - 3)
    if not 0 < layers[0] < layers[1] < layers[2]:
        raise LayerError(
            f"a target of {num_layers} layers has no three distinct default auxiliary layers "
            f"{list(layers)}: give `layers` explicitly"
        )
    return layers


def plan_layers(
    layers: Sequence[int] | None, num_layers: int, convention: str = HIDDEN_STATE_INDEX
) -> LayerPlan:
    """The capture plan for given (or default) auxiliary layers, ascending.

    Raises LayerError for ids that the target does not have, repeated or descending ones.
    """
    if layers is None:
        return LayerPlan(default_aux_layers(num_layers), num_layers)
    if not layers:
        raise LayerError("`layers` is empty: give at least one auxiliary layer")
    aux = from_convention(layers, convention, num_layers)
    if list(aux) != sorted(aux):
        raise LayerError(f"layer indices {list(aux)} must ascend")
    return LayerPlan(aux, num_layers)
