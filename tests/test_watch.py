"""`watch`: what is told of a job is what its files say, while it works and after."""

import json
import os
import threading
import time

import pytest

import paceline
from paceline.artefact import open_stage
from paceline.cli.watch import show
from paceline.errors import UsageError
from paceline.store import ShardWriter
from paceline.store.budget import let_go
from paceline.store.shard import Shard
from tests.cli.consoles import text_console

from .store.making import make_sample, make_spec, states_of

SPEC = make_spec(shard_bytes=25_000)


def record(step, **changes):
    figures = {"loss": 2.0, "acceptance_rate": [0.25 + step / 100, None]}
    return {
        "step": step,
        "loss": 4.0 - step / 10,
        "tokens": 300,
        "rows": 100,
        "step_s": 0.5,
        "wait_s": 0.1,
        "learning_rate": 1e-3,
        "mfu": 0.2 + step / 100,
        "peak_bytes": 3_000_000_000 - step,
        "train": figures,
        **changes,
    }


def write_log(folder, records):
    with (folder / "log.jsonl").open("a") as file:
        file.writelines(json.dumps(r) + "\n" for r in records)


def shown(result, terminal=False):
    console, text = text_console(terminal)
    show(result, console)
    return text()


def test_a_training_at_work_and_stopped(tmp_path):
    folder = tmp_path / "run" / "train"
    with open_stage(folder, "train", {}, {}) as stage:
        stage.announce({"steps": 40})
        assert "0 of 40" in shown(paceline.watch(str(tmp_path / "run")))
        write_log(folder, [record(s) for s in range(10)])
        for step, length in [(4, None), (8, 1.75), (10, 2.25)]:
            look = {"loss": 2.5, "acceptance": {"acceptance_length": length}}
            write_log(folder, [{"step": step, "heldout": look}])
        (seen,) = paceline.watch(str(tmp_path / "run"))["stages"]
        text = shown(paceline.watch(str(folder), once=True))
    assert seen["status"] == "running"
    assert (seen["steps"], seen["planned_steps"]) == (10, 40)
    assert seen["tokens_per_s"] == pytest.approx(600) and seen["rows_per_s"] == pytest.approx(200)
    assert seen["wait_share"] == pytest.approx(0.2)
    assert seen["seconds_left"] == pytest.approx(15)
    assert seen["acceptance_rate"][-1] == pytest.approx(0.34)
    assert seen["heldout_acceptance_length"] == [None, 1.75, 2.25]
    assert seen["mfu"] == pytest.approx(0.245) and seen["peak_bytes"] == 3_000_000_000
    assert "train: running" in text
    assert "10 of 40 (25.0%)" in text
    assert "4.000 \u2588\u2587" in text and "\u2581 3.100" in text
    assert "2.500" in text and "1.750" in text and "2.250" in text
    assert "24.5%" in text and "3 GB" in text
    (seen,) = paceline.watch(str(folder))["stages"]
    assert seen["status"] == "stopped"


def test_an_extraction_with_a_budget(tmp_path):
    folder = tmp_path / "extract"
    samples = [make_sample(i, num_tokens=30) for i in range(12)]
    with open_stage(folder, "extract", {}, {}) as stage:
        stage.announce({"planned": {"train": {"samples": 50, "supervised": 9}}})
        with ShardWriter(folder, SPEC) as writer:
            for sample in samples:
                writer.add(sample, *states_of(sample, SPEC))
        let_go(folder, 0)
        first, second = sorted((folder / "shards").iterdir())
        for path, published in ((first, 1000), (second, 1004)):
            os.utime(path, (published, published))
        result = paceline.watch(str(tmp_path))
    (seen,) = result["stages"]
    assert (seen["samples"], seen["planned_samples"]) == (12, 50)
    assert (seen["shards"], seen["shards_removed"]) == (2, 1)
    assert seen["bytes"] == sum(p.stat().st_size for p in (folder / "shards").iterdir())
    assert seen["samples_per_s"] == Shard(second).num_samples / 4
    assert "12 of 50 (24.0%)" in shown(result)


def test_a_second_look_opens_only_the_shards_that_are_new(tmp_path, monkeypatch):
    folder, opened = tmp_path / "extract", []
    read = lambda path: opened.append(path.name) or Shard(path)
    monkeypatch.setattr("paceline.watch.Shard", read)
    with open_stage(folder, "extract", {}, {}) as stage:
        stage.announce({})
        for first in (0, 8):
            with ShardWriter(folder, SPEC) as writer:
                for sample in (make_sample(i, num_tokens=30) for i in range(first, first + 8)):
                    writer.add(sample, *states_of(sample, SPEC))
            seen = paceline.watch(str(folder))["stages"][0]
            assert seen["samples"] == first + 8
    assert sorted(opened) == [path.name for path in sorted((folder / "shards").iterdir())]


def test_on_a_terminal_it_looks_until_the_work_ends(tmp_path):
    folder = tmp_path / "train"
    began, end = threading.Event(), threading.Event()

    def work():
        with open_stage(folder, "train", {}, {}) as stage:
            stage.announce({"steps": 3})
            began.set()
            assert end.wait(300)

    worker = threading.Thread(target=work)
    worker.start()
    assert began.wait(300)
    result = paceline.watch(str(folder), interval_s=0.01)
    console, text = text_console(terminal=True)
    watching = threading.Thread(target=show, args=(result, console))
    watching.start()
    write_log(folder, [record(0)])
    deadline = time.monotonic() + 300
    while "1 of 3" not in text() and time.monotonic() < deadline:
        pass
    assert watching.is_alive()
    end.set()
    worker.join()
    watching.join(300)
    assert not watching.is_alive()
    assert "train: running" in text() and "train: stopped" in text()


def test_every_folder_of_a_stage_is_shown(tmp_path):
    for name in ("evaluate", "served", "train"):
        with open_stage(tmp_path / name, {"served": "evaluate"}.get(name, name), {}, {}):
            pass
    result = paceline.watch(str(tmp_path))
    assert [stage["folder"] for stage in result["stages"]] == [
        str(tmp_path / name) for name in ("train", "evaluate", "served")
    ]
    text = shown(result)
    assert "evaluate: stopped" in text and "evaluate (served): stopped" in text


def test_a_finished_run_and_a_folder_that_is_none(tiny_run, tmp_path):
    result = paceline.watch(str(tiny_run))
    assert not result["is_running"]
    status = {stage["stage"]: stage["status"] for stage in result["stages"]}
    assert status == dict.fromkeys(
        ["generate", "prepare", "extract", "align", "train", "evaluate", "export", "report"],
        "complete",
    )
    text = shown(result, terminal=True)
    assert "32 of 32 (100.0%)" in text and "60 of 60 (100.0%)" in text
    for folder in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(UsageError, match="is no run of paceline"):
            paceline.watch(str(folder))
