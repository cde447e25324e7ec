"""Answers through transformers: left-padded batches of like lengths over a key/value cache.

B sequences of a batch, T padded prompt tokens, V logit width.
"""

import inspect
from collections.abc import Callable, Sequence
from itertools import groupby

import numpy as np
import torch
from transformers import Cache, PreTrainedModel

from paceline.answers.engine import LENGTH, STOP, Answer, Prompt, Sampling
from paceline.device import choose_device, choose_dtype, dtype_name
from paceline.fingerprint import package_versions
from paceline.recipe import GenerateOptions
from paceline.target.model import cached, load_model
from paceline.target.spec import Target, long_rope_from

# Rows of finished answers are dropped from the batch when they are at least this share of it.
_COMPACT_SHARE = 0.25


def open_engine(options: GenerateOptions, target: Target) -> "TransformersAnswers":
    device = choose_device(options.device)
    dtype = choose_dtype(options.dtype, device, target.native_dtype())
    model = load_model(target, dtype, device)
    return TransformersAnswers(model, options.batch_size, long_rope_from(target))


class TransformersAnswers:
    """The engine `transformers`; see AnswerEngine."""

    def __init__(
        self, model: PreTrainedModel, batch_size: int, long_from: int | None = None
    ) -> None:
        """long_from: see `long_rope_from`."""
        self.model = model
        self.batch_size = batch_size
        self._long_from = long_from
        self.describe = {
            "name": "transformers",
            "version": package_versions()["transformers"],
            "dtype": dtype_name(model.dtype),
            "device": str(model.device),
        }
        # Logits of a whole prompt are [B, T, V]; where the model can, only the last are made.
        parameters = inspect.signature(model.forward).parameters
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
        self._takes_positions = "position_ids" in parameters

    def answer(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        on_answer: Callable[[Answer], None],
    ) -> None:
        # Long prompts first: memory runs out at once or not at all.
        ordered = sorted(prompts, key=lambda prompt: -len(prompt.ids))
        for _, alike in groupby(ordered, lambda prompt: self._rope_group(prompt, sampling)):
            group = list(alike)
            for start in range(0, len(group), self.batch_size):
                self._answer_batch(group[start : start + self.batch_size], sampling, on_answer)

    def _rope_group(self, prompt: Prompt, sampling: Sampling) -> str:
        """A batch runs by the rotary frequencies of its longest row: prompts that may turn to the
        long ones on the way share no batch with any other."""
        if self._long_from is None or len(prompt.ids) > self._long_from:
            return "alike"
        most = len(prompt.ids) + sampling.max_new_tokens + sampling.num_past_end
        return f"turns/{prompt.key}" if most > self._long_from else "short"

    def close(self) -> None:
        del self.model

    @torch.inference_mode()
    def _answer_batch(
        self, prompts: Sequence[Prompt], sampling: Sampling, on_answer: Callable[[Answer], None]
    ) -> None:
        writers = [_Writer(prompt, sampling) for prompt in prompts]
        ids_BT, mask_BT = self._padded(prompts)
        positions_BT = (mask_BT.cumsum(1) - 1).clamp(min=0)
        cache: Cache | None = None
        while writers:
            out = self.model(
                input_ids=ids_BT,
                attention_mask=mask_BT,
                **({"position_ids": positions_BT} if self._takes_positions else {}),
                **cached(self.model, cache),
                **self._last_only,
            )
            cache = out.past_key_values
            next_B = _choose(out.logits[:, -1].float(), writers, sampling)
            for writer, token in zip(writers, next_B.tolist(), strict=True):
                if writer.write(token):
                    on_answer(writer.answer())
            ids_BT = next_B[:, None]
            positions_BT = positions_BT[:, -1:] + 1
            mask_BT = torch.cat([mask_BT, mask_BT.new_ones(len(writers), 1)], dim=1)
            rows = [i for i, writer in enumerate(writers) if not writer.done]
            if not rows:
                return
            if len(rows) <= (1 - _COMPACT_SHARE) * len(writers):
                kept = torch.tensor(rows, device=ids_BT.device)
                # As beam search does it: linear attention's states know no batch_select_indices.
                cache.reorder_cache(kept)
                ids_BT, positions_BT, mask_BT = ids_BT[kept], positions_BT[kept], mask_BT[kept]
                writers = [writers[i] for i in rows]

    def _padded(self, prompts: Sequence[Prompt]) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids and attention mask [B, T], padding on the left."""
        longest = max(len(prompt.ids) for prompt in prompts)
        ids_BT = np.zeros((len(prompts), longest), np.int64)
        mask_BT = np.zeros((len(prompts), longest), np.int64)
        for row, prompt in enumerate(prompts):
            ids_BT[row, longest - len(prompt.ids) :] = prompt.ids
            mask_BT[row, longest - len(prompt.ids) :] = 1
        device = self.model.device
        return torch.from_numpy(ids_BT).to(device), torch.from_numpy(mask_BT).to(device)


class _Writer:
    """One answer in the making."""

    def __init__(self, prompt: Prompt, sampling: Sampling) -> None:
        self.prompt = prompt
        self.sampling = sampling
        self.ids: list[int] = []
        self.end: int | None = None
        self.finish_reason = LENGTH
        # One number per token, drawn beforehand from the prompt's own seed.
        longest = sampling.max_new_tokens + sampling.num_past_end
        self.draws = np.random.default_rng(prompt.seed).random(longest)

    @property
    def done(self) -> bool:
        return self.end is not None and len(self.ids) >= self.end + self.sampling.num_past_end

    @property
    def draw(self) -> float:
        return float(self.draws[min(len(self.ids), len(self.draws) - 1)])

    def write(self, token: int) -> bool:
        """Take the next token; True if it is the last one. Tokens after that are ignored."""
        if self.done:
            return False
        self.ids.append(token)
        if self.end is None:
            if token in self.sampling.end_ids:
                self.end, self.finish_reason = len(self.ids), STOP
            elif len(self.ids) == self.sampling.max_new_tokens:
                self.end = len(self.ids)
        return self.done

    def answer(self) -> Answer:
        return Answer(self.prompt.key, self.ids, self.finish_reason, self.sampling.num_past_end)


def _choose(logits_BV: torch.Tensor, writers: list[_Writer], sampling: Sampling) -> torch.Tensor:
    """Next token of each row [B]: the largest logit, or the inverse of the distribution's sum at
    the row's own draw."""
    if sampling.temperature == 0:
        return logits_BV.argmax(-1)
    probabilities_BV, order_BV = (
        (logits_BV / sampling.temperature).softmax(-1).sort(dim=-1, descending=True)
    )
    sums_BV = probabilities_BV.cumsum(-1)
    # The nucleus: the fewest tokens that together reach top_p.
    sizes_B = ((sums_BV - probabilities_BV) < sampling.top_p).sum(-1, keepdim=True)
    within_B = sums_BV.gather(1, sizes_B - 1)
    draws_B = torch.tensor([[w.draw] for w in writers], dtype=sums_BV.dtype).to(sums_BV.device)
    places_B = torch.searchsorted(sums_BV, draws_B * within_B, right=True).minimum(sizes_B - 1)
    return order_BV.gather(1, places_B)[:, 0]
