"""A tiny target and a tiny draft for it, with few enough tokens to list all that they can say."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from paceline.contracts import LayerPlan
from paceline.draft.model import Draft
from paceline.evaluate.decode import SpeculativeDecoder
from paceline.target.model import load_model
from paceline.target.spec import Target
from tests.forms.making import config_for, draft_for, tiny_target

NUM_LAYERS = 4
PLAN = LayerPlan((1, 2, 3), NUM_LAYERS)


@dataclass(frozen=True)
class Pair:
    target: Target
    model: PreTrainedModel
    draft: Draft

    @property
    def decoder(self) -> SpeculativeDecoder:
        return SpeculativeDecoder(self.model, self.draft, PLAN)

    @torch.inference_mode()
    def distribution(self, ids: list[int], temperature: float) -> np.ndarray:
        """The target's next token after `ids`, float64 [V], by a plain forward."""
        logits = self.model(torch.tensor([ids])).logits[0, -1].double()
        return (logits / temperature).softmax(-1).numpy()


def tiny_pair(folder: Path, vocab_size: int = 6, draft_vocab_size: int = 4) -> Pair:
    target = tiny_target(folder, num_hidden_layers=NUM_LAYERS, vocab_size=vocab_size)
    config = config_for(
        aux_layers=PLAN.aux, vocab_size=vocab_size, draft_vocab_size=draft_vocab_size
    )
    draft = draft_for(target, config)
    return Pair(target, load_model(target, torch.float32, "cpu"), draft)
