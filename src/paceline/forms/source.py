"""A draft wherever it comes from: a folder of `train`, a compact draft, a server's checkpoint."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paceline import fingerprint
from paceline.artefact import Manifest, describe_input, load_finished
from paceline.contracts import MANIFEST_NAME
from paceline.draft.checkpoint import load_draft, read_draft_config
from paceline.draft.config import DraftConfig
from paceline.draft.model import Draft
from paceline.errors import UsageError
from paceline.forms.compact import (
    COMPACT_FILE,
    COMPACT_WEIGHTS_FILE,
    load_compact,
    read_compact_config,
    recorded_target,
    trained_manifest,
)
from paceline.forms.config_json import form_of
from paceline.forms.load import CONFIG_FILE, load_exported, read_exported_config, read_json
from paceline.forms.names import FORM_NAMES
from paceline.target.resolve import resolve_draft
from paceline.target.spec import Target


@dataclass(frozen=True)
class DraftSource:
    """Where a draft is. trained: the manifest of the `train` that made it; None for a server's
    checkpoint, made here or elsewhere. form: which server's that is, as given or as its config
    says; None: neither does. compact: its weights are kept in 8 bits, away from that folder."""

    folder: Path
    trained: Manifest | None
    form: str | None = None
    compact: bool = False

    @property
    def recorded_target(self) -> dict[str, Any] | None:
        """The target that made it, as its manifest says; a checkpoint says none."""
        if self.compact:
            return recorded_target(self.folder)
        return None if self.trained is None else self.trained.result["target"]

    def describe_input(self) -> dict[str, Any]:
        """The draft as an entry of a manifest's `inputs`."""
        if self.compact:
            # The weights alone: what is said of them may grow.
            weights = fingerprint.of_files([self.folder / COMPACT_WEIGHTS_FILE])
            return {"path": str(self.folder), "fingerprint": weights}
        if self.trained is not None:
            return describe_input(self.folder, self.trained)
        files = [*self.folder.glob("*.safetensors"), *self.folder.glob("*.bin")]
        return {
            "path": str(self.folder),
            "fingerprint": fingerprint.of_files([self.folder / CONFIG_FILE, *files]),
        }

    def check_target(self, target: Target) -> None:
        """Raises FingerprintMismatch for another target than the draft was trained on."""
        if self.trained is None:
            return
        target.check_made_by(
            self.trained.inputs["target"]["fingerprint"], f"{self.folder} was trained on"
        )

    def config(self, target: Target) -> DraftConfig:
        """The draft's shape, without reading its weights."""
        if self.compact:
            return read_compact_config(self.folder)
        if self.trained is not None:
            return read_draft_config(self.folder)
        return read_exported_config(self.folder, target, self.form)

    def load(self, target: Target, dtype: torch.dtype = torch.float32) -> Draft:
        """The draft with the target's embedding, in eval mode."""
        if self.compact:
            return load_compact(self.folder, target, dtype)
        if self.trained is not None:
            return load_draft(self.folder, target, dtype)
        return load_exported(self.folder, target, dtype, self.form)


def open_draft(folder: str | Path, form: str | None = None) -> DraftSource:
    """The draft of a finished `train` folder, a compact one, or a server's checkpoint. It may be on
    the Hugging Face Hub.

    Raises UsageError where the folder is none of them, TargetError where an id cannot be fetched,
    ExportError for a config that is not JSON.
    """
    folder = resolve_draft(str(folder))
    if (folder / COMPACT_FILE).is_file():
        return DraftSource(folder, trained_manifest(folder), compact=True)
    if (folder / MANIFEST_NAME).is_file():
        _refuse_exports(folder)
        return DraftSource(folder, load_finished(folder, "train"))
    if (folder / CONFIG_FILE).is_file():
        return DraftSource(folder, None, form or form_of(read_json(folder)))
    hint = f"; {folder / 'train'} does" if (folder / "train" / MANIFEST_NAME).is_file() else ""
    raise UsageError(
        f"{folder} holds no draft: neither {MANIFEST_NAME} (of `paceline train`) nor {CONFIG_FILE} "
        f"(of a checkpoint for a server){hint}"
    )


def _refuse_exports(folder: Path) -> None:
    """What `export` wrote is a folder for each server."""
    forms = [folder / name for name in FORM_NAMES if (folder / name / CONFIG_FILE).is_file()]
    if forms:
        raise UsageError(
            f"{folder} was made by `paceline export` and holds a draft for each server: name one, "
            f"such as {forms[0]}"
        )
