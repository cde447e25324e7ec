"""A draft to keep: its weights in 8 bits in one safetensors file, and a JSON file beside it that
says what it is and how it was made. `evaluate`, `train` and `export` read it; no server does.

Matrices are int8 with a float32 scale per output row, gains stay float32. What can be had from the
target is left out: a shared embedding, and a head that is the target's own rows.
Legend: O outputs, I inputs.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from paceline import fingerprint
from paceline.artefact import Manifest, write_atomically, write_json
from paceline.draft.checkpoint import build_draft, draft_tensors
from paceline.draft.config import DraftConfig
from paceline.draft.model import EMBEDDING_NAME, Draft
from paceline.errors import ExportError, TrainingError, VocabularyError
from paceline.target.model import TeacherHead, load_embedding
from paceline.target.spec import Target
from paceline.vocab import DraftVocabulary

COMPACT_FILE, COMPACT_WEIGHTS_FILE = "compact.json", "compact.safetensors"
_SCHEMA = 1
_HEAD, _SCALE = "lm_head.weight", ".scale"
_LARGEST = 127


def write_compact(
    folder: Path,
    draft: Draft,
    target: Target,
    trained: Manifest | None,
    acceptance: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Write both files, each whole or not at all. Returns {"folder", "bytes", "head"}.

    trained: the manifest of the `train` that made the draft; None for one made elsewhere.
    acceptance: what `evaluate` returned of it; None where it was not measured.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: t.float() for name, t in draft_tensors(draft).items() if name != "t2d"}
    offsets = tensors.pop("d2t")
    head_is_targets = draft.config.shares_embedding and torch.equal(
        tensors[_HEAD], _head_rows(target, offsets.long().numpy())
    )
    if head_is_targets:
        del tensors[_HEAD]
    stored = {"d2t": offsets.to(torch.int32)}
    for name, tensor in tensors.items():
        stored |= _rounded(name, tensor) if tensor.ndim == 2 else {name: tensor}
    data = save(stored, metadata={"format": "pt"})
    write_atomically(folder / COMPACT_WEIGHTS_FILE, data)
    described = {
        "schema": _SCHEMA,
        "draft": draft.config.to_dict(),
        "head": "target" if head_is_targets else "own",
        "weights": fingerprint.of_bytes(data),
        "target": {**asdict(target.reference), "fingerprint": target.fingerprints},
        "trained": None if trained is None else _provenance(trained),
        "acceptance": acceptance and {k: acceptance[k] for k in _ACCEPTANCE if k in acceptance},
    }
    write_json(folder / COMPACT_FILE, described)
    return {"folder": str(folder), "bytes": len(data), "head": described["head"]}


_ACCEPTANCE = ("definition", "mode", "split", "dtype", "states_dtype", "results", "baselines")


def read_compact(folder: Path) -> dict[str, Any]:
    """What the JSON file says. Raises ExportError where it is none of this paceline's."""
    path = folder / COMPACT_FILE
    try:
        values = json.loads(path.read_text())
        schema = values["schema"]
    except (ValueError, TypeError, KeyError) as error:
        raise ExportError(f"{path} is not the description of a compact draft: {error!r}") from error
    if schema != _SCHEMA:
        raise ExportError(f"{path} has schema {schema}; this paceline reads {_SCHEMA}")
    return values


def trained_manifest(folder: Path) -> Manifest | None:
    """The manifest of the `train` that made a compact draft, as far as it is kept."""
    kept = read_compact(folder)["trained"]
    return None if kept is None else Manifest(**kept)


def recorded_target(folder: Path) -> dict[str, Any]:
    """The target that a compact draft is for, as manifests name targets."""
    return {k: v for k, v in read_compact(folder)["target"].items() if k != "fingerprint"}


