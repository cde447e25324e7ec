"""A draft's weights on the way in and out of training: rounded for the arithmetic, and as they are
kept, float32 from the masters that the optimiser moves."""

from collections.abc import Sequence
from typing import Any

import torch

from paceline import fingerprint
from paceline.artefact import StageFolder
from paceline.draft.checkpoint import CONFIG_FILE, WEIGHTS_FILE, own_state, write_draft
from paceline.draft.model import Draft
from paceline.side_files import describe_side_files
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


def finish_draft(
    stage: StageFolder,
    draft: Draft,
    tensors: dict[str, torch.Tensor],
    result: dict[str, Any],
    more_files: Sequence[str] = (),
) -> None:
    """Make a finished folder of `train` of the draft with these `kept_tensors`. more_files: those
    in the folder besides that its manifest is to vouch for."""
    write_draft(stage.path, draft.config, tensors)
    files = describe_side_files(stage.path, [CONFIG_FILE, *more_files])
    stage.finish({**result, **files}, content=fingerprint.of_file(stage.path / WEIGHTS_FILE))
