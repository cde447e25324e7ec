"""Losses that a draft can be trained on: by formula against autograd and the float64 oracle."""

import pytest
import torch

from paceline.draft.batch import pack
from paceline.draft.losses import Teacher, distillation_loss
from paceline.draft.objectives import OBJECTIVES
from paceline.recipe import TrainOptions

from . import oracle
from .tiny import random_doc, shape_of, stored, tiny_config, tiny_draft, weights_of

NAMES = sorted(OBJECTIVES)


def test_the_recipe_knows_every_loss():
    literal = TrainOptions.model_fields["loss"].annotation
    assert sorted(literal.__args__) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_slopes_are_the_derivatives_of_the_value(name):
    kl = torch.tensor([0.1, 2.0, 0.7], dtype=torch.float64, requires_grad=True)
    accepted = torch.tensor([0.9, 0.02, 0.4], dtype=torch.float64, requires_grad=True)
    objective = OBJECTIVES[name]
    value = objective.value(kl, accepted)
    by_kl, by_accepted = objective.slopes(kl.detach(), accepted.detach())
    if name == "hybrid":  # its share is a weight: only what it weighs is differentiated
        share = torch.exp(-3 * accepted.detach())
        value = share * kl + (1 - share) * (1 - accepted)
        torch.testing.assert_close(value, objective.value(kl, accepted))
    (value.sum() + 0 * (kl + accepted).sum()).backward()
    torch.testing.assert_close(by_kl, kl.grad)
    expected = torch.zeros_like(kl) if by_accepted is None else by_accepted
    torch.testing.assert_close(expected, accepted.grad)


@pytest.mark.parametrize("whole", [True, False], ids=["whole vocabulary", "part of it"])
@pytest.mark.parametrize("name", NAMES)
def test_loss_and_gradients_equal_the_oracle(name, whole):
    config = tiny_config(**({"draft_vocab_size": 40} if whole else {}))
    draft = tiny_draft(config)
    docs = [random_doc(config, [0, 0, 1, 1, 1, 0, 1], 1), random_doc(config, [0, 1, 1, 1], 2)]
    head = torch.randn(40, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    logits = lambda last: last @ head.T
    said = torch.arange(config.draft_vocab_size) + draft.d2t
    teacher = Teacher(logits) if whole else Teacher(logits, said)
    batch = pack([stored(doc) for doc in docs])
    rows = batch.num_supervised_rows
    loss, sums = distillation_loss(draft, batch, teacher, 3, 0.8, rows, 4, name)
    loss.backward()
    weights = weights_of(draft)
    embedding = draft.embed_tokens.weight.detach()
    expected = oracle.loss(
        weights, shape_of(config), docs, embedding, logits, 3, 0.8, kind=name, said=said
    )
    expected.backward()
    torch.testing.assert_close(loss.detach(), expected.detach(), rtol=1e-9, atol=1e-12)
    for key, weight in draft.named_parameters():
        if weight.requires_grad:
            torch.testing.assert_close(
                weight.grad, weights[key].grad, rtol=1e-7, atol=1e-10, msg=key
            )
    mean = sums.loss.double() @ torch.tensor([1, 0.8, 0.64], dtype=torch.float64) / rows
    torch.testing.assert_close(mean, loss.detach())


@pytest.mark.parametrize("name", NAMES)
def test_a_temperature_divides_the_targets_logits(name):
    config = tiny_config()
    draft = tiny_draft(config)
    head = torch.randn(40, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    logits = lambda last: last @ head.T
    said = torch.arange(config.draft_vocab_size) + draft.d2t
    docs = [random_doc(config, [0, 1, 1, 1, 0, 1], 1)]
    batch = pack([stored(doc) for doc in docs])
    teacher = Teacher(logits, said, 0.4)
    loss, _ = distillation_loss(draft, batch, teacher, 2, 0.8, 4, 3, name)
    expected = oracle.loss(
        weights_of(draft),
        shape_of(config),
        docs,
        draft.embed_tokens.weight.detach(),
        lambda last: logits(last) / 0.4,
        2,
        0.8,
        kind=name,
        said=said,
    )
    torch.testing.assert_close(loss.detach(), expected.detach(), rtol=1e-9, atol=1e-12)


def test_what_the_draft_cannot_say_counts_as_rejected():
    """A draft that is right on its vocabulary accepts just the target's mass there."""
    config = tiny_config()
    draft = tiny_draft(config)
    said = torch.arange(config.draft_vocab_size) + draft.d2t
    wide = torch.full((40,), -30.0, dtype=torch.float64)
    wide[said], wide[torch.nonzero(~draft.t2d)[0]] = 1.0, 1.0
    with torch.no_grad():
        draft.lm_head.weight.zero_()
    batch = pack([stored(random_doc(config, [0, 1, 1], 1))])
    teacher = Teacher(lambda last: wide.expand(len(last), -1), said)
    _, sums = distillation_loss(draft, batch, teacher, 1, 0.8, 2, 9, "total_variation")
    assert float(sums.kl[0]) == pytest.approx(0.0, abs=1e-9)
    assert float(sums.overlap[0]) == pytest.approx(2 * 12 / 13)
    assert float(sums.loss[0]) == pytest.approx(2 * 1 / 13)
