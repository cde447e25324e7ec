"""Opening, finding and reading what was stored; damage of every kind is named, never read past."""

import json
import os
import resource
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.contracts import LayerPlan
from paceline.errors import StoreCorruption, StoreError, UsageError
from paceline.store import ShardWriter, Store, published_ids
from paceline.store.budget import let_go
from paceline.store.files import INDEX_NAME, receipt_path, shard_numbers, shard_path
from paceline.store.index import IndexBuilder
from paceline.store.shard import Shard

from .making import assert_holds, make_sample, make_spec, states_of, write_manifest, write_store

SAMPLES = [make_sample(i, split="heldout" if i % 5 == 0 else "train") for i in range(12)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_store(tmp_path / "store", make_spec(), SAMPLES)


def test_records_are_a_sequence_in_the_order_of_shards(folder: Path) -> None:
    records = Store(folder).records
    assert len(records) == 12
    assert [r.sample_id for r in records] == [s.sample_id for s in SAMPLES]
    assert records[-1] == records[11] == records[10:][1]
    assert [(r.num_tokens, r.num_aux_rows, r.num_supervised) for r in records] == [
        (s.num_tokens, s.num_aux_rows, s.num_supervised) for s in SAMPLES
    ]
    shards = [r.shard for r in records]
    assert shards == sorted(shards)
    assert shards[-1] > 0
    first_of_last = shards.index(shards[-1])
    assert [r.position for r in records[first_of_last:]] == list(range(12 - first_of_last))
    with pytest.raises(IndexError, match="sample 12 of a store of 12"):
        records[12]


def test_samples_are_found_by_split_source_and_id(folder: Path) -> None:
    store = Store(folder)
    assert store.split("heldout").tolist() == [0, 5, 10]
    assert store.split("nothing").tolist() == []
    assert store.records.source("source-1").tolist() == [1, 4, 7, 10]
    assert [store.records.find(s.sample_id) for s in SAMPLES] == list(range(12))
    with pytest.raises(KeyError, match="sample-99"):
        store.records.find("sample-99")


@pytest.mark.parametrize("codec", ["raw", "lossless", "int8", "fp8"])
def test_tokens_are_read_without_the_states(tmp_path: Path, codec: str) -> None:
    store = Store(write_store(tmp_path / "store", make_spec(codec), SAMPLES))
    store.codec = None  # Nothing can be decoded.
    for i, sample in enumerate(SAMPLES):
        ids, mask = store.read_tokens(i)
        assert (ids.dtype, mask.dtype) == (np.int32, np.bool_)
        assert (ids.tolist(), mask.tolist()) == (
            sample.input_ids.tolist(),
            sample.loss_mask.tolist(),
        )


def test_reading_touches_only_its_own_memory(folder: Path) -> None:
    before = (folder / "shards/00000.safetensors").read_bytes()
    store = Store(folder)
    index = next(i for i in range(12) if len(store.read(i).aux))
    sample = store.read(index)
    sample.aux.zero_()
    assert (folder / "shards/00000.safetensors").read_bytes() == before
    assert_holds(Store(folder), SAMPLES)


def test_an_unfinished_store_opens_only_when_asked(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest.update(status="running", result={}, checksum=None)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UsageError, match="not finished"):
        Store(folder)
    assert_holds(Store(folder, unfinished=True), SAMPLES)
    with ShardWriter(folder, make_spec()) as writer:
        more = make_sample(50)
        writer.add(more, *states_of(more, make_spec()))
    assert_holds(Store(folder, unfinished=True), [*SAMPLES, more])


def test_a_folder_that_is_no_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"it has no manifest\.json"):
        Store(tmp_path)


@pytest.mark.parametrize("damage", ["missing", "cut", "flipped", "of another version", "empty"])
def test_the_index_is_made_again_from_the_shards(folder: Path, damage: str) -> None:
    path = folder / INDEX_NAME
    good = path.read_bytes()
    if damage == "missing":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(good[:-1])
    elif damage == "flipped":
        path.write_bytes(good[:-9] + bytes([good[-9] ^ 1]) + good[-8:])
    elif damage == "empty":
        path.write_bytes(b"")
    else:
        path.write_bytes(good.replace(b'"version":"1"', b'"version":"9"'))
    assert_holds(Store(folder), SAMPLES)
    assert path.read_bytes() == good


