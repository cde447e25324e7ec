"""A record of the log speaks of all steps since the one before, and of nothing else."""

import importlib
import time

import pytest

from paceline.runlog import read_log
from tests.lines import extracted, trained

session = importlib.import_module("paceline.train.session")


def test_a_record_is_the_mean_of_its_steps(tmp_path):
    extracted(tmp_path)
    logs = {}
    for every in (1, 3):
        trained(tmp_path, f"every-{every}", max_steps=8, log_every=every)
        logs[every] = read_log(tmp_path / f"every-{every}").train
    assert [record["step"] for record in logs[3]] == [2, 5, 7]
    for record, steps in zip(logs[3], (range(3), range(3, 6), range(6, 8))):
        for name in ("rows", "tokens", "needed_flops"):
            each = [logs[1][step][name] for step in steps]
            assert len(set(each)) > 1 and record[name] == pytest.approx(sum(each) / len(each))
    took = sum(n * record["step_s"] for n, record in zip((3, 3, 2), logs[3]))
    assert 0 < took <= logs[3][-1]["elapsed_s"]


def test_looks_at_held_out_data_are_no_steps(tmp_path, monkeypatch):
    extracted(tmp_path)
    look = session.heldout_figures

    def slow(*arguments):
        time.sleep(0.5)
        return look(*arguments)

    monkeypatch.setattr(session, "heldout_figures", slow)
    trained(tmp_path, max_steps=8, log_every=4, eval_every=2)
    log = read_log(tmp_path / "draft")
    took = sum(4 * record["step_s"] for record in log.train)
    # Three on the way and none behind the last record.
    assert took <= log.train[-1]["elapsed_s"] - 3 * 0.5
