"""Rotary positions, by transformers' own scaling rules, for any positions at any step."""

from collections.abc import Callable
from typing import Self

import torch
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from paceline.draft.config import DraftConfig


def llama_config(config: DraftConfig) -> LlamaConfig:
    """The draft as a transformers config, rope in the spelling that this transformers reads."""
    rope = dict(config.rope)
    common = {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "num_hidden_layers": config.num_layers,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "hidden_act": config.hidden_act,
        "tie_word_embeddings": False,
    }
    if hasattr(LlamaConfig(), "rope_parameters"):
        return LlamaConfig(**common, rope_parameters=rope)
    theta = rope.pop("rope_theta")
    scaling = rope if rope.get("rope_type", "default") != "default" else None
    return LlamaConfig(**common, rope_theta=theta, rope_scaling=scaling)


class Rotary(nn.Module):
    """cos and sin for given positions, for the half-split rotation of llama (`ops.heads`)."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        source = LlamaRotaryEmbedding(llama_config(config))
        self.scaling: float = source.attention_scaling
        self.register_buffer("inv_freq", source.inv_freq.float().clone(), persistent=False)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Moves between devices; frequencies stay float32, whatever dtype the weights get: rounded
        to bfloat16 they would turn a key a thousand positions away by most of a radian."""
        exact = self.inv_freq
        super()._apply(fn, recurse)
        self.inv_freq = exact.to(self.inv_freq.device)
        return self

    def forward(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """positions [R] -> cos, sin [R, K / 2]."""
        angles = positions.float()[:, None] * self.inv_freq
        cos, sin = angles.cos(), angles.sin()
        if self.scaling != 1.0:
            cos, sin = cos * self.scaling, sin * self.scaling
        return cos.to(dtype), sin.to(dtype)
