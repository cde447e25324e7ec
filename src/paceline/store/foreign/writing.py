"""Writes a store's samples as other tools keep them: one file a sample.

Rows that a store does not keep, since no draft step reads them, are zeros in such files: last
states where nothing is supervised, auxiliary states from the last supervised position on.
"""

import gzip
import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from paceline.artefact import disk_errors, write_atomically
from paceline.store.reader import StoredSample

_SAMPLES_IN_FOLDER = 2000
HIDDEN_STATE_INDEX = "hidden_state_index"


@dataclass(frozen=True)
class Layout:
    """How a tool keeps samples. path: of sample number N below the folder. values: what its file
    holds. convention: how it counts layers."""

    path: Callable[[int], str]
    values: Callable[[StoredSample], dict[str, Any]]
    convention: str


def _whole(sample: StoredSample) -> tuple[torch.Tensor, torch.Tensor]:
    """aux [T, A, D] and last [T, D], rows that are not stored as zeros."""
    num_tokens, (rows, num_aux, width) = len(sample.input_ids), sample.aux.shape
    aux = sample.aux.new_zeros(num_tokens, num_aux, width)
    aux[:rows] = sample.aux
    last = sample.last.new_zeros(num_tokens, width)
    last[sample.loss_mask] = sample.last
    return aux, last


def _eagle_values(sample: StoredSample) -> dict[str, Any]:
    aux, last = _whole(sample)
    return {
        "input_ids": sample.input_ids.long(),
        "loss_mask": sample.loss_mask.long(),
        "hidden_state": last[None],
        "aux_hidden_state": aux.flatten(1)[None],
    }


def _listed_values(sample: StoredSample) -> dict[str, Any]:
    aux, last = _whole(sample)
    return {
        "input_ids": sample.input_ids.long(),
        # A view would take its whole tensor along into the file.
        "hidden_states": [*(states.clone() for states in aux.unbind(1)), last],
        "loss_mask": sample.loss_mask.long(),
    }


def _joined_values(sample: StoredSample) -> dict[str, Any]:
    aux, last = _whole(sample)
    return {
        "hidden_states": torch.cat([aux, last[:, None]], 1),
        "token_ids": sample.input_ids.long(),
    }


def _rows_path(ending: str) -> Callable[[int], str]:
    def path(number: int) -> str:
        start = number // _SAMPLES_IN_FOLDER * _SAMPLES_IN_FOLDER
        return f"rows_{start}-{start + _SAMPLES_IN_FOLDER}/data_{number}{ending}"

    return path


LAYOUTS = {
    "eagle": Layout(_rows_path(".ckpt"), _eagle_values, HIDDEN_STATE_INDEX),
    "eagle.gz": Layout(_rows_path(".ckpt.gz"), _eagle_values, HIDDEN_STATE_INDEX),
    "speculators_0.3": Layout(lambda n: f"data_{n}.pt", _listed_values, "speculators_0.3"),
    "speculators_0.9": Layout(lambda n: f"hs_{n}.safetensors", _joined_values, "speculators_0.9"),
}


def write_sample(path: Path, values: dict[str, Any]) -> None:
    """Write one file whole or not at all; what it is, its ending says. Raises DiskFullError."""
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".safetensors":
        write_atomically(path, save({k: v.contiguous() for k, v in values.items()}))
        return
    buffer = io.BytesIO()
    torch.save(values, buffer)
    data = buffer.getvalue()
    write_atomically(path, gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)
