"""Tiny drafts and documents for tests, in float64."""

from types import SimpleNamespace

import numpy as np
import torch

from paceline.draft.config import DraftConfig
from paceline.draft.model import Draft

from .oracle import Doc, Shape

THETA = 10000.0


def tiny_config(**changes):
    values = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "num_layers": 1,
        "target_hidden_size": 16,
        "vocab_size": 40,
        "draft_vocab_size": 12,
        "aux_layers": (1, 2, 3),
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 128,
        "rope": {"rope_type": "default", "rope_theta": THETA},
    }
    return DraftConfig(**{**values, **changes})


def tiny_draft(config, seed=0):
    """Random weights of a size at which every part matters, norms away from one."""
    generator = torch.Generator().manual_seed(seed)
    draft = Draft(config).double()
    half = config.head_dim // 2
    draft.rotary.inv_freq = THETA ** (-torch.arange(half, dtype=torch.float64) / half)
    for _name, weight in draft.named_parameters():
        noise = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
        weight.data = 1.0 + 0.2 * noise if weight.ndim == 1 else 0.3 * noise
    if config.aux_norm == "static":
        draft.aux_norm.scale = torch.rand(config.num_aux, generator=generator).double() + 0.5
    selected = torch.randperm(config.vocab_size, generator=generator)[: config.draft_vocab_size]
    selected = selected.sort().values
    draft.d2t = selected - torch.arange(len(selected))
    draft.t2d[selected] = True
    return draft


def weights_of(draft):
    """Leaves of the oracle: copies of the draft's weights, with gradients of their own."""
    return {
        n: p.detach().clone().requires_grad_(p.is_floating_point())
        for n, p in draft.state_dict().items()
        if n != "embed_tokens.weight"
    }


def shape_of(config):
    return Shape(
        heads=config.num_attention_heads,
        groups=config.num_key_value_heads,
        head_dim=config.head_dim,
        eps=config.rms_norm_eps,
        theta=THETA,
        num_layers=config.num_layers,
        qk_norm=config.qk_norm,
        aux_norm=config.aux_norm,
        norm_output=config.norm_output,
        norm_before_residual=config.norm_before_residual,
        hidden_act=config.hidden_act,
    )


def random_doc(config, mask, seed):
    generator = torch.Generator().manual_seed(seed)
    mask = torch.as_tensor(mask, dtype=torch.bool)
    length, width = len(mask), config.target_hidden_size
    return Doc(
        ids=torch.randint(0, config.vocab_size, (length,), generator=generator),
        mask=mask,
        aux=torch.randn(length, config.num_aux, width, generator=generator, dtype=torch.float64),
        last=torch.randn(length, width, generator=generator, dtype=torch.float64),
    )


def stored(doc):
    """A document as the store gives it: aux only up to the last supervised position but one, last
    only at supervised positions."""
    supervised = np.flatnonzero(doc.mask.numpy())
    rows = int(supervised[-1]) if len(supervised) else 0
    return SimpleNamespace(
        input_ids=doc.ids.to(torch.int32),
        loss_mask=doc.mask,
        aux=doc.aux[:rows],
        last=doc.last[doc.mask],
    )
