"""The training-time test written the obvious way, in float64: all rows, dense masks, one document
at a time, whole [rows, vocabulary] tensors. Plain weights only; imports nothing of paceline."""

from dataclasses import dataclass

import torch
from torch.nn import functional as F


@dataclass
class Shape:
    heads: int
    groups: int
    head_dim: int
    eps: float
    theta: float
    num_layers: int = 1
    qk_norm: bool = False
    aux_norm: str = "rms"
    norm_output: bool = False
    norm_before_residual: bool = False
    hidden_act: str = "silu"


@dataclass
class Doc:
    ids: torch.Tensor  # [T]
    mask: torch.Tensor  # bool [T]
    aux: torch.Tensor  # [T, A, D]
    last: torch.Tensor  # [T, D], all rows


def rms(x, weight, eps):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def rope(x, positions, theta):
    """x [T, heads, K]."""
    half = x.shape[-1] // 2
    inv = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = positions.double()[:, None] * inv
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


def states_of_steps(w, shape, doc, embedding, steps, read=None):
    """Residual streams of every step for every row, [T, E] each. read(step, p) -> token id that row
    p reads at a step (default: the true token, 0 past the end)."""
    T = len(doc.ids)
    read = read or (lambda j, p: int(doc.ids[p + 1 + j]) if p + 1 + j < T else 0)
    parts = []
    for a in range(doc.aux.shape[1]):
        x = doc.aux[:, a]
        if shape.aux_norm == "rms":
            x = rms(x, w[f"aux_norm.norms.{a}.weight"], shape.eps)
        elif shape.aux_norm == "static":
            x = x * w["aux_norm.scale"][a]
        parts.append(x)
    joined = torch.cat(parts, -1)
    if shape.aux_norm == "joint":
        joined = rms(joined, w["aux_norm.norm.weight"], shape.eps)
    fused = joined @ w["fc.weight"].T
    keys = [[] for _ in range(shape.num_layers)]
    values = [[] for _ in range(shape.num_layers)]
    state, states = fused, []
    positions = torch.arange(T)
    causal = torch.tril(torch.ones(T, T, dtype=torch.bool))
    diagonal = torch.eye(T, dtype=torch.bool)
    for j in range(steps):
        emb = embedding[torch.tensor([read(j, p) for p in range(T)])]
        x = state
        for layer in range(shape.num_layers):
            pre = f"layers.{layer}."
            if layer == 0:
                z = torch.cat(
                    [
                        rms(emb, w[pre + "input_layernorm.weight"], shape.eps),
                        rms(x, w[pre + "hidden_norm.weight"], shape.eps),
                    ],
                    -1,
                )
                if shape.norm_before_residual:
                    x = rms(x, w[pre + "hidden_norm.weight"], shape.eps)
            else:
                z = rms(x, w[pre + "input_layernorm.weight"], shape.eps)
            attn = pre + "self_attn."
            q = (z @ w[attn + "q_proj.weight"].T).view(T, shape.heads, shape.head_dim)
            k = (z @ w[attn + "k_proj.weight"].T).view(T, shape.groups, shape.head_dim)
            v = (z @ w[attn + "v_proj.weight"].T).view(T, shape.groups, shape.head_dim)
            if shape.qk_norm:
                q = rms(q, w[attn + "q_norm.weight"], shape.eps)
                k = rms(k, w[attn + "k_norm.weight"], shape.eps)
            q, k = (rope(t, positions + j, shape.theta) for t in (q, k))
            keys[layer].append(k)
            values[layer].append(v)
            repeat = shape.heads // shape.groups
            all_k = torch.cat(keys[layer]).repeat_interleave(repeat, 1)
            all_v = torch.cat(values[layer]).repeat_interleave(repeat, 1)
            allowed = torch.cat([causal] + [diagonal] * j, 1)
            scores = torch.einsum("phd,khd->hpk", q, all_k) / shape.head_dim**0.5
            scores = scores.masked_fill(~allowed, float("-inf"))
            mixed = torch.einsum("hpk,khd->phd", scores.softmax(-1), all_v).reshape(T, -1)
            x = x + mixed @ w[attn + "o_proj.weight"].T
            y = rms(x, w[pre + "post_attention_layernorm.weight"], shape.eps)
            gate = getattr(F, shape.hidden_act)(y @ w[pre + "mlp.gate_proj.weight"].T)
            up = y @ w[pre + "mlp.up_proj.weight"].T
            x = x + (gate * up) @ w[pre + "mlp.down_proj.weight"].T
        states.append(x)
        state = rms(x, w["norm.weight"], shape.eps) if shape.norm_output else x
    return states


def logits_of(w, shape, state):
    return rms(state, w["norm.weight"], shape.eps) @ w["lm_head.weight"].T


def supervised(mask, p, j):
    """All of p+1 .. p+1+j are supervised."""
    return p + 1 + j < len(mask) and all(bool(mask[p + 1 + i]) for i in range(j + 1))


def row_loss(kind, log_p, log_q, said):
    """One row's loss: log_p over the target's vocabulary, log_q over the draft's, whose target ids
    are `said`. What the draft cannot say counts as rejected."""
    p, q = log_p[said].exp(), log_q.exp()
    renormed = log_p[said] - log_p[said].logsumexp(-1)
    kl = (renormed.exp() * (renormed - log_q)).sum()
    accepted = torch.minimum(p, q).sum()
    if kind == "kl":
        return kl
    if kind == "total_variation":
        return 1 - accepted
    if kind == "log_acceptance":
        return -accepted.log()
    share = torch.exp(-3 * accepted).detach()
    return share * kl + (1 - share) * (1 - accepted)


def loss(w, shape, docs, embedding, teacher_logits, steps, decay, kind="kl", said=slice(None)):
    """sum_j decay^j * (sum over the rows of step j of the row's loss) / N. teacher_logits(last row)
    -> logits over the target's vocabulary, or over `said` alone where that is everything."""
    num_rows = sum(supervised(d.mask, p, 0) for d in docs for p in range(len(d.ids)))
    total = torch.zeros((), dtype=torch.float64)
    for doc in docs:
        for j, state in enumerate(states_of_steps(w, shape, doc, embedding, steps)):
            log_q = logits_of(w, shape, state).log_softmax(-1)
            for p in range(len(doc.ids)):
                if supervised(doc.mask, p, j):
                    log_p = teacher_logits(doc.last[p + 1 + j]).log_softmax(-1)
                    total = total + decay**j * row_loss(kind, log_p, log_q[p], said) / num_rows
    return total
