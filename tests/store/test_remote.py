"""Stores below a URL: a real S3-compatible server, behind a proxy that fails on demand."""

import itertools
import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import pytest
import s3fs
import torch

from paceline.artefact import load_manifest
from paceline.errors import FingerprintMismatch, StoreCorruption, StoreError, UsageError
from paceline.store import PackedReader, Store, iterate_packed, place
from paceline.store.blocks import BLOCK_BYTES
from paceline.store.cache import Cache
from paceline.store.place import Place
from paceline.store.shard import HEADER_BYTES
from paceline.store.upload import CLAIM_NAME, Sent, upload

from .making import (
    assert_holds,
    make_sample,
    make_spec,
    same_bytes,
    states_of,
    write_store,
)
from .s3 import BUCKET, ERROR_403, ERROR_500, FAULTS, FLIP, Proxy, object_store

SAMPLES = [make_sample(i) for i in range(12)]
NUM_FILES = 13  # twelve shards and the index


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_store(tmp_path_factory.mktemp("local") / "store", make_spec(), SAMPLES)


@pytest.fixture(scope="module")
def server() -> Iterator[Proxy]:
    torch.set_num_threads(1)
    with object_store() as proxy:
        yield proxy


_numbers = itertools.count()


@pytest.fixture
def proxy(server: Proxy, monkeypatch: pytest.MonkeyPatch) -> Proxy:
    monkeypatch.setattr(place, "_FIRST_PAUSE_S", 0.01)
    server.forget()
    return server


@pytest.fixture
def url(proxy: Proxy) -> str:
    return f"s3://{BUCKET}/{next(_numbers)}/store"


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")


@pytest.mark.parametrize("protocol", ["s3", "file", "memory"])
def test_what_was_uploaded_is_read_as_it_was_written(
    local: Path, cache: Cache, url: str, tmp_path: Path, protocol: str
) -> None:
    if protocol != "s3":
        url = f"{protocol}://{tmp_path}/far/store"
    total = sum(p.stat().st_size for p in [*local.glob("shards/*"), local / "index.safetensors"])
    assert upload(local, url) == Sent(NUM_FILES, total, 0)
    assert upload(local, url) == Sent(0, 0, NUM_FILES)
    store, near = Store(url, cache=cache), Store(local)
    assert store.folder == url
    assert_holds(store, SAMPLES)
    assert store.manifest == near.manifest
    groups = list(iterate_packed(near, "train", 90, seed=3))
    for far, here in zip(PackedReader(store, groups), PackedReader(near, groups)):
        assert same_bytes(far.aux, here.aux)
        assert same_bytes(far.last, here.last)
        assert far.input_ids.tolist() == here.input_ids.tolist()
    assert store.verify() == near.verify()


# One shard of some 9 MB.
BIG_SPEC = make_spec(hidden_size=1024, shard_bytes=64 << 20)
BIG_SAMPLES = [make_sample(i, num_tokens=60) for i in range(30)]


