"""The weights of an EAGLE-3 draft, its fusion of auxiliary states and its head; the arithmetic of
a layer is in `layer`, steps are in `unroll`.

Legend: R rows, A auxiliary states, D target width, E draft width, H / G query / key heads,
K head width, V target vocabulary, W draft vocabulary.
"""

import torch
from torch import nn
from torch.nn import functional as F

from paceline.draft.config import DraftConfig
from paceline.draft.rope import Rotary
from paceline.ops.norm import rms_norm


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1])
        return rms_norm(flat, self.weight, self.eps).view(x.shape)


class Attention(nn.Module):
    """Projections of one attention."""

    def __init__(self, config: DraftConfig, input_size: int) -> None:
        super().__init__()
        self.num_heads, self.num_groups = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.head_dim
        width, kv_width = self.num_heads * self.head_dim, self.num_groups * self.head_dim
        self.q_proj = nn.Linear(input_size, width, bias=False)
        self.k_proj = nn.Linear(input_size, kv_width, bias=False)
        self.v_proj = nn.Linear(input_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps) if config.qk_norm else None


class MLP(nn.Module):
    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.hidden_act = config.hidden_act


EMBEDDING_NAME = "embed_tokens.weight"
# Names inside a layer that llama-style targets, drafts and servers' checkpoints share.
LLAMA_LAYER_NAMES = (
    "self_attn.q_proj.weight",
    "self_attn.k_proj.weight",
    "self_attn.v_proj.weight",
    "self_attn.o_proj.weight",
    "self_attn.q_norm.weight",
    "self_attn.k_norm.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "mlp.down_proj.weight",
    "post_attention_layernorm.weight",
)


class DraftLayer(nn.Module):
    """One decoder layer. The first reads [norm(embedding), norm(state)]; the residual is the
    un-normed state (the normed one where `norm_before_residual`). Later ones read norm(state), as
    any llama layer."""

    def __init__(self, config: DraftConfig, first: bool) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps) if first else None
        self.self_attn = Attention(config, config.hidden_size * (2 if first else 1))
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)
        self.norm_before_residual = first and config.norm_before_residual


class AuxNorm(nn.Module):
    """The norm in front of `fc`: an RMSNorm, a fixed scale or nothing per auxiliary state, or one
    RMSNorm over all of them."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.kind = config.aux_norm
        if self.kind == "rms":
            self.norms = nn.ModuleList(
                RMSNorm(config.target_hidden_size, config.rms_norm_eps)
                for _ in range(config.num_aux)
            )
        elif self.kind == "joint":
            self.norm = RMSNorm(config.num_aux * config.target_hidden_size, config.rms_norm_eps)
        elif self.kind == "static":
            # Multiplied in; measured on the data, frozen, folded into `fc` at export.
            self.register_buffer("scale", torch.ones(config.num_aux))

    def scaled(self, aux_RAD: torch.Tensor) -> torch.Tensor:
        """The normed states side by side [R, A D], without the trained gain."""
        if self.kind == "rms":
            eps, width = self.norms[0].eps, aux_RAD.shape[-1]
            return rms_norm(aux_RAD.reshape(-1, width), None, eps).view(len(aux_RAD), -1)
        if self.kind == "joint":
            return rms_norm(aux_RAD.flatten(1), None, self.norm.eps)
        if self.kind == "static":
            aux_RAD = aux_RAD * self.scale.to(aux_RAD.dtype)[:, None]
        return aux_RAD.flatten(1)

    def gain(self) -> torch.Tensor | None:
        """The trained gain [A D] that belongs to `scaled`."""
        if self.kind == "rms":
            return torch.cat([norm.weight for norm in self.norms])
        return self.norm.weight if self.kind == "joint" else None


class Draft(nn.Module):
    """An EAGLE-3 draft: fusion of the auxiliary states, decoder layers, own norm and head.

    embed_tokens [V, E] is the target's, frozen, where the widths agree. d2t int64 [W] holds
    offsets: target id = draft id + d2t[draft id]; t2d bool [V] marks the ids it can say.
    """

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.config = config
        width = config.hidden_size
        self.aux_norm = AuxNorm(config)
        self.fc = nn.Linear(config.num_aux * config.target_hidden_size, width, bias=False)
        self.layers = nn.ModuleList(DraftLayer(config, i == 0) for i in range(config.num_layers))
        self.norm = RMSNorm(width, config.rms_norm_eps)
        self.lm_head = nn.Linear(width, config.draft_vocab_size, bias=False)
        self.embed_tokens = nn.Embedding(config.vocab_size, width)
        self.embed_tokens.requires_grad_(not config.shares_embedding)
        self.rotary = Rotary(config)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))

    def fuse(self, aux_RAD: torch.Tensor) -> torch.Tensor:
        """Auxiliary states [R, A, D] -> the state that step 0 starts from, [R, E]."""
        weight, gain = self.fc.weight, self.aux_norm.gain()
        if gain is not None:
            # So the gain gets its gradient out of the weight's; no product makes one of the states.
            weight = weight * gain.to(weight.dtype)
        return F.linear(self.aux_norm.scaled(aux_RAD.to(weight.dtype)), weight)

    def embed(self, ids_R: torch.Tensor) -> torch.Tensor:
        """Embeddings [R, E] in the dtype of the arithmetic, whatever they are kept in."""
        return self.embed_tokens(ids_R).to(self.fc.weight.dtype)

    def logits(self, state_RE: torch.Tensor) -> torch.Tensor:
        """Residual stream -> logits over the draft vocabulary [R, W]."""
        return self.lm_head(self.norm(state_RE))

    def target_ids(self, draft_ids: torch.Tensor) -> torch.Tensor:
        return draft_ids + self.d2t[draft_ids]

    def propose(self, state_RE: torch.Tensor) -> torch.Tensor:
        """The greedy next token of each row, as target ids int64 [R]."""
        return self.target_ids(self.logits(state_RE).argmax(-1))
