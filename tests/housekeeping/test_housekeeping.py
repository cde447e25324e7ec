"""Merge, subset, delete, upgrade: the samples that stay keep every bit; a kill leaves no half."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import paceline
from paceline.artefact import load_manifest
from paceline.errors import FingerprintMismatch, StoreCorruption, StoreError, UsageError
from paceline.store import Store
from paceline.store.files import shard_numbers, shard_path
from paceline.store.records import Records
from paceline.store.upload import upload
from tests.store.making import assert_holds, make_sample, make_spec, write_store
from tests.store.working import published_now

from .early import make_early, read_shard

SAMPLES = [make_sample(i, split="heldout" if i % 5 == 0 else "train") for i in range(14)]
INPUTS = {"target": {"path": "t", "fingerprint": {"config": "c", "weights": "w", "tokenizer": "k"}}}


def make_store(folder: Path, samples=SAMPLES, codec: str = "raw", **changes) -> Path:
    inputs = changes.pop("inputs", INPUTS)
    more = changes.pop("more", {})
    result = {
        "target": {"target": "t"},
        "chat_template_kwargs": {},
        "flagged": 0,
        "accounting": {"in": len(samples), "done": len(samples), "quarantined": {}, "skipped": {}},
        **more,
    }
    return write_store(folder, make_spec(codec, **changes), samples, inputs, result)


def bits(folder: Path) -> dict[str, tuple[bytes, ...]]:
    """Every byte that belongs to each sample, read by hand from the shards."""
    found = {}
    for number in shard_numbers(folder):
        header, tensors = read_shard(shard_path(folder, number))
        offsets = torch.frombuffer(bytearray(tensors["offsets"]), dtype=torch.int64).view(-1, 3)
        columns = json.loads(tensors["samples"])
        for i, sample_id in enumerate(columns["sample_id"]):
            parts = []
            for name, column in (("input_ids", 0), ("loss_mask", 0), ("aux", 1), ("last", 2)):
                whole = header[name]["shape"][0]
                row = len(tensors[name]) // max(whole, 1)
                a, b = offsets[i : i + 2, column].tolist()
                parts.append(tensors[name][a * row : b * row])
            about = json.dumps([columns[name][i] for name in sorted(columns)]).encode()
            found[sample_id] = (*parts, about, tensors["sample_checksums"][16 * i : 16 * i + 16])
    return found


@pytest.mark.parametrize("codec", ["raw", "int8", "fp8"])
def test_merged_stores_hold_the_same_bits(tmp_path: Path, codec: str) -> None:
    # The second has other shard borders and shares a sample with the first.
    make_store(tmp_path / "a", SAMPLES[:8], codec)
    make_store(tmp_path / "b", SAMPLES[7:], codec, shard_bytes=9_500)
    result = paceline.merge_stores(
        [str(tmp_path / "a"), str(tmp_path / "b")], out=str(tmp_path / "both")
    )
    accounting = {
        "in": 15,
        "done": 14,
        "quarantined": {},
        "skipped": {"in an earlier store too": 1},
    }
    assert result["accounting"] == accounting
    Store(tmp_path / "both").verify()
    assert bits(tmp_path / "both") == {**bits(tmp_path / "a"), **bits(tmp_path / "b")}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"codec": "int8"}, r"store\.codec: was 'raw', now 'int8'"),
        ({"dtype": "float32"}, r"store\.dtype: was 'bfloat16', now 'float32'"),
        ({"hidden_size": 32}, "store.hidden_size: was 16, now 32"),
        (
            {
                "inputs": {
                    "target": {"fingerprint": {**INPUTS["target"]["fingerprint"], "tokenizer": "z"}}
                }
            },
            "target.tokenizer: was 'k', now 'z'",
        ),
        ({"more": {"chat_template_kwargs": {"enable_thinking": False}}}, "enable_thinking"),
    ],
)
def test_stores_of_two_kinds_are_not_merged(tmp_path: Path, change: dict, named: str) -> None:
    make_store(tmp_path / "a", SAMPLES[:4])
    make_store(tmp_path / "b", SAMPLES[4:], **change)
    with pytest.raises(FingerprintMismatch, match=named):
        paceline.merge_stores([str(tmp_path / "a"), str(tmp_path / "b")], out=str(tmp_path / "c"))


def test_two_samples_of_one_id_are_told(tmp_path: Path) -> None:
    make_store(tmp_path / "a", SAMPLES[:4])
    make_store(tmp_path / "b", [make_sample(2, num_tokens=9)])
    with pytest.raises(StoreError, match="'sample-2' is in .*a and, different, in .*b"):
        paceline.merge_stores([str(tmp_path / "a"), str(tmp_path / "b")], out=str(tmp_path / "c"))


def test_a_damaged_sample_is_not_copied_under_a_fresh_checksum(tmp_path: Path) -> None:
    folder = make_store(tmp_path / "a")
    with shard_path(folder, 0).open("r+b") as file:
        file.seek(8192 + 40)
        byte = file.read(1)
        file.seek(8192 + 40)
        file.write(bytes([byte[0] ^ 4]))
    with pytest.raises(StoreCorruption, match="sample sample-.* its shard is damaged"):
        paceline.subset_store(str(folder), out=str(tmp_path / "b"))


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"split": "heldout"}, [0, 5, 10]),
        ({"sources": ["source-1"]}, [1, 4, 7, 10, 13]),
        ({"sources": ["source-1", "source-2"], "split": "heldout"}, [5, 10]),
        ({"ids": ["sample-9", "sample-2"]}, [2, 9]),
        ({"limit": 3}, [0, 1, 2]),
        ({"split": "train", "limit": 2}, [1, 2]),
    ],
)
def test_subsets(tmp_path: Path, options: dict, wanted: list[int]) -> None:
    folder = make_store(tmp_path / "all")
    result = paceline.subset_store(str(folder), out=str(tmp_path / "some"), **options)
    assert result["accounting"]["done"] == len(wanted)
    all_bits = bits(folder)
    assert bits(tmp_path / "some") == {f"sample-{i}": all_bits[f"sample-{i}"] for i in wanted}
    assert Store(tmp_path / "some").manifest.inputs["target"] == INPUTS["target"]


def test_a_subset_of_nothing_and_of_strangers(tmp_path: Path) -> None:
    folder = make_store(tmp_path / "all")
    ids = tmp_path / "ids"
    ids.write_text("sample-1\n\nnobody\n")
    with pytest.raises(UsageError, match="has no sample 'nobody'"):
        paceline.subset_store(str(folder), out=str(tmp_path / "x"), ids_file=str(ids))
    with pytest.raises(UsageError, match="has no sample that all options want"):
        paceline.subset_store(str(folder), out=str(tmp_path / "x"), sources=["source-9"])


def test_another_codec(tmp_path: Path) -> None:
    folder = make_store(tmp_path / "raw")
    for codec in ("lossless", "int8"):
        paceline.subset_store(str(folder), out=str(tmp_path / codec), codec=codec)
    assert_holds(Store(tmp_path / "lossless"), SAMPLES)
    again = make_store(tmp_path / "direct", codec="int8")
    assert bits(tmp_path / "int8") == bits(again)
    with pytest.raises(UsageError, match="stored as int8, which has lost digits"):
        paceline.subset_store(str(tmp_path / "int8"), out=str(tmp_path / "no"), codec="raw")


@pytest.mark.parametrize("out", ["a", "link"])
@pytest.mark.parametrize("verb", ["merge", "subset"])
def test_a_store_is_not_overwritten_by_what_is_made_of_it(
    tmp_path: Path, verb: str, out: str
) -> None:
    parts = [str(make_store(tmp_path / "b", SAMPLES[8:])), str(make_store(tmp_path / "a"))]
    (tmp_path / "link").symlink_to("a")
    before = bits(tmp_path / "a")
    with pytest.raises(UsageError, match=f"{out} holds .*, which would be lost"):
        if verb == "merge":
            paceline.merge_stores(parts, out=str(tmp_path / out), overwrite=True)
        else:
            paceline.subset_store(parts[1], out=str(tmp_path / out), limit=3, overwrite=True)
    assert bits(tmp_path / "a") == before
    Store(tmp_path / "a").verify()


def test_deleting_touches_no_byte_of_the_others(tmp_path: Path) -> None:
    folder = make_store(tmp_path / "store")
    before, shards = bits(folder), {n: shard_path(folder, n).stat() for n in shard_numbers(folder)}
    store = Store(folder)
    doomed = ["sample-1", "sample-12"]
    touched = {store.records[store.records.find(i)].shard for i in doomed}
    assert 0 < len(touched) < len(shards)
    old = load_manifest(folder).fingerprint
    result = paceline.delete_samples(str(folder), ids=doomed)
    assert result["accounting"] == {
        "in": 14,
        "done": 12,
        "quarantined": {},
        "skipped": {"deleted": 2},
    }
    assert bits(folder) == {i: b for i, b in before.items() if i not in doomed}
    for number in set(shards) - touched:
        found = shard_path(folder, number).stat()
        assert (found.st_ino, found.st_mtime_ns) == (
            shards[number].st_ino,
            shards[number].st_mtime_ns,
        )
    assert_holds(Store(folder), [s for s in SAMPLES if s.sample_id not in doomed])
    Store(folder).verify()
    assert load_manifest(folder).fingerprint != old
    assert not list(folder.glob(".rewrite"))
    # The bytes are gone from the disk, not only from the index.
    text = b"".join(path.read_bytes() for path in (folder / "shards").iterdir())
    assert b'"sample-12"' not in text
    # The same command again does nothing; strangers are named.
    stamp = [(p.name, p.stat().st_mtime_ns) for p in sorted((folder / "shards").iterdir())]
    paceline.delete_samples(str(folder), ids=doomed)
    assert [(p.name, p.stat().st_mtime_ns) for p in sorted((folder / "shards").iterdir())] == stamp
    with pytest.raises(UsageError, match="has no sample 'nobody'"):
        paceline.delete_samples(str(folder), ids=["nobody"])


def test_deleting_looks_at_the_touched_shards_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others may have millions of samples."""
    folder = make_store(tmp_path / "store")
    shards = [record.shard for record in Store(folder).records]
    looked, look = set(), Records.__getitem__
    monkeypatch.setattr(Records, "__getitem__", lambda r, i: looked.add(i) or look(r, i))
    paceline.delete_samples(str(folder), ids=["sample-1"])
    assert {shards[i] for i in looked} == {shards[1]} < set(shards)


