"""A draft's weights on the way in and out of training: rounded for the arithmetic, and as they are
kept, float32 from the masters that the optimiser moves."""

import torch

from paceline.draft.checkpoint import own_state
from paceline.draft.model import Draft
from paceline.train.loop import Trainer
from paceline.train.parallel import whole


def round_weights(draft: Draft, dtype: torch.dtype) -> Draft:
    """In place; the maps of the vocabulary stay as they are."""
    for module in draft.children():
        module.to(dtype)
    return draft


def frozen_weights(draft: Draft) -> dict[str, torch.Tensor]:
    """Weights that are not trained, in float32 on the CPU, before they are rounded for the
    arithmetic; a shared embedding left out."""
    frozen = {name for name, weight in draft.named_parameters() if not weight.requires_grad}
    own = own_state(draft)
    return {name: own[name].cpu().float().clone() for name in frozen & own.keys()}


def kept_tensors(trainer: Trainer) -> dict[str, torch.Tensor]:
    """The draft's own tensors on the CPU, weights in float32. All ranks enter."""
    exact = {name: whole(m).detach().cpu() for name, m in trainer.optimiser.masters.items()}
    exact |= trainer.frozen
    rest = {name: t.cpu() for name, t in own_state(trainer.draft).items() if name not in exact}
    kept = {name: t.float() if t.is_floating_point() else t for name, t in rest.items()} | exact
    return {name: tensor.contiguous() for name, tensor in kept.items()}
