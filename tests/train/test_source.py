"""Where training reads from: a training that began on a stream keeps to it until it starts over."""

import json

import pytest

from paceline.artefact import describe_growing, load_manifest, open_stage
from paceline.recipe import TrainOptions
from paceline.store import Follower, Store
from paceline.train.ranks import open_ranks
from paceline.train.source import ORDER_FILE, open_store
from tests.store.making import make_sample, make_spec, write_store


@pytest.fixture
def begun(tmp_path):
    """Options of a training that began on a stream and was stopped; the store is finished since."""
    store = write_store(tmp_path / "store", make_spec(), [make_sample(i) for i in range(4)])
    options = TrainOptions(store=str(store), out=str(tmp_path / "train"), max_steps=3)
    inputs = {"store": describe_growing(store, load_manifest(store)), "vocab": {"fingerprint": "v"}}
    with open_stage(options.out, "train", inputs, options.identity()) as stage:
        (stage.path / ORDER_FILE).write_text(json.dumps({"shards": [], "ended": False}))
    return options


def kind(options, **changes):
    changed = options.model_copy(update=changes)
    with open_ranks("cpu") as ranks, open_store(changed, ranks) as (store, described):
        # What the stage is compared by must fit what is read.
        assert isinstance(described["fingerprint"], dict) == isinstance(store, Follower)
        return type(store)


@pytest.mark.parametrize("overwrite", [False, True, "other"])
def test_an_unfinished_training_keeps_to_its_stream(begun, overwrite):
    assert kind(begun, overwrite=overwrite) is Follower


@pytest.mark.parametrize("overwrite", [False, True, "other"])
def test_one_that_was_killed_before_the_first_shard_keeps_to_it_too(begun, overwrite, tmp_path):
    (tmp_path / "train" / ORDER_FILE).unlink()
    assert kind(begun, overwrite=overwrite) is Follower


@pytest.mark.parametrize("overwrite", [True, "other"])
def test_one_that_starts_over_reads_the_finished_store(begun, overwrite, tmp_path):
    assert kind(begun, overwrite=overwrite, max_steps=4) is Store
    (tmp_path / "train" / "manifest.json").write_text("{")
    assert kind(begun, overwrite=overwrite) is Store


@pytest.mark.parametrize(("overwrite", "found"), [("other", Follower), (True, Store)])
def test_a_finished_training_starts_over_only_where_that_is_asked_for(begun, overwrite, found):
    manifest = load_manifest(begun.out)
    with open_stage(begun.out, "train", manifest.inputs, manifest.options) as stage:
        stage.finish({}, "c")
    assert kind(begun, overwrite=overwrite) is found
