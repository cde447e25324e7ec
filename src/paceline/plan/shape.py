"""How many weights a target has and how many of them a token meets: from its config alone.

Legend: D hidden width, V logit width, H / G query / key heads, K head width.
"""

from dataclasses import dataclass
from typing import Any

import torch

from paceline.draft.from_target import Config, dense_width, values_of
from paceline.errors import TargetError
from paceline.target.identity import read_json
from paceline.target.spec import Target

# Spellings of one thing by family.
_NUM_EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts")
_EXPERTS_PER_TOKEN = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "top_k_experts",
    "moe_topk",
)
_EXPERT_WIDTHS = ("moe_intermediate_size", "expert_ffn_hidden_size")
_DENSE_FIRST = ("first_k_dense_replace",)
_EIGHT_BIT_METHODS = ("fp8", "fbgemm_fp8")


@dataclass(frozen=True)
class TargetShape:
    """layer_weights: weights of all decoder layers; active_weights: those that one token meets;
    expert_weights: those of routed experts (0 where dense). embedding_weights: embedding and head.
    weight_bytes: of the checkpoint. attention_width: H * K, for the cost of attention itself.
    """

    text_config: Config
    num_layers: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    layer_weights: int
    active_weights: int
    expert_weights: int
    embedding_weights: int
    attention_width: int
    dtype: str
    weight_bytes: int

    @property
    def num_weights(self) -> int:
        return self.layer_weights + self.embedding_weights

    def token_flops(self, mean_context: float, with_head: bool = False) -> float:
        """Floating-point operations of one token's forward pass, attention over a mean context
        included; the head only where logits are made."""
        attention = 4.0 * self.num_layers * self.attention_width * mean_context
        head = 2.0 * self.vocab_size * self.hidden_size if with_head else 0.0
        return 2.0 * self.active_weights + attention + head


def shape_of(target: Target) -> TargetShape:
    """The shape of a target of which at least `config.json` is there.

    Raises TargetError where the config lacks a width or a count.
    """
    config = _text_config(target)
    values = values_of(config)
    missing = [n for n in ("num_hidden_layers", "hidden_size", "vocab_size") if not values.get(n)]
    if missing:
        raise TargetError(f"{target.folder}: config.json says no {', '.join(missing)}")
    dense, experts, active_experts = _mlp_weights(values)
    attention, width = _attention_weights(values)
    layers, hidden = values["num_hidden_layers"], values["hidden_size"]
    shared = layers * (attention + 2 * hidden) + dense + hidden
    tied = bool(values.get("tie_word_embeddings"))
    embedding = values["vocab_size"] * hidden * (1 if tied else 2)
    dtype = _dtype(target, values)
    return TargetShape(
        text_config=config,
        num_layers=layers,
        hidden_size=hidden,
        intermediate_size=dense_width(values),
        vocab_size=values["vocab_size"],
        layer_weights=shared + experts,
        active_weights=shared + active_experts,
        expert_weights=experts,
        embedding_weights=embedding,
        attention_width=width,
        dtype=dtype,
        weight_bytes=_weight_bytes(target, shared + embedding, experts, dtype),
    )


def _text_config(target: Target) -> Config:
    """transformers' own reading, with its defaults; where it cannot read the config (its code is
    not at hand, or it does not know the model), the JSON itself."""
    try:
        return target.text_config
    except (TargetError, ImportError):
        values = _config_json(target)
        return _Json(values.get("text_config", values))


def _config_json(target: Target) -> dict[str, Any]:
    return read_json(target.folder / "config.json")


@dataclass(frozen=True)
class _Json:
    """A config that transformers does not read, as far as it is needed: its values."""

    values: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        return dict(self.values)


def _attention_weights(values: dict[str, Any]) -> tuple[int, int]:
    """Weights of one attention, and the width that its scores and mixing run over."""
    hidden, heads = values["hidden_size"], values["num_attention_heads"]
    if latent := values.get("kv_lora_rank"):
        rope, plain = values["qk_rope_head_dim"], values["qk_nope_head_dim"]
        value = values["v_head_dim"]
        queries = heads * (plain + rope)
        rank = values.get("q_lora_rank")
        project = hidden * rank + rank * queries if rank else hidden * queries
        keys = hidden * (latent + rope) + latent * heads * (plain + value)
        return project + keys + heads * value * hidden, heads * (plain + rope + value) // 2
    head_dim = values.get("head_dim") or hidden // heads
    key_width = (values.get("num_key_value_heads") or heads) * head_dim
    return 2 * hidden * heads * head_dim + 2 * hidden * key_width, heads * head_dim


def _mlp_weights(values: dict[str, Any]) -> tuple[int, int, int]:
    """(weights that every token meets, weights of routed experts, those of them that one token
    meets), over all layers."""
    hidden, layers = values["hidden_size"], values["num_hidden_layers"]
    wide = dense_width(values)
    num_experts = _first(values, _NUM_EXPERTS)
    if not num_experts:
        return layers * 3 * hidden * wide, 0, 0
    width = _first(values, _EXPERT_WIDTHS) or wide
    num_dense = _first(values, _DENSE_FIRST) or len(values.get("mlp_only_layers") or ())
    num_sparse = layers - num_dense
    shared_width = values.get("shared_expert_intermediate_size") or (
        (values.get("n_shared_experts") or 0) * width
    )
    router = hidden * num_experts
    always = num_dense * 3 * hidden * wide + num_sparse * (router + 3 * hidden * shared_width)
    expert = 3 * hidden * width
    chosen = _first(values, _EXPERTS_PER_TOKEN) or num_experts
    return always, num_sparse * num_experts * expert, num_sparse * chosen * expert


def _weight_bytes(target: Target, plain: int, experts: int, dtype: str) -> int:
    """Of the checkpoint's files where they are there, else by the config."""
    if found := target.weights.total_bytes:
        return found
    item = getattr(torch, dtype).itemsize
    bits = _quantised_bits(_config_json(target))
    if bits is None:
        return (plain + experts) * item
    # Quantised mixtures keep all but their routed experts as they were; a scale per 32 weights.
    small = bits / 8 + 2 / 32
    return round(plain * item + experts * small) if experts else round(plain * small)


def _quantised_bits(config: dict[str, Any]) -> int | None:
    text = config.get("text_config") or {}
    found = config.get("quantization_config") or text.get("quantization_config")
    if not found:
        return None
    if found.get("quant_method") in _EIGHT_BIT_METHODS:
        return 8
    groups = found.get("config_groups") or {}
    for group in groups.values():
        if bits := (group.get("weights") or {}).get("num_bits"):
            return bits
    return found.get("bits") or found.get("num_bits")


def _dtype(target: Target, text_values: dict[str, Any]) -> str:
    whole = _config_json(target)
    for place in (whole, text_values):
        for key in ("dtype", "torch_dtype"):
            if place.get(key):
                return str(place[key]).removeprefix("torch.")
    return "float32"


def _first(values: dict[str, Any], names: tuple[str, ...]) -> int:
    return next((values[n] for n in names if isinstance(values.get(n), int)), 0)
