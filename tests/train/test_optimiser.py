"""Masters that move as torch's own optimisers would move them; what is not finite moves nothing."""

import copy

import pytest
import torch
from torch import nn

from paceline.errors import TrainingError
from paceline.recipe import TrainOptions
from paceline.train.optimiser import OPTIMISERS, MasterAdamW, NotFinite


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(6, 5)
        self.lm_head = nn.Linear(5, 4, bias=False)

    def forward(self, x):
        return self.lm_head(torch.tanh(self.fc(x))).square().mean()


def batches(count, size=3):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(size, 6, generator=generator) * 30 for _ in range(count)]


OPTIONS = {"weight_decay": 0.1, "max_grad_norm": 0.5, "learning_rate": 0.01}


def test_steps_are_those_of_torchs_adamw():
    model, twin = Model(), Model()
    ours = MasterAdamW(model, TrainOptions(**OPTIONS))
    groups = [
        {"params": [p for p in twin.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in twin.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    theirs = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95))
    for x in batches(6):
        model(x).backward()
        ours.accumulate()
        norm = ours.step(0.01)
        twin(x).backward()
        expected = nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
        theirs.step()
        theirs.zero_grad()
        torch.testing.assert_close(norm, expected)
    torch.testing.assert_close(list(model.parameters()), list(twin.parameters()))


@pytest.mark.parametrize("name", sorted(OPTIMISERS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_micro_batches_add_up_and_copies_are_the_rounded_masters(name, dtype):
    models = [Model().to(dtype), Model().to(dtype)]
    optimisers = [OPTIMISERS[name](m, TrainOptions(**OPTIONS)) for m in models]
    for x in batches(3, size=8):
        for model, optimiser, parts in zip(models, optimisers, (1, 4)):
            for part in x.to(dtype).chunk(parts):
                (model(part) / parts).backward()
                optimiser.accumulate()
            optimiser.step(0.01)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for key in optimisers[0].masters:
        one, many = (o.masters[key] for o in optimisers)
        torch.testing.assert_close(one, many, rtol=tolerance, atol=tolerance)
        assert torch.equal(one.to(dtype), dict(models[0].named_parameters())[key])


@pytest.mark.parametrize("name", sorted(OPTIMISERS))
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_moves_nothing(name, value):
    model = Model()
    optimiser = OPTIMISERS[name](model, TrainOptions(**OPTIONS))
    before = copy.deepcopy(list(model.parameters()))
    model(batches(1)[0]).backward()
    model.fc.weight.grad[0, 0] = value
    optimiser.accumulate()
    with pytest.raises(TrainingError, match="no weight was moved"):
        optimiser.step(0.01)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))


@pytest.mark.parametrize("name", sorted(OPTIMISERS))
def test_a_loss_that_is_not_finite_moves_nothing_whatever_its_gradient(name):
    model = Model()
    optimiser = OPTIMISERS[name](model, TrainOptions(**OPTIONS))
    before = copy.deepcopy(list(model.parameters()))
    model(batches(1)[0]).backward()
    optimiser.accumulate()
    with pytest.raises(NotFinite, match="loss is inf: no weight was moved"):
        optimiser.step(0.01, torch.tensor(float("inf")))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))
    optimiser.check()


@pytest.mark.parametrize("name", sorted(OPTIMISERS))
def test_a_state_that_is_saved_and_loaded_goes_on_bit_by_bit(name):
    whole, resumed = Model().bfloat16(), Model().bfloat16()
    first = OPTIMISERS[name](whole, TrainOptions(**OPTIONS))
    second = OPTIMISERS[name](resumed, TrainOptions(**OPTIONS))
    for number, x in enumerate(batches(6)):
        if number == 3:
            state = {k: v.clone() for k, v in first.state_tensors().items()}
            second.load_state_tensors(state)
            state.popitem()
            with pytest.raises(TrainingError, match="the checkpoint lacks"):
                OPTIMISERS[name](Model(), TrainOptions(**OPTIONS)).load_state_tensors(state)
        for model, optimiser in ((whole, first), (resumed, second))[: 1 + (number >= 3)]:
            model(x.bfloat16()).backward()
            optimiser.accumulate()
            optimiser.step(0.01)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters()))
