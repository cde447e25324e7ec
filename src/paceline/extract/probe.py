"""The probe: before bulk work a few prompts show whether the engine's states are right.

Two independent looks: the engine against itself (its greedy tokens against head(norm(last))) and
the engine against a plain transformers forward (an engine can agree with itself and still run a
wrong target). Legend: R rows, A layers, D width.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paceline.artefact import open_stage
from paceline.contracts import TokenSample
from paceline.errors import ProbeFailure
from paceline.extract.engine import Engine
from paceline.extract.guards import Guards, past_first_token, row_rms
from paceline.extract.reference import compare_with_plain_forward
from paceline.extract.sink import QUARANTINE_PATTERN, Destination, read_lines
from paceline.store import Store, StoreSpec, published_ids
from paceline.target.model import TeacherHead
from paceline.target.spec import Target

MIN_GREEDY_ROWS = 64
_MAX_PROMPT_TOKENS = 256
# A logit may be this many units in the last place below the largest. In half precision the greedy
# pass and the captured one run in other shapes, so a few close calls may fall the other way.
_GREEDY_ULPS = 2.0
_GREEDY_SHARE = {"float32": 1.0, "bfloat16": 0.95, "float16": 0.95}


@dataclass(frozen=True)
class ProbeResult:
    """What the probe saw; part of the manifest.

    errors: per k the row-relative error to the plain forward, None where that comparison was
    waived. reference_layers: the decoder layers that this forward ran, fewer than the target's
    where it was a cut-down copy; 0 where it was waived.
    """

    num_rows: int
    num_greedy_rows: int
    num_greedy_agree: int
    errors: dict[str, dict[str, float]] | None
    reference_layers: int
    rms_ranges: tuple[tuple[float, float], ...]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def run_probe(
    engine: Engine,
    target: Target,
    spec: StoreSpec,
    prompts: Sequence[np.ndarray],
    scratch: Path,
    reference_layers: int,
) -> ProbeResult:
    """Run prompts through the engine and check what it captured; ProbeFailure names the layer.

    prompts: int32 arrays. scratch: an empty folder for the probe's own shards. reference_layers:
    compare with a plain transformers forward of so many of the target's layers, in the same dtype;
    0: with none.
    """
    plan = spec.layers
    if 0 < reference_layers < target.num_layers:
        # Where the copy ends is looked at too: the plan's own layers may all lie beyond it.
        aux = tuple(sorted({*plan.aux, reference_layers}))
        spec = replace(spec, layers=replace(plan, aux=aux))
    num_new = math.ceil(MIN_GREEDY_ROWS / len(prompts))
    answers = engine.greedy(prompts, num_new)
    samples = [
        _probe_sample(i, p, a) for i, (p, a) in enumerate(zip(prompts, answers, strict=True))
    ]
    captured = _capture(engine, spec, samples, scratch)
    agree, rows = _check_greedy(target, spec, samples, captured)
    errors = None
    if reference_layers:
        errors = compare_with_plain_forward(
            target, spec, samples, captured, num_layers=reference_layers
        )
    return ProbeResult(
        num_rows=sum(sample.num_aux_rows for sample in samples),
        num_greedy_rows=rows,
        num_greedy_agree=agree,
        errors=errors,
        reference_layers=reference_layers,
        rms_ranges=_rms_ranges(samples, captured, [spec.layers.aux.index(k) for k in plan.aux]),
    )


def choose_prompts(samples: Sequence[TokenSample], count: int) -> list[np.ndarray]:
    """Beginnings of samples, spread over them: up to the first supervised token, at most 256."""
    chosen = samples[:: max(1, len(samples) // count)][:count]
    prompts = []
    for sample in chosen:
        first = int(np.flatnonzero(sample.loss_mask)[0])
        prompts.append(sample.input_ids[: min(max(first, 1), _MAX_PROMPT_TOKENS)])
    return prompts


def _probe_sample(number: int, prompt: np.ndarray, answer: Sequence[int]) -> TokenSample:
    """Prompt and answer; "supervised" are the rows whose next token the engine chose itself."""
    ids = np.concatenate([prompt, np.asarray(answer, np.int32)]).astype(np.int32)
    mask = np.zeros(len(ids), bool)
    mask[len(prompt) - 1 : len(ids) - 1] = True
    return TokenSample(sample_id=f"probe-{number}", input_ids=ids, loss_mask=mask)


@dataclass(frozen=True)
class _Captured:
    aux: torch.Tensor  # [R, A, D]
    last: torch.Tensor  # [M, D]


def _capture(
    engine: Engine, spec: StoreSpec, samples: list[TokenSample], scratch: Path
) -> list[_Captured]:
    """Through the engine, the guards, a shard and back: the whole way that bulk work takes."""
    destination = Destination(scratch, spec, Guards(spec.layers, spec.hidden_size))
    with open_stage(scratch, "extract", inputs={}, options={}):
        engine.capture(samples, spec.layers, destination, lambda _: None)
    rejected = read_lines(scratch, QUARANTINE_PATTERN)
    if rejected:
        raise ProbeFailure(
            f"probe: {rejected[0]['sample_id']} was refused: {rejected[0]['reason']}"
        )
    missing = {s.sample_id for s in samples} - published_ids(scratch)
    if missing:
        raise ProbeFailure(f"probe: the engine gave nothing for {', '.join(sorted(missing))}")
    store = Store(scratch, unfinished=True)
    stored = [store.read(store.records.find(s.sample_id)) for s in samples]
    return [_Captured(s.aux.clone(), s.last.clone()) for s in stored]


def _check_greedy(
    target: Target, spec: StoreSpec, samples: list[TokenSample], captured: list[_Captured]
) -> tuple[int, int]:
    dtype = getattr(torch, spec.dtype)
    head = TeacherHead(target, dtype)
    agree = rows = 0
    worst = 0.0
    for sample, states in zip(samples, captured, strict=True):
        logits = head(states.last.to(dtype)).float()
        chosen = torch.from_numpy(sample.input_ids[1:][sample.loss_mask[:-1]].astype(np.int64))
        highest = logits.max(-1).values
        gap = highest - logits.gather(1, chosen[:, None]).squeeze(1)
        ulps = gap / (torch.finfo(dtype).eps * highest.abs().log2().floor().exp2())
        agree += int((ulps <= _GREEDY_ULPS).sum())
        rows += len(chosen)
        worst = max(worst, float(ulps.max()))
    if agree < _GREEDY_SHARE[spec.dtype] * rows:
        raise ProbeFailure(
            f"probe: at {rows - agree} of {rows} rows the engine's own greedy token is not the "
            f"most likely one of head(norm(last state k = {spec.layers.last})) (worst: {worst:.0f} "
            "units in the last place below it): the last state, its norm or the head is wrong"
        )
    return agree, rows


def _rms_ranges(
    samples: list[TokenSample], captured: list[_Captured], columns: list[int]
) -> tuple[tuple[float, float], ...]:
    """Lowest and highest row RMS of these columns of `aux` and of the last state, first tokens
    apart."""
    rows = [past_first_token(s, c.aux, c.last) for s, c in zip(samples, captured, strict=True)]
    layers = [torch.cat([row_rms(aux[:, i]) for aux, _ in rows]) for i in columns]
    layers.append(torch.cat([row_rms(last) for _, last in rows]))
    return tuple((float(rms.min()), float(rms.max())) for rms in layers)
