"""From what a foreign folder and the options say, by name, to which tensor is which layer."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.contracts import LayerPlan
from paceline.errors import LayerError, UsageError
from paceline.recipe import ImportStoreOptions
from paceline.store.foreign.layouts import CONFIG_NAME, Columns
from paceline.store.spec import POST_NORM, PRE_NORM
from paceline.target.layers import CONVENTIONS, from_convention

# These tools take every state before the final norm; of others it must be said.
_PRE_NORM_CONVENTIONS = ("speculators_0.3", "speculators_0.9")


@dataclass(frozen=True)
class Said:
    """What is known of foreign states: layer ids in the files' order, how they count, and whether
    the last state is `pre` or `post` norm."""

    ids: tuple[int, ...]
    convention: str
    last_norm: str


def said_of(options: ImportStoreOptions, config: dict[str, Any]) -> Said:
    """Options and data_config.json put together. Raises UsageError that lists what is missing or
    said in two ways: nothing is guessed from numbers."""
    states = config.get("hidden_states")
    told = states if isinstance(states, dict) else {}
    problems: list[str] = []

    def choose(name: str, option: Any, key: str) -> Any:
        value = told.get(key)
        if option is not None and value is not None and option != value:
            problems.append(f"{name}: {option} is asked for, {CONFIG_NAME} says {value}")
        return value if option is None else option

    ids = choose("layers", options.layers, "layer_ids")
    convention = choose("layer_convention", options.layer_convention, "layer_convention")
    last_norm = choose("last_norm", options.last_norm, "last_norm")
    if last_norm is None and convention in _PRE_NORM_CONVENTIONS:
        last_norm = PRE_NORM
    for name, value in (
        ("layers", ids),
        ("layer_convention", convention),
        ("last_norm", last_norm),
    ):
        if not value:
            problems.append(f"{name}: neither the options nor {CONFIG_NAME} say it")
    if convention and convention not in CONVENTIONS:
        problems.append(f"layer_convention: {convention!r} is not known")
    if problems:
        raise UsageError(
            f"import-store: the states of {options.source} cannot be told apart:\n  "
            + "\n  ".join(problems)
        )
    return Said(tuple(ids), convention, last_norm)


def columns_of(said: Said, num_layers: int, last_apart: bool) -> Columns:
    """Where each layer lies in the files of a target of `num_layers` layers.

    last_apart: the last state has a tensor of its own and no id. Raises LayerError for ids that
    the convention cannot say, and for a list without the last state (k = num_layers).
    """
    convention = CONVENTIONS[said.convention]
    last = None if last_apart else _last_column(said, num_layers + convention.offset, num_layers)
    places = [i for i in range(len(said.ids)) if i != last]
    indices = from_convention([said.ids[i] for i in places], said.convention, num_layers)
    if not indices:
        raise LayerError("a store needs an auxiliary layer besides the last state")
    order = np.argsort(indices).tolist()
    plan = LayerPlan(tuple(indices[i] for i in order), num_layers)
    return Columns(plan, tuple(places[i] for i in order), last)


def _last_column(said: Said, last_id: int, num_layers: int) -> int:
    if last_id not in said.ids:
        raise LayerError(
            f"layer ids {list(said.ids)} of {said.convention!r} do not hold the last state, id "
            f"{last_id} of a target of {num_layers} layers: without it nothing can be learnt"
        )
    if CONVENTIONS[said.convention].last_needs_pre_norm and said.last_norm != POST_NORM:
        raise LayerError(
            f"id {last_id} of {said.convention!r} is after the final norm: say last_norm post"
        )
    return said.ids.index(last_id)
