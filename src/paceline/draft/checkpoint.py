"""A draft on disk: `draft.json` (its shape) and `draft.safetensors` (its own weights).

The embedding is the target's and is not stored where it is shared; it is loaded from the target.
"""

import json
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from paceline.artefact import write_atomically, write_json
from paceline.draft.config import DraftConfig
from paceline.draft.model import EMBEDDING_NAME, Draft
from paceline.errors import TrainingError
from paceline.target.model import load_embedding
from paceline.target.spec import Target

CONFIG_FILE = "draft.json"
WEIGHTS_FILE = "draft.safetensors"


def draft_tensors(draft: Draft) -> dict[str, torch.Tensor]:
    """The draft's own tensors, on the CPU; a shared embedding left out."""
    return {name: tensor.cpu().contiguous() for name, tensor in own_state(draft).items()}


def own_state(draft: Draft) -> dict[str, torch.Tensor]:
    """The draft's own tensors as they are, without a shared embedding; they share its memory."""
    state = {name: tensor.detach() for name, tensor in draft.state_dict().items()}
    if draft.config.shares_embedding:
        del state[EMBEDDING_NAME]
    return state


def write_draft(folder: Path, config: DraftConfig, tensors: dict[str, torch.Tensor]) -> None:
    """Write a draft's shape and its `draft_tensors`, on the CPU; each file appears whole or not at
    all."""
    write_json(folder / CONFIG_FILE, config.to_dict())
    write_atomically(folder / WEIGHTS_FILE, save(tensors))


def read_draft_config(folder: Path) -> DraftConfig:
    """The shape of a folder's draft. Raises TrainingError for a damaged file."""
    path = folder / CONFIG_FILE
    try:
        return DraftConfig.from_dict(json.loads(path.read_text()))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> TrainingError:
    return TrainingError(
        f"{path} cannot be read ({error}): it was damaged or removed after the training. "
        "Train again with --overwrite, or take the draft from a copy"
    )


def load_draft(folder: Path, target: Target, dtype: torch.dtype = torch.float32) -> Draft:
    """The draft of a folder with the target's embedding, in eval mode.

    Raises TrainingError that lists missing and unexpected tensors together, or names a damaged
    file.
    """
    config = read_draft_config(folder)
    path = folder / WEIGHTS_FILE
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise _damaged(path, error) from error
    if config.shares_embedding:
        tensors[EMBEDDING_NAME] = load_embedding(target, dtype)
    return build_draft(config, tensors, dtype, str(folder))


def build_draft(
    config: DraftConfig, tensors: dict[str, torch.Tensor], dtype: torch.dtype, where: str
) -> Draft:
    """A draft from exactly the tensors that its shape asks for; d2t and t2d keep their dtypes."""
    with torch.device("meta"):
        draft = Draft(config)
    wanted = draft.state_dict()
    missing, unexpected = sorted(wanted.keys() - tensors), sorted(tensors.keys() - wanted.keys())
    shapes = [
        f"{name} is {list(tensors[name].shape)}, not {list(wanted[name].shape)}"
        for name in wanted.keys() & tensors.keys()
        if tensors[name].shape != wanted[name].shape
    ]
    if missing or unexpected or shapes:
        raise TrainingError(
            f"{where}: tensors do not fit the draft's shape: missing {missing or 'none'}, "
            f"unexpected {unexpected or 'none'}, wrong shapes {shapes or 'none'}"
        )
    converted = {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor
        for name, tensor in tensors.items()
    }
    draft.load_state_dict(converted, assign=True)
    draft.rotary = type(draft.rotary)(config)
    draft.embed_tokens.requires_grad_(not config.shares_embedding)
    return draft.eval()
