"""A draft's shape as a server's `config.json`, and back: one place for every field.

The reading side takes a field as the server takes it where it is missing, and refuses what a
paceline draft cannot be, all problems in one error.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.draft.config import SCALING_KEYS, DraftConfig
from paceline.errors import ExportError
from paceline.forms.layer_ids import NESTED, read_layer_ids, write_layer_ids
from paceline.forms.names import SGLANG, SPECULATORS
from paceline.forms.rope import both_spellings, read_rope, same_rope
from paceline.target.spec import Target

MARK = "paceline"  # who wrote a config, in which form, and what became of the embedding
SHARED, COPIED, OWN = "shared", "copied", "own"
LAYER_CONFIG = "transformer_layer_config"
_SPECULATORS_VERSION = "0.9.0"  # the release of that library whose fields these are

# What LlamaConfig takes where a checkpoint says nothing, and so what its servers take.
_LLAMA_DEFAULTS = {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048, "hidden_act": "silu"}
_ORIGINAL = "original_max_position_embeddings"
_NEEDED = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")

# Fields that mean another arithmetic than a paceline draft's: the only value that can be read.
_FIXED = {
    "attention_bias": False,
    "mlp_bias": False,
    "bias": False,
    "qkv_bias": False,
    "logit_scale": 1.0,
    "partial_rotary_factor": 1.0,
    "use_sliding_window": False,
    "parallel_drafting": False,
}


@dataclass(frozen=True)
class Serving:
    """What a config says besides the draft's shape. dtype: its name. copies_embedding: the
    target's embedding is in the checkpoint too. The rest is read in the speculators form alone."""

    dtype: str
    copies_embedding: bool = False
    target_name: str = ""
    target_architectures: tuple[str, ...] = ()
    num_speculative_tokens: int = 1


def write_config(
    config: DraftConfig, form: str, num_layers: int, serving: Serving
) -> dict[str, Any]:
    """`config.json` of a draft in a form. num_layers: the target's. A `static` norm must have
    been folded already. Raises LayerError for layers that the form's convention cannot say."""
    layer = _layer_config(config, serving.dtype)
    draft = {
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        **_flags(config),
        **write_layer_ids(config.aux_layers, form, num_layers),
    }
    mark = {MARK: {"form": form, "embedding": _embedding(config, serving)}}
    if form != SPECULATORS:
        llama_name = "LlamaForCausalLMEagle3"
        name = "Eagle3Qwen3ForCausalLM" if config.qk_norm else llama_name
        return {"architectures": [name], **layer, **draft, **mark}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": _SPECULATORS_VERSION,
        "tie_word_embeddings": False,
        "dtype": serving.dtype,
        "torch_dtype": serving.dtype,
        **draft,
        # vLLM 0.22 to 0.24 copies not all flags from the top level, but everything in here.
        LAYER_CONFIG: {**layer, **_flags(config)},
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": serving.num_speculative_tokens,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {
                "name_or_path": serving.target_name,
                "architectures": list(serving.target_architectures),
            },
        },
        **mark,
    }


def _embedding(config: DraftConfig, serving: Serving) -> str:
    if not config.shares_embedding:
        return OWN
    return COPIED if serving.copies_embedding else SHARED


def _layer_config(config: DraftConfig, dtype: str) -> dict[str, Any]:
    return {
        "model_type": "qwen3" if config.qk_norm else "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": config.hidden_act,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
        "attention_bias": False,
        "mlp_bias": False,
        # SGLang would take the embedding for the head, whatever the target does.
        "tie_word_embeddings": False,
        "dtype": dtype,
        "torch_dtype": dtype,
        **both_spellings(config.rope),
    }


def _flags(config: DraftConfig) -> dict[str, Any]:
    flags: dict[str, Any] = {
        # False by default in one form and true in the other: always said.
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.aux_norm == "joint",
        "fc_norm": config.aux_norm == "rms",
        "norm_output": config.norm_output,
    }
    if config.num_aux != 3:
        flags["num_aux_hidden_states"] = config.num_aux
    return flags


def form_of(values: Mapping[str, Any]) -> str | None:
    """The form that a config is in; None where it does not say which server it is for."""
    if values.get("speculators_model_type"):
        return SPECULATORS
    mark = values.get(MARK)
    return mark.get("form") if isinstance(mark, Mapping) else None


