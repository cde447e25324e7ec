"""The training log is read as it is written: resumed, cut off, in work."""

import json

import pytest

from paceline.errors import DataError
from paceline.runlog import read_log, throughput


def _write(folder, *lines, end="\n"):
    text = "\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines)
    (folder / "log.jsonl").write_text(text + end)


def test_the_last_word_on_a_step_counts(tmp_path):
    """A run that was resumed from a checkpoint logs the steps after it again."""
    first = [{"step": s, "loss": 9.0} for s in (9, 19, 29)]
    again = [{"step": s, "loss": 1.0} for s in (19, 29, 39)]
    _write(tmp_path, *first, {"step": 20, "heldout": {"loss": 5}}, *again)
    log = read_log(tmp_path)
    assert [(r["step"], r["loss"]) for r in log.train] == [(9, 9), (19, 1), (29, 1), (39, 1)]
    assert [r["step"] for r in log.heldout] == [20]


def test_steps_that_a_resumed_run_has_yet_to_make_again_are_not_there(tmp_path):
    steps = (0, 10, 20, 30, 38, 20, 22)
    _write(tmp_path, *({"step": step, "loss": number} for number, step in enumerate(steps)))
    log = read_log(tmp_path)
    assert [(r["step"], r["loss"]) for r in log.train] == [(0, 0), (10, 1), (20, 5), (22, 6)]


def test_a_line_that_is_being_written_does_not_count(tmp_path):
    _write(tmp_path, {"step": 0, "loss": 1.0}, '{"step": 1, "lo', end="")
    assert [r["step"] for r in read_log(tmp_path).train] == [0]


@pytest.mark.parametrize("line", ["{broken", "[1]", '{"loss": 3}'])
def test_a_damaged_line_is_named(tmp_path, line):
    _write(tmp_path, {"step": 0, "loss": 1.0}, line, {"step": 1, "loss": 1.0})
    with pytest.raises(DataError, match=r"log\.jsonl, line 2"):
        read_log(tmp_path)


def test_throughput_is_of_all_records_together():
    """And waiting counts; a log of an earlier paceline has no share of products."""
    records = [
        {"step_s": 2.0, "wait_s": 1.0, "tokens": 300, "rows": 100, "mfu": 0.1, "peak_bytes": 7},
        {"step_s": 8.0, "wait_s": 0.0, "tokens": 200, "rows": 50, "mfu": 0.6, "peak_bytes": 9},
    ]
    expected = {"tokens_per_s": 50, "rows_per_s": 15, "wait_share": 0.1, "mfu": 0.5}
    assert throughput(records) == pytest.approx({**expected, "peak_bytes": 9})
    del records[0]["mfu"]
    assert throughput(records) == {**expected, "mfu": None, "peak_bytes": None}


def test_no_log_yet(tmp_path):
    log = read_log(tmp_path)
    assert (log.train, log.heldout) == ([], [])