def test_deleting_a_whole_shard(tmp_path: Path) -> None:
    folder = make_store(tmp_path / "store")
    gone = [r.sample_id for r in Store(folder).records if r.shard == 1]
    paceline.delete_samples(str(folder), ids=gone)
    assert_holds(Store(folder), [s for s in SAMPLES if s.sample_id not in gone])
    paceline.delete_samples(
        str(folder), ids=[s.sample_id for s in SAMPLES if s.sample_id not in gone]
    )
    assert len(Store(folder)) == 0


class _Killed(BaseException):
    """Stands for the end of the process at a call to the file system."""


CALLS = ("rename", "replace", "unlink", "fsync", "rmdir")


@pytest.fixture
def kill_at(monkeypatch: pytest.MonkeyPatch) -> Iterator:
    """kill_at(n): the n-th call (from 0) that changes a folder does not happen, nor any after."""
    real = {name: getattr(os, name) for name in CALLS}
    state = {"left": None}

    def intercept(name: str):
        def call(*args, **kwargs):
            if state["left"] is not None:
                if state["left"] <= 0:
                    raise _Killed
                state["left"] -= 1
            return real[name](*args, **kwargs)

        return call

    for name in CALLS:
        monkeypatch.setattr(os, name, intercept(name))

    def arm(count: int | None) -> None:
        state["left"] = count

    yield arm
    arm(None)


