"""Holds an exported folder against the draft that it was made from, as a server would read it."""

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from paceline.device import dtype_name
from paceline.draft.config import DraftConfig
from paceline.draft.model import EMBEDDING_NAME, Draft
from paceline.draft.unroll import Unroll
from paceline.errors import ExportError
from paceline.forms.config_json import Serving, form_of, write_config
from paceline.forms.load import load_exported, read_json, read_tensors
from paceline.forms.names import VLLM
from paceline.forms.rope import same_rope
from paceline.forms.write import form_tensors, served_config
from paceline.target.spec import Target

REPLAY_STEPS = 3
_REPLAY_ROWS = 24
_SEED = 20261129

# Most that rounding the weights may move the logits of a row, as a share of their norm.
_BOUNDS: dict[torch.dtype, float] = {torch.float32: 0.0, torch.float16: 0.02, torch.bfloat16: 0.1}
EXPORTED_DTYPES = tuple(_BOUNDS)
# Folding a fixed scale into fc rounds once more, in another order.
_FOLDED_BOUND = 1e-4

# What a config says of the place it is served at, not of the draft.
_OF_THE_PLACE = ("speculators_config", "speculators_version")


def verify_exported(folder: str | Path, target: Target, draft: Draft) -> dict[str, Any]:
    """Re-load an exported folder and replay it against the trainer's draft.

    draft: the trainer's, float32, on the CPU. Checked: every tensor against the draft's own, bit
    for bit in the exported dtype; every field of the config against what this draft needs; the
    draft that a server would read from it against the trainer's; and the logits of three unrolled
    steps on random states. Returns {form, dtype, tensors, replay}. Raises ExportError that names
    everything that differs.
    """
    folder = Path(folder)
    values, found = read_json(folder), read_tensors(folder)
    form = form_of(values) or VLLM
    loaded = load_exported(folder, target, torch.float32, form)
    dtype = _dtype_of(found)
    problems = [
        *_config_differences(values, found, form, draft.config, target),
        *_shape_differences(loaded.config, served_config(draft.config)),
        *_tensor_differences(found, form, dtype, draft, target),
    ]
    error, bound = replay(draft, loaded), _bound(draft.config, dtype)
    if not error <= bound:
        problems.append(
            f"logits of {REPLAY_STEPS} replayed steps differ by {error:.2g} of their norm from the "
            f"trainer's (at most {bound:.2g} in {dtype})"
        )
    if problems:
        raise ExportError(
            f"{folder} would not be served as it was trained:\n  " + "\n  ".join(problems)
        )
    return {
        "form": form,
        "dtype": dtype_name(dtype),
        "tensors": len(found),
        "replay": {"steps": REPLAY_STEPS, "relative_error": error, "bound": bound},
    }


@torch.no_grad()
def replay(trained: Draft, served: Draft) -> float:
    """The largest difference of a row's logits in three unrolled steps, relative to their norm.

    Random states and teacher-forced random tokens from a seed of their own; positions over the
    whole range that the draft is made for, so that lost rotary scaling shows.
    """
    config = trained.config
    generator = torch.Generator().manual_seed(_SEED)
    aux_TAD = torch.randn(
        _REPLAY_ROWS, config.num_aux, config.target_hidden_size, generator=generator
    )
    ids_ST = torch.randint(config.vocab_size, (REPLAY_STEPS, _REPLAY_ROWS), generator=generator)
    last = max(config.max_position_embeddings - REPLAY_STEPS, _REPLAY_ROWS)
    positions_T = torch.linspace(0, last, _REPLAY_ROWS).long()
    expected = _logits(trained, aux_TAD, ids_ST, positions_T)
    given = _logits(served, aux_TAD, ids_ST, positions_T)
    if expected.shape != given.shape:
        return float("inf")
    difference = (expected - given).norm(dim=-1) / expected.norm(dim=-1)
    return float(difference.nan_to_num(nan=float("inf")).max())


def _logits(
    draft: Draft, aux_TAD: torch.Tensor, ids_ST: torch.Tensor, positions_T: torch.Tensor
) -> torch.Tensor:
    """[steps, rows, draft vocabulary] of one document."""
    if aux_TAD.shape[1] != draft.config.num_aux:
        return torch.empty(0)
    rows = torch.arange(len(positions_T))
    unroll = Unroll(draft, aux_TAD, ids_ST[0], positions_T, torch.zeros_like(positions_T))
    states = [unroll.first(rows), *(unroll.next(ids) for ids in ids_ST[1:])]
    return torch.stack([draft.logits(state) for state in states])


def _bound(config: DraftConfig, dtype: torch.dtype) -> float:
    folded = _FOLDED_BOUND if config.aux_norm == "static" else 0.0
    return max(_BOUNDS[dtype], folded)


def _dtype_of(found: Mapping[str, torch.Tensor]) -> torch.dtype:
    dtypes = {tensor.dtype for tensor in found.values() if tensor.is_floating_point()}
    if len(dtypes) != 1 or not dtypes <= set(_BOUNDS):
        raise ExportError(f"weights are of {sorted(map(str, dtypes))}; one is expected")
    return dtypes.pop()


def _config_differences(
    values: Mapping[str, Any],
    found: Mapping[str, torch.Tensor],
    form: str,
    config: DraftConfig,
    target: Target,
) -> list[str]:
    """Fields that are not what paceline would write for this draft."""
    dtype = dtype_name(_dtype_of(found))
    serving = Serving(dtype, copies_embedding=EMBEDDING_NAME in found)
    wanted = write_config(served_config(config), form, target.num_layers, serving)
    wanted = {key: value for key, value in wanted.items() if key not in _OF_THE_PLACE}
    return _differences(json.loads(json.dumps(wanted)), values, "config.json: ")


def _differences(wanted: Mapping[str, Any], found: Mapping[str, Any], where: str) -> list[str]:
    lines = []
    for key, value in wanted.items():
        there = found.get(key)
        if isinstance(value, Mapping) and isinstance(there, Mapping):
            lines += _differences(value, there, f"{where}{key}.")
        elif there != value:
            lines.append(f"{where}{key} is {there!r}, the draft needs {value!r}")
    return lines


def _shape_differences(loaded: DraftConfig, wanted: DraftConfig) -> list[str]:
    """Where the draft that a server reads is not the trained one; rotary positions by value."""
    lines = [
        f"a server reads {name} = {getattr(loaded, name)!r}, the draft has {value!r}"
        for name, value in asdict(replace(wanted, rope=loaded.rope)).items()
        if getattr(loaded, name) != value
    ]
    if not lines and not same_rope(wanted, loaded.rope, wanted.rope):
        lines.append(f"a server reads rotary parameters {loaded.rope}, the draft has {wanted.rope}")
    return lines


def _tensor_differences(
    found: Mapping[str, torch.Tensor],
    form: str,
    dtype: torch.dtype,
    draft: Draft,
    target: Target,
) -> list[str]:
    wanted = form_tensors(draft, form, dtype, target, copy_embedding=EMBEDDING_NAME in found)
    missing, unexpected = sorted(wanted.keys() - found), sorted(found.keys() - wanted)
    lines = [f"{name} is missing" for name in missing]
    lines += [f"{name} should not be there" for name in unexpected]
    lines += [
        f"{name} is not the draft's"
        for name in sorted(wanted.keys() & found)
        if found[name].dtype != wanted[name].dtype or not torch.equal(found[name], wanted[name])
    ]
    return lines
