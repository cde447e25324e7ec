"""The step's loss and gradients against the float64 oracle."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.draft.batch import pack
from paceline.draft.losses import Teacher, distillation_loss
from paceline.ops import distil

from . import oracle
from .tiny import random_doc, shape_of, stored, tiny_config, tiny_draft, weights_of

masks = st.lists(st.booleans(), min_size=2, max_size=14)
VARIANTS = [
    {},
    {"aux_norm": "static"},
    {"aux_norm": "none"},
    {"aux_norm": "joint"},
    {"norm_before_residual": True},
    {"norm_before_residual": True, "num_layers": 2, "norm_output": True},
    {"norm_output": True},
    {"qk_norm": True},
    {"num_layers": 2},
    {"num_layers": 3, "qk_norm": True, "norm_output": True},
    {"aux_layers": (0, 3)},
    {"hidden_act": "gelu"},
    {"draft_vocab_size": 40},
    {"hidden_size": 12, "head_dim": 6, "num_attention_heads": 2, "num_key_value_heads": 1},
]


def both(config, docs, steps, chunk=5, decay=0.8, packed=True):
    """(loss, gradients) of the step and of the oracle."""
    draft = tiny_draft(config)
    head = torch.randn(
        config.draft_vocab_size,
        config.target_hidden_size,
        dtype=torch.float64,
        generator=torch.Generator().manual_seed(9),
    )
    teacher = lambda last: last @ head.T
    groups = [docs] if packed else [[doc] for doc in docs]
    batches = [pack([stored(d) for d in group]) for group in groups]
    num_rows = sum(b.num_supervised_rows for b in batches)
    total = 0.0
    for batch in batches:
        loss, _ = distillation_loss(draft, batch, Teacher(teacher), steps, decay, num_rows, chunk)
        loss.backward()
        total = total + loss.detach()
    weights = weights_of(draft)
    embedding = draft.embed_tokens.weight.detach().clone().requires_grad_()
    expected = oracle.loss(weights, shape_of(config), docs, embedding, teacher, steps, decay)
    expected.backward()
    if draft.embed_tokens.weight.requires_grad:
        weights["embed_tokens.weight"] = embedding
    return draft, total, weights, expected.detach()


def assert_equal(draft, total, weights, expected):
    torch.testing.assert_close(total, expected, rtol=1e-9, atol=1e-12)
    for name, weight in draft.named_parameters():
        if weight.requires_grad:
            got = torch.zeros_like(weight) if weight.grad is None else weight.grad
            torch.testing.assert_close(got, weights[name].grad, rtol=1e-7, atol=1e-10, msg=name)


@settings(max_examples=25, deadline=None)
@given(
    first=masks,
    second=masks,
    steps=st.integers(1, 4),
    chunk=st.integers(1, 9),
    packed=st.booleans(),
)
def test_loss_and_gradients_equal_the_oracle(first, second, steps, chunk, packed):
    first[1], second[-1] = True, True
    config = tiny_config()
    docs = [random_doc(config, first, 1), random_doc(config, second, 2)]
    assert_equal(*both(config, docs, steps, chunk=chunk, packed=packed))


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_every_form_of_draft_equals_the_oracle(changes):
    config = tiny_config(**changes)
    docs = [
        random_doc(config, [0, 0, 1, 1, 1, 0, 0, 1, 1, 1, 1, 0], 1),
        random_doc(config, [0, 1, 1, 1, 1], 2),
    ]
    assert_equal(*both(config, docs, steps=3))


def test_T01_the_mask_is_shifted_with_the_ids():
    config = tiny_config()
    doc = random_doc(config, [0, 0, 0, 0, 1, 1, 1, 1], 3)
    batch = pack([stored(doc)])
    step_0 = (batch.run_length > 0).int().tolist()
    assert [*step_0, 0] == [0, 0, 0, 1, 1, 1, 1, 0]
    assert batch.num_supervised_rows == 4
    for step in range(4):
        rows = batch.supervised_rows(step).tolist()
        assert rows == list(range(3, 7 - step))
        assert rows == [p for p in range(8) if oracle.supervised(doc.mask, p, step)]


def test_the_sums_are_those_of_the_rows():
    config = tiny_config()
    docs = [random_doc(config, [0, 1, 1, 1, 0, 1], 1)]
    draft = tiny_draft(config)
    batch = pack([stored(d) for d in docs])
    teacher = lambda last: last[:, :12] * 3
    _, sums = distillation_loss(draft, batch, Teacher(teacher), 3, 0.8, 4, chunk=2)
    states = oracle.states_of_steps(
        weights_of(draft), shape_of(config), docs[0], draft.embed_tokens.weight, 3
    )
    for step in range(3):
        rows = [p for p in range(6) if oracle.supervised(docs[0].mask, p, step)]
        q = oracle.logits_of(weights_of(draft), shape_of(config), states[step])[rows].softmax(-1)
        p = torch.stack([teacher(docs[0].last[r + 1 + step][None])[0] for r in rows]).softmax(-1)
        assert int(sums.rows[step]) == len(rows)
        torch.testing.assert_close(sums.overlap[step], torch.minimum(p, q).sum())
        assert int(sums.agree[step]) == int((p.argmax(-1) == q.argmax(-1)).sum())


def test_without_gradients_the_figures_are_the_same_and_none_is_made(monkeypatch):
    config = tiny_config()
    batch = pack([stored(random_doc(config, [0, 1, 1, 1, 0, 1], 1))])
    draft, teacher = tiny_draft(config), Teacher(lambda last: last[:, :12] * 3)
    loss, sums = distillation_loss(draft, batch, teacher, 3, 0.8, 4, chunk=2)
    monkeypatch.delattr(distil.TorchScores, "gradient")
    with torch.no_grad():
        alone, same = distillation_loss(draft, batch, teacher, 3, 0.8, 4, chunk=2)
    assert loss.requires_grad and not alone.requires_grad
    assert torch.equal(alone, loss) and torch.equal(same.stacked(), sums.stacked())
