"""Training from a store that is still being written, in two real processes."""

import json
import signal
from pathlib import Path

import pytest
from safetensors.torch import load_file

import paceline
from paceline.errors import UsageError
from paceline.runlog import read_log
from paceline.store import Store, published_ids
from paceline.store.presence import READER, WRITER, look

from . import rank_work
from .launch import start_ranks
from .pairs import prepare, start_extract, start_train, wait


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("pairs")
    prepare(made)
    return made


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> Path:
    """A pair that nothing happened to."""
    store, out = folder / "store", folder / "draft"
    assert wait(start_train(folder, store, out), start_extract(folder, store)) == [0, 0]
    return out


def assert_same_draft(one: Path, two: Path) -> None:
    weights = [load_file(out / "draft.safetensors") for out in (one, two)]
    assert weights[0].keys() == weights[1].keys()
    assert all(weights[0][name].equal(weights[1][name]) for name in weights[0])


def curve(out: Path) -> list[float]:
    return [record["loss"] for record in read_log(out).train]


def test_a_pair_trains_on_more_than_its_budget_holds(folder: Path, undisturbed: Path) -> None:
    store = Store(folder / "store")
    accounting = store.manifest.result["accounting"]
    assert accounting["done"] == accounting["in"] == 150
    assert len(published_ids(folder / "store")) == 150
    assert len(store) < 100
    planned = store.manifest.result["planned"]
    assert len(store.split("heldout")) == planned["heldout"]["samples"] > 0
    manifest = json.loads((undisturbed / "manifest.json").read_text())
    assert manifest["result"]["steps"] == planned["train"]["supervised"] // 100
    assert manifest["result"]["heldout"]["rows"][0] > 0
    losses = curve(undisturbed)
    assert sum(losses[-3:]) < 0.9 * sum(losses[:3])
    # What is left of the store is enough to measure the draft on what it never saw.
    result = paceline.evaluate(
        draft=str(undisturbed), store=str(folder / "store"), out=str(folder / "result")
    )
    assert result["results"]["1"]["pooled"]["verify_steps"] > 0


# Which side is killed, and before which of the samples or optimiser steps of that start.
KILLS = [("train", 0), ("extract", 0), ("train", 1), ("extract", 25), ("train", 3), ("extract", 9)]


def test_a_pair_that_is_killed_again_and_again_ends_with_the_same_weights(
    folder: Path, undisturbed: Path, tmp_path: Path
) -> None:
    store, out = tmp_path / "store", tmp_path / "draft"
    for side, number in KILLS:
        fatal = {side: number}
        extracting = start_extract(folder, store, fatal.get("extract"))
        training = start_train(folder, store, out, fatal.get("train"))
        killed, other = (training, extracting) if side == "train" else (extracting, training)
        assert wait(killed) == [-signal.SIGKILL], (side, number)
        # The other side says so, and leaves.
        assert wait(other) == [1], (side, number)
        assert not (out / "draft.safetensors").exists()
    assert wait(start_train(folder, store, out), start_extract(folder, store)) == [0, 0]
    assert_same_draft(out, undisturbed)
    assert curve(out) == curve(undisturbed)


def test_two_ranks_follow_as_one_does(folder: Path, undisturbed: Path, tmp_path: Path) -> None:
    store, out = tmp_path / "store", tmp_path / "draft"
    ranks = start_ranks(rank_work.follow, tmp_path, str(folder), str(store), str(out))
    assert wait(*ranks, start_extract(folder, store)) == [0, 0, 0]
    # More than the budget went through it.
    assert len(Store(store)) < 100
    assert curve(out) == pytest.approx(curve(undisturbed), rel=1e-4)


def test_a_stream_that_fits_serves_several_epochs(folder: Path, tmp_path: Path) -> None:
    pair, out = (folder, tmp_path / "store"), tmp_path / "draft"
    extracting = start_extract(*pair, stream_bytes=None, shard_bytes=50_000)
    training = start_train(*pair, out, epochs=2.0, batch_rows=16, min_lr_ratio=0.0)
    assert wait(training, extracting) == [0, 0]
    store = Store(tmp_path / "store")
    assert len(store) == 150
    # Most answers are longer than a step's rows: the steps are told beforehand all the same.
    answers = [store.records[i].num_supervised for i in store.split("train").tolist()]
    steps = 2 * sum(min(answer, 16) for answer in answers) // 16
    assert steps < 0.9 * 2 * sum(answers) / 16
    rates = [record["learning_rate"] for record in read_log(out).train]
    assert len(rates) == steps
    assert rates[-1] < 1e-3 * max(rates)


def test_a_budget_in_which_two_epochs_do_not_fit_is_said(folder: Path, tmp_path: Path) -> None:
    pair = (folder, tmp_path / "store")
    codes = wait(start_extract(*pair), start_train(*pair, tmp_path / "draft", epochs=2.0))
    assert codes == [1, 1]
    errors = [look(tmp_path / "store", side).error for side in (READER, WRITER)]
    assert all("2 epochs need the whole store" in error for error in errors)


def test_without_follow_an_unfinished_store_is_refused(folder: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    wait(start_extract(folder, store, die_at=40, stream_bytes=None))
    with pytest.raises(UsageError, match="is not finished: .*--follow"):
        paceline.train(store=str(store), vocab=str(folder / "vocab"), out=str(tmp_path / "draft"))
