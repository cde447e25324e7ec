"""Real speculative decoding with transformers, one conversation at a time.

The target verifies K draft tokens in one forward pass and its own tokens are what is emitted, so
greedy output is the target's whatever the draft says, and sampled output is distributed as its.
"""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from paceline.acceptance.counts import Counts
from paceline.contracts import LayerPlan
from paceline.draft.model import Draft
from paceline.draft.unroll import KeysValues, Unroll, prepared_layers
from paceline.errors import EvaluationError
from paceline.evaluate.sampling import Drafted, Greedy, Rule
from paceline.recipe import EvaluateOptions
from paceline.target.model import cached
from paceline.target.spec import Target
from paceline.target.tap import LayerTap

# Kinds of layers, as configs call them, whose states cannot be taken back to an earlier token.
_RECURRENT = ("linear_attention", "mamba", "conv", "recurrent", "hybrid", "hybrid_sliding")


def check_decodable(options: EvaluateOptions, target: Target) -> None:
    """Raises EvaluationError where the options ask for decoding with transformers and the target
    (Qwen3-Next, Qwen3.5, Nemotron-H) keeps more than keys and values: of what was verified and
    rejected nothing can be cut off there."""
    if options.mode != "decode" and not options.speedup.predict:
        return
    config = target.text_config
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()
    if found := sorted({kind for kind in kinds if kind in _RECURRENT}):
        raise EvaluationError(
            f"{target.reference.target} has layers of {', '.join(found)}, whose states go back to "
            "no earlier token, as mode decode and speedup.predict need it: use mode chain or served"
        )


@dataclass(frozen=True)
class Decoded:
    """tokens: the answer up to its end (end-of-turn token included) or the length limit."""

    tokens: list[int]
    counts: Counts


class Drafter:
    """The draft's side of decoding: its step-0 keys grow with what the target has verified."""

    def __init__(self, draft: Draft, rule: Rule) -> None:
        self._draft = draft
        self._rule = rule
        self._layers = prepared_layers(draft)
        self._past: list[KeysValues] | None = None
        self._num_rows = 0

    def propose(self, aux_RAD: torch.Tensor, next_ids: list[int], count: int) -> list[Drafted]:
        """Take in R newly verified rows and draft `count` tokens after the last of them.

        aux [R, A, D] and the token after each row.
        """
        device = aux_RAD.device
        positions = self._num_rows + torch.arange(len(aux_RAD), device=device)
        starts = torch.zeros_like(positions)
        ids = torch.tensor(next_ids, device=device)
        unroll = Unroll(self._draft, aux_RAD, ids, positions, starts, self._past, self._layers)
        state = unroll.first(torch.tensor([len(aux_RAD) - 1], device=device))
        self._past = unroll.step_0_keys
        self._num_rows += len(aux_RAD)
        drafted = [self._rule.draft(self._draft, state)]
        while len(drafted) < count:
            state = unroll.next(torch.tensor([drafted[-1].token], device=device))
            drafted.append(self._rule.draft(self._draft, state))
        return drafted


class SpeculativeDecoder:
    """Decodes prompts with a target and a draft; `alone` is the target without it, to compare."""

    def __init__(self, model: PreTrainedModel, draft: Draft, plan: LayerPlan) -> None:
        self._model = model
        self._draft = draft
        self._plan = plan

    @torch.inference_mode()
    def decode(
        self,
        prompt: list[int],
        num_draft_tokens: int,
        max_new_tokens: int,
        end_ids: set[int],
        rule: Rule | None = None,
    ) -> Decoded:
        """Verify steps that start before the answer's end are counted whole: the target goes on
        past the end of turn, so that the last one is not cut short. rule: None is greedy."""
        rule = rule or Greedy()
        counts = Counts.zero(num_draft_tokens)
        drafter, cache = Drafter(self._draft, rule), DynamicCache()
        tap = LayerTap(self._model, self._plan, self._plan.last)
        try:
            written = [rule.write(self._forward(prompt, cache)[-1])]
            rows = self._aux(tap)
            next_ids = [*prompt[1:], written[0]]
            while not _ended(written, max_new_tokens, end_ids):
                drafted = drafter.propose(rows, next_ids, num_draft_tokens)
                logits = self._forward([written[-1], *(d.token for d in drafted)], cache)
                next_ids = rule.verify(drafted, logits)
                accepted = len(next_ids) - 1
                counts.add_step(accepted)
                rows = self._aux(tap)[: len(next_ids)]
                written += next_ids
                # Keys and values of rejected tokens go; a negative size says how many, in every
                # transformers.
                if accepted < num_draft_tokens:
                    cache.crop(accepted - num_draft_tokens)
        finally:
            tap.close()
        return Decoded(_until_end(written, max_new_tokens, end_ids), counts)

    @torch.inference_mode()
    def alone(
        self,
        prompt: list[int],
        max_new_tokens: int,
        end_ids: set[int],
        rule: Rule | None = None,
    ) -> list[int]:
        """The target's own answer, a token at a time."""
        rule = rule or Greedy()
        cache = DynamicCache()
        written = [rule.write(self._forward(prompt, cache)[-1])]
        while not _ended(written, max_new_tokens, end_ids):
            written.append(rule.write(self._forward(written[-1:], cache)[-1]))
        return written

    @torch.inference_mode()
    def gap(self, prompt: list[int], own: int, other: int) -> float:
        """log p(own) - log p(other) after `prompt`."""
        logits = self._forward(prompt, DynamicCache())[-1].double()
        return float(logits[own] - logits[other])

    def _forward(self, ids: list[int], cache: Any) -> torch.Tensor:
        """The target's logits after each of `ids`, [L, V]."""
        tensor = torch.tensor([ids], device=self._model.device)
        output = self._model(input_ids=tensor, **cached(self._model, cache))
        return output.logits[0]

    def _aux(self, tap: LayerTap) -> torch.Tensor:
        return torch.stack([tap.states[k][0] for k in self._plan.aux], 1)


def _ended(written: list[int], max_new_tokens: int, end_ids: set[int]) -> bool:
    return len(written) >= max_new_tokens or not end_ids.isdisjoint(written[:max_new_tokens])


def _until_end(written: list[int], max_new_tokens: int, end_ids: set[int]) -> list[int]:
    for at, token in enumerate(written[:max_new_tokens]):
        if token in end_ids:
            return written[: at + 1]
    return written[:max_new_tokens]
