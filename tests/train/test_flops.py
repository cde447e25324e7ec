"""The needed arithmetic against what torch counts in a real step."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from paceline.draft.batch import pack
from paceline.draft.losses import Teacher, distillation_loss
from paceline.train.flops import needed_flops

from ..draft.tiny import random_doc, stored, tiny_config, tiny_draft

# Whole documents, none, gaps: other rows at each step.
MASKS = [[0, 0, 1, 1, 1, 1, 1], [0, 1, 0, 1, 1, 0, 0, 1], [1, 1, 1]]


def counted(draft, batch, steps, teacher_head):
    """Operations of all products but those of attention (products in batches)."""
    teacher = Teacher(lambda last: last @ teacher_head.T)
    in_place = {torch.ops.aten.addmm_: lambda _, a, b, out_shape=None, **__: 2 * a[0] * a[1] * b[1]}
    with FlopCounterMode(display=False, custom_mapping=in_place) as counter:
        loss, _ = distillation_loss(draft, batch, teacher, steps, 0.8, 5, 4)
        loss.backward()
    seen = counter.get_flop_counts()["Global"]
    return sum(n for op, n in seen.items() if op != torch.ops.aten.bmm)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_layers": 3, "qk_norm": True},
        {"hidden_size": 12, "head_dim": 6, "num_attention_heads": 2, "num_key_value_heads": 1},
        {"aux_layers": (0, 3), "aux_norm": "none", "draft_vocab_size": 40},
    ],
    ids=str,
)
@pytest.mark.parametrize("trains_head", [True, False])
def test_a_step_makes_the_needed_products_and_no_more(changes, trains_head):
    config = tiny_config(**changes)
    draft = tiny_draft(config)
    draft.lm_head.requires_grad_(trains_head)
    docs = [random_doc(config, mask, seed) for seed, mask in enumerate(MASKS)]
    batch = pack([stored(doc) for doc in docs])
    head = torch.randn(config.draft_vocab_size, config.target_hidden_size, dtype=torch.float64)
    for steps in (1, 3, 6):
        needed = needed_flops(config, batch, steps, trains_head=trains_head)
        assert counted(draft, batch, steps, head) == needed, steps
