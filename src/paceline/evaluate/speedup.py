"""Predicted speed-up: what acceptance is worth on this machine, and the best chain length.

A verify step with K draft tokens takes K draft steps and one target step of K + 1 tokens, and
writes as many tokens as the acceptance length; without a draft a target step of one token writes
one. Prefill, scheduling and whatever else a server does between steps are not in it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.draft.model import Draft
from paceline.evaluate.step_times import StepTimer, StepTimes
from paceline.recipe import SpeedupOptions
from paceline.target.model import load_model
from paceline.target.spec import Target


def acceptance_lengths(results: Mapping[str, Any]) -> dict[int, float]:
    """For every K up to the longest measured: as measured, else from the longest chain's acceptance
    per position (a shorter chain starts its steps elsewhere, so that is close and not exact)."""
    pooled = {int(k): found["pooled"] for k, found in results.items()}
    longest = max(pooled)
    lengths = {}
    for k in range(1, longest + 1):
        measured = pooled[k]["acceptance_length"] if k in pooled else None
        lengths[k] = measured or 1.0 + sum(pooled[longest]["per_position"][:k])
    return lengths


def speedups(lengths: Mapping[int, float], times: StepTimes) -> dict[int, float]:
    """{K: predicted speed-up over the target alone}; times.target up to K + 1 tokens."""
    return {
        k: length * times.target[0] / (times.target[k] + k * times.draft)
        for k, length in lengths.items()
    }


def best_length(predicted: Mapping[int, float]) -> int:
    """The K that is fastest; 0 where none is faster than the target alone."""
    best = max(predicted, key=lambda k: predicted[k])
    return best if predicted[best] > 1.0 else 0


def predict(
    options: SpeedupOptions, draft: Draft, target: Target, results: Mapping[str, Any]
) -> dict[str, Any]:
    """Time steps here and predict. Returns what `result.json` holds as `speedup`: {"engine",
    "device", "acceptance_lengths", "table": one entry for each batch size and context that fits
    into memory, "left_out": those that do not}."""
    lengths = acceptance_lengths(results)
    weight = draft.fc.weight
    model = load_model(target, weight.dtype, weight.device)
    timer = StepTimer(model, draft, max(lengths))
    table: list[dict[str, Any]] = []
    left_out: list[Sequence[int]] = []
    for context in options.contexts:
        for batch_size in options.batch_sizes:
            if not timer.fits(batch_size, context):
                left_out.append((batch_size, context))
                continue
            times = timer.measure(batch_size, context)
            predicted = speedups(lengths, times)
            table.append(
                {
                    "batch_size": batch_size,
                    "context": context,
                    "target_step_s": list(times.target),
                    "draft_step_s": times.draft,
                    "predicted": {str(k): value for k, value in predicted.items()},
                    "best": best_length(predicted),
                }
            )
    return {
        "engine": "transformers",
        "device": weight.device.type,
        "acceptance_lengths": {str(k): length for k, length in lengths.items()},
        "table": table,
        "left_out": left_out,
    }
