"""What each server can carry, from which release on; what it cannot is refused by name.

Versions are the lowest release whose own source was read and does it (docs/export.md lists them);
a server below them either fails or, worse, skips the tensors without a word.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from paceline.draft.config import SCALING_KEYS, DraftConfig
from paceline.draft.rope import Rotary
from paceline.errors import ExportError
from paceline.forms.names import SGLANG, SPECULATORS, VLLM


@dataclass(frozen=True)
class Feature:
    """Something that a draft may have and a server may lack."""

    description: str
    used: Callable[[DraftConfig, int], bool]  # (draft, number of the target's layers)


@dataclass(frozen=True)
class Form:
    """A way to write a draft. lowest: the oldest server release that was looked at; carries: for
    each feature the lowest release that does it, None where none does."""

    name: str
    server: str
    lowest: str
    layer_convention: str
    carries: Mapping[str, str | None]


def _starts_elsewhere(config: DraftConfig, _: int) -> bool:
    """A list that does not start at k = 2, as the default layers do.

    SGLang adds 1 to the ids of a config, but for some targets (DeepSeek, Kimi, GLM) only if the
    first id is 1: only a list that starts there means the same everywhere.
    """
    return config.aux_layers[0] != 2


def _scales_by_itself(config: DraftConfig, _: int) -> bool:
    """Yarn whose cos and sin are not scaled by the usual rule of its factor. A server that passes
    over the keys that say so multiplies every attention score of the draft by a constant."""
    rope = config.rope
    if rope.get("rope_type") != "yarn":
        return False
    if rope.get("attn_factor") is not None:
        return True  # which some servers read, and training did not
    return not math.isclose(Rotary(config).scaling, 0.1 * math.log(max(rope["factor"], 1.0)) + 1.0)


FEATURES: dict[str, Feature] = {
    "aux_norm: rms": Feature(
        "an RMSNorm on each auxiliary state before fc", lambda c, _: c.aux_norm == "rms"
    ),
    "aux_norm: joint": Feature(
        "one RMSNorm over all auxiliary states before fc", lambda c, _: c.aux_norm == "joint"
    ),
    "aux_norm: static": Feature(
        "a fixed scale on each auxiliary state (folded into fc)",
        lambda c, _: c.aux_norm == "static",
    ),
    "aux_norm: none": Feature("no norm before fc", lambda c, _: c.aux_norm == "none"),
    "num_aux": Feature(
        "another number of auxiliary states than three", lambda c, _: c.num_aux != 3
    ),
    "num_layers": Feature("more than one decoder layer", lambda c, _: c.num_layers > 1),
    "qk_norm": Feature("norms on queries and keys", lambda c, _: c.qk_norm),
    "norm_output": Feature("the normed state fed to the next step", lambda c, _: c.norm_output),
    "norm_before_residual": Feature(
        "a first layer whose residual is the normed state", lambda c, _: c.norm_before_residual
    ),
    "first_layer": Feature(
        "the embedding output (k = 0) as an auxiliary state", lambda c, _: 0 in c.aux_layers
    ),
    "last_layer": Feature(
        "the last layer's output (k = n) as an auxiliary state", lambda c, n: n in c.aux_layers
    ),
    "layer_list": Feature(
        "auxiliary layers that do not start at k = 2, as the default ones do", _starts_elsewhere
    ),
    "own_embedding": Feature(
        "another width than the target's, with an embedding of its own",
        lambda c, _: not c.shares_embedding,
    ),
    "square_fc": Feature(
        "the width of all auxiliary states together (SGLang then leaves fc out)",
        lambda c, _: c.hidden_size == c.num_aux * c.target_hidden_size,
    ),
    "hidden_act": Feature("another activation than silu", lambda c, _: c.hidden_act != "silu"),
    "rope_type": Feature(
        "a rotary scaling that servers compute otherwise than training did",
        lambda c, _: c.rope.get("rope_type", "default") not in SCALING_KEYS,
    ),
    "yarn_scale": Feature(
        "yarn with a scale of its own (mscale and mscale_all_dim, or attention_factor)",
        _scales_by_itself,
    ),
    "yarn_truncate": Feature(
        "yarn whose correction range is not rounded (truncate: false, as gpt-oss has it)",
        lambda c, _: c.rope.get("rope_type") == "yarn" and c.rope.get("truncate") is False,
    ),
}

_VLLM = {
    "aux_norm: rms": "0.22",
    "aux_norm: joint": "0.18",
    "aux_norm: static": "0.16",
    "aux_norm: none": "0.16",
    "num_aux": "0.22",
    "num_layers": "0.16",
    "qk_norm": "0.24",
    "norm_output": "0.22",
    "norm_before_residual": "0.16",
    "first_layer": "0.18",
    "last_layer": "0.18",
    "layer_list": "0.16",
    "own_embedding": "0.16",
    "square_fc": "0.16",
    "hidden_act": None,
    "rope_type": None,
    # 0.16.0 was run and is wrong; 0.25.0 still is, by public reports. 0.32.0 was run and is right.
    "yarn_scale": "0.32",
    "yarn_truncate": "0.16",
}

FORMS: dict[str, Form] = {
    VLLM: Form(VLLM, "vLLM", "0.16", "vllm", _VLLM),
    # Read by vLLM too, through the nested config; ids are vLLM's.
    SPECULATORS: Form(SPECULATORS, "vLLM (speculators form)", "0.16", "vllm", _VLLM),
    SGLANG: Form(
        SGLANG,
        "SGLang",
        "0.5.6",
        "sglang",
        {
            "aux_norm: rms": "0.5.12",
            "aux_norm: joint": "0.5.23",
            "aux_norm: static": "0.5.6",
            "aux_norm: none": "0.5.6",
            "num_aux": "0.5.12",
            "num_layers": "0.5.12",
            "qk_norm": None,
            "norm_output": "0.5.12",
            "norm_before_residual": None,
            "first_layer": None,
            "last_layer": None,
            "layer_list": None,
            "own_embedding": "0.5.6",
            "square_fc": None,
            "hidden_act": None,
            "rope_type": None,
            "yarn_scale": None,
            # 0.5.6 passes over the key and rounds: other frequencies than in training.
            "yarn_truncate": "0.5.11",
        },
    ),
}


@dataclass(frozen=True)
class Carried:
    """version: the lowest release that runs a draft as trained; needs: what each feature asks."""

    version: str
    needs: dict[str, str]


def check_carried(
    form: Form, config: DraftConfig, num_layers: int, at_most: str | None = None
) -> Carried:
    """What the form's server must be to run this draft as it was trained.

    num_layers: the target's. at_most: the release that is to serve it. Raises ExportError that
    names the server and every feature that it (or that release of it) lacks.
    """
    used = [name for name, feature in FEATURES.items() if feature.used(config, num_layers)]
    lacking = [_described(name) for name in used if form.carries[name] is None]
    if lacking:
        raise ExportError(
            f"{form.server} carries no draft with {'; '.join(lacking)}. "
            "Export for another server, or train a draft without it."
        )
    needs = {name: version for name in used if (version := form.carries[name])}
    late = [
        f"{_described(name)} needs {version}"
        for name, version in needs.items()
        if at_most is not None and _order(version) > _order(at_most)
    ]
    if late:
        raise ExportError(
            f"{form.server} {at_most} cannot carry this draft: {'; '.join(late)}. "
            "Use a newer server, export for another one, or train a draft without it."
        )
    return Carried(max((form.lowest, *needs.values()), key=_order), needs)


def _described(name: str) -> str:
    return f"{name} ({FEATURES[name].description})"


def _order(version: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in version.split("."))
    except ValueError:
        raise ExportError(f"server version {version!r}: write numbers such as 0.22.1") from None