def read_config(values: Mapping[str, Any], form: str | None, target: Target) -> DraftConfig:
    """The draft that a server would run from a `config.json`.

    Raises ExportError with every field that is missing, does not fit the target, or asks for
    arithmetic that a paceline draft does not have.
    """
    body = values.get(LAYER_CONFIG) if form == SPECULATORS else values
    if not isinstance(body, Mapping):
        raise ExportError(f"config.json has no {LAYER_CONFIG}: it is not in the speculators form")
    # Of the speculators form vLLM sees the layer's config with some fields of the top level.
    unseen = (NESTED,) if form == SPECULATORS else ()
    said = {key: v for key, v in values.items() if v is not None and key not in unseen}
    merged = {**body, **said}
    if missing := [name for name in _NEEDED if not body.get(name)]:
        raise ExportError(f"config.json has no {', '.join(missing)}")
    problems = _unlike_a_draft(body, merged, form)
    if form == SPECULATORS:
        problems += _flags_at_one_level(body, values)
    for name, wanted in (
        ("vocab_size", target.vocab_size),
        ("target_hidden_size", target.hidden_size),
    ):
        found = merged.get(name) or body["hidden_size"]
        if found != wanted:
            problems.append(f"{name} is {found}, the target's is {wanted}")
    if problems:
        raise ExportError("config.json cannot be used: " + "; ".join(problems))
    config = _draft_config(body, merged, form, target)
    spellings = read_rope(body)
    if config.rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ExportError("partial_rotary_factor is not 1: a paceline draft rotates whole heads")
    reads_original = _ORIGINAL in SCALING_KEYS.get(config.rope["rope_type"], ())
    original = body.get(_ORIGINAL)
    if reads_original and original not in (None, config.rope.get(_ORIGINAL)):
        raise ExportError(
            f"{_ORIGINAL} is {original}, but {config.rope.get(_ORIGINAL)} among the rotary "
            "parameters: transformers 5, SGLang and vLLM on it take the former, others the latter"
        )
    if not all(same_rope(config, spelling, config.rope) for spelling in spellings):
        raise ExportError(
            f"rope_parameters and rope_theta / rope_scaling do not agree: {spellings[0]} against "
            f"{spellings[-1]}. A server reads one or the other; correct the wrong one."
        )
    return config


def _draft_config(
    body: Mapping[str, Any], merged: Mapping[str, Any], form: str | None, target: Target
) -> DraftConfig:
    heads = body["num_attention_heads"]
    aux_layers = read_layer_ids(merged, form, target.num_layers)
    return DraftConfig(
        hidden_size=body["hidden_size"],
        intermediate_size=body["intermediate_size"],
        num_attention_heads=heads,
        num_key_value_heads=body.get("num_key_value_heads") or heads,
        head_dim=body.get("head_dim") or body["hidden_size"] // heads,
        num_layers=body.get("num_hidden_layers", 1),
        target_hidden_size=target.hidden_size,
        vocab_size=body["vocab_size"],
        draft_vocab_size=merged.get("draft_vocab_size") or body["vocab_size"],
        aux_layers=aux_layers,
        rms_norm_eps=body.get("rms_norm_eps", _LLAMA_DEFAULTS["rms_norm_eps"]),
        max_position_embeddings=body.get(
            "max_position_embeddings", _LLAMA_DEFAULTS["max_position_embeddings"]
        ),
        rope=read_rope(body)[0],
        hidden_act=body.get("hidden_act", _LLAMA_DEFAULTS["hidden_act"]),
        qk_norm=_is_qwen3(body, merged, form),
        aux_norm=_aux_norm(merged),
        norm_output=bool(merged.get("norm_output")),
        norm_before_residual=bool(merged.get("norm_before_residual")),
    )


def _unlike_a_draft(
    body: Mapping[str, Any], merged: Mapping[str, Any], form: str | None
) -> list[str]:
    problems = [
        f"{name} is {merged[name]!r}; only {only!r} can be read"
        for name, only in _FIXED.items()
        if merged.get(name) not in (None, only)
    ]
    nested = merged.get(NESTED) or {}
    if nested.get("use_aux_hidden_state") is False:
        problems.append(f"{NESTED}.use_aux_hidden_state is false: this is no EAGLE-3 draft")
    if "sliding_attention" in (body.get("layer_types") or ()):
        problems.append("layer_types has sliding_attention; a paceline draft attends to all rows")
    if form == SGLANG and body.get("tie_word_embeddings"):
        problems.append("tie_word_embeddings is true: SGLang then takes the embedding for the head")
    if form == SGLANG and merged.get("norm_before_residual"):
        problems.append("norm_before_residual is true; SGLang does not read it")
    if form == SPECULATORS and merged.get("norm_before_residual") is None:
        problems.append(
            "norm_before_residual is missing: vLLM takes true then, the speculators library false"
        )
    if _has_fc_norm(merged) and _has_joint_norm(merged):
        problems.append("fc_norm and norm_before_fc are both true; a draft has one norm before fc")
    return problems


def _flags_at_one_level(body: Mapping[str, Any], top: Mapping[str, Any]) -> list[str]:
    """vLLM 0.32 takes the flags of the speculators form from the top level, false where they are
    missing; 0.22 to 0.24 some of them from the layer's config."""
    return [
        f"{name} is {body[name]} in {LAYER_CONFIG} and {top.get(name, 'missing')} at the top "
        "level: releases of vLLM read one or the other"
        for name in ("norm_before_fc", "fc_norm", "norm_output")
        if name in body and bool(body[name]) != bool(top.get(name))
    ]


def _is_qwen3(body: Mapping[str, Any], merged: Mapping[str, Any], form: str | None) -> bool:
    """Servers choose the class by its name; in the speculators form vLLM names it by model type."""
    if form != SPECULATORS:
        for name in merged.get("architectures") or ():
            if "Qwen3" in name or "Llama" in name:
                return "Qwen3" in name
    return body.get("model_type") == "qwen3"


def _has_fc_norm(merged: Mapping[str, Any]) -> bool:
    return bool(merged.get("fc_norm") or merged.get("use_aux_norm"))


def _has_joint_norm(merged: Mapping[str, Any]) -> bool:
    nested = merged.get(NESTED) or {}
    return bool(nested.get("norm_before_fc", merged.get("norm_before_fc", False)))


def _aux_norm(merged: Mapping[str, Any]) -> str:
    if _has_fc_norm(merged):
        return "rms"
    return "joint" if _has_joint_norm(merged) else "none"
