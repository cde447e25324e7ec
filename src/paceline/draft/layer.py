"""The arithmetic of one decoder layer over rows, with its weights laid out for it.

A norm's gain in front of q, k and v is multiplied into their weights, and the first layer's weights
are split into the half that reads the token's embedding and the half that reads the state: the
token's half is the same at every step that reads the token, so it is computed once, and a frozen
embedding needs no gradient. Legend: R rows, E draft width, H / G query / key heads, K head width.
"""

import torch
from transformers.activations import ACT2FN

from paceline.draft.model import DraftLayer, RMSNorm
from paceline.ops.attention import RowSpans, rows_attention
from paceline.ops.gain import with_gains
from paceline.ops.heads import rotated_heads
from paceline.ops.norm import normed_linear, rms_norm
from paceline.ops.shared import Shared, linear
from paceline.ops.swiglu import add_swiglu


class LayerArithmetic:
    """A layer's weights as its products read them; made anew once the weights have moved.

    `all_heads`, `queries`, `keys_values`: slices of the rows of the joint q, k, v weight
    [(H + 2G) K, E].
    """

    def __init__(self, layer: DraftLayer) -> None:
        attention = layer.self_attn
        self._layer, self._eps = layer, layer.post_attention_layernorm.eps
        self._act, self._is_silu = ACT2FN[layer.mlp.hidden_act], layer.mlp.hidden_act == "silu"
        width = attention.num_heads * attention.head_dim
        self.all_heads, self.queries = slice(None), slice(width)
        self.keys_values = slice(width, None)
        weights = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
        norms = [norm for norm in (layer.input_layernorm, layer.hidden_norm) if norm is not None]
        gains = [norm.weight.to(weights[0].dtype) for norm in norms]
        *token, state = (Shared(block) for block in with_gains(weights, gains))
        self._token, self._state = token[0] if token else None, state
        self._out = Shared(attention.o_proj.weight)
        self._gate, self._up = Shared(layer.mlp.gate_proj.weight), Shared(layer.mlp.up_proj.weight)
        self._down = Shared(layer.mlp.down_proj.weight)

    def token_part(self, embedding_RE: torch.Tensor, part: slice) -> torch.Tensor:
        """What the embeddings add to a part of the heads, before rotation."""
        return linear(rms_norm(embedding_RE, None, self._eps), self._token.part(part))

    def heads(
        self,
        state_RE: torch.Tensor,
        part: slice,
        cos: torch.Tensor,
        sin: torch.Tensor,
        token_part: torch.Tensor | None = None,
        shared: Shared | None = None,
        source: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(a part of the heads [R, n, K], queries and keys rotated; the state, to read on from).
        What the tokens add is `token_part`, row by row, or `shared[source]`."""
        product, state_RE = normed_linear(state_RE, self._state.part(part), self._eps, token_part)
        return self._rotated(product, part, cos, sin, shared, source), state_RE

    def _rotated(
        self,
        product: torch.Tensor,
        part: slice,
        cos: torch.Tensor,
        sin: torch.Tensor,
        shared: Shared | None,
        source: torch.Tensor | None,
    ) -> torch.Tensor:
        attention = self._layer.self_attn
        num_queries = 0 if part == self.keys_values else attention.num_heads
        num_keys = 0 if part == self.queries else attention.num_groups
        num_rotated = num_queries + num_keys
        if attention.q_norm is None:
            return rotated_heads(product, cos, sin, num_rotated, shared, source)
        heads = rotated_heads(product, cos, sin, 0, shared, source)
        q, k, rest = heads.split([num_queries, num_keys, heads.shape[1] - num_rotated], 1)
        normed = torch.cat([attention.q_norm(q), attention.k_norm(k), rest], 1)
        return rotated_heads(normed.flatten(1), cos, sin, num_rotated)

    def finish(
        self,
        state_RE: torch.Tensor,
        q_RHK: torch.Tensor,
        kv_TGK: torch.Tensor,
        own_JRGK: torch.Tensor | None,
        spans: RowSpans,
    ) -> torch.Tensor:
        """Residual stream after attention and MLP, [R, E]."""
        if self._layer.norm_before_residual:
            state_RE = self._layer.hidden_norm(state_RE)
        mixed = rows_attention(q_RHK, kv_TGK, own_JRGK, spans)
        state = linear(mixed.flatten(1), self._out, state_RE)
        norm: RMSNorm = self._layer.post_attention_layernorm
        if self._is_silu:
            weights = self._gate, self._up, self._down
            return add_swiglu(state, norm.weight, norm.eps, *weights)
        normed = norm(state)
        inner = self._act(linear(normed, self._gate)) * linear(normed, self._up)
        return linear(inner, self._down, state)
