"""The target with its weights: the whole model, its decoder layers, or its norm and head alone."""

import copy
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Cache,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import BaseModelOutputWithPast

from paceline.errors import TargetError
from paceline.target.spec import Target

# What decoders call the norm that stands between the last layer and the head.
_FINAL_NORM_NAMES = (
    "norm",
    "final_layernorm",
    "final_layer_norm",
    "ln_f",
    "norm_f",
    "final_norm",
    "embedding_norm",
)


def load_model(
    target: Target,
    dtype: torch.dtype,
    device: str | torch.device,
    num_layers: int | None = None,
) -> PreTrainedModel:
    """The target through transformers, in eval mode, without gradients: whole, or a copy that is
    cut down to its first `num_layers` decoder layers, same weights."""
    options = {}
    if getattr(target.text_config, "attn_logit_softcapping", None):
        # Fused attention has no soft-capping, and some transformers leave it out in silence.
        options["attn_implementation"] = "eager"
    with _told_as_target_error(target):
        model = _auto_class(target.config).from_pretrained(
            target.folder,
            config=target.config if num_layers is None else _cut_down(target, num_layers),
            dtype=dtype,
            trust_remote_code=target.reference.trust_remote_code,
            **options,
        )
    return model.to(device).eval().requires_grad_(False)


def cached(model: nn.Module, cache: Cache | None) -> dict[str, Cache | bool | None]:
    """Arguments of a forward pass over keys and values, by the name that this release knows."""
    return {_cache_argument(type(model)): cache, "use_cache": True}


@lru_cache
def _cache_argument(kind: type[nn.Module]) -> str:
    # Looked up once a class: it is asked for at every token.
    return "cache" if "cache" in inspect.signature(kind.forward).parameters else "past_key_values"


def num_parameters(target: Target) -> int:
    """Numbers that transformers' model of the target holds; nothing is loaded."""
    return sum(weight.numel() for weight in _shell(target).parameters())


def _shell(target: Target) -> PreTrainedModel:
    """The model's modules without any weights."""
    with _told_as_target_error(target), torch.device("meta"):
        return _auto_class(target.config).from_config(
            target.config, trust_remote_code=target.reference.trust_remote_code
        )


def _auto_class(config: PretrainedConfig) -> type:
    """Most wrapped multimodal models are no causal language models to transformers. What is known
    as neither may be remote code, which AutoModelForCausalLM looks for."""
    wrapped = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    if wrapped and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return AutoModelForImageTextToText
    return AutoModelForCausalLM


@contextmanager
def _told_as_target_error(target: Target) -> Iterator[None]:
    try:
        yield
    except (ValueError, OSError, ImportError, SafetensorError) as error:
        raise TargetError(f"{target.folder}: transformers cannot load it: {error}") from error


def _cut_down(target: Target, num_layers: int) -> PretrainedConfig:
    """The target's config for its first layers: whatever is said layer by layer is cut too."""
    config = copy.deepcopy(target.config)
    text = config.get_text_config()
    for key, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == target.num_layers:
            setattr(text, key, value[:num_layers])
    text.num_hidden_layers = num_layers
    return config


def decoder_of(model: nn.Module, num_layers: int) -> nn.Module:
    """The module that holds the token embedding and the decoder layers side by side.

    Wrapped models have towers with layer lists of their own; only the decoder has the embedding.
    """
    embedding = model.get_input_embeddings()
    for module in model.modules():
        children = list(module.children())
        if any(child is embedding for child in children) and any(
            isinstance(child, nn.ModuleList) and len(child) == num_layers for child in children
        ):
            return module
    raise TargetError(
        f"{type(model).__name__}: no module holds the embedding and {num_layers} decoder layers"
    )


def decoder_layers(model: nn.Module, num_layers: int) -> nn.ModuleList:
    """The decoder layers in order."""
    return next(
        child
        for child in decoder_of(model, num_layers).children()
        if isinstance(child, nn.ModuleList) and len(child) == num_layers
    )


def bare_layers(target: Target) -> nn.ModuleList:
    """The target's decoder layers in order, without any weights."""
    return decoder_layers(_shell(target), target.num_layers)


def final_norm_of(model: nn.Module, num_layers: int) -> nn.Module:
    """The norm between the last layer and the head."""
    decoder = decoder_of(model, num_layers)
    for name in _FINAL_NORM_NAMES:
        if isinstance(norm := getattr(decoder, name, None), nn.Module):
            return norm
    raise TargetError(f"{type(decoder).__name__} has no final norm that paceline knows")


