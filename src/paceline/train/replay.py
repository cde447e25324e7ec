"""`replay`: a step that stopped a training, computed again, whole and sample by sample."""

import math
from pathlib import Path
from typing import Any

import torch

from paceline.device import choose_device
from paceline.draft.batch import PackedBatch, from_packed
from paceline.draft.checkpoint import load_draft
from paceline.draft.losses import distillation_loss
from paceline.errors import UsageError
from paceline.recipe import ReplayOptions, TrainOptions, build
from paceline.target.spec import open_target
from paceline.train.nan_batch import load_step
from paceline.train.optimiser import MasterAdamW, NotFinite
from paceline.train.teacher import open_teacher
from paceline.train.weights import round_weights
from paceline.verbs import make_callable
from paceline.vocab import DraftVocabulary


def run(options: ReplayOptions) -> dict[str, Any]:
    """Compute a kept step again; nothing is trained. Returns `step`, `loss` and `grad_norm` (a
    number, or the string "nan", "inf"), `recorded` with those of the training, and `samples`: of
    each its `loss` (its share of the step's) and `not_finite`, how many stored values are none.

    Raises UsageError for a folder without such a step.
    """
    if not options.folder:
        raise UsageError("replay: name the `nan_batch` folder of a training")
    folder = Path(options.folder)
    record, batches = load_step(folder)
    device, dtype = choose_device(options.device), getattr(torch, record["dtype"])
    trained_with = build(TrainOptions, record["options"])
    target = open_target(options, record["target"])
    draft = load_draft(folder, target)
    vocabulary = DraftVocabulary(draft.d2t.numpy(), draft.t2d.numpy())
    teacher = open_teacher(
        trained_with, record["last_is_normed"], vocabulary, target, dtype, device
    )
    draft = round_weights(draft.to(device), dtype).train()
    draft.lm_head.requires_grad_(trained_with.train_head)

    def loss_of(batch: PackedBatch) -> torch.Tensor:
        return distillation_loss(
            draft,
            batch.to(device, dtype),
            teacher,
            record["ttt_steps"],
            trained_with.step_decay,
            record["num_rows"],
            trained_with.logit_chunk,
            trained_with.loss,
        )[0]

    optimiser, total = MasterAdamW(draft, trained_with), torch.zeros((), device=device)
    for batch in batches:
        loss = loss_of(from_packed(batch))
        loss.backward()
        optimiser.accumulate()
        total = total + loss.detach()
    try:
        norm = float(optimiser.step(0.0, total))
    except NotFinite as found:
        norm = found.norm
    with torch.no_grad():
        losses = [float(loss_of(from_packed(alone))) for batch in batches for alone in batch]
    return {
        "folder": str(folder),
        "step": record["step"],
        "loss": _told(float(total)),
        "grad_norm": _told(norm),
        "recorded": {"loss": record["loss"], "grad_norm": record["grad_norm"]},
        "dtype": record["dtype"],
        "device": str(device),
        "samples": [
            {**sample, "loss": _told(loss)}
            for sample, loss in zip(record["samples"], losses, strict=True)
        ],
    }


def _told(value: float) -> float | str:
    """JSON has no words for what is not finite."""
    return value if math.isfinite(value) else str(value)


VERB = (ReplayOptions, run)
make_callable(__name__)
