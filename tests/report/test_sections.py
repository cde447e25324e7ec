"""What the page claims in words is no more than what was measured."""

import pytest

from paceline.artefact import Manifest
from paceline.report.gather import RunRecord, StageRecord
from paceline.report.sections import headline_length, verdict
from paceline.runlog import TrainingLog


def _pooled(length, low=None, high=None):
    interval = None if low is None else [low, high]
    return {"3": {"pooled": {"acceptance_length": length, "interval": interval}}}


def _run(tmp_path, measured):
    """A run in which `evaluate` found this."""
    manifest = Manifest("evaluate", 1, "complete", {}, {}, {}, "", result=measured)
    stages = {"evaluate": StageRecord(tmp_path, manifest)} if measured else {}
    return RunRecord(tmp_path, stages, TrainingLog([], []), {})


@pytest.mark.parametrize(
    ("draft", "bigram", "lookup", "says"),
    [
        ((2.0, 1.9, 2.1), (1.3, 1.2, 1.4), (1.6, 1.5, 1.7), "0.40 above the best baseline (prompt"),
        ((2.0, 1.9, 2.1), (1.3, 1.2, 1.4), (1.6, 1.5, 1.7), "intervals do not overlap"),
        ((1.6, 1.5, 1.7), (1.3, 1.2, 1.4), (1.62, 1.5, 1.8), "0.02 below"),
        ((1.6, 1.5, 1.7), (1.3, 1.2, 1.4), (1.62, 1.5, 1.8), "intervals overlap"),
        ((1.1, 1.0, 1.2), (1.9, 1.8, 2.0), (None,), "0.80 below the best baseline (bigram table)"),
        ((None,), (1.3, 1.2, 1.4), (1.6, 1.5, 1.7), ""),
        ((1.6, 1.5, 1.7), (None,), (None,), ""),
        (
            (2.0,),
            (1.3,),
            (1.6,),
            "0.40 above the best baseline (prompt lookup); one conversation gives no interval.",
        ),
    ],
)
def test_the_verdict_names_the_best_baseline_and_the_overlap(tmp_path, draft, bigram, lookup, says):
    baselines = {"bigram": _pooled(*bigram), "prompt_lookup": _pooled(*lookup)}
    told = verdict(_run(tmp_path, {"results": _pooled(*draft), "baselines": baselines}))
    assert says in told
    assert bool(says) == bool(told)


def test_no_verdict_without_baselines(tmp_path):
    assert verdict(_run(tmp_path, {"results": _pooled(2.0, 1.9, 2.1), "baselines": {}})) == ""
    assert verdict(_run(tmp_path, None)) == ""


@pytest.mark.parametrize(
    ("lengths", "expected"), [(["1", "3", "5"], "3"), (["5", "7"], "5"), (["2", "4"], "2")]
)
def test_the_headline_is_k_3_or_the_nearest(lengths, expected):
    assert headline_length(lengths) == expected