def test_shards_that_come_or_go_after_the_end_are_noticed(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "copy")
    with ShardWriter(folder, make_spec()) as writer:
        writer.add(make_sample(50), *states_of(make_sample(50), make_spec()))
    with pytest.raises(StoreCorruption, match="does not hold what its manifest says"):
        Store(folder)
    (tmp_path / "copy/shards/00001.safetensors").unlink()
    with pytest.raises(StoreCorruption, match="shards are missing"):
        Store(tmp_path / "copy")


def swap_first_shard(folder: Path, aside: Path) -> None:
    """For a whole one of the same samples and the same size with other states."""
    store, spec = Store(folder), make_spec()
    with ShardWriter(aside, spec) as writer:
        for record in store.records:
            if record.shard == 0:
                sample = SAMPLES[store.records.find(record.sample_id)]
                aux, last = states_of(sample, spec)
                writer.add(sample, -aux, last)
    shutil.copy(aside / "shards/00000.safetensors", folder / "shards")


def test_a_shard_swapped_under_an_open_store_is_not_read(folder: Path, tmp_path: Path) -> None:
    store = Store(folder)
    swap_first_shard(folder, tmp_path / "other")
    with pytest.raises(StoreCorruption, match="another shard than the index knows"):
        store.read(0)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(where=st.integers(0, 10**9), bit=st.integers(0, 7), codec=st.sampled_from(["raw", "int8"]))
def test_every_flipped_bit_of_a_shard_is_found(
    stores: dict[str, Path], where: int, bit: int, codec: str
) -> None:
    path = stores[codec] / "shards/00000.safetensors"
    good = path.read_bytes()
    at = where % len(good)
    _expect_found(stores[codec], path, good, at, bit)


