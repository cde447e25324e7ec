"""Times from measured rates, against arithmetic by hand."""

from types import SimpleNamespace

import pytest

from paceline.plan.data import DataSample
from paceline.plan.times import Measured, train_time
from paceline.recipe import PlanOptions, TrainOptions

MEASURED = Measured(
    extract_start_s=0.0,
    extract_tokens_per_s=1.0,
    train_start_s=5.0,
    train_s_per_step=3.0,
    states_share=1.0,
    prepare_start_s=0.0,
)


def data(num_heldout):
    """Each held-out sample has 20 supervised rows and stands for ten of its kind."""
    samples = [SimpleNamespace(split="heldout", num_supervised=20) for _ in range(num_heldout)]
    return DataSample(samples, scale=10.0, rows=0, origin="", record=None)


@pytest.mark.parametrize(
    ("options", "looked_at"),
    [
        ({}, 256 * 20),
        ({"eval_samples": None}, 500 * 20),
        ({"eval_every": 30, "eval_samples": 100}, 4 * 100 * 20),
        ({"eval_every": 25, "eval_samples": 9999}, 4 * 500 * 20),
    ],
    ids=str,
)
def test_looks_at_held_out_data_take_their_time(options, looked_at):
    train = TrainOptions(max_steps=100, batch_rows=50, **options)
    found = train_time(PlanOptions(devices=2), train, data(50), None, 1.0, MEASURED)
    # A step is a forward and twice as much backward; a look is two forwards.
    assert found.seconds == pytest.approx(5 + 3 * (100 + looked_at * 2 / 3 / 50) / 2)
