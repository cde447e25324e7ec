"""Attention of chosen rows over the keys of their own document and over keys of their own.

The plain-torch twin: dense scores over blocks of rows. Legend: R rows that ask, T rows that have
step-0 keys (T >= R), H query heads, G key/value heads, K head width, J own keys of each row. Keys
and values lie side by side: [.., 2G, K], the keys first.
"""

from dataclasses import dataclass

import torch

from paceline.ops.kernels import kernels, use_kernels

# Rows whose scores are dense in the twin.
BLOCK_ROWS = 256


@dataclass(frozen=True)
class RowSpans:
    """Which step-0 keys each row may see: key_start[r] <= key <= key_last[r], both ascending in r.

    int64 [R] on the device of the arithmetic.
    """

    key_start: torch.Tensor
    key_last: torch.Tensor

    def select(self, keep: torch.Tensor | None) -> "RowSpans":
        """The spans of some rows, ascending; None for all."""
        if keep is None:
            return self
        return RowSpans(self.key_start[keep], self.key_last[keep])


def rows_attention(
    q_RHK: torch.Tensor,
    kv_TGK: torch.Tensor,
    own_JRGK: torch.Tensor | None,
    spans: RowSpans,
) -> torch.Tensor:
    """softmax(q k^T / sqrt(K)) v over each row's span of step-0 keys and its J own keys.

    q [R, H, K]; kv [T, 2G, K]; own [J, R, 2G, K] or None. Returns [R, H, K] in q's dtype; scores
    and weights are float32 or better. Differentiable in all tensors.
    """
    if use_kernels(q_RHK):
        return kernels("attention").rows_attention(q_RHK, kv_TGK, own_JRGK, spans)
    return rows_attention_torch(q_RHK, kv_TGK, own_JRGK, spans)


def rows_attention_torch(
    q_RHK: torch.Tensor,
    kv_TGK: torch.Tensor,
    own_JRGK: torch.Tensor | None,
    spans: RowSpans,
) -> torch.Tensor:
    """The twin; any device and dtype."""
    outputs = []
    for start in range(0, len(q_RHK), BLOCK_ROWS):
        block = slice(start, min(start + BLOCK_ROWS, len(q_RHK)))
        own = None if own_JRGK is None else own_JRGK[:, block]
        part = RowSpans(spans.key_start[block], spans.key_last[block])
        outputs.append(_attend_block(q_RHK[block], kv_TGK, own, part))
    return torch.cat(outputs) if outputs else torch.empty_like(q_RHK)


def _attend_block(
    q_RHK: torch.Tensor,
    kv_TGK: torch.Tensor,
    own_JRGK: torch.Tensor | None,
    spans: RowSpans,
) -> torch.Tensor:
    rows, heads, width = q_RHK.shape
    groups = kv_TGK.shape[1] // 2
    low, high = int(spans.key_start[0]), int(spans.key_last[-1]) + 1
    keys = torch.arange(low, high, device=q_RHK.device)
    hidden_RS = (keys < spans.key_start[:, None]) | (keys > spans.key_last[:, None])
    k_SGK, v_SGK = kv_TGK[low:high].split(groups, 1)

    # The heads of a group share its keys, so they are folded into the rows of one product.
    q_GNK = (
        (q_RHK * width**-0.5)
        .view(rows, groups, heads // groups, width)
        .permute(1, 2, 0, 3)
        .reshape(groups, -1, width)
    )
    scores = _exact(q_GNK @ k_SGK.permute(1, 2, 0)).view(groups, heads // groups, rows, -1)
    scores = scores.masked_fill(hidden_RS, float("-inf"))
    num_own = 0 if own_JRGK is None else len(own_JRGK)
    own = [_own_scores(q_GNK, own_JRGK[j, :, :groups], scores.shape) for j in range(num_own)]
    weights = torch.cat([scores, *own], -1).softmax(-1).to(q_RHK.dtype)

    span = high - low
    mixed = weights[..., :span].reshape(groups, -1, span) @ v_SGK.transpose(0, 1)
    mixed = mixed.view(groups, heads // groups, rows, width)
    for j in range(num_own):
        v_RGK = own_JRGK[j, :, groups:]
        mixed = mixed + weights[..., span + j, None] * v_RGK.transpose(0, 1)[:, None]
    return mixed.permute(2, 0, 1, 3).reshape(rows, heads, width)


def _own_scores(q_GNK: torch.Tensor, k_RGK: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Scores of each row with the one key that only it may see: [G, H / G, R, 1]."""
    groups, per_group, rows, _ = shape
    q_GPRK = q_GNK.view(groups, per_group, rows, -1)
    return _exact((q_GPRK * k_RGK.transpose(0, 1)[:, None]).sum(-1, keepdim=True))


def _exact(scores: torch.Tensor) -> torch.Tensor:
    return scores.to(torch.promote_types(scores.dtype, torch.float32))
