"""The needed arithmetic against what torch counts in a real step."""

import importlib

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from paceline.draft.batch import pack
from paceline.draft.losses import Teacher, distillation_loss
from paceline.runlog import read_log
from paceline.store import Store
from paceline.train.flops import needed_flops

from ..draft.tiny import random_doc, stored, tiny_config, tiny_draft
from ..lines import extracted, trained

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
    # KL needs the draft vocabulary's logits; the teacher of other losses makes all of them.
    head = torch.randn(config.draft_vocab_size, config.target_hidden_size, dtype=torch.float64)
    for steps in (1, 3, 6):
        needed = needed_flops(
            config, batch, steps, trains_head=trains_head, teacher_width=len(head)
        )
        assert counted(draft, batch, steps, head) == needed, steps


def test_the_log_holds_it_beside_the_device(tmp_path, monkeypatch):
    """Whole epochs: what is logged of them is what a slow count of the store says."""
    stage = importlib.import_module("paceline.train.run")
    monkeypatch.setattr(stage, "product_flops", lambda device, dtype: 1e9)
    extracted(tmp_path)
    trained(tmp_path, max_steps=None, epochs=1.0, ttt_steps=2, loss="hybrid")
    logged = read_log(tmp_path / "draft").train
    store = Store(tmp_path / "store")
    rows = taught = again = teachers = 0
    for index in store.split("train"):
        mask = store.read(int(index)).loss_mask.tolist()
        last = max(i for i, supervised in enumerate(mask) if supervised)
        rows += last
        taught += sum(mask[p + 1] for p in range(last))
        again += sum(mask[p + 1] and mask[p + 2] for p in range(last - 1))
        teachers += sum(mask)
    # The target's width 32, 4 heads and 2 groups of 8, an MLP of 48, 64 of 320 tokens, 3 states.
    layer = 32 * 64 + 32 * 32 + 3 * 32 * 48
    products = 2 * rows * 3 * 32 * 32 + 2 * 32 * (32 * taught + 32 * rows)
    products += 3 * (layer * (taught + again) + 32 * 32 * (rows - taught))
    products += 3 * 32 * 64 * (taught + again) + 32 * 320 * teachers
    assert sum(r["needed_flops"] for r in logged) == 2 * products
    for record in logged:
        assert record["mfu"] == pytest.approx(record["needed_flops"] / record["step_s"] / 1e9)
        assert record["peak_bytes"] > 1e8
