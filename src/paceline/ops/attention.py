"""Attention of chosen rows over the keys of their own document and over keys of their own.

The plain-torch twin: dense scores over blocks of rows. Legend: R rows that ask, T rows that have
step-0 keys (T >= R), H query heads, G key/value heads, K head width, J own keys of each row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

_BLOCK_ROWS = 256


@dataclass(frozen=True)
class RowSpans:
    """Which step-0 keys each row may see: key_start[r] <= key <= key_last[r], ascending in r.

    int64 [R] on the CPU: block borders are chosen on the host.
    """

    key_start: torch.Tensor
    key_last: torch.Tensor

    def select(self, keep: torch.Tensor) -> "RowSpans":
        keep = keep.cpu()
        return RowSpans(self.key_start[keep], self.key_last[keep])


def rows_attention(
    q_RHK: torch.Tensor,
    k_TGK: torch.Tensor,
    v_TGK: torch.Tensor,
    own_k_RGK: Sequence[torch.Tensor],
    own_v_RGK: Sequence[torch.Tensor],
    spans: RowSpans,
) -> torch.Tensor:
    """softmax(q k^T / sqrt(K)) v over each row's span of step-0 keys and its J own keys.

    Returns [R, H, K] in q's dtype; scores and weights are float32 or better. Differentiable in all tensors.
    """
    outputs = []
    for start in range(0, len(q_RHK), _BLOCK_ROWS):
        block = slice(start, min(start + _BLOCK_ROWS, len(q_RHK)))
        outputs.append(
            _attend_block(
                q_RHK[block],
                k_TGK,
                v_TGK,
                [k[block] for k in own_k_RGK],
                [v[block] for v in own_v_RGK],
                RowSpans(spans.key_start[block], spans.key_last[block]),
            )
        )
    return torch.cat(outputs) if outputs else torch.empty_like(q_RHK)


def _attend_block(
    q_RHK: torch.Tensor,
    k_TGK: torch.Tensor,
    v_TGK: torch.Tensor,
    own_k_RGK: Sequence[torch.Tensor],
    own_v_RGK: Sequence[torch.Tensor],
    spans: RowSpans,
) -> torch.Tensor:
    rows, heads, width = q_RHK.shape
    groups = k_TGK.shape[1]
    low, high = int(spans.key_start[0]), int(spans.key_last[-1]) + 1
    keys = torch.arange(low, high)
    hidden = (keys < spans.key_start[:, None]) | (keys > spans.key_last[:, None])
    hidden_RS = hidden.to(q_RHK.device)

    # The heads of a group share its keys, so they are folded into the rows of one product.
    q_GNK = (
        (q_RHK * width**-0.5)
        .view(rows, groups, heads // groups, width)
        .permute(1, 2, 0, 3)
        .reshape(groups, -1, width)
    )
    k_GKS = k_TGK[low:high].permute(1, 2, 0)
    scores = _exact(q_GNK @ k_GKS).view(groups, heads // groups, rows, -1)
    scores = scores.masked_fill(hidden_RS, float("-inf"))
    own = [_own_scores(q_GNK, k_RGK, scores.shape) for k_RGK in own_k_RGK]
    weights = torch.cat([scores, *own], -1).softmax(-1).to(q_RHK.dtype)

    span = high - low
    mixed = weights[..., :span].reshape(groups, -1, span) @ v_TGK[low:high].transpose(0, 1)
    mixed = mixed.view(groups, heads // groups, rows, width)
    for j, v_RGK in enumerate(own_v_RGK):
        mixed = mixed + weights[..., span + j, None] * v_RGK.transpose(0, 1)[:, None]
    return mixed.permute(2, 0, 1, 3).reshape(rows, heads, width)


def _own_scores(q_GNK: torch.Tensor, k_RGK: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Scores of each row with the one key that only it may see: [G, H / G, R, 1]."""
    groups, per_group, rows, _ = shape
    q_GPRK = q_GNK.view(groups, per_group, rows, -1)
    return _exact((q_GPRK * k_RGK.transpose(0, 1)[:, None]).sum(-1, keepdim=True))


def _exact(scores: torch.Tensor) -> torch.Tensor:
    return scores.to(torch.promote_types(scores.dtype, torch.float32))
