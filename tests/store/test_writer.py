"""What the writer puts on the disk, read back by others: the safetensors library, and by hand."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from paceline.errors import StoreError
from paceline.store import ShardWriter, Store, content_fingerprint, published_ids
from paceline.store.files import shard_numbers, shard_path

from .making import (
    assert_holds,
    make_sample,
    make_spec,
    same_bytes,
    states_of,
    write_manifest,
    write_store,
)


def test_a_shard_is_what_the_format_page_says(tmp_path: Path) -> None:
    spec = make_spec(shard_bytes=1 << 20)
    samples = [make_sample(0, 6), make_sample(1, 1), make_sample(2, 9)]
    write_store(tmp_path / "store", spec, samples)
    data = (tmp_path / "store/shards/00000.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    meta = header.pop("__metadata__")
    tensors = {
        name: data[8 + length + v["data_offsets"][0] : 8 + length + v["data_offsets"][1]]
        for name, v in header.items()
    }
    # The tensors tile the rest of the file, in the order of the header.
    borders = [v["data_offsets"] for v in header.values()]
    assert [a for a, _ in borders] == [0] + [b for _, b in borders[:-1]]
    assert 8 + length + borders[-1][1] == len(data)
    assert (8 + length) % 4096 == 0
    aux = torch.cat([states_of(s, spec)[0][: s.num_aux_rows] for s in samples])
    last = torch.cat([states_of(s, spec)[1] for s in samples])
    assert tensors["aux"] == aux.view(torch.uint8).numpy().tobytes()
    assert tensors["last"] == last.view(torch.uint8).numpy().tobytes()
    assert tensors["input_ids"] == b"".join(s.input_ids.astype("<i4").tobytes() for s in samples)
    assert tensors["loss_mask"] == b"".join(bytes(s.loss_mask.tolist()) for s in samples)
    counts = [(s.num_tokens, s.num_aux_rows, s.num_supervised) for s in samples]
    offsets = np.cumsum([(0, 0, 0), *counts], axis=0).astype("<i8")
    assert tensors["offsets"] == offsets.tobytes()
    columns = json.loads(tensors["samples"])
    assert columns["sample_id"] == ["sample-0", "sample-1", "sample-2"]
    assert columns["finished"] == [None, True, False]
    assert json.loads(meta["spec"]) == spec.identity()
    assert json.loads(meta["checksums"]) == {
        name: xxhash.xxh3_128_hexdigest(value) for name, value in tensors.items()
    }
    blank = data[: 8 + length].replace(meta["header_checksum"].encode(), b"0" * 32)
    assert xxhash.xxh3_128_hexdigest(blank) == meta["header_checksum"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_safetensors_library_opens_a_shard(tmp_path: Path, dtype: str) -> None:
    # An odd width makes the streamed tensor end off the alignment of those after it.
    spec = make_spec(dtype=dtype, hidden_size=3, shard_bytes=1 << 20)
    samples = [make_sample(i) for i in range(9)]
    write_store(tmp_path / "store", spec, samples)
    with safe_open(tmp_path / "store/shards/00000.safetensors", framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    last = torch.cat([states_of(s, spec)[1] for s in samples])
    assert same_bytes(tensors["last"], last)
    assert tensors["offsets"][-1].tolist() == [
        sum(s.num_tokens for s in samples),
        sum(s.num_aux_rows for s in samples),
        sum(s.num_supervised for s in samples),
    ]
    assert tensors["num_past_end"].tolist() == [s.num_past_end for s in samples]


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=12),
    shard_bytes=st.integers(1, 20_000),
    codec=st.sampled_from(["raw", "lossless"]),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    hidden_size=st.integers(1, 9),
)
def test_round_trip_for_any_lengths_and_borders(
    tmp_path_factory: pytest.TempPathFactory,
    lengths: list[int],
    shard_bytes: int,
    codec: str,
    dtype: str,
    hidden_size: int,
) -> None:
    spec = make_spec(codec, dtype, hidden_size, shard_bytes)
    samples = [make_sample(i, length) for i, length in enumerate(lengths)]
    folder = write_store(tmp_path_factory.mktemp("trip") / "store", spec, samples)
    store = Store(folder)
    assert_holds(store, samples)
    store.verify()
    assert published_ids(folder) == {s.sample_id for s in samples}


@pytest.mark.parametrize("codec", ["raw", "lossless", "int8", "fp8"])
def test_bytes_of_a_sample_depend_on_nothing_but_the_sample(tmp_path: Path, codec: str) -> None:
    samples = [make_sample(i) for i in range(24)]
    one = write_store(tmp_path / "one", make_spec(codec, shard_bytes=1 << 20), samples)
    spec = make_spec(codec, shard_bytes=12_500)
    many = tmp_path / "many"
    # Two workers, other borders, other order.
    with ShardWriter(many, spec, worker=0) as a, ShardWriter(many, spec, worker=1) as b:
        for i, sample in enumerate(reversed(samples)):
            (a if i % 3 else b).add(sample, *states_of(sample, spec))
    assert len(shard_numbers(many)) > len(shard_numbers(one)) == 1
    assert _bytes_by_sample(one) == _bytes_by_sample(many)
    assert content_fingerprint(one) == content_fingerprint(many)
    beside = tmp_path / "beside"
    with ShardWriter(beside, spec, num_lanes=3) as writer:
        for sample in samples:
            writer.add(sample, *states_of(sample, spec))
    assert _bytes_by_sample(one) == _bytes_by_sample(beside)
    other = tmp_path / "other"
    with ShardWriter(other, spec) as writer:
        for sample in samples[1:]:
            writer.add(sample, *states_of(sample, spec))
    assert content_fingerprint(other) != content_fingerprint(one)


def _bytes_by_sample(folder: Path) -> dict[str, list[bytes]]:
    """Each sample's slice of every tensor that has an entry per row or per sample, cut with the
    safetensors library and the offsets."""
    found = {}
    for number in shard_numbers(folder):
        with safe_open(shard_path(folder, number), framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        ids = json.loads(tensors["samples"].numpy().tobytes())["sample_id"]
        for i, sample_id in enumerate(ids):
            token, aux, last = (slice(*c) for c in tensors["offsets"][i : i + 2].T.tolist())
            rows = {"input_ids": token, "loss_mask": token, "aux": aux, "last": last}
            rows |= {"aux.scale": aux, "last.scale": last, "sample_checksums": slice(i, i + 1)}
            for name in ("aux", "last"):
                if f"{name}.offsets" in tensors:
                    rows[name] = slice(*tensors[f"{name}.offsets"][i : i + 2].tolist())
            found[sample_id] = [
                tensors[name][where].contiguous().view(torch.uint8).numpy().tobytes()
                for name, where in rows.items()
                if name in tensors
            ]
    return found


def test_a_wrong_sample_is_refused_by_name_and_the_writer_goes_on(tmp_path: Path) -> None:
    spec = make_spec()
    sample = make_sample(5, 12)
    aux, last = states_of(sample, spec)
    with ShardWriter(tmp_path, spec) as writer:
        for bad_aux, bad_last, words in (
            (aux.float(), last, "aux is torch.float32"),
            (aux[:, :2], last, "rows must be"),
            (aux[: sample.num_aux_rows - 1], last, "aux has"),
            (aux, last[1:], "tokens are supervised"),
            (aux, last[:, 1:], "last is"),
        ):
            with pytest.raises(StoreError, match=f"sample sample-5: .*{words}"):
                writer.add(sample, bad_aux, bad_last)
        writer.add(sample, aux, last)
        with pytest.raises(StoreError, match="sample-5: it was stored already"):
            writer.add(sample, aux, last)
    assert published_ids(tmp_path) == {"sample-5"}


@pytest.mark.parametrize("codec", ["raw", "lossless", "int8"])
def test_no_shard_outgrows_its_limit_and_none_is_cut_short(tmp_path: Path, codec: str) -> None:
    spec = make_spec(codec, shard_bytes=20_000)
    write_store(tmp_path / "store", spec, [make_sample(i) for i in range(60)])
    *full, _ = (shard_path(tmp_path / "store", n) for n in shard_numbers(tmp_path / "store"))
    sizes = [path.stat().st_size for path in full]
    assert max(sizes) <= 20_000
    # The largest sample takes about 4,500 bytes.
    assert min(sizes) > 15_000


def test_an_exception_publishes_nothing_unfinished(tmp_path: Path) -> None:
    spec = make_spec(shard_bytes=1 << 20)
    with pytest.raises(ZeroDivisionError), ShardWriter(tmp_path, spec) as writer:
        writer.add(make_sample(0, 5), *states_of(make_sample(0, 5), spec))
        raise ZeroDivisionError
    assert list((tmp_path / "shards").iterdir()) == []


def test_what_the_caller_does_with_its_tensors_later_does_not_reach_the_store(
    tmp_path: Path,
) -> None:
    spec = make_spec(shard_bytes=1 << 20)
    samples = [make_sample(i, 8) for i in range(2)]
    with ShardWriter(tmp_path, spec) as writer:
        for sample in samples:
            aux, last = (t.clone() for t in states_of(sample, spec))
            writer.add(sample, aux, last)
            aux.zero_()
            last.zero_()
    write_manifest(tmp_path)
    assert_holds(Store(tmp_path, unfinished=True), samples)


def test_a_store_that_repeats_a_sample_is_refused(tmp_path: Path) -> None:
    spec = make_spec()
    for worker in range(2):
        with ShardWriter(tmp_path, spec, worker=worker) as writer:
            writer.add(make_sample(7), *states_of(make_sample(7), spec))
    write_manifest(tmp_path)
    with pytest.raises(StoreError, match="'sample-7' is in the store twice"):
        Store(tmp_path, unfinished=True)