def test_a_kill_at_any_call_leaves_the_old_store_or_goes_on(tmp_path: Path, kill_at) -> None:
    whole = make_store(tmp_path / "whole")
    doomed = ["sample-1", "sample-12"]
    before = bits(whole)
    after = {i: b for i, b in before.items() if i not in doomed}
    outcomes = []
    for count in range(100):
        folder = tmp_path / f"round-{count}"
        shutil.copytree(whole, folder)
        kill_at(count)
        try:
            paceline.delete_samples(str(folder), ids=doomed)
            finished = True
        except _Killed:
            finished = False
        kill_at(None)
        try:
            Store(folder)
            found = bits(folder)
            outcomes.append("old" if found == before else "new")
            assert found in (before, after)
        except StoreError as error:
            assert "run the same command again" in str(error)
            outcomes.append("to be finished")
            with pytest.raises(StoreError, match="run the same command again"):
                upload(folder, f"file://{tmp_path}/far")
            assert not (tmp_path / "far").exists()
        paceline.delete_samples(str(folder), ids=doomed)
        assert bits(folder) == after
        Store(folder).verify()
        assert load_manifest(folder).result["deleted"] == doomed
        assert not list(folder.glob(".rewrite"))
        shutil.rmtree(folder)
        if finished:
            break
    assert finished
    assert set(outcomes) == {"old", "to be finished", "new"}
    assert outcomes == sorted(outcomes, key=["old", "to be finished", "new"].index)