@pytest.fixture(scope="module")
def big_url(server: Proxy, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = write_store(tmp_path_factory.mktemp("big") / "store", BIG_SPEC, BIG_SAMPLES)
    url = f"s3://{BUCKET}/big"
    upload(folder, url)
    return url


def shard_bytes_sent(proxy: Proxy) -> int:
    return sum(s.sent for s in proxy.seen if s.method == "GET" and "/shards/" in s.path)


def test_only_the_needed_slices_are_fetched_and_once(
    big_url: str, proxy: Proxy, cache: Cache
) -> None:
    store = Store(big_url, cache=cache)
    assert shard_bytes_sent(proxy) == 0
    proxy.forget()
    sample = store.read(17)
    slices = sample.aux.nbytes + sample.last.nbytes
    # A block at either end of each of aux and last; header, offsets, ids and mask lie in one each.
    assert slices <= shard_bytes_sent(proxy) <= slices + 8 * BLOCK_BYTES
    proxy.forget()
    store.read(17)
    Store(big_url, cache=cache).read(17)
    assert shard_bytes_sent(proxy) == 0


def test_tokens_are_fetched_without_the_states(big_url: str, proxy: Proxy, cache: Cache) -> None:
    store = Store(big_url, cache=cache)
    proxy.forget()
    for i, sample in enumerate(BIG_SAMPLES):
        ids, mask = store.read_tokens(i)
        assert (ids.tolist(), mask.tolist()) == (
            sample.input_ids.tolist(),
            sample.loss_mask.tolist(),
        )
    # Header, offsets, ids and mask: a block each, if they lie apart.
    assert shard_bytes_sent(proxy) <= 4 * BLOCK_BYTES


@pytest.mark.parametrize("name", ["input_ids", "loss_mask"])
def test_tokens_that_changed_far_away_are_refused(
    local: Path, url: str, cache: Cache, name: str
) -> None:
    upload(local, url)
    shard = "shards/00003.safetensors"
    good = Place(url).read(shard)
    at = good.index(getattr(SAMPLES[3], name).tobytes(), HEADER_BYTES)
    Place(url).write(shard, good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
    with pytest.raises(StoreCorruption, match=rf"{url}/{shard}: tensor '{name}'"):
        Store(url, cache=cache).read_tokens(3)


def test_a_damaged_cache_is_filled_again(big_url: str, proxy: Proxy, cache: Cache) -> None:
    whole = sum(len(Store(big_url, cache=cache).read(i).aux) for i in range(30))
    assert whole
    (copy,) = Path(cache.folder).rglob("*.sparse")
    with copy.open("r+b") as file:
        file.seek(5 * BLOCK_BYTES + 77)
        file.write(b"\xff\xff\xff\xff\xff\xff\xff\xff")
    proxy.forget()
    assert_holds(Store(big_url, cache=cache), BIG_SAMPLES)
    assert shard_bytes_sent(proxy) == BLOCK_BYTES


def test_the_cache_keeps_to_its_limit_and_reading_goes_on(
    local: Path, url: str, tmp_path: Path
) -> None:
    upload(local, url)
    limit = 5 * 16_384
    cache = Cache(tmp_path / "small", max_bytes=limit)
    store = Store(url, cache=cache)
    for _ in range(2):
        assert_holds(store, SAMPLES)
        taken = sum(p.stat().st_blocks * 512 for p in Path(cache.folder).rglob("*.sparse"))
        assert 0 < taken <= limit


def test_copies_are_looked_through_once_for_many(
    local: Path, url: str, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There may be tens of thousands of them."""
    upload(local, url)
    looks, make_room = [], Cache.make_room
    look = lambda cache, num_bytes: looks.append(num_bytes) or make_room(cache, num_bytes)
    monkeypatch.setattr(Cache, "make_room", look)
    assert_holds(Store(url, cache=cache), SAMPLES)
    assert len(looks) == 1


def test_bits_that_flip_on_the_way_are_fetched_again_or_named(
    big_url: str, proxy: Proxy, cache: Cache, tmp_path: Path
) -> None:
    """Slices of tensors have no checksum; the samples that are made of them do."""
    groups = [[i] for i in range(30)]

    def flip(which: Callable[[int], bool]) -> None:
        proxy.forget()
        number_of = lambda: sum("/shards/" in s.path for s in proxy.seen)
        proxy.choose = lambda _, s: FLIP if "/shards/" in s.path and which(number_of()) else None

    for number in (1, 3, 5):
        flip(lambda n, number=number: n == number)
        assert_holds(Store(big_url, cache=Cache(tmp_path / str(number))), BIG_SAMPLES)
    flip(lambda n: n > 6)
    store = Store(big_url, cache=cache)
    with pytest.raises(StoreCorruption, match=r"sample sample-\d+ is not what its checksum says"):
        for batch in PackedReader(store, groups, num_threads=1):
            aux, _ = states_of(BIG_SAMPLES[int(batch.records[0].sample_id[7:])], BIG_SPEC)
            assert same_bytes(batch.aux, aux[: batch.records[0].num_aux_rows])


def test_a_changed_object_is_named(local: Path, url: str, cache: Cache) -> None:
    upload(local, url)
    far = Place(url)
    name = "shards/00003.safetensors"
    good = far.read(name)
    at = good.index(SAMPLES[3].input_ids.tobytes())
    far.write(name, good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :])
    with pytest.raises(StoreCorruption, match=rf"{url}/{name}: tensor 'input_ids'"):
        Store(url, cache=cache).verify()
    at = good.index(b'["sample-3"]')
    far.write(name, good[:at] + good[at:].replace(b"sample-3", b"sample-4", 1))
    with pytest.raises(StoreCorruption, match=rf"{url}/{name}: tensor 'samples'"):
        Store(url, cache=Cache(cache.folder / "other")).shard(3).tensor("samples")


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_the_server_are_lived_through(
    local: Path,
    url: str,
    proxy: Proxy,
    cache: Cache,
    fault: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No request is refused twice in a row, but every kind of request is."""
    timeouts = {"config_kwargs": {"read_timeout": 1}}
    monkeypatch.setitem(fsspec.config.conf, "s3", timeouts)
    upload(local, url)
    proxy.choose = lambda number, seen: fault if number in (3, 5, 7, 10) else None
    assert_holds(Store(url, cache=cache), SAMPLES)
    assert len(proxy.seen) > 10
    proxy.forget()
    proxy.choose = lambda number, seen: fault if number in (2, 6, 13, 31) else None
    upload(local, f"{url}-again")
    proxy.forget()
    assert_holds(Store(f"{url}-again", cache=cache), SAMPLES)


def test_a_server_that_fails_for_good_is_an_error_that_says_where(
    local: Path, url: str, proxy: Proxy, cache: Cache
) -> None:
    upload(local, url)
    store = Store(url, cache=cache)
    proxy.choose = lambda number, seen: ERROR_500 if "00007" in seen.path else None
    with pytest.raises(StoreError, match=rf"{url}/shards/00007\.safetensors: tried 4 times"):
        assert_holds(store, SAMPLES)
    proxy.forget()
    assert_holds(store, SAMPLES)


def test_an_upload_that_is_killed_goes_on_and_sends_nothing_twice(
    local: Path, url: str, proxy: Proxy, cache: Cache
) -> None:
    """kill -9 when the n-th object arrives, before it is stored, again and again."""
    stored: set[str] = set()
    for _ in range(2):
        proxy.forget()
        child = subprocess.Popen([sys.executable, "-c", _UPLOAD, str(local), url])

        def kill(number: int, seen: object, child: subprocess.Popen = child) -> None:
            if len(proxy.puts()) == 4:
                child.kill()

        proxy.choose = kill
        assert child.wait() == -signal.SIGKILL
        sent = {name.split("store/")[1] for name in proxy.puts()}
        assert not sent & stored
        # The server may have kept an object whose body was cut by the kill; that one goes again.
        far = {name: found.num_bytes for name, found in Place(url).files().items()}
        del far[CLAIM_NAME]
        stored = {name for name in far if far[name] == (local / name).stat().st_size}
        assert stored
        with pytest.raises(UsageError, match=r"has no manifest\.json.* uploaded last"):
            Store(url, cache=cache)
    proxy.forget()
    result = upload(local, url)
    assert result.num_kept >= len(stored)
    assert result.num_kept + result.num_files == NUM_FILES
    assert_holds(Store(url, cache=cache), SAMPLES)
    assert Store(url, cache=cache).verify() == Store(local).verify()
    assert CLAIM_NAME not in Place(url).files()


_UPLOAD = "import sys; from paceline.store.upload import upload; upload(*sys.argv[1:])"


def test_objects_that_are_not_what_was_written_are_sent_again(
    local: Path, url: str, proxy: Proxy, cache: Cache
) -> None:
    proxy.choose = lambda number, seen: ERROR_500 if "manifest" in seen.path else None
    with pytest.raises(StoreError, match="manifest"):
        upload(local, url)
    proxy.forget()
    far = Place(url)
    good = far.read("shards/00002.safetensors")
    far.write("shards/00002.safetensors", good[:-1])
    far.write("shards/00005.safetensors", b"x" + far.read("shards/00005.safetensors")[1:])
    far.write("shards/00099.safetensors", good)
    assert upload(local, url).num_files == 2
    assert_holds(Store(url, cache=cache), SAMPLES)


def test_a_large_object_is_known_by_the_checksum_of_its_parts(
    url: str, proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert s3fs.core.calculate_chunksize(1 << 30) == place._PART_BYTES
    monkeypatch.setattr(place, "_PART_BYTES", 5 << 20)
    path = tmp_path / "large"
    path.write_bytes(os.urandom(11 << 20))
    s3fs.S3FileSystem().put_file(str(path), f"{url}/large", chunksize=5 << 20)
    far = Place(url)
    found = far.files()["large"]
    assert found.etag.endswith("-3")
    proxy.forget()
    assert far.holds(path, "large", found)
    assert proxy.seen == []
    with path.open("r+b") as file:
        file.write(b"y")
    assert not far.holds(path, "large", found)


def test_what_is_hidden_is_not_sent(local: Path, tmp_path: Path) -> None:
    folder = tmp_path / "store"
    shutil.copytree(local, folder)
    (folder / ".probe/shards").mkdir(parents=True)
    shutil.copy(folder / "shards/00000.safetensors", folder / ".probe/shards/00000.safetensors")
    upload(folder, f"file://{tmp_path}/far")
    sent = [p for p in (tmp_path / "far").rglob("*") if p.is_file()]
    assert len(sent) == NUM_FILES + 1  # and the manifest
    assert not (tmp_path / "far/.probe").exists()


def test_a_damaged_shard_is_not_sent(local: Path, url: str, tmp_path: Path) -> None:
    folder = write_store(tmp_path / "store", make_spec(), SAMPLES)
    path = folder / "shards/00006.safetensors"
    data = bytearray(path.read_bytes())
    data[8192] ^= 1
    path.write_bytes(data)
    with pytest.raises(StoreCorruption, match="00006"):
        upload(folder, url)
    assert "shards/00006.safetensors" not in Place(url).files()


def test_a_store_that_lacks_a_shard_is_not_sent(local: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(local, tmp_path / "store")
    (folder / "shards/00006.safetensors").unlink()
    with pytest.raises(StoreCorruption, match="shards are missing"):
        upload(folder, f"file://{tmp_path}/far")
    assert not (tmp_path / "far").exists()


def test_a_place_that_is_taken_is_refused_or_cleared(
    local: Path, url: str, cache: Cache, tmp_path: Path
) -> None:
    others = [make_sample(i) for i in range(50, 55)]
    other = write_store(tmp_path / "other", make_spec(), others)
    upload(other, url)
    with pytest.raises(FingerprintMismatch, match="holds another store"):
        upload(local, url)
    opened = Store(url, cache=cache)
    assert upload(local, url, overwrite=True).num_files == NUM_FILES
    assert_holds(Store(url, cache=cache), SAMPLES)
    # One who had the old store open is told, and reads nothing of the new one as the old.
    with pytest.raises(StoreCorruption, match=url):
        assert_holds(opened, others)
    Place(f"{url}-strange").write("notes.txt", b"mine")
    for overwrite in (False, True):
        with pytest.raises(UsageError, match=r"is not empty \(notes\.txt"):
            upload(local, f"{url}-strange", overwrite=overwrite)


def test_a_place_that_was_being_cleared_is_cleared_by_the_same_command(
    local: Path, cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ended at a call to the server, and given again. Meanwhile what is there is the old store,
    whole, or none."""
    others = [make_sample(i) for i in range(50, 55)]
    other = write_store(tmp_path / "other", make_spec(), others)
    ask, fatal, num_calls = Place._again, math.inf, 0

    def end(self: Place, *args: object, **kwargs: object) -> object:
        nonlocal num_calls
        num_calls += 1
        if num_calls > fatal:
            raise KeyboardInterrupt
        return ask(self, *args, **kwargs)

    monkeypatch.setattr(Place, "_again", end)
    num_old = 0
    # Closely where the old store goes, here and there while the new one comes.
    for number in itertools.chain(range(8), itertools.count(8, 6)):
        url = f"file://{tmp_path}/place-{number}"
        fatal = math.inf
        upload(other, url)
        num_calls, fatal = 0, number
        try:
            upload(local, url, overwrite=True)
            break
        except KeyboardInterrupt:
            fatal = math.inf
        if "manifest.json" in Place(url).files():
            found = Store(url, cache=cache)
            is_new = found.manifest.fingerprint == load_manifest(local).fingerprint
            assert_holds(found, SAMPLES if is_new else others)
            num_old += not is_new
        upload(local, url, overwrite=True)
        assert_holds(Store(url, cache=cache), SAMPLES)
    assert number > NUM_FILES and num_old > 1


def test_a_refused_login_and_an_unknown_protocol_are_told_at_once(
    local: Path, proxy: Proxy, cache: Cache
) -> None:
    with pytest.raises(UsageError, match=r"has no manifest\.json"):
        Store("s3://no-such-bucket/store", cache=cache)
    with pytest.raises(UsageError, match="nonsense://store cannot be used"):
        Store("nonsense://store", cache=cache)
    proxy.choose = lambda number, seen: ERROR_403
    with pytest.raises(StoreError, match="access is refused"):
        Store(f"s3://{BUCKET}/0/store", cache=cache)
    assert len(proxy.seen) < 4
