"""The two sides of benchmarks/equal_acceptance.py: paceline's training step and speculators 0.9.0's
EAGLE-3 model, on the same batches with the same optimiser."""

import copy
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.draft.batch import from_packed
from paceline.draft.config import DraftConfig
from paceline.draft.losses import Teacher, distillation_loss
from paceline.draft.model import Draft
from paceline.draft.rope import llama_config
from paceline.forms.config_json import Serving
from paceline.forms.load import load_exported
from paceline.forms.names import SPECULATORS
from paceline.forms.write import write_draft
from paceline.recipe import TrainOptions
from paceline.store import PackedSamples
from paceline.target.model import TeacherHead, load_embedding
from paceline.target.spec import Target
from paceline.train.optimiser import OPTIMISERS
from paceline.vocab import DraftVocabulary


@dataclass(frozen=True)
class Setup:
    """What both sides share."""

    target: Target
    config: DraftConfig
    vocabulary: DraftVocabulary
    options: TrainOptions
    device: torch.device
    dtype: torch.dtype
    max_tokens: int

    @property
    def columns(self) -> torch.Tensor:
        return torch.from_numpy(self.vocabulary.selected)


class OwnTrainer:
    """paceline's step on a draft in float32, which it takes over; head frozen. temperature: of
    what is taught."""

    def __init__(self, name: str, setup: Setup, draft: Draft, temperature: float = 1.0) -> None:
        self.name, self._setup, self._draft = name, setup, draft.to(setup.device).train()
        self._head = draft.lm_head.weight.detach().clone()
        draft.lm_head.requires_grad_(False)
        for module in draft.children():
            module.to(setup.dtype)
        head = TeacherHead(setup.target, setup.dtype, setup.device, rows=setup.columns)
        self._teacher = Teacher(head, temperature=temperature)
        self._optimiser = OPTIMISERS[setup.options.optimiser](draft, setup.options)

    def step(self, packed: PackedSamples, rate: float) -> torch.Tensor:
        """One optimiser step. Returns the loss, on the device."""
        setup, options = self._setup, self._setup.options
        batch = from_packed(packed)
        loss, _ = distillation_loss(
            self._draft,
            batch.to(setup.device, setup.dtype),
            self._teacher,
            options.ttt_steps,
            options.step_decay,
            batch.num_supervised_rows,
            options.logit_chunk,
        )
        loss.backward()
        self._optimiser.accumulate()
        self._optimiser.step(rate)
        return loss.detach()

    def save(self, folder: Path) -> None:
        draft = copy.deepcopy(self._draft).float()
        with torch.no_grad():
            weights = dict(draft.named_parameters())
            weights["lm_head.weight"].copy_(self._head)
            for name, master in self._optimiser.masters.items():
                weights[name].copy_(master)
        write_draft(folder, draft.cpu(), SPECULATORS, self._setup.target, Serving(dtype="float32"))


class PeerTrainer:
    """The peer's model, head and embedding frozen; compiled with FlexAttention on CUDA, eager on
    the CPU. As with paceline, the arithmetic's weights are rounded copies of float32 masters."""

    name = "speculators"

    def __init__(self, setup: Setup) -> None:
        from speculators.losses import resolve_loss_config

        self._setup = setup
        self._model = peer_model(setup)
        rotary = copy.deepcopy(self._model.rotary_emb)
        self._model.to(setup.device, setup.dtype)
        # Its frequencies must not be rounded.
        self._model.rotary_emb = rotary.to(setup.device)
        self._arguments = {
            "ttt_steps": setup.options.ttt_steps,
            "ttt_step_loss_decay": setup.options.step_decay,
            # Its fused one does not compile on torch 2.11.
            "loss_config": resolve_loss_config("kl_div", "eager"),
        }

    def restart(self, seed: int) -> None:
        """Its own starting values anew; what was compiled is kept."""
        torch.manual_seed(seed)
        self._model.load_state_dict(peer_model(self._setup).state_dict())
        options = self._setup.options
        self._optimiser = OPTIMISERS[options.optimiser](self._model, options)

    def step(self, packed: PackedSamples, rate: float) -> torch.Tensor:
        _, loss, _ = self._model(**peer_batch(packed, self._setup), **self._arguments)
        loss.backward()
        self._optimiser.accumulate()
        self._optimiser.step(rate)
        return loss.detach()

    def save(self, folder: Path) -> None:
        whole = peer_model(self._setup)
        with torch.no_grad():
            weights = dict(whole.named_parameters())
            for name, master in self._optimiser.masters.items():
                weights[name].copy_(master)
        whole.save_pretrained(folder)


