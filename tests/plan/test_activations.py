"""The foretold memory of a training step against what a step really keeps, counted byte by byte."""

import gc

import numpy as np
import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from paceline.draft.batch import pack
from paceline.draft.losses import Teacher, distillation_loss
from paceline.ops import attention
from paceline.plan.activations import kept_bytes, taught_rows, weight_bytes
from tests.draft.tiny import random_doc, stored, tiny_config, tiny_draft

BASE = {
    "hidden_size": 32,
    "target_hidden_size": 32,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "aux_norm": "none",
}
MASKS = [
    np.arange(70) >= 35,
    np.asarray([1, 1, 0, 0, 1, 1, 1, 0, 1] * 4, bool),
    np.asarray([0, 1], bool),
]


def live_bytes(known: set[int]) -> int:
    """Bytes of all tensors' storages but those at the known places."""
    return sum(size for place, size in live_storages().items() if place not in known)


def live_storages() -> dict[int, int]:
    """Address -> bytes, of all tensors that the garbage collector knows."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    storages = [tensor.untyped_storage() for tensor in tensors if tensor.device.type == "cpu"]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def counted(config, masks, steps, train_head):
    """Bytes that live between the forward and the backward pass beyond what lived before. The hook
    keeps what autograd saves where the garbage collector sees it."""
    draft = tiny_draft(config).float()
    draft.lm_head.requires_grad_(train_head)
    batch = pack([stored(random_doc(config, m, i)) for i, m in enumerate(masks)])
    batch = batch.to("cpu", torch.float32)
    teacher = Teacher(lambda last: last[:, :12] * 3)
    known = set(live_storages())
    with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        loss, _ = distillation_loss(draft, batch, teacher, steps, 0.8, 10, 50)
        kept = live_bytes(known)
    loss.backward()
    return kept


@pytest.mark.parametrize(
    ("changes", "steps", "train_head"),
    [
        ({}, 1, True),
        ({}, 2, False),
        ({}, 5, True),
        ({"num_layers": 2}, 3, True),
        ({"qk_norm": True}, 3, False),
        ({"aux_norm": "rms", "norm_output": True}, 3, True),
        ({"norm_before_residual": True, "hidden_size": 48}, 3, True),
    ],
    ids=str,
)
def test_a_step_keeps_what_was_foretold(changes, steps, train_head, monkeypatch):
    # As on a GPU: the kernel, in Triton's interpreter, keeps no scores.
    monkeypatch.setattr(attention, "use_kernels", lambda tensor: True)
    config = tiny_config(**{**BASE, **changes})
    kept = counted(config, MASKS, steps, train_head)
    num_rows = sum(int(np.flatnonzero(mask)[-1]) for mask in MASKS)
    foretold = kept_bytes(config, num_rows, taught_rows(MASKS, steps), 4)
    foretold += weight_bytes(config, 4, train_head)
    assert abs(foretold - kept) < 0.05 * kept, (foretold, kept)


def test_taught_rows_are_those_of_the_batch():
    batch = pack([stored(random_doc(tiny_config(), m, i)) for i, m in enumerate(MASKS)])
    expected = [len(batch.supervised_rows(step)) for step in range(9)]
    assert taught_rows(MASKS, 9) == expected
    assert expected[0] > expected[4] > 0
