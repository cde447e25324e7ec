"""`run` with `overlap`: extraction and training in one process, through a stream."""

import re
import threading

import pytest

import paceline
from paceline.errors import TrainingError
from paceline.recipe import Recipe, build
from paceline.store import Store
from paceline.train.loop import Trainer

from .lines import TINY_LAYERS, write_rows
from .targets import save_target


@pytest.fixture
def recipe(tmp_path):
    values = {
        "target": str(save_target(tmp_path / "target")),
        "run_dir": str(tmp_path / "run"),
        "overlap": True,
        "prepare": {
            "data": [str(write_rows(tmp_path / "rows.jsonl", 120))],
            "heldout_share": 0.05,
        },
        "align": {"draft_vocab_size": 64},
        "extract": {"layers": TINY_LAYERS, "dtype": "float32", "stream_bytes": 400_000},
        "train": {
            "dtype": "float32",
            "batch_rows": 60,
            "warmup_steps": 2,
            "checkpoint_every": 4,
        },
        "evaluate": {"num_draft_tokens": [1, 3], "bootstrap": 100},
        "export": {"dtype": "float32"},
    }
    return build(Recipe, values)


def test_a_run_overlaps_extraction_and_training_and_goes_on_after_a_failure(
    recipe, tmp_path, monkeypatch, caplog
):
    """Also where all stages may start over: what is unfinished goes on, what is finished stays."""
    caplog.set_level("INFO")

    real_step = Trainer.step

    def failing_step(self, read):
        if read.step.number == 6:
            raise TrainingError("loss is nan")
        return real_step(self, read)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", failing_step)
        with pytest.raises(TrainingError, match="loss is nan"):
            paceline.run(recipe, overwrite_from="prepare")
    assert not [t for t in threading.enumerate() if t.name.startswith("store-writer")]
    caplog.clear()
    stages = paceline.run(recipe, overwrite_from="prepare")["stages"]
    assert re.search(r"\(from step [1-9]", caplog.text)
    assert list(stages) == ["prepare", "align", "extract", "train", "evaluate", "export", "report"]
    assert stages["prepare"]["skipped"] and not stages["train"]["skipped"]
    assert stages["extract"]["result"]["accounting"]["done"] == 120
    # More than the budget went through.
    assert len(Store(tmp_path / "run/extract")) < 120
    results = stages["evaluate"]["result"]["results"]
    assert results["1"]["pooled"]["verify_steps"] > 0
    for given in ({}, {"overwrite_from": "prepare"}):
        again = paceline.run(recipe, **given)["stages"]
        assert all(stage["skipped"] for stage in again.values())
