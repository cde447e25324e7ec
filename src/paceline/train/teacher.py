"""The target's norm and head as the loss wants them."""

import torch

from paceline.draft.losses import Teacher
from paceline.draft.objectives import OBJECTIVES
from paceline.recipe import TrainOptions
from paceline.target.model import TeacherHead
from paceline.target.spec import Target
from paceline.vocab import DraftVocabulary


def open_teacher(
    options: TrainOptions,
    last_is_normed: bool,
    vocabulary: DraftVocabulary,
    target: Target,
    dtype: torch.dtype,
    device: torch.device,
) -> Teacher:
    """Logits over the draft vocabulary, or of all ids where the loss needs the whole softmax."""
    columns = torch.from_numpy(vocabulary.selected)
    whole = OBJECTIVES[options.loss].whole_softmax and len(columns) < target.vocab_size
    rows = None if whole else columns
    head = TeacherHead(target, dtype, device, rows=rows, is_normed=last_is_normed)
    return Teacher(head, columns.to(device) if whole else None, options.teacher_temperature)
