"""The shape of a draft for a target: what the options leave out comes from the target's config.

A draft is a llama-style layer, whatever the target is; what of the target's shape no such layer
has, or no server would run as it was trained, is left behind.
"""

import math
from collections.abc import Mapping
from typing import Any, Protocol

from paceline.draft.config import SCALING_KEYS, DraftConfig, rope_of
from paceline.errors import TrainingError
from paceline.recipe import DraftOptions

Values = Mapping[str, Any]


class Config(Protocol):
    """transformers' config of a language model, or what stands in for it."""

    def to_dict(self) -> dict[str, Any]: ...


_HEAD_DIM = 128  # where the target's own width of a head does not fit
_LENGTHS = ("max_position_embeddings", "model_max_length")
_DENSE_WIDTHS = ("intermediate_size", "ffn_hidden_size")
_USUAL_NAMES = (
    "num_hidden_layers",
    "hidden_size",
    "vocab_size",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
)


def draft_config(
    options: DraftOptions,
    text_config: Config,
    aux_layers: tuple[int, ...],
    draft_vocab_size: int,
) -> DraftConfig:
    """The draft that the options ask for, on a target with this config.

    Raises TrainingError that names what neither says.
    """
    values = values_of(text_config)
    if missing := [name for name in ("hidden_size", "vocab_size") if not values.get(name)]:
        raise TrainingError(f"draft: the target's config has no {', '.join(missing)}")
    hidden = options.hidden_size or values["hidden_size"]
    heads, kv_heads, head_dim = _heads(options, values, hidden)
    return DraftConfig(
        hidden_size=hidden,
        intermediate_size=options.intermediate_size or dense_width(values),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        num_layers=options.num_layers,
        target_hidden_size=values["hidden_size"],
        vocab_size=values["vocab_size"],
        draft_vocab_size=draft_vocab_size,
        aux_layers=tuple(aux_layers),
        rms_norm_eps=values.get("rms_norm_eps") or 1e-5,
        max_position_embeddings=options.max_position_embeddings or _length(values),
        rope=draft_rope(values, options.rope_theta),
        qk_norm=options.qk_norm,
        aux_norm=options.aux_norm,
        norm_output=options.norm_output,
    )


def values_of(config: Config) -> dict[str, Any]:
    """A config's values, by their usual names too where its family has others (GPT-2's n_embd) or
    works them out (Nemotron-H's number of layers)."""
    values = config.to_dict()
    usual = {name: getattr(config, name, None) for name in _USUAL_NAMES if not values.get(name)}
    return values | {name: value for name, value in usual.items() if value is not None}


def draft_rope(values: Values, theta: float | None = None) -> dict[str, Any]:
    """Rotary parameters in transformers-5 form, such that every server turns heads as the draft
    does in training. theta: takes the place of all that the target says.

    Of a dict for each kind of layer it is the one of full attention. Kept are the scalings of
    SCALING_KEYS with the keys that all servers read; the theta alone remains of any other one, and
    of an MLA target's, which is meant for its narrow rotary heads. Raises TrainingError where
    neither says a theta.
    """
    if theta is not None:
        return {"rope_type": "default", "rope_theta": theta}
    try:
        rope = rope_of(_of_full_attention(values))
    except TrainingError as error:
        raise TrainingError(f"{error}; `train.draft.rope_theta` sets the draft's own") from None
    kind = rope["rope_type"]
    if _is_mla(values) or kind not in SCALING_KEYS:
        kind = "default"
    kept = {key: rope[key] for key in SCALING_KEYS[kind] if rope.get(key) is not None}
    return {"rope_type": kind, "rope_theta": rope["rope_theta"], **kept}


def dense_width(values: Values) -> int:
    """Inner width of a target's dense MLPs, the widest where layers differ; four times the hidden
    width where the config says none (all layers are mixtures)."""
    said = next((values[name] for name in _DENSE_WIDTHS if values.get(name)), None)
    return max(said) if isinstance(said, list | tuple) else said or 4 * values["hidden_size"]


def _heads(options: DraftOptions, values: Values, hidden: int) -> tuple[int, int, int]:
    """Query heads, key heads and the width of one.

    The target's, unless it is MLA or their number does not divide the hidden width: transformers 5,
    and servers on it, refuse such a llama.
    """
    is_mla = _is_mla(values)
    theirs = 0 if is_mla else values.get("num_attention_heads") or 0
    fits = theirs > 0 and hidden % theirs == 0
    head_dim = options.head_dim or (not is_mla and values.get("head_dim")) or 0
    if options.num_attention_heads or fits:
        heads = options.num_attention_heads or theirs
        head_dim = head_dim or (_HEAD_DIM if is_mla else hidden // heads)
    else:
        head_dim = head_dim or _HEAD_DIM
        heads = _divisor_up_to(hidden // head_dim, hidden)
    kv_heads = 0 if is_mla else values.get("num_key_value_heads") or 0
    return heads, options.num_key_value_heads or math.gcd(heads, kv_heads), head_dim


def _divisor_up_to(most: int, number: int) -> int:
    """The largest divisor of `number` that is not above `most`, at least 1."""
    return next((n for n in range(most, 1, -1) if number % n == 0), 1)


def _length(values: Values) -> int:
    found = next((values[name] for name in _LENGTHS if values.get(name)), None)
    if found is None:
        raise TrainingError(
            f"draft: the target's config has no {_LENGTHS[0]}: set "
            "`train.draft.max_position_embeddings`, the longest position that the draft is made for"
        )
    return found


def _of_full_attention(values: Values) -> dict[str, Any]:
    """A config that keeps rotary parameters for each kind of layer, cut down to the kind that sees
    all rows, as a draft does; others as they are."""
    said = values.get("rope_parameters") or {}
    kinds = {kind: rope for kind, rope in said.items() if isinstance(rope, dict)}
    if not kinds:
        return dict(values)
    first = next(iter(kinds.values()))
    return {**values, "rope_parameters": kinds.get("full_attention", first)}


def _is_mla(values: Values) -> bool:
    return values.get("kv_lora_rank") is not None