def test_every_single_bit_of_header_and_manifest_is_guarded(stores: dict[str, Path]) -> None:
    folder = stores["raw"]
    shard, manifest = folder / "shards/00000.safetensors", folder / "manifest.json"
    for path in (shard, manifest):
        good = path.read_bytes()
        text_bytes = good.rindex(b"}", 0, 8192) + 1 if path == shard else len(good)
        for at in range(0, text_bytes, 11):
            _expect_found(folder, path, good, at, at // 11 % 8)


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("flips")
    return {
        codec: write_store(root / codec, make_spec(codec, shard_bytes=1 << 20), SAMPLES)
        for codec in ("raw", "int8")
    }


def _expect_found(folder: Path, path: Path, good: bytes, at: int, bit: int) -> None:
    bad = bytearray(good)
    bad[at] ^= 1 << bit
    path.write_bytes(bad)
    try:
        with pytest.raises((StoreCorruption, UsageError)) as caught:
            Store(folder).verify()
        assert path.name in str(caught.value)
    finally:
        path.write_bytes(good)


def test_verify_names_the_shard_and_the_tensor(folder: Path) -> None:
    assert Store(folder).verify() > 0
    path = folder / "shards/00001.safetensors"
    with path.open("r+b") as file:
        file.seek(8192)
        byte = file.read(1)
        file.seek(8192)
        file.write(bytes([byte[0] ^ 0x40]))
    with pytest.raises(StoreCorruption, match=r"00001\.safetensors: tensor 'aux' .* checksum"):
        Store(folder).verify()


def test_verify_looks_at_the_receipts_of_shards_that_were_let_go(folder: Path) -> None:
    whole = Store(folder).verify()
    let_go(folder, 0)
    # The index is made again, and then knows of the receipt only that it counts.
    assert 0 < Store(folder).verify() < whole
    path = receipt_path(folder, 0)
    good = path.read_bytes()
    for at in range(0, len(good), 199):
        bad = bytearray(good)
        bad[at] ^= 1
        path.write_bytes(bad)
        with pytest.raises(StoreCorruption, match=r"receipts/00000\.safetensors"):
            Store(folder).verify()
    path.unlink()
    with pytest.raises(StoreCorruption, match="does not hold what its manifest says"):
        Store(folder).verify()
    path.write_bytes(good)
    Store(folder).verify()


def test_verify_does_not_go_by_the_index(folder: Path) -> None:
    swap_first_shard(folder, folder.with_name("other"))
    with pytest.raises(StoreCorruption, match="does not hold what its manifest says"):
        Store(folder).verify()


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(share=st.floats(0, 0.999))
def test_a_cut_shard_is_refused(stores: dict[str, Path], share: float) -> None:
    path = stores["raw"] / "shards/00000.safetensors"
    good = path.read_bytes()
    path.write_bytes(good[: int(len(good) * share)])
    (stores["raw"] / INDEX_NAME).unlink(missing_ok=True)
    try:
        with pytest.raises(StoreCorruption, match="00000"):
            Store(stores["raw"])
    finally:
        path.write_bytes(good)


def test_shards_of_two_stores_do_not_mix(tmp_path: Path) -> None:
    spec, other = make_spec(), make_spec(layers=LayerPlan((2, 3, 6), 8))
    for folder, kind in ((tmp_path / "a", spec), (tmp_path / "b", other)):
        with ShardWriter(folder, kind) as writer:
            number = 1 if kind is spec else 2
            writer.add(make_sample(number), *states_of(make_sample(number), kind))
    with pytest.raises(StoreError, match=r"aux_layers: was \[2, 3, 5\], now \[2, 3, 6\]"):
        ShardWriter(tmp_path / "a", other)
    shutil.copy(tmp_path / "b/shards/00000.safetensors", tmp_path / "a/shards/00001.safetensors")
    write_manifest(tmp_path / "a")
    with pytest.raises(StoreError, match="is of another store"):
        Store(tmp_path / "a", unfinished=True)


def test_records_of_the_shards_so_far_stay_as_they_are(folder: Path) -> None:
    numbers = shard_numbers(folder)
    growing, found = IndexBuilder(), []
    for number in numbers:
        growing.add(number, Shard(shard_path(folder, number)))
        found.append(growing.records())
    for count, records in enumerate(found, start=1):
        whole = IndexBuilder()
        for number in numbers[:count]:
            whole.add(number, Shard(shard_path(folder, number)))
        wanted = whole.build().records
        assert [r.sample_id for r in records] == [s.sample_id for s in SAMPLES[: len(records)]]
        assert list(records) == list(wanted)
        assert (records.tables, records.columns.keys()) == (wanted.tables, wanted.columns.keys())
        for name, values in wanted.columns.items():
            assert records.columns[name].dtype == values.dtype
            assert np.array_equal(records.columns[name], values)
    assert list(found[-1]) == list(Store(folder).records)


def test_a_store_without_samples_is_a_store(tmp_path: Path) -> None:
    store = Store(write_store(tmp_path / "store", make_spec(), []))
    assert len(store) == 0
    assert store.split("train").tolist() == []
    assert store.spec == make_spec()
    assert published_ids(tmp_path / "store") == set()


@pytest.mark.parametrize(("limit", "num_kept"), [(64, 8), (320, 20), (resource.RLIM_INFINITY, 30)])
def test_a_reader_leaves_most_of_the_process_s_open_files_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int, num_kept: int
) -> None:
    folder = write_store(tmp_path, make_spec(shard_bytes=1), [make_sample(i, 5) for i in range(30)])
    monkeypatch.setattr("resource.getrlimit", lambda _: (limit, limit))
    store = Store(folder)
    for index in [*range(30), *range(30)]:
        store.read(index)
    targets = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    assert sum(str(folder / "shards") in target for target in targets) == 2 * num_kept


def test_threads_share_a_store(folder: Path) -> None:
    store = Store(folder)
    wanted = [states_of(s, store.spec)[1] for s in SAMPLES]
    order = np.random.default_rng(0).integers(0, 12, 400).tolist()
    with ThreadPoolExecutor(4) as pool:
        for index, sample in zip(order, pool.map(store.read, order), strict=True):
            assert torch.equal(sample.last, wanted[index])
