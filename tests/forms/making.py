"""Tiny targets, trained-looking drafts on them, and checkpoints changed by hand."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from paceline.draft.config import DraftConfig
from paceline.draft.model import Draft
from paceline.draft.rope import Rotary
from paceline.target.model import load_embedding
from paceline.target.spec import Target, TargetReference
from tests.draft.tiny import tiny_config, tiny_draft
from tests.targets import save_model

NUM_LAYERS = 8
DEFAULTS = (2, 4, 5)  # 2, n // 2, n - 3

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def tiny_target(folder: Path, **changes) -> Target:
    """Eight layers of width 16 with 40 logits, like tests.draft.tiny's drafts."""
    values = {
        "vocab_size": 40,
        "hidden_size": 16,
        "head_dim": 4,
        "num_hidden_layers": NUM_LAYERS,
        "tie_word_embeddings": False,
    }
    save_model(folder, "llama", **{**values, **changes})
    return Target(TargetReference(str(folder)))


def config_for(**changes) -> DraftConfig:
    return tiny_config(**{"aux_layers": DEFAULTS, **changes})


def draft_for(target: Target, config: DraftConfig, seed: int = 0) -> Draft:
    """A draft of random weights that all matter, in float32, with the target's embedding."""
    draft = tiny_draft(config, seed).float().eval()
    draft.rotary = Rotary(config)
    if config.shares_embedding:
        draft.embed_tokens.weight.data = load_embedding(target, torch.float32)
    return draft.requires_grad_(False)


def change_config(folder: Path, change: Callable[[dict], object]) -> None:
    path = folder / "config.json"
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    save_file(tensors, path)
