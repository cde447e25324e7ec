"""Reads a draft from a server's checkpoint: paceline's own exports, and drafts made elsewhere
(EAGLE, speculators, SpecForge). Whatever a server would pass over in silence is refused here.
"""

import json
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from paceline.draft.checkpoint import build_draft
from paceline.draft.config import DraftConfig
from paceline.draft.model import EMBEDDING_NAME, Draft
from paceline.errors import (
    ExportError,
    LayerError,
    PacelineError,
    TrainingError,
    VocabularyError,
)
from paceline.forms.config_json import MARK, SHARED, form_of, read_config
from paceline.forms.names import FORM_NAMES, VLLM, from_form, is_ignored, to_form
from paceline.target.model import load_embedding
from paceline.target.spec import Target
from paceline.vocab import DraftVocabulary

CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"

Tensors = dict[str, torch.Tensor]


def load_exported(
    folder: str | Path, target: Target, dtype: torch.dtype, form: str | None = None
) -> Draft:
    """The draft of a server's checkpoint with the target's embedding, in eval mode.

    form: `vllm`, `speculators` or `sglang`; None: as the config says. Raises ExportError with all
    that does not fit: missing and unexpected tensors together, a norm's flag without its weights
    or the other way round, maps that contradict each other or are absolute, an embedding that is
    not the target's, rotary parameters that were lost, layer ids that two servers read differently.
    """
    folder = Path(folder)
    values, form = _described(folder, form)
    config = _config(folder, values, form, target)
    with _naming(folder):
        tensors = _own_names(read_tensors(folder), config, form or VLLM)
        _check_embedding_mark(values, EMBEDDING_NAME in tensors)
        tensors |= _vocabulary(tensors, config)
        tensors[EMBEDDING_NAME] = _embedding(tensors.get(EMBEDDING_NAME), config, target, dtype)
        return build_draft(config, tensors, dtype, "its tensors")


def read_exported_config(
    folder: str | Path, target: Target, form: str | None = None
) -> DraftConfig:
    """The shape of a server's checkpoint; see load_exported. Raises ExportError."""
    folder = Path(folder)
    return _config(folder, *_described(folder, form), target)


def _config(folder: Path, values: dict[str, Any], form: str | None, target: Target) -> DraftConfig:
    with _naming(folder):
        try:
            return read_config(values, form, target)
        except PacelineError:
            raise
        except Exception as error:  # anything may stand in the JSON of others
            raise ExportError(
                f"{CONFIG_FILE} has a field of a kind that no draft has ({error!r})"
            ) from error


def _described(folder: Path, form: str | None) -> tuple[dict[str, Any], str | None]:
    """A checkpoint's config and which server's it is: as given, else as it says."""
    values = read_json(folder)
    if not isinstance(values.get(MARK) or {}, dict):
        raise ExportError(f"{folder}: {MARK} in {CONFIG_FILE} is no mapping")
    form = form or form_of(values)
    if form is not None and form not in FORM_NAMES:
        raise ExportError(f"{folder}: form {form!r} is none of {', '.join(FORM_NAMES)}")
    return values, form


@contextmanager
def _naming(folder: Path) -> Iterator[None]:
    """What does not fit is told with the checkpoint's folder."""
    try:
        yield
    except (ExportError, LayerError, TrainingError, VocabularyError) as error:
        raise ExportError(f"{folder}: {error}") from error


def read_json(folder: Path) -> dict[str, Any]:
    """A checkpoint's config.json."""
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise ExportError(f"{folder} is not an exported draft: it has no {CONFIG_FILE}")
    try:
        values = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ExportError(f"{path} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ExportError(f"{path} is not a JSON object")
    return values


def read_tensors(folder: Path) -> Tensors:
    """All tensors of a checkpoint: safetensors, else `.bin` files read as plain tensors only."""
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
    if not files:
        raise ExportError(f"{folder} has no weights (*.safetensors or *.bin)")
    tensors: Tensors = {}
    for file in files:
        try:
            if file.suffix == ".safetensors":
                tensors |= load_file(file)
            else:
                tensors |= torch.load(file, map_location="cpu", weights_only=True)
        except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError) as error:
            raise ExportError(f"{file} cannot be read as plain tensors: {error}") from error
    return {name: tensor for name, tensor in tensors.items() if not is_ignored(name)}


