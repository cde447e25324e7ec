"""On a GPU a step is found not to be finite a step later: the guilty one is kept."""

import json

import pytest
from safetensors.torch import load_file

import paceline
from paceline.errors import TrainingError
from paceline.store import Store
from tests.lines import extracted, trained
from tests.train.poison import poison, samples_of_steps

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("steps_after", [0, 1, 2])
@pytest.mark.parametrize("optimiser", ["adamw", "muon"])
def test_the_guilty_step_is_kept_and_replayed(tmp_path, steps_after, optimiser):
    extracted(tmp_path)
    store = Store(tmp_path / "store")
    steps = samples_of_steps(store, max_steps=None)
    guilty = len(steps) - 1 - steps_after
    bad, _ = poison(store, steps[guilty][-1])
    options = {"device": "cuda", "log_every": 1000, "checkpoint_every": guilty, "epochs": 1.0}
    with pytest.raises(TrainingError, match=f"optimiser step {guilty}: .*{bad}"):
        trained(tmp_path, max_steps=None, optimiser=optimiser, **options)
    folder = tmp_path / "draft" / "nan_batch"
    record = json.loads((folder / "batch.json").read_text())
    assert record["step"] == guilty
    assert [s["sample_id"] for s in record["samples"]] == [
        store.records[i].sample_id for i in steps[guilty]
    ]
    # The weights are those of the checkpoint before that step: nothing has moved since.
    kept = load_file(folder / "draft.safetensors")
    state = load_file(tmp_path / "draft" / "checkpoints" / f"{guilty:08d}" / "state.safetensors")
    for name, weight in kept.items():
        if f"master.{name}" in state:
            assert weight.equal(state[f"master.{name}"]), name
    found = paceline.replay(str(folder), device="cuda")
    assert found["loss"] == found["grad_norm"] == "nan"
    assert [s["sample_id"] for s in found["samples"] if s["loss"] == "nan"] == [bad]