class _Output(BaseModelOutputWithPast):
    """Some families' forwards also hand on what their decoder says of routers or images: None."""

    def __getattr__(self, name: str) -> None:
        return None


class _NormOnly(nn.Module):
    """Stands in for the decoder inside the target's own forward: hidden states in, normed out (or
    as they came, where the norm is the identity)."""

    def __init__(self, norm: nn.Module, decoder: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        # Some forwards read numbers of their decoder (Falcon-H1's lm_head_multiplier).
        for name, value in vars(decoder).items():
            if isinstance(value, int | float):
                setattr(self, name, value)

    def forward(self, inputs_embeds: torch.Tensor, **_: object) -> BaseModelOutputWithPast:
        return _Output(last_hidden_state=self.norm(inputs_embeds))


class TeacherHead(nn.Module):
    """Logits from the last hidden state (k = n, before the norm), exactly as the target does it.

    The target's own forward runs with its decoder replaced by its final norm, so that gain
    conventions, scaling, biases and soft-capping are the target's own code. `rows`: the ids whose
    logits are wanted (a draft vocabulary), None for all. `is_normed`: the states that it is given
    have been through the norm already (some foreign stores). Only the norm and head are loaded.
    """

    def __init__(
        self,
        target: Target,
        dtype: torch.dtype,
        device: str | torch.device = "cpu",
        rows: torch.Tensor | None = None,
        is_normed: bool = False,
    ) -> None:
        super().__init__()
        shell = _shell(target)
        norm = final_norm_of(shell, target.num_layers)
        head = shell.get_output_embeddings()
        names = {id(module): name for name, module in shell.named_modules()}
        _materialise(norm, names[id(norm)], target, dtype)
        _materialise(head, names[id(_stored_head(shell, names, target))], target, dtype, rows)
        decoder = _set_aside(shell, target.num_layers)
        in_its_place = _NormOnly(nn.Identity() if is_normed else norm, decoder)
        _replace(shell, names[id(decoder)], in_its_place)
        self.norm = norm
        self.head = head
        self.model = shell.to(device).eval().requires_grad_(False)

    @property
    def weight(self) -> torch.Tensor:
        """Head rows [W or V, D]."""
        return self.head.weight

    @torch.no_grad()
    def forward(self, last_MD: torch.Tensor) -> torch.Tensor:
        """last [M, D] -> logits [M, W or V] in the head's dtype."""
        states = last_MD.to(self.weight.dtype)
        return self.model(inputs_embeds=states[None], use_cache=False).logits[0]


def load_embedding(target: Target, dtype: torch.dtype) -> torch.Tensor:
    """The target's token embedding [V, D], unscaled as stored: what servers share with a draft."""
    shell = _shell(target)
    names = {id(module): name for name, module in shell.named_modules()}
    return target.weights.load(names[id(shell.get_input_embeddings())] + ".weight").to(dtype)


def _stored_head(shell: PreTrainedModel, names: dict[int, str], target: Target) -> nn.Module:
    """The module under whose name the checkpoint keeps the head: itself, or the embedding that it
    is tied to. A stored head counts whatever the config says, as in transformers: wrapped models
    have two configs, and the outer one is often tied only because nothing was written there."""
    head, embedding = shell.get_output_embeddings(), shell.get_input_embeddings()
    tied = head.weight is embedding.weight
    return embedding if tied and not target.weights.has(names[id(head)] + ".weight") else head


def _set_aside(shell: PreTrainedModel, num_layers: int) -> nn.Module:
    """The largest part of the model that holds its decoder and not its head."""
    decoder, head = decoder_of(shell, num_layers), shell.get_output_embeddings()
    for module in shell.modules():  # Parents come before their children.
        parts = {id(part) for part in module.modules()}
        if id(decoder) in parts and id(head) not in parts:
            return module
    raise TargetError(f"{type(shell).__name__} has its head inside its decoder")


def _materialise(
    module: nn.Module,
    name: str,
    target: Target,
    dtype: torch.dtype,
    rows: torch.Tensor | None = None,
) -> None:
    for key in list(dict(module.named_parameters(recurse=False))):
        tensor = target.weights.load(f"{name}.{key}").to(dtype)
        tensor = tensor if rows is None else tensor[rows]
        setattr(module, key, nn.Parameter(tensor.contiguous(), requires_grad=False))


def _replace(root: nn.Module, name: str, module: nn.Module) -> None:
    *parents, leaf = name.split(".")
    setattr(root.get_submodule(".".join(parents)), leaf, module)