def read_compact_config(folder: Path) -> DraftConfig:
    """The shape of a compact draft."""
    try:
        return DraftConfig.from_dict(read_compact(folder)["draft"])
    except (KeyError, TypeError, TrainingError) as error:
        raise ExportError(f"{folder / COMPACT_FILE}: {error!r}") from error


def load_compact(folder: Path, target: Target, dtype: torch.dtype) -> Draft:
    """The draft with the target's embedding (and head, where it has none), in eval mode.

    Raises ExportError for weights that are damaged, of another draft, or do not fit its shape,
    FingerprintMismatch for another target than that of the draft.
    """
    values = read_compact(folder)
    target.check_made_by(values["target"]["fingerprint"], f"{folder} was trained on")
    path = folder / COMPACT_WEIGHTS_FILE
    if not path.is_file():
        raise ExportError(f"{folder} has no {COMPACT_WEIGHTS_FILE}")
    data = path.read_bytes()
    if fingerprint.of_bytes(data) != values["weights"]:
        raise ExportError(
            f"{path} is not what {COMPACT_FILE} describes: it was damaged, or is another draft's"
        )
    try:
        config = DraftConfig.from_dict(values["draft"])
        tensors = _exact(load_file(path))
        tensors |= _vocabulary(tensors, config)
        if values["head"] == "target":
            tensors[_HEAD] = _head_rows(target, tensors["d2t"].numpy())
        if config.shares_embedding:
            tensors[EMBEDDING_NAME] = load_embedding(target, torch.float32)
        return build_draft(config, tensors, dtype, "its tensors")
    except (ExportError, TrainingError, VocabularyError, SafetensorError, TypeError) as error:
        raise ExportError(f"{path}: {error}") from error


def _rounded(name: str, weight_OI: torch.Tensor) -> dict[str, torch.Tensor]:
    """int8 [O, I] and float32 scales [O]; the largest value of a row is kept, zeros stay zero."""
    largest = weight_OI.abs().amax(1)
    scale_O = torch.where(largest > 0, largest, 1.0) / _LARGEST
    values = (weight_OI / scale_O[:, None]).round().clamp(-_LARGEST, _LARGEST)
    return {name: values.to(torch.int8), name + _SCALE: scale_O}


def _exact(stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Float32 tensors of the stored ones; d2t stays as it is. Raises ExportError that names the
    matrix without a fitting scale."""
    tensors = {}
    for name, tensor in stored.items():
        if tensor.dtype == torch.int8:
            scale = stored.get(name + _SCALE)
            if scale is None or scale.shape != tensor.shape[:1] or not scale.isfinite().all():
                raise ExportError(f"{name} has no finite scale for each of its {len(tensor)} rows")
            tensors[name] = tensor.float() * scale[:, None]
        elif not (name.endswith(_SCALE) and name.removesuffix(_SCALE) in stored):
            tensors[name] = tensor
    return tensors


def _vocabulary(
    tensors: Mapping[str, torch.Tensor], config: DraftConfig
) -> dict[str, torch.Tensor]:
    if "d2t" not in tensors:
        raise ExportError("there is no d2t")
    offsets = tensors["d2t"].numpy().astype(np.int64)
    vocabulary = DraftVocabulary.from_offsets(offsets, config.vocab_size)
    vocabulary.check()
    return {"d2t": torch.from_numpy(vocabulary.d2t), "t2d": torch.from_numpy(vocabulary.t2d)}


def _head_rows(target: Target, offsets: np.ndarray) -> torch.Tensor:
    rows = torch.from_numpy(np.arange(len(offsets)) + offsets)
    return TeacherHead(target, torch.float32, rows=rows).weight.detach()


def _provenance(trained: Manifest) -> dict[str, Any]:
    """Of the manifest what is the same wherever the folders lie."""
    inputs = {
        name: {"path": Path(str(made["path"])).name, "fingerprint": made["fingerprint"]}
        for name, made in trained.inputs.items()
    }
    return {**asdict(trained), "inputs": inputs, "checksum": None}
