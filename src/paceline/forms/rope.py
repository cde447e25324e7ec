"""Rotary parameters in the two spellings that servers read, and back.

transformers 5 keeps one dict, `rope_parameters`; transformers 4, and servers built on it, read
`rope_theta` beside `rope_scaling`. A reader of one spelling falls back to a theta of 10000 without
a word where it finds only the other, so both are written, and both are held against each other.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from paceline.draft.config import DraftConfig, rope_of
from paceline.draft.rope import Rotary
from paceline.errors import ExportError

Rope = dict[str, Any]


def both_spellings(rope: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_parameters`, `rope_theta` and `rope_scaling` (null for plain rotary positions)."""
    parameters = dict(rope)
    scaling = {key: value for key, value in parameters.items() if key != "rope_theta"}
    plain = scaling.get("rope_type", "default") == "default"
    return {
        "rope_theta": parameters["rope_theta"],
        "rope_scaling": None if plain else scaling,
        "rope_parameters": parameters,
    }


def read_rope(values: Mapping[str, Any]) -> list[Rope]:
    """The rotary parameters that a config says, once for each spelling that it uses.

    Raises ExportError where it says no theta at all: nothing falls back to a default.
    """
    new, theta, scaling = (
        values.get(key) for key in ("rope_parameters", "rope_theta", "rope_scaling")
    )
    inner = (new or {}).get("rope_theta")
    spellings = []
    if new:
        spellings.append({**new, "rope_theta": theta if inner is None else inner})
    # A theta beside rope_parameters that have none completes them; it is no spelling of its own.
    if scaling or (theta is not None and not (new and inner is None)):
        spellings.append({**(scaling or {}), "rope_theta": inner if theta is None else theta})
    if not spellings or any(rope["rope_theta"] is None for rope in spellings):
        raise ExportError(
            "config.json has no rope_theta, neither alone nor in rope_parameters: servers would "
            "take 10000 without a word. Write the theta that the draft was trained with."
        )
    return [rope_of({"rope_parameters": rope}) for rope in spellings]


def frequencies(config: DraftConfig, rope: Rope | None = None) -> tuple[torch.Tensor, float]:
    """Inverse frequencies float32 [K / 2] and the attention scaling, by transformers' own rules."""
    rotary = Rotary(config if rope is None else replace(config, rope=rope))
    return rotary.inv_freq, rotary.scaling


def same_rope(config: DraftConfig, a: Rope, b: Rope) -> bool:
    """Whether two spellings give the same rotary positions, bit for bit."""
    (freq_a, scaling_a), (freq_b, scaling_b) = frequencies(config, a), frequencies(config, b)
    return torch.equal(freq_a, freq_b) and scaling_a == scaling_b
