"""A step that is not finite stops the run with all that it takes to run it again: real poison in a
store, a real divergence."""

import json

import pytest
import torch
from safetensors.torch import load_file

import paceline
from paceline.cli.replay import show
from paceline.errors import TrainingError, UsageError
from paceline.store import Store
from paceline.train import checkpoint, optimiser
from tests.cli.consoles import text_console

from ..lines import TINY_LAYERS, extracted, trained
from .poison import LAYER, poison, samples_of_steps


@pytest.fixture
def line(tmp_path):
    extracted(tmp_path)
    return tmp_path


def stopped(line, **options):
    """(the error's text, what `batch.json` says)."""
    with pytest.raises(TrainingError) as raised:
        trained(line, max_steps=None, epochs=1.0, **options)
    return str(raised.value), json.loads((line / "draft" / "nan_batch" / "batch.json").read_text())


def masters(checkpoint):
    tensors = load_file(checkpoint / "state.safetensors")
    return {n.removeprefix("master."): t for n, t in tensors.items() if n.startswith("master.")}


def test_a_poisoned_row_is_named_kept_and_replayed(line):
    sample, shard = poison(Store(line / "store"), 7)
    text, record = stopped(line, checkpoint_every=1)
    step = record["step"]
    assert step > 0 and sample in {s["sample_id"] for s in record["samples"]}
    assert f"optimiser step {step}: gradient norm is nan, loss is nan: no weight was moved" in text
    assert f"sample {sample} in {shard}: 1 values of k={TINY_LAYERS[LAYER]}." in text
    assert f"paceline replay {line / 'draft' / 'nan_batch'}" in text
    # The weights are those before the step.
    newest = sorted((line / "draft" / "checkpoints").iterdir())[-1]
    assert json.loads((newest / "state.json").read_text())["next_step"] == step
    kept = load_file(line / "draft" / "nan_batch" / "draft.safetensors")
    before = masters(newest)
    assert all(torch.equal(kept[name], weight) for name, weight in before.items())

    found = paceline.replay(str(line / "draft" / "nan_batch"), device="cpu")
    assert (found["step"], found["loss"], found["grad_norm"]) == (step, "nan", "nan")
    losses = {s["sample_id"]: s["loss"] for s in found["samples"]}
    assert losses.pop(sample) == "nan"
    assert losses and all(0 < loss < 100 for loss in losses.values())
    assert {s["sample_id"]: s["not_finite"] for s in found["samples"]}[sample] == {"aux 1": 1}
    console, shown = text_console(False)
    show(found, console)
    assert "nan, in training nan" in shown() and "aux 1 1" in shown()


@pytest.mark.parametrize("optimiser_name", ["adamw", "muon"])
def test_a_draft_that_diverged_is_replayed(line, optimiser_name):
    """Every state is finite; one step threw the weights out of what float32 holds."""
    text, record = stopped(line, learning_rate=1e30, warmup_steps=0, optimiser=optimiser_name)
    assert record["step"] == 1
    assert "the draft has diverged: lower learning_rate (it is 1e+30)" in text
    found = paceline.replay(str(line / "draft" / "nan_batch"), device="cpu")
    assert found["loss"] == record["loss"] and found["grad_norm"] == record["grad_norm"]
    assert isinstance(found["loss"], str) or isinstance(found["grad_norm"], str)
    assert not any(s["not_finite"] for s in found["samples"])


class LateAdamW(optimiser.MasterAdamW):
    """What a norm is becomes known as on a GPU: when the next step asks."""

    def _check_early(self):
        pass


@pytest.mark.parametrize("steps_after", [0, 1])
def test_the_guilty_step_is_kept_where_it_is_found_a_step_later(line, monkeypatch, steps_after):
    store = Store(line / "store")
    monkeypatch.setattr(checkpoint, "_KEPT", 3)
    clean = trained(line, "clean", max_steps=None, epochs=1.0, checkpoint_every=1)
    guilty = clean["steps"] - 1 - steps_after
    samples = samples_of_steps(store, max_steps=None)[guilty]
    sample, _ = poison(store, samples[-1])
    monkeypatch.setitem(optimiser.OPTIMISERS, "adamw", LateAdamW)
    _, record = stopped(line, log_every=1000, checkpoint_every=1000)
    assert record["step"] == guilty
    assert [s["sample_id"] for s in record["samples"]] == [
        store.records[i].sample_id for i in samples
    ]
    assert sample in {s["sample_id"] for s in record["samples"] if s["not_finite"]}
    # Nothing has moved since: the weights are those that a clean run had before this step.
    kept = load_file(line / "draft" / "nan_batch" / "draft.safetensors")
    before = masters(line / "clean" / "checkpoints" / f"{guilty:08d}")
    assert all(torch.equal(kept[name], weight) for name, weight in before.items())


def test_a_folder_without_a_step(tmp_path):
    with pytest.raises(UsageError, match="holds no step to replay"):
        paceline.replay(str(tmp_path))
