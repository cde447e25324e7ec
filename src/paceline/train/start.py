"""Starting values of a draft: from the target's own last layers and head, or random.

A draft that starts as "the target's last layers on the deepest auxiliary state" knows the target's
directions from the first step on; with little time this matters more than the learning rate. With
millions of rows small random weights and gains of one end as well or better (docs/train.md).
"""

import logging
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from paceline.artefact import refuse_own_inputs
from paceline.device import choose_device
from paceline.draft.config import DraftConfig
from paceline.draft.from_target import Config, draft_config
from paceline.draft.model import EMBEDDING_NAME, LLAMA_LAYER_NAMES, Draft, DraftLayer
from paceline.errors import FingerprintMismatch, TrainingError
from paceline.forms.source import DraftSource, open_draft
from paceline.recipe import TrainOptions
from paceline.target.model import TeacherHead, bare_layers, load_embedding
from paceline.target.spec import Target
from paceline.train.trackers import check_installed
from paceline.vocab import DraftVocabulary

logger = logging.getLogger(__name__)

_RANDOM_STD = 0.02
_SMALL_LOGIT = 1e-3
_BEFORE_MLP = "pre_feedforward_layernorm.weight"


def check_early(options: TrainOptions) -> None:
    """What the options alone tell, before there are inputs. Raises UsageError."""
    check_installed(options.trackers)
    choose_device(options.device)
    refuse_own_inputs(Path(options.out), {"start_from": {"path": options.start_from}})


def shape_to_train(
    options: TrainOptions,
    target: Target,
    text_config: Config,
    aux_layers: tuple[int, ...],
    draft_vocab_size: int,
) -> DraftConfig:
    """The shape of the draft that a training moves: that of `start_from`, or a new one's, which has
    so many tokens. Configs tell it, before there are data or weights.

    text_config: the target's. aux_layers: those of the states. Raises FingerprintMismatch where an
    earlier draft reads others, TrainingError where no such draft can be made.
    """
    if options.start_from:
        source = open_draft(options.start_from, options.start_form)
        config = source.config(target)
        _check_layers(source, config, aux_layers)
        return config
    return new_shape(options, text_config, aux_layers, draft_vocab_size)


def new_shape(
    options: TrainOptions, text_config: Config, aux_layers: tuple[int, ...], draft_vocab_size: int
) -> DraftConfig:
    """The shape of a new draft; see shape_to_train. Raises TrainingError."""
    config = draft_config(options.draft, text_config, aux_layers, draft_vocab_size)
    if not options.train_head and not config.shares_embedding:
        raise TrainingError(
            f"train_head false keeps the target's head of width {config.target_hidden_size}, the "
            f"draft's hidden_size is {config.hidden_size}: leave one of them out"
        )
    return config


def earlier_draft(source: DraftSource, target: Target, aux_layers: tuple[int, ...]) -> Draft:
    """A draft to train further, in float32. Raises FingerprintMismatch where it reads other layers
    than the states have, or was trained on another target."""
    source.check_target(target)
    draft = source.load(target, torch.float32)
    _check_layers(source, draft.config, aux_layers)
    return draft


def _check_layers(source: DraftSource, config: DraftConfig, aux_layers: tuple[int, ...]) -> None:
    if config.aux_layers != aux_layers:
        raise FingerprintMismatch(
            f"{source.folder} reads the layers {list(config.aux_layers)}, the states are those of "
            f"{list(aux_layers)}: extract what the draft reads"
        )


