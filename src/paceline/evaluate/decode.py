"""Real lossless speculative decoding with transformers, one conversation at a time, greedy.

The target verifies K draft tokens in one forward pass and its own tokens are what is emitted, so
the output is the target's greedy output whatever the draft says.
"""

from dataclasses import dataclass

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

from paceline.contracts import LayerPlan
from paceline.draft.model import Draft
from paceline.draft.unroll import Unroll
from paceline.evaluate.acceptance import Counts
from paceline.target.tap import LayerTap


@dataclass(frozen=True)
class Decoded:
    """tokens: the answer up to its end (end-of-turn token included) or the length limit."""

    tokens: list[int]
    counts: Counts


class Drafter:
    """The draft's side of decoding: its step-0 keys grow with what the target has verified."""

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self._past: list[tuple[torch.Tensor, torch.Tensor]] | None = None
        self._num_rows = 0

    def propose(self, aux_RAD: torch.Tensor, next_ids_R: torch.Tensor, count: int) -> list[int]:
        """Take in R newly verified rows and draft `count` tokens after the last of them.

        aux [R, A, D] and the token after each row, int64 [R].
        """
        positions = self._num_rows + torch.arange(len(aux_RAD), device=aux_RAD.device)
        starts = torch.zeros_like(positions)
        unroll = Unroll(self._draft, aux_RAD, next_ids_R, positions, starts, self._past)
        state = unroll.first(torch.tensor([len(aux_RAD) - 1], device=aux_RAD.device))
        self._past = unroll.step_0_keys
        self._num_rows += len(aux_RAD)
        proposed = [self._draft.propose(state)]
        while len(proposed) < count:
            proposed.append(self._draft.propose(unroll.next(proposed[-1])))
        return torch.cat(proposed).tolist()


class SpeculativeDecoder:
    """Decodes prompts with a target and a draft; `greedy` is the target alone, for comparison."""

    def __init__(self, model: PreTrainedModel, draft: Draft, plan: LayerPlan) -> None:
        self._model = model
        self._draft = draft
        self._plan = plan

    @torch.inference_mode()
    def decode(
        self, prompt: np.ndarray, num_draft_tokens: int, max_new_tokens: int, end_ids: set[int]
    ) -> Decoded:
        """prompt int32 [T]. Verify steps that start before the answer's end are counted whole: the
        target goes on past the end of turn, so that the last one is not cut short."""
        counts = Counts.zero(num_draft_tokens)
        drafter, cache = Drafter(self._draft), DynamicCache()
        tap = LayerTap(self._model, self._plan, self._plan.last)
        try:
            written = self._forward(prompt.tolist(), cache)[-1:]
            rows = self._aux(tap)
            next_ids = [*prompt.tolist()[1:], written[0]]
            while not _ended(written, max_new_tokens, end_ids):
                proposed = drafter.propose(
                    rows, torch.tensor(next_ids, device=rows.device), num_draft_tokens
                )
                verified = self._forward([written[-1], *proposed], cache)
                accepted = 0
                while accepted < num_draft_tokens and proposed[accepted] == verified[accepted]:
                    accepted += 1
                counts.add_step(accepted)
                next_ids = verified[: accepted + 1]
                rows = self._aux(tap)[: accepted + 1]
                written += next_ids
                # Keys and values of rejected tokens go; a negative size says how many, in every
                # transformers.
                if accepted < num_draft_tokens:
                    cache.crop(accepted - num_draft_tokens)
        finally:
            tap.close()
        return Decoded(_until_end(written, max_new_tokens, end_ids), counts)

    @torch.inference_mode()
    def greedy(self, prompt: np.ndarray, max_new_tokens: int, end_ids: set[int]) -> list[int]:
        """The target's own greedy answer, a token at a time."""
        cache = DynamicCache()
        written = self._forward(prompt.tolist(), cache)[-1:]
        while not _ended(written, max_new_tokens, end_ids):
            written += self._forward(written[-1:], cache)
        return written

    def _forward(self, ids: list[int], cache: DynamicCache) -> list[int]:
        """The target's most likely next token after each of `ids`."""
        tensor = torch.tensor([ids], device=self._model.device)
        output = self._model(input_ids=tensor, past_key_values=cache, use_cache=True)
        return output.logits[0].argmax(-1).tolist()

    def _aux(self, tap: LayerTap) -> torch.Tensor:
        return torch.stack([tap.states[k][0] for k in self._plan.aux], 1)


def _ended(written: list[int], max_new_tokens: int, end_ids: set[int]) -> bool:
    return len(written) >= max_new_tokens or not end_ids.isdisjoint(written[:max_new_tokens])


def _until_end(written: list[int], max_new_tokens: int, end_ids: set[int]) -> list[int]:
    for at, token in enumerate(written[:max_new_tokens]):
        if token in end_ids:
            return written[: at + 1]
    return written[:max_new_tokens]
