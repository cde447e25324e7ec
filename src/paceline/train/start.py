"""Starting values of a draft: from the target's own last layers and head, or random.

A draft that starts as "the target's last layers on the deepest auxiliary state" knows the target's
directions from the first step on; with little time this matters more than the learning rate.
"""

import logging

import torch
from torch import nn

from paceline.draft.config import DraftConfig
from paceline.draft.model import LLAMA_LAYER_NAMES, Draft, DraftLayer
from paceline.errors import FingerprintMismatch, TrainingError
from paceline.forms.source import DraftSource
from paceline.store import Store
from paceline.target.model import TeacherHead, load_embedding
from paceline.target.spec import Target
from paceline.vocab import DraftVocabulary

logger = logging.getLogger(__name__)

_RANDOM_STD = 0.02


def earlier_draft(source: DraftSource, target: Target, store: Store) -> Draft:
    """A draft to train further, in float32. Raises FingerprintMismatch where it reads other layers
    than the store holds, or was trained on another target."""
    source.check_target(target)
    draft = source.load(target, torch.float32)
    if draft.config.aux_layers != store.spec.layers.aux:
        raise FingerprintMismatch(
            f"{source.folder} reads the layers {list(draft.config.aux_layers)}, {store.folder} "
            f"holds {list(store.spec.layers.aux)}: extract those that the draft reads"
        )
    return draft


def new_draft(
    config: DraftConfig,
    vocabulary: DraftVocabulary,
    target: Target,
    aux_rms: torch.Tensor,
    seed: int,
    from_target: bool,
    head_from_target: bool,
) -> Draft:
    """A draft in float32 with its vocabulary and the target's embedding.

    aux_rms: float32 [A], the typical RMS of each auxiliary state. from_target: see module.
    head_from_target: the head is to be the target's, whatever the rest starts from. Raises
    TrainingError where the draft's width is not the target's then.
    """
    if head_from_target and not config.shares_embedding:
        raise TrainingError(
            f"train_head false keeps the target's head of width {config.target_hidden_size}, the "
            f"draft's hidden_size is {config.hidden_size}: leave one of them out"
        )
    draft = Draft(config)
    generator = torch.Generator().manual_seed(seed)
    for name, weight in draft.named_parameters():
        if weight.ndim > 1 and name != "embed_tokens.weight":
            nn.init.normal_(weight, std=_RANDOM_STD, generator=generator)
    draft.d2t.copy_(torch.from_numpy(vocabulary.d2t))
    draft.t2d.copy_(torch.from_numpy(vocabulary.t2d))
    if config.shares_embedding:
        draft.embed_tokens.weight.data = load_embedding(target, torch.float32)
        draft.embed_tokens.requires_grad_(False)
    else:
        nn.init.normal_(draft.embed_tokens.weight, std=_RANDOM_STD, generator=generator)
    if config.aux_norm == "static":
        draft.aux_norm.scale.copy_(1.0 / aux_rms)
    if from_target and not config.shares_embedding:
        logger.warning("train: the draft's width is not the target's; it starts from random values")
        return draft
    if from_target or head_from_target:
        _copy_head(draft, vocabulary, target)
    if from_target:
        _start_from_layers(draft, target, aux_rms)
    return draft


@torch.no_grad()
def _copy_head(draft: Draft, vocabulary: DraftVocabulary, target: Target) -> None:
    head = TeacherHead(target, torch.float32, rows=torch.from_numpy(vocabulary.selected))
    draft.lm_head.weight.copy_(head.weight)
    draft.norm.weight.copy_(_gain(head.norm))


@torch.no_grad()
def _start_from_layers(draft: Draft, target: Target, aux_rms: torch.Tensor) -> None:
    config = draft.config
    # fc passes the deepest auxiliary state through, at unit scale.
    width = config.hidden_size
    draft.fc.weight.zero_()
    draft.fc.weight[:, -width:].copy_(torch.eye(width))
    scale = float(aux_rms[-1])
    if config.aux_norm == "none":
        draft.fc.weight /= scale
    first = max(target.num_layers - config.num_layers, 0)
    for number, layer in zip(range(first, target.num_layers), draft.layers, strict=False):
        _copy_layer(layer, target, number, scale)


def _copy_layer(layer: DraftLayer, target: Target, number: int, scale: float) -> None:
    """A layer of the target on the state half of the inputs, zeros on the embedding half.

    What the layer adds to the residual stream is divided by the stream's scale, since the draft's
    stream starts at unit scale.
    """
    theirs = target.layer_tensors(number)
    ours = dict(layer.named_parameters())
    wanted = [name for name in LLAMA_LAYER_NAMES if name in ours]
    width = layer.input_layernorm.weight.numel()
    if any(
        name not in theirs or theirs[name].shape != _state_half(name, ours[name], width).shape
        for name in wanted
    ):
        logger.warning("train: the target's layers have another form; the draft's layer is random")
        return
    for name in wanted:
        value = theirs[name].float()
        if name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
            value = value / scale
        ours[name].zero_()
        _state_half(name, ours[name], width).copy_(value)
    reads_state = layer.input_layernorm if layer.hidden_norm is None else layer.hidden_norm
    reads_state.weight.copy_(theirs["input_layernorm.weight"].float())


def _state_half(name: str, weight: torch.Tensor, width: int) -> torch.Tensor:
    """The columns that read the state: q, k and v of the first layer read [embedding, state]."""
    reads_heads = name.split(".")[1] in ("q_proj", "k_proj", "v_proj")
    return weight[:, -width:] if reads_heads else weight


def _gain(norm: nn.Module) -> torch.Tensor:
    """A norm's effective gain, whatever its convention (Gemma's is 1 + w): its output on a row of
    ones, whose RMS is one."""
    width = norm.weight.numel()
    return norm(torch.ones(1, width, dtype=norm.weight.dtype, device=norm.weight.device))[0]
