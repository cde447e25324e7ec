"""Sizes of stores foretold, against stores really written: the oracle is the disk."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.contracts import LayerPlan
from paceline.store import Store
from paceline.store.sizes import store_size
from tests.store.making import make_sample, make_spec, write_store

FIXED_WIDTH = ("raw", "int8", "fp8")


def _on_disk(folder: Path) -> int:
    """Shards and index; the manifest and the lock are not the store's content."""
    Store(folder)  # leaves the index
    files = [*folder.glob("shards/*.safetensors"), folder / "index.safetensors"]
    return sum(path.stat().st_size for path in files)


def _written(folder, spec, count):
    samples = [make_sample(i) for i in range(count)]
    return write_store(folder, spec, samples), samples


@pytest.mark.parametrize("codec", FIXED_WIDTH)
@pytest.mark.parametrize(
    ("hidden_size", "dtype", "aux"),
    [(64, "bfloat16", (2, 3, 5)), (576, "float32", (1, 4)), (96, "float16", (1, 2, 3, 4))],
)
def test_a_store_is_as_large_as_foretold(tmp_path, codec, hidden_size, dtype, aux):
    layers = LayerPlan(aux, 8)
    spec = make_spec(codec, dtype, hidden_size, shard_bytes=400_000, layers=layers)
    folder, samples = _written(tmp_path / "store", spec, 120)
    size = store_size(spec, samples)
    assert size.total == pytest.approx(_on_disk(folder), rel=0.01)
    num_shards = len(list(folder.glob("shards/*")))
    assert abs(size.num_shards - num_shards) <= 1 + num_shards // 10


def test_lossless_is_never_above_what_was_foretold(tmp_path):
    spec = make_spec("lossless", hidden_size=64, shard_bytes=400_000)
    folder, samples = _written(tmp_path / "store", spec, 60)
    found = _on_disk(folder)
    assert found < store_size(spec, samples).total
    # Told the share to which the states shrink, the size is right again.
    states = store_size(spec, samples).states
    rest = store_size(spec, samples).total - states
    size = store_size(spec, samples, states_share=(found - rest) / states)
    assert size.total == pytest.approx(found, rel=0.001)


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    count=st.integers(1, 40),
    codec=st.sampled_from(FIXED_WIDTH),
    hidden_size=st.sampled_from([32, 100, 256]),
    shard_bytes=st.integers(60_000, 2_000_000),
)
def test_any_shape(tmp_path_factory, count, codec, hidden_size, shard_bytes):
    spec = make_spec(codec, "bfloat16", hidden_size, shard_bytes)
    folder, samples = _written(tmp_path_factory.mktemp("any") / "s", spec, count)
    # A shard more or less has its header: small stores may be off by that, and those of shards that
    # hold a sample or two by some more.
    headers = 9_000 * (1 + len(list(folder.glob("shards/*"))) // 5)
    foretold = store_size(spec, samples).total
    assert foretold == pytest.approx(_on_disk(folder), rel=0.02, abs=headers)


def test_a_part_stands_for_the_whole():
    spec = make_spec(hidden_size=64)
    samples = [make_sample(i, num_tokens=30) for i in range(50)]
    whole = store_size(spec, samples * 4)
    assert store_size(spec, samples, scale=4.0).total == pytest.approx(whole.total, rel=1e-6)


def test_no_samples_take_no_shard():
    size = store_size(make_spec(), [])
    assert (size.num_shards, size.states, size.tokens) == (0, 0, 0)