def new_draft(
    config: DraftConfig,
    vocabulary: DraftVocabulary,
    target: Target,
    aux_rms: torch.Tensor,
    seed: int,
    from_target: bool,
    train_head: bool = True,
) -> Draft:
    """A draft in float32 with its vocabulary and, where its width is the target's, the target's
    embedding and head rows.

    aux_rms: float32 [A], the typical RMS of each auxiliary state. from_target: the rest is the
    target's too, where its layers have the draft's form; else it is random. train_head: the head
    is to be trained; else it is the target's rows bit by bit.
    """
    draft = _random_draft(config, aux_rms, seed)
    draft.d2t.copy_(torch.from_numpy(vocabulary.d2t))
    draft.t2d.copy_(torch.from_numpy(vocabulary.t2d))
    if not config.shares_embedding:
        if from_target:
            logger.warning("train: the draft's width is not the target's; it starts random")
        return draft
    draft.embed_tokens.weight.data = load_embedding(target, torch.float32)
    draft.embed_tokens.requires_grad_(False)
    rows = torch.from_numpy(vocabulary.selected)
    head = TeacherHead(target, torch.float32, rows=rows, is_normed=True)
    draft.lm_head.weight.data.copy_(head.weight)
    if from_target:
        _start_from_layers(draft, target, aux_rms, head.norm)
    # No draft scales its logits: what the target multiplies them by goes into the weights.
    scaled = draft.lm_head if train_head else draft.norm
    scaled.weight.data *= _logit_scale(head)
    return draft


def _random_draft(config: DraftConfig, aux_rms: torch.Tensor, seed: int) -> Draft:
    """Small random weights, gains of one; auxiliary states meet them at unit scale, normed or not.
    An embedding that is the target's is left as it is."""
    draft = Draft(config)
    generator = torch.Generator().manual_seed(seed)
    for name, weight in draft.named_parameters():
        is_targets = config.shares_embedding and name == EMBEDDING_NAME
        if weight.ndim > 1 and not is_targets:
            nn.init.normal_(weight, std=_RANDOM_STD, generator=generator)
    if config.aux_norm == "static":
        draft.aux_norm.scale.copy_(1.0 / aux_rms)
    elif config.aux_norm == "none":
        draft.fc.weight.data /= aux_rms.repeat_interleave(config.target_hidden_size)
    return draft


@torch.no_grad()
def _start_from_layers(
    draft: Draft, target: Target, aux_rms: torch.Tensor, norm: nn.Module
) -> None:
    """All of the start but the head, or none of it: behind random layers the gain of the
    target's norm makes the first logits large and wrong, and `fc` as it is here holds such a draft
    back (docs/train.md has what each costs)."""
    config, scale = draft.config, float(aux_rms[-1])
    first = max(target.num_layers - config.num_layers, 0)
    bare = bare_layers(target)
    copies: list[_Copy] = []
    for number, layer in zip(range(first, target.num_layers), draft.layers, strict=False):
        found = _copies(layer, target.layer_tensors(number), bare[number], scale)
        if not found:
            logger.warning("train: the target's layers have another form; the draft's are random")
            return
        copies += found
    for copy in copies:
        copy.weight.zero_()
        copy.part.copy_(copy.value)
    # fc passes the deepest auxiliary state through, at unit scale.
    width = config.hidden_size
    draft.fc.weight.zero_()
    draft.fc.weight[:, -width:].copy_(torch.eye(width))
    if config.aux_norm == "none":
        draft.fc.weight /= scale
    draft.norm.weight.copy_(_gain(norm))


class _Copy(NamedTuple):
    """A weight of the draft, the part of it that a tensor of the target fills, and that tensor."""

    weight: nn.Parameter
    part: torch.Tensor
    value: torch.Tensor


def _copies(
    layer: DraftLayer, theirs: dict[str, torch.Tensor], bare: nn.Module, scale: float
) -> list[_Copy]:
    """A layer of the target on the state half of the inputs, zeros on the embedding half; none
    where it has another form.

    theirs, bare: the target's layer, its tensors and its modules without them. What the layer adds
    to the residual stream is divided by the stream's scale, since the draft's stream starts at unit
    scale.
    """
    ours = dict(layer.named_parameters())
    width = layer.input_layernorm.weight.numel()
    sources = _sources(layer, theirs)
    parts = {name: _state_half(name, ours[name], width) for name in sources}
    if not all(_is_like(theirs.get(source), parts[name]) for name, source in sources.items()):
        return []
    head_dim = layer.self_attn.head_dim
    if getattr(bare.self_attn, "head_dim", head_dim) != head_dim:
        return []  # as many rows, cut into heads elsewhere
    copies = []
    for name, source in sources.items():
        is_norm = source.endswith("norm.weight")
        value = _gain_inside(bare, source, theirs) if is_norm else theirs[source].float()
        copies.append(_Copy(ours[name], parts[name], value * _factor(name, layer, bare, scale)))
    return copies


