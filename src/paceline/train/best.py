"""The best draft of a run so far, by held-out acceptance length.

It is a finished folder of `train` inside the run's own, so that it can be evaluated, exported or
trained further like any other, also while the run goes on.
"""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from paceline.artefact import StageFolder, load_finished, mend_folder, replaced_folder
from paceline.contracts import MANIFEST_NAME
from paceline.draft.checkpoint import WEIGHTS_FILE
from paceline.runlog import acceptance_of
from paceline.train.loop import Trainer
from paceline.train.weights import finish_draft, kept_tensors

logger = logging.getLogger(__name__)

FOLDER = "best"


@dataclass(frozen=True)
class BestDraft:
    """Of the run in `run_folder`. stage: of the first rank; the others touch nothing there. about:
    what all drafts of the run have in common in a manifest's result."""

    run_folder: Path
    stage: StageFolder | None
    about: dict[str, Any]

    @property
    def folder(self) -> Path:
        return self.run_folder / FOLDER

    def result(self) -> dict[str, Any] | None:
        """What the manifest of the best draft says; None where none is kept."""
        mend_folder(self.folder)
        if not (self.folder / MANIFEST_NAME).is_file():
            return None
        return load_finished(self.folder, "train").result

    def offer(self, trainer: Trainer, steps: int, heldout: dict[str, Any]) -> None:
        """Keep the trainer's draft, after so many optimiser steps, if it is better than all before
        it. All ranks enter."""
        if trainer.ranks.from_first(lambda: self.is_better(heldout)):
            tensors = kept_tensors(trainer)
            trainer.ranks.from_first(lambda: self._keep(trainer, steps, heldout, tensors))

    def is_better(self, heldout: dict[str, Any]) -> bool:
        """Than what is kept, by acceptance length; also where that was measured in another way."""
        new, known = acceptance_of(heldout), self.result()
        old = acceptance_of(known["heldout"]) if known else None
        if new is None or old is None:
            return new is not None
        before, now = _way(known["heldout"]), _way(heldout)
        if before != now:
            logger.warning(
                "train: the best draft, of step %d, was measured otherwise (%s, now %s), so the "
                "best is looked for anew",
                known["steps"],
                before,
                now,
            )
        return before != now or new > old

    def _keep(
        self,
        trainer: Trainer,
        steps: int,
        heldout: dict[str, Any],
        tensors: dict[str, torch.Tensor],
    ) -> None:
        result = {**self.about, "steps": steps, "heldout": heldout}
        with replaced_folder(self.folder) as aside:
            stage = StageFolder(aside, self.stage.manifest, resumed=False)
            finish_draft(stage, trainer.draft, tensors, result)

    def tensors(self) -> dict[str, torch.Tensor]:
        return load_file(self.folder / WEIGHTS_FILE)


def _way(heldout: dict[str, Any]) -> str:
    """How an acceptance length was measured: lengths of other chains or chats are no measure."""
    acceptance = heldout["acceptance"]
    return f"K = {acceptance['num_draft_tokens']}, {acceptance['conversations']} conversations"