def peer_model(setup: Setup) -> nn.Module:
    """Its EAGLE-3 model of the draft's shape with the target's embedding, norm and head rows."""
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3SpeculatorConfig
    from speculators.models.eagle3.core import Eagle3DraftModel
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    layer = llama_config(setup.config)
    on_cuda = setup.device.type == "cuda"
    layer._attn_implementation = "simple_flex_attention" if on_cuda else "eager"
    layer.architectures = ["LlamaForCausalLM"]
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=setup.config.draft_vocab_size,
        norm_before_residual=False,
        fc_norm=setup.config.aux_norm == "rms",
        eagle_aux_hidden_state_layer_ids=list(setup.config.aux_layers),
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=5)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        ),
    )
    model = Eagle3DraftModel(config).float()
    head = TeacherHead(setup.target, torch.float32, rows=setup.columns)
    for weight, value in (
        (model.embed_tokens.weight, load_embedding(setup.target, torch.float32)),
        (model.lm_head.weight, head.weight),
        (model.verifier_lm_head.weight, head.weight),
        (model.verifier_norm.weight, head.norm.weight),
    ):
        weight.data.copy_(value)
    maps = setup.vocabulary.t2d, setup.vocabulary.d2t
    model.load_vocab_mappings(*map(torch.from_numpy, maps))
    return model


def same_start(setup: Setup, trainer: PeerTrainer, folder: Path) -> Draft:
    """A paceline draft with the peer's weights as they are now."""
    trainer.save(folder)
    return load_exported(folder, setup.target, torch.float32)


def peer_batch(packed: PackedSamples, setup: Setup) -> dict[str, Any]:
    """The same samples in the peer's form: tokens, mask and last states moved up by one, all of
    them padded to one length, so that nothing is compiled again."""
    device, width = setup.device, setup.config.target_hidden_size
    size = -(-setup.max_tokens // 128) * 128
    hidden = torch.zeros(size, packed.aux.shape[1] * width, dtype=packed.aux.dtype, device=device)
    hidden[: len(packed.aux)] = packed.aux.flatten(1)
    last = torch.zeros(size, width, dtype=packed.last.dtype, device=device)
    ids, mask = torch.zeros(size, dtype=torch.long), torch.zeros(size, dtype=torch.bool)
    document, position = torch.full((size,), -1), torch.zeros(size, dtype=torch.long)
    taught, sources = [], []
    for number, ((row, row_end), token, first_last) in enumerate(
        zip(pairwise(packed.aux_starts), packed.token_starts, packed.last_starts, strict=False)
    ):
        rows, after = slice(row, row_end), slice(token + 1, token + 1 + row_end - row)
        ids[rows], mask[rows] = packed.input_ids[after].long(), packed.loss_mask[after]
        document[rows], position[rows] = number, torch.arange(1, row_end - row + 1)
        supervised = torch.nonzero(mask[rows]).squeeze(1)
        # A supervised first token has a last state too, but no row that it teaches.
        skipped = int(packed.loss_mask[token])
        taught.append(row + supervised)
        sources.append(first_last + skipped + torch.arange(len(supervised)))
    last[torch.cat(taught).to(device)] = packed.last[torch.cat(sources).to(device)]
    fields: dict[str, torch.Tensor] = {
        "hidden_states": hidden,
        "input_ids": ids,
        "document_ids": document,
        "loss_mask": mask,
        "position_ids": position,
        "verifier_last_hidden_states": last,
    }
    moved = {name: value.to(device)[None] for name, value in fields.items()}
    return {n: t.to(setup.dtype) if t.is_floating_point() else t for n, t in moved.items()}
