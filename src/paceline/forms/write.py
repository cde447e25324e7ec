"""Writes a draft in a server's form: `config.json` and `model.safetensors`."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from paceline.artefact import write_atomically, write_json
from paceline.draft.checkpoint import draft_tensors
from paceline.draft.config import DraftConfig
from paceline.draft.model import EMBEDDING_NAME, Draft
from paceline.forms.config_json import Serving, write_config
from paceline.forms.load import CONFIG_FILE, WEIGHTS_FILE, Tensors
from paceline.forms.names import to_form
from paceline.target.model import load_embedding
from paceline.target.spec import Target


def served_config(config: DraftConfig) -> DraftConfig:
    """The shape that servers see: a fixed scale is part of `fc`, so there is no norm left."""
    return replace(config, aux_norm="none") if config.aux_norm == "static" else config


def served_tensors(draft: Draft, dtype: torch.dtype) -> Tensors:
    """The draft's own tensors under paceline's names, as servers get them, floats in `dtype`.

    A fixed scale per auxiliary state is folded into the columns of `fc` that read it, in the
    draft's own dtype: fc(scale * x) = (fc * scale)(x). Both maps of a full vocabulary are left
    out (vLLM refuses them), a shared embedding too.
    """
    tensors = draft_tensors(draft)
    config = draft.config
    if config.aux_norm == "static":
        scale_C = tensors.pop("aux_norm.scale").repeat_interleave(config.target_hidden_size)
        tensors["fc.weight"] = tensors["fc.weight"] * scale_C.to(tensors["fc.weight"].dtype)
    if config.draft_vocab_size == config.vocab_size:
        del tensors["d2t"], tensors["t2d"]
    return {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor
        for name, tensor in tensors.items()
    }


def form_tensors(
    draft: Draft, form: str, dtype: torch.dtype, target: Target, copy_embedding: bool = False
) -> Tensors:
    """All tensors of a checkpoint by the server's names. copy_embedding: with the target's
    embedding, bit for bit (a server that runs its pipeline over several GPUs cannot share it)."""
    tensors = served_tensors(draft, dtype)
    if copy_embedding and draft.config.shares_embedding:
        tensors[EMBEDDING_NAME] = load_embedding(target, dtype)
    return {to_form(name, form): tensor for name, tensor in tensors.items()}


def write_form(folder: Path, config: dict[str, Any], tensors: Tensors) -> None:
    """Write both files, each whole or not at all; the same draft always gives the same bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    write_atomically(folder / WEIGHTS_FILE, save(contiguous, metadata={"format": "pt"}))
    write_json(folder / CONFIG_FILE, config)


def write_draft(folder: Path, draft: Draft, form: str, target: Target, serving: Serving) -> None:
    """Write a draft in a form. Raises LayerError for layers that the form cannot say."""
    dtype = getattr(torch, serving.dtype)
    config = write_config(served_config(draft.config), form, target.num_layers, serving)
    write_form(folder, config, form_tensors(draft, form, dtype, target, serving.copies_embedding))