def _factor(name: str, layer: DraftLayer, bare: nn.Module, scale: float) -> float:
    """What a copied weight is multiplied by, so that a draft's layer does with it what the target's
    does: Granite's multiplies what it adds to the stream, and its attention scores (Gemma's too) by
    another factor than the width of a head gives."""
    attention = layer.self_attn
    if name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
        return getattr(bare, "residual_multiplier", 1.0) / scale
    if name == f"self_attn.{'q_proj' if attention.q_norm is None else 'q_norm'}.weight":
        usual = attention.head_dim**-0.5
        return getattr(bare.self_attn, "scaling", usual) / usual
    return 1.0


def _sources(layer: DraftLayer, theirs: dict[str, torch.Tensor]) -> dict[str, str]:
    """The draft's parameters that the target's layer gives, each with the name that it has there.

    Layers that also norm what attention and MLP put out (Gemma 2 and 3) call one of these norms
    what llama calls the norm in front of the MLP.
    """
    ours = dict(layer.named_parameters())
    sources = {name: name for name in LLAMA_LAYER_NAMES if name in ours}
    reads_state = "input_layernorm" if layer.hidden_norm is None else "hidden_norm"
    sources[f"{reads_state}.weight"] = "input_layernorm.weight"
    if _BEFORE_MLP in theirs:
        sources["post_attention_layernorm.weight"] = _BEFORE_MLP
    return sources


def _is_like(tensor: torch.Tensor | None, wanted: torch.Tensor) -> bool:
    """Whether a stored tensor is a weight of that shape: codes of a quantised one are nothing
    without their scales."""
    return tensor is not None and tensor.shape == wanted.shape and tensor.itemsize > 1


def _state_half(name: str, weight: torch.Tensor, width: int) -> torch.Tensor:
    """The columns that read the state: q, k and v of the first layer read [embedding, state]."""
    reads_heads = name.split(".")[1] in ("q_proj", "k_proj", "v_proj")
    return weight[:, -width:] if reads_heads else weight


def _gain_inside(bare: nn.Module, name: str, theirs: dict[str, torch.Tensor]) -> torch.Tensor:
    """The gain that a stored norm weight of the target's layer stands for."""
    path = name.removesuffix(".weight")
    norm = bare.get_submodule(path)
    for key, _ in list(norm.named_parameters()):
        stored = theirs[f"{path}.{key}"].float()
        setattr(norm, key, nn.Parameter(stored, requires_grad=False))
    return _gain(norm)


def _gain(norm: nn.Module) -> torch.Tensor:
    """A norm's effective gain, whatever its convention (Gemma's is 1 + w): from its outputs on a
    row of ones and minus ones, whose mean is zero and whose RMS is one; a bias falls out."""
    weight = norm.weight
    row = torch.ones(1, weight.numel(), dtype=weight.dtype, device=weight.device)
    row[:, 1::2] = -1
    return ((norm(row) - norm(-row)) / 2 * row)[0]


def _logit_scale(head: TeacherHead) -> float:
    """What the target multiplies the logits of its head by (Cohere, Granite), from a state whose
    logits are so small that soft-capping leaves them alone; a bias falls out.

    head: without its norm, which would give the state a size of its own.
    """
    rows = head.weight
    longest = rows[rows.norm(dim=1).argmax()]
    state = (longest * (_SMALL_LOGIT / longest.square().sum()))[None]
    said, plain = ((f(state) - f(-state)).double() for f in (head, head.head))
    # Rounded, so that a target without such a scale has 1.
    return round(float((said * plain).sum() / plain.square().sum()), 6)
