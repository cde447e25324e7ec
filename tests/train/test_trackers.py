"""Trackers are told what the log says, and a run that goes on tells no step twice."""

import json
import sys

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from paceline.errors import UsageError
from paceline.train import loop
from paceline.train.trackers import figures_of

from ..lines import extracted, trained


class Stopped(BaseException):
    """As a signal would."""


def scalars(folder):
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    return {
        name: {e.step: e.value for e in events.Scalars(name)} for name in events.Tags()["scalars"]
    }


def held_out(folder):
    records = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
    return [record for record in records if "heldout" in record]


def logged(folder):
    records = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
    return {record["step"]: record for record in records if "loss" in record}


def test_tensorboard_shows_the_log_of_a_run_that_was_broken(tmp_path, monkeypatch):
    extracted(tmp_path)
    out = tmp_path / "draft"
    options = {"trackers": ["tensorboard"], "max_steps": 8, "log_every": 1, "eval_every": 2}
    options["checkpoint_every"] = 4
    whole_step = loop.Trainer.step

    def stopping_step(self, read):
        if read.step.number == 5:
            raise Stopped
        return whole_step(self, read)

    with monkeypatch.context() as patch:
        patch.setattr(loop.Trainer, "step", stopping_step)
        with pytest.raises(Stopped):
            trained(tmp_path, str(out), **options)
    trained(tmp_path, str(out), **options)
    shown, log = scalars(out), logged(out)
    # A record of the log has the number of its step, from 0; a tracker counts the steps done.
    assert sorted(shown["loss"]) == list(range(1, 9))
    assert shown["loss"] == pytest.approx({step + 1: r["loss"] for step, r in log.items()})
    first_kl = {step + 1: r["train"]["kl"][0] for step, r in log.items()}
    assert shown["train/kl/0"] == pytest.approx(first_kl)
    for name in ("mfu", "peak_bytes", "wait_share"):
        assert shown[name] == pytest.approx({step + 1: r[name] for step, r in log.items()})
    looks = {r["step"]: r["heldout"]["acceptance"]["acceptance_length"] for r in held_out(out)}
    assert sorted(looks) == [2, 4, 6, 8]
    assert shown["heldout/acceptance/acceptance_length"] == pytest.approx(looks)


def test_figures_are_named_by_their_places():
    record = {"loss": 2, "train": {"kl": [1.5, None], "rows": [3, 0]}, "heldout": None}
    assert figures_of(record) == {
        "loss": 2.0,
        "train/kl/0": 1.5,
        "train/rows/0": 3.0,
        "train/rows/1": 0.0,
    }


def test_a_tracker_that_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UsageError, match=r"pip install 'paceline\[wandb\]'"):
        trained(tmp_path, trackers=["wandb"])
    assert not (tmp_path / "draft").exists()
