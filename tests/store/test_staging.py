"""A finished store that lacks something is not done: what is missing is made again."""

import json
import shutil
from pathlib import Path

import pytest

import paceline
from paceline.artefact import load_manifest
from paceline.errors import StoreCorruption, StoreError, UsageError
from paceline.store import Store
from paceline.store.budget import let_go
from paceline.store.files import INDEX_NAME, receipt_path, shard_numbers, shard_path
from paceline.store.shard import Shard

from .working import SAMPLES, assert_equal_to_undisturbed, run


@pytest.fixture
def undisturbed(tmp_path: Path) -> Path:
    run(tmp_path / "undisturbed")
    return tmp_path / "undisturbed"


def damage(path: Path) -> str:
    """Flip a bit of a shard's states. Returns what is said of it."""
    data = bytearray(path.read_bytes())
    data[9000] ^= 1
    path.write_bytes(data)
    with pytest.raises(StoreCorruption, match=path.name) as caught:
        Shard(path).verify()
    return str(caught.value)


@pytest.mark.parametrize("which", [0, 1, -1, None], ids=str)
@pytest.mark.parametrize("has_index", [True, False], ids=["index", "no index"])
def test_the_advice_for_a_damaged_shard_mends_the_store(
    tmp_path: Path, undisturbed: Path, which: int | None, has_index: bool
) -> None:
    folder = Path(shutil.copytree(undisturbed, tmp_path / "store"))
    numbers = shard_numbers(folder)
    for number in numbers if which is None else [numbers[which]]:
        says = damage(shard_path(folder, number))
        assert "Remove this file and run the command that made the store" in says
        shard_path(folder, number).unlink()
    if not has_index:
        (folder / INDEX_NAME).unlink()
    made: list[int] = []
    run(folder, on_sample=made.append)
    assert 0 < len(made) <= len(SAMPLES)
    assert (len(made) == len(SAMPLES)) == (which is None)
    assert_equal_to_undisturbed(folder, undisturbed)


def test_a_finished_store_is_done_and_no_shard_is_read(undisturbed: Path) -> None:
    before = (undisturbed / "manifest.json").read_bytes()
    # Whoever opened one of these would say so.
    for number in shard_numbers(undisturbed):
        path = shard_path(undisturbed, number)
        path.write_bytes(bytes(path.stat().st_size))
    run(undisturbed, on_sample=lambda _: pytest.fail("a sample was made again"))
    assert (undisturbed / "manifest.json").read_bytes() == before


def test_a_store_of_which_parts_were_let_go_is_done(undisturbed: Path) -> None:
    let_go(undisturbed, shard_numbers(undisturbed)[1])
    run(undisturbed, on_sample=lambda _: pytest.fail("a sample was made again"))


def test_a_receipt_that_was_removed_is_made_again_as_a_shard(
    tmp_path: Path, undisturbed: Path
) -> None:
    folder = Path(shutil.copytree(undisturbed, tmp_path / "store"))
    let_go(folder, 1)
    receipt_path(folder, 1).unlink()
    (folder / INDEX_NAME).unlink()
    run(folder)
    assert_equal_to_undisturbed(folder, undisturbed)


def test_nobody_takes_a_store_for_complete_while_it_is_mended(undisturbed: Path) -> None:
    shard_path(undisturbed, 1).unlink()

    def look(_: int) -> None:
        with pytest.raises(UsageError, match="is not finished"):
            Store(undisturbed)
        assert load_manifest(undisturbed).fingerprint is None

    run(undisturbed, on_sample=look)
    assert load_manifest(undisturbed).status == "complete"


def test_deleted_samples_do_not_come_back(undisturbed: Path) -> None:
    path = undisturbed / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["result"]["accounting"] = {"in": 30, "done": 30, "quarantined": {}, "skipped": {}}
    path.write_text(json.dumps(manifest | {"checksum": None}))
    paceline.delete_samples(str(undisturbed), ids=[SAMPLES[0].sample_id])
    run(undisturbed, on_sample=lambda _: pytest.fail("a deleted sample was made again"))
    shard_path(undisturbed, shard_numbers(undisturbed)[0]).unlink()
    with pytest.raises(StoreError, match="were deleted from it: start over with overwrite"):
        run(undisturbed)


def test_a_change_of_samples_that_is_not_finished_is_finished_first(undisturbed: Path) -> None:
    (undisturbed / ".rewrite").mkdir()
    (undisturbed / ".rewrite/plan.json").write_text("{}")
    with pytest.raises(StoreError, match="a change of its samples is not finished"):
        run(undisturbed)
