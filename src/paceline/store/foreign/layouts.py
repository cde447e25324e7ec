"""What others' files mean: names of samples, tokens, masks, and which tensor is which layer.

Legend: T tokens, A auxiliary layers, L all captured layers, D target hidden width.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paceline.contracts import LayerPlan
from paceline.errors import UsageError
from paceline.store.foreign.reading import ForeignFileError, read_values

CONFIG_NAME = "data_config.json"
_ENDINGS = (".pt", ".ckpt", ".safetensors")
_DIGITS = re.compile(r"\d+")
# Names by tool: EAGLE and SpecForge keep the last state apart, speculators has one list of all.
_TOKENS = ("input_ids", "token_ids")
_LAST, _AUX, _ALL = "hidden_state", "aux_hidden_state", "hidden_states"


@dataclass(frozen=True)
class ForeignFile:
    """One sample's file. relative: its path below the folder; name: the same without endings."""

    path: Path
    relative: str
    name: str


@dataclass(frozen=True)
class ForeignSample:
    """input_ids int32 [T]; loss_mask bool [T], None where the file has none; aux [T, A, D] in the
    order of the file's layers; last [T, D]."""

    input_ids: np.ndarray
    loss_mask: np.ndarray | None
    aux: torch.Tensor
    last: torch.Tensor


@dataclass(frozen=True)
class Columns:
    """Which of a file's states is which. plan: the layers as k, ascending. aux: for each of them
    its column; last: the column of the last state, None where it has a tensor of its own."""

    plan: LayerPlan
    aux: tuple[int, ...]
    last: int | None


def find_files(folder: Path) -> list[ForeignFile]:
    """All samples of a folder in the order of their numbers. Raises UsageError where there are
    none."""
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such folder")
    paths = [p for p in folder.rglob("*") if p.name.removesuffix(".gz").endswith(_ENDINGS)]
    if not paths:
        raise UsageError(
            f"{folder} holds no samples of other tools: no file that ends in "
            f"{', '.join(_ENDINGS)}, each also .gz"
        )
    files = [_file(folder, path) for path in paths]
    numbers = lambda file: [int(digits) for digits in _DIGITS.findall(file.name)]
    return sorted(files, key=lambda file: (numbers(file), file.relative))


def holds_last_apart(path: Path) -> bool:
    """Whether the last state of such files has a tensor of its own, of the first that opens."""
    return _LAST in read_values(path)


def read_sample(path: Path, columns: Columns) -> ForeignSample:
    """One file's sample with layers in ascending order. Raises ForeignFileError."""
    values = read_values(path)
    ids = _tokens(path, values)
    num_layers = len(columns.aux) + (columns.last is not None)
    if columns.last is None:
        joined = _states(path, values, _AUX, len(ids))
        if joined.shape[1] % num_layers:
            raise ForeignFileError(
                path, f"{_AUX} is {joined.shape[1]} wide, not {num_layers} layers side by side"
            )
        aux = joined.unflatten(1, (num_layers, -1))[:, list(columns.aux)]
        last = _states(path, values, _LAST, len(ids))
    else:
        layers = _listed(path, values, len(ids))
        if len(layers) != num_layers:
            raise ForeignFileError(path, f"{_ALL} holds {len(layers)} layers, not {num_layers}")
        aux, last = torch.stack([layers[i] for i in columns.aux], 1), layers[columns.last]
    if aux.shape[2] != last.shape[1]:
        raise ForeignFileError(path, f"widths differ: {aux.shape[2]} and {last.shape[1]}")
    return ForeignSample(ids, _mask(path, values, len(ids)), aux, last)


def _file(folder: Path, path: Path) -> ForeignFile:
    relative = path.relative_to(folder)
    return ForeignFile(
        path, str(relative), str(relative.with_name(Path(path.name.removesuffix(".gz")).stem))
    )


def _tokens(path: Path, values: dict[str, Any]) -> np.ndarray:
    name = next((name for name in _TOKENS if name in values), None)
    if name is None:
        raise ForeignFileError(path, f"has neither {' nor '.join(_TOKENS)}")
    ids = _row(path, values, name)
    if not len(ids) or int(ids.min()) < 0 or int(ids.max()) > np.iinfo(np.int32).max:
        raise ForeignFileError(path, f"{name} holds no token ids")
    return ids.to(torch.int32).numpy()


def _mask(path: Path, values: dict[str, Any], num_tokens: int) -> np.ndarray | None:
    if "loss_mask" not in values:
        return None
    mask = _row(path, values, "loss_mask")
    if len(mask) != num_tokens:
        raise ForeignFileError(path, f"loss_mask has {len(mask)} entries for {num_tokens} tokens")
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise ForeignFileError(path, "loss_mask holds other values than 0 and 1")
    return mask.bool().numpy()


def _row(path: Path, values: dict[str, Any], name: str) -> torch.Tensor:
    """A tensor of whole numbers, [T] or [1, T], as [T]."""
    found = values[name]
    if not isinstance(found, torch.Tensor):
        raise ForeignFileError(path, f"{name} is no tensor", type(found).__name__)
    flat = found.reshape(-1) if found.ndim == 1 or found.shape[:-1].numel() == 1 else found
    if flat.ndim != 1 or (flat.is_floating_point() and name != "loss_mask"):
        raise ForeignFileError(path, f"{name} is {found.dtype} {list(found.shape)}, not ids [T]")
    return flat


def _states(path: Path, values: dict[str, Any], name: str, num_tokens: int) -> torch.Tensor:
    """States [T, W] or [1, T, W] as [T, W]."""
    found = values.get(name)
    if not isinstance(found, torch.Tensor):
        raise ForeignFileError(path, f"has no tensor {name}", ", ".join(values))
    return _checked(path, found, name, num_tokens)


def _listed(path: Path, values: dict[str, Any], num_tokens: int) -> list[torch.Tensor]:
    """States of all layers: a list of [T, D], or one tensor [T, L, D]."""
    found = values.get(_ALL)
    if isinstance(found, torch.Tensor):
        if found.ndim != 3 or len(found) != num_tokens:
            raise ForeignFileError(
                path, f"{_ALL} is {list(found.shape)}, not [{num_tokens}, layers, width]"
            )
        return list(found.unbind(1))
    if not isinstance(found, list) or not all(isinstance(s, torch.Tensor) for s in found):
        raise ForeignFileError(path, f"has no {_ALL}", ", ".join(values))
    layers = [_checked(path, s, f"{_ALL}[{i}]", num_tokens) for i, s in enumerate(found)]
    if len({(s.shape, s.dtype) for s in layers}) > 1:
        raise ForeignFileError(path, f"layers of {_ALL} differ in width or dtype")
    return layers


def _checked(path: Path, found: torch.Tensor, name: str, num_tokens: int) -> torch.Tensor:
    states = found[0] if found.ndim == 3 and len(found) == 1 else found
    if states.ndim != 2 or len(states) != num_tokens:
        raise ForeignFileError(
            path, f"{name} is {list(found.shape)} for {num_tokens} tokens, not [T, width]"
        )
    if not states.is_floating_point():
        raise ForeignFileError(path, f"{name} is {states.dtype}, not states")
    return states
