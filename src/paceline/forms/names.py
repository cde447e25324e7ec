"""Tensor names: paceline's own beside those of each server's checkpoint, both directions.

`{a}` is an auxiliary state, `{i}` a decoder layer after the first.
"""

import re

from paceline.draft.model import LLAMA_LAYER_NAMES
from paceline.errors import ExportError

FORM_NAMES = VLLM, SPECULATORS, SGLANG = ("vllm", "speculators", "sglang")

# (paceline's name, the server's name)
Pairs = tuple[tuple[str, str], ...]

_AROUND_THE_LAYERS: Pairs = (
    ("aux_norm.norms.{a}.weight", "fc_norm.{a}.weight"),
    ("aux_norm.norm.weight", "input_norm.weight"),
    ("fc.weight", "fc.weight"),
    ("norm.weight", "norm.weight"),
    ("lm_head.weight", "lm_head.weight"),
    ("embed_tokens.weight", "embed_tokens.weight"),
    ("d2t", "d2t"),
    ("t2d", "t2d"),
)


def _layer(ours: str, theirs: str, *norms: tuple[str, str]) -> Pairs:
    inside = ((part, part) for part in LLAMA_LAYER_NAMES)
    return tuple((f"{ours}.{a}", f"{theirs}.{b}") for a, b in (*norms, *inside))


_EMBEDDING_NORM = ("input_layernorm.weight", "input_layernorm.weight")
_STATE_NORM = ("hidden_norm.weight", "hidden_norm.weight")
_RELEASED_FIRST_LAYER = _layer("layers.0", "midlayer", _EMBEDDING_NORM, _STATE_NORM)

NAMES: dict[str, Pairs] = {
    VLLM: (
        *_AROUND_THE_LAYERS,
        *_RELEASED_FIRST_LAYER,
        *_layer("layers.{i}", "layers.{i}", _EMBEDDING_NORM),
    ),
    SPECULATORS: (
        *_AROUND_THE_LAYERS,
        *_layer("layers.0", "layers.0", _EMBEDDING_NORM, _STATE_NORM),
        *_layer("layers.{i}", "layers.{i}", _EMBEDDING_NORM),
    ),
    SGLANG: (
        *_AROUND_THE_LAYERS,
        *_RELEASED_FIRST_LAYER,
        # SGLang's later layers norm what they read with `hidden_norm`; their `input_layernorm`
        # would be loaded and never used.
        *_layer("layers.{i}", "layers.{i}", ("input_layernorm.weight", "hidden_norm.weight")),
    ),
}

# Other spellings of the same things in checkpoints that people have: (found, as in the tables).
_SPELLINGS = (
    (re.compile(r"^model\."), ""),
    (re.compile(r"^midlayer\."), "layers.0."),
    (re.compile(r"^aux_norm_low\."), "fc_norm.0."),
    (re.compile(r"^aux_norm_mid\."), "fc_norm.1."),
    (re.compile(r"^aux_norm_high\."), "fc_norm.2."),
)

# Computed from the config by everybody; old checkpoints carry it along.
_IGNORED = re.compile(r"(^|\.)rotary_emb\.inv_freq$")

_NUMBERS = {"{a}": r"(\d+)", "{i}": r"([1-9]\d*)"}


def to_form(name: str, form: str) -> str:
    """paceline's tensor name -> the server's."""
    for ours, theirs in NAMES[form]:
        if (found := _match(ours, name)) is not None:
            return _fill(theirs, found)
    raise ExportError(f"tensor {name!r} has no name in the {form} form")


def from_form(name: str, form: str) -> str | None:
    """A checkpoint's tensor name -> paceline's; None for a tensor that the form does not have."""
    wanted = _canonical(name)
    for ours, theirs in NAMES[form]:
        if (found := _match(_canonical(theirs), wanted)) is not None:
            return _fill(ours, found)
    return None


def is_ignored(name: str) -> bool:
    return _IGNORED.search(name) is not None


def _canonical(name: str) -> str:
    for pattern, replacement in _SPELLINGS:
        name = pattern.sub(replacement, name)
    return name


def _match(template: str, name: str) -> str | None:
    """The number at a template's placeholder ("" where it has none), None where it differs."""
    pattern = re.escape(template)
    for placeholder, number in _NUMBERS.items():
        pattern = pattern.replace(re.escape(placeholder), number)
    found = re.fullmatch(pattern, name)
    return None if found is None else "".join(found.groups())


def _fill(template: str, number: str) -> str:
    return re.sub(r"\{[ai]\}", number, template)