def _own_names(found: Tensors, config: DraftConfig, form: str) -> Tensors:
    """Tensors under paceline's names. Raises ExportError that lists missing and unexpected ones."""
    named = {name: from_form(name, form) for name in found}
    wanted = set(_wanted(config))
    unexpected = sorted(name for name, own in named.items() if own not in wanted)
    missing = sorted(
        to_form(name, form) for name in wanted - set(named.values()) - _optional(config)
    )
    if missing or unexpected:
        hints = _flag_hints(missing, unexpected)
        raise ExportError(
            f"tensors do not fit the config: missing {missing or 'none'}, unexpected "
            f"{unexpected or 'none'}{hints}"
        )
    if len(set(named.values())) != len(named):
        raise ExportError(f"two tensors have the same meaning: {sorted(named)}")
    return {own: found[name] for name, own in named.items() if own is not None}


def _wanted(config: DraftConfig) -> list[str]:
    with torch.device("meta"):
        return list(Draft(config).state_dict())


def _optional(config: DraftConfig) -> set[str]:
    """What a checkpoint may leave out: t2d (servers do without), the maps of a full vocabulary,
    an embedding that is the target's."""
    optional = {"t2d"}
    if config.draft_vocab_size == config.vocab_size:
        optional.add("d2t")
    if config.shares_embedding:
        optional.add(EMBEDDING_NAME)
    return optional


# A tensor's name and what its presence must go with in the config.
_FLAGS = (
    ("fc_norm.", "fc_norm: true"),
    ("input_norm.", "norm_before_fc: true"),
    ("q_norm.", 'model_type: "qwen3"'),
)


def _flag_hints(missing: list[str], unexpected: list[str]) -> str:
    hints = []
    for part, flag in _FLAGS:
        if any(part in name for name in unexpected):
            hints.append(f"there are {part}* weights, but the config does not say {flag}")
        if any(part in name for name in missing):
            hints.append(f"the config says {flag}, but there are no {part}* weights")
    if "d2t" in missing:
        hints.append(
            "without d2t a server takes draft ids for target ids and accepts next to nothing"
        )
    return "".join(f"; {hint}" for hint in hints)


def _vocabulary(tensors: Tensors, config: DraftConfig) -> Tensors:
    """d2t int64 and t2d bool, checked; made where the checkpoint may leave them out."""
    size, width = config.draft_vocab_size, config.vocab_size
    d2t, t2d = tensors.get("d2t"), tensors.get("t2d")
    offsets = np.zeros(size, np.int64) if d2t is None else d2t.long().numpy()
    if t2d is None:
        vocabulary = _from_offsets(offsets, width)
    else:
        vocabulary = DraftVocabulary(offsets, t2d.bool().numpy())
    vocabulary.check()
    return {
        "d2t": torch.from_numpy(vocabulary.d2t.copy()),
        "t2d": torch.from_numpy(vocabulary.t2d.copy()),
    }


def _from_offsets(offsets: np.ndarray, width: int) -> DraftVocabulary:
    if len(offsets) > 1 and np.all(np.diff(offsets) > 0):
        raise VocabularyError(
            "d2t ascends from entry to entry: it looks like absolute target ids, where it must "
            "hold offsets (target id = draft id + d2t[draft id]), and there is no t2d to settle it"
        )
    return DraftVocabulary.from_offsets(offsets, width)


def _check_embedding_mark(values: dict[str, Any], present: bool) -> None:
    """What paceline's own configs say of the embedding must be so."""
    said = (values.get(MARK) or {}).get("embedding")
    if said is not None and present != (said != SHARED):
        there = "there is one" if present else "there is none"
        raise ExportError(f"the config says that the embedding is {said}, but {there}")


def _embedding(
    found: torch.Tensor | None, config: DraftConfig, target: Target, dtype: torch.dtype
) -> torch.Tensor:
    """The embedding of the draft; where it is the target's, it must be so bit for bit."""
    if not config.shares_embedding:
        assert found is not None  # it is not optional then
        return found
    theirs = load_embedding(target, target.native_dtype())
    if found is not None and not _same_values(found, theirs):
        raise ExportError(
            "embed_tokens.weight is not the target's embedding: one server would replace it, "
            "another keep it. A paceline draft shares the target's; remove the tensor if it was "
            "trained with that one"
        )
    return theirs.to(dtype)


def _same_values(found: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Equal after rounding to the coarser of the two dtypes."""
    if found.shape != theirs.shape:
        return False
    return torch.equal(found, theirs.to(found.dtype)) or torch.equal(found.to(theirs.dtype), theirs)
