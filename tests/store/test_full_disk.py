"""A real file system of a few MiB that fills up, and one that fails calls."""

import errno
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.errors import DiskFullError, StoreError
from paceline.store.files import shard_numbers

from ..small_disk import resize, small_disk
from .making import make_sample, make_spec
from .rounds import ROUNDS
from .working import assert_equal_to_undisturbed, published_now, run

# 100 samples of some 64 KiB and shards of 256 KiB, on 1 MiB.
BIG_SPEC = make_spec(hidden_size=128, shard_bytes=256 << 10)
BIG_SAMPLES = [make_sample(i, num_tokens=70) for i in range(100)]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", "1m") as folder:
        yield folder


def test_E11_a_full_disk_is_a_clear_error_and_the_rerun_goes_on(tmp_path: Path, disk: Path) -> None:
    undisturbed = tmp_path / "undisturbed"
    run(undisturbed, BIG_SAMPLES, BIG_SPEC)
    folder = disk / "store"
    with pytest.raises(DiskFullError, match=r"no space left .* run the same command again"):
        run(folder, BIG_SAMPLES, BIG_SPEC)
    published = published_now(folder)
    assert published
    assert len(published) < len(BIG_SAMPLES)
    assert not [p for p in (folder / "shards").iterdir() if p.name.startswith(".")]
    # Still full: the same error, and still nothing lost.
    with pytest.raises(DiskFullError):
        run(folder, BIG_SAMPLES, BIG_SPEC)
    assert published.items() <= published_now(folder).items()
    stamps = [(p.name, p.stat().st_mtime_ns) for p in sorted((folder / "shards").iterdir())]
    resize(disk, "64m")
    run(folder, BIG_SAMPLES, BIG_SPEC)
    assert_equal_to_undisturbed(folder, undisturbed, BIG_SAMPLES)
    now = [(p.name, p.stat().st_mtime_ns) for p in sorted((folder / "shards").iterdir())]
    assert now[: len(stamps)] == stamps


def test_a_disk_that_grows_by_a_little_each_time_is_filled_to_the_end(tmp_path: Path) -> None:
    """Each run gets somewhat further, fails for want of room at another place and loses nothing."""
    rng = random.Random(1)
    undisturbed = tmp_path / "undisturbed"
    run(undisturbed)
    full = rounds = 0
    while full < ROUNDS // 2:
        rounds += 1
        kib = rng.randint(24, 64)
        with small_disk(tmp_path / f"disk-{rounds}", f"{kib}k") as disk:
            folder = disk / "store"
            while True:
                before = published_now(folder)
                try:
                    run(folder, num_lanes=1 + rounds % 2)
                    break
                except DiskFullError:
                    full += 1
                assert before.items() <= published_now(folder).items()
                kib += rng.randint(4, 40)
                resize(disk, f"{kib}k")
            assert_equal_to_undisturbed(folder, undisturbed)
    print(f"{full} full disks in {rounds} runs")


@pytest.mark.parametrize("call", ["pwrite", "fsync", "rename", "open"])
@pytest.mark.parametrize("code", [errno.EIO, errno.EDQUOT])
def test_a_failing_call_loses_nothing_that_was_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    """The n-th such call fails, for a few n; the next run goes on."""
    undisturbed = tmp_path / "undisturbed"
    run(undisturbed)
    for fails_at in (0, 1, 4, 9):
        folder = tmp_path / f"store-{fails_at}"
        run_failing(folder, call, fails_at, code, monkeypatch)
        numbers = shard_numbers(folder)
        published_now(folder)
        run(folder)
        assert shard_numbers(folder)[: len(numbers)] == numbers
        assert_equal_to_undisturbed(folder, undisturbed)


def run_failing(
    folder: Path, call: str, fails_at: int, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, count = getattr(os, call), 0

    def failing(*args: object, **kwargs: object) -> object:
        nonlocal count
        inside = call in ("pwrite", "fsync") or "/shards/" in str(args[0])
        count += inside
        if inside and count == fails_at + 1:
            raise OSError(code, os.strerror(code))
        return real(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing)
        kind = DiskFullError if code == errno.EDQUOT else StoreError
        with pytest.raises(kind, match="All that was published is kept"):
            run(folder)
    assert [p.name for p in folder.rglob(".*") if p.name != ".lock"] == []