@pytest.mark.parametrize("verb", ["merge", "subset"])
def test_a_copy_that_is_killed_or_lost_a_shard_goes_on(tmp_path: Path, kill_at, verb: str) -> None:
    parts = [make_store(tmp_path / "a", SAMPLES[:8]), make_store(tmp_path / "b", SAMPLES[8:])]

    def copy(out: str) -> None:
        if verb == "merge":
            paceline.merge_stores([*map(str, parts)], out=str(tmp_path / out), shard_bytes=9_500)
        else:
            paceline.subset_store(str(parts[0]), out=str(tmp_path / out), shard_bytes=9_500)

    copy("whole")
    kills = 0
    for count in (0, 3, 7, 8, 9, 12):
        kill_at(count)
        try:
            copy("killed")
        except _Killed:
            kills += 1
        kill_at(None)
    copy("killed")
    assert kills > 3
    assert bits(tmp_path / "killed") == bits(tmp_path / "whole")
    Store(tmp_path / "killed").verify()
    # A damaged shard that was removed, as its error says.
    before = (tmp_path / "whole/manifest.json").read_bytes()
    copy("whole")
    assert (tmp_path / "whole/manifest.json").read_bytes() == before
    shard_path(tmp_path / "whole", shard_numbers(tmp_path / "whole")[0]).unlink()
    copy("whole")
    assert bits(tmp_path / "whole") == bits(tmp_path / "killed")
    Store(tmp_path / "whole").verify()


@pytest.mark.parametrize("codec", ["raw", "lossless", "int8"])
def test_an_early_store_is_upgraded(tmp_path: Path, codec: str) -> None:
    folder = make_store(tmp_path / "store", codec=codec)
    before = bits(folder) if codec == "raw" else None
    decoded = [Store(folder).read(i).aux.clone() for i in range(len(SAMPLES))]
    make_early(folder)
    for open_it in (lambda: Store(folder), lambda: paceline.inspect(str(folder))):
        with pytest.raises(StoreError, match=r"early form .*paceline upgrade-store"):
            open_it()
    result = paceline.upgrade_store(str(folder))
    assert result["shards_rewritten"] > 1
    assert result["manifest_sealed"]
    store = Store(folder)
    store.verify()
    for i, sample in enumerate(SAMPLES):
        stored = store.read(store.records.find(sample.sample_id))
        assert torch.equal(stored.aux, decoded[i])
        assert stored.record.finished is None
        assert stored.record.split == sample.split
    if before:
        assert {i: b[:4] for i, b in bits(folder).items()} == {i: b[:4] for i, b in before.items()}
    assert paceline.upgrade_store(str(folder))["shards_rewritten"] == 0


def test_a_store_whose_index_does_not_say_of_which_store(tmp_path: Path) -> None:
    folder = make_store(tmp_path / "store")
    wanted = load_manifest(folder).fingerprint
    make_early(folder, in_shards=False)
    assert paceline.inspect(str(folder))["sample"]["sample_id"] == "sample-0"
    assert_holds(Store(folder), SAMPLES)
    make_early(folder, in_shards=False)  # opening it has made a new index
    result = paceline.upgrade_store(str(folder))
    assert (result["shards_rewritten"], result["manifest_sealed"]) == (0, True)
    manifest = load_manifest(folder)
    assert manifest.fingerprint == wanted
    assert manifest.checksum


def test_a_damaged_early_store_is_not_upgraded(tmp_path: Path) -> None:
    folder = make_store(tmp_path / "store")
    make_early(folder)
    path = shard_path(folder, 1)
    data = bytearray(path.read_bytes())
    data[8192 + 100] ^= 1
    path.write_bytes(data)
    with pytest.raises(StoreCorruption, match=r"00001\.safetensors: tensor 'aux'"):
        paceline.upgrade_store(str(folder))
    path.unlink()
    with pytest.raises(StoreCorruption, match="not upgraded"):
        paceline.upgrade_store(str(folder))
    assert len(published_now(folder)) < len(SAMPLES)
