"""A power cut after any call to the file system, with what was not fsynced lost in three ways."""

from pathlib import Path

import pytest

from paceline.errors import StoreCorruption
from paceline.store import Store, published_ids
from paceline.store.files import AsideFile

from .disk_model import FATES, DiskModel
from .working import SAMPLES, assert_equal_to_undisturbed, published_now, run

FEW = SAMPLES[:7]


@pytest.mark.parametrize("fate", FATES)
def test_what_was_published_survives_and_the_run_goes_on(tmp_path: Path, fate: str) -> None:
    undisturbed = tmp_path / "undisturbed"
    run(undisturbed, FEW)
    folder = tmp_path / "store"
    model = DiskModel(folder)
    told: list[tuple[int, set[str]]] = []

    real = AsideFile.publish

    def telling(file: AsideFile) -> Path:
        path = real(file)
        told.append((len(model.instants), set(published_now(folder))))
        return path

    with pytest.MonkeyPatch.context() as patch, model.watch():
        patch.setattr(AsideFile, "publish", telling)
        run(folder, FEW)
    done_at = len(model.instants)
    assert len(told) > 2
    checked = set()
    for number, instant in enumerate(model.instants):
        left = tmp_path / f"left-{number}"
        instant.rebuild(left, fate)
        key = tuple(sorted((p.name, p.read_bytes()) for p in left.rglob("*") if p.is_file()))
        promised = set().union(*(ids for at, ids in told if at <= number))
        # A rename that reached the disk ahead of the folder's fsync may show a shard early.
        assert promised <= set(published_now(left))
        if key in checked:
            continue
        checked.add(key)
        _assert_sound(left)
        run(left, FEW)
        assert_equal_to_undisturbed(left, undisturbed, FEW)
    assert model.instants[done_at - 1].durable_names.keys() >= {"manifest.json"}


def _assert_sound(folder: Path) -> None:
    """Whatever is published in there is whole, to the last bit."""
    if published_ids(folder):
        Store(folder, unfinished=True).verify()


def test_the_model_sees_a_writer_that_never_syncs(tmp_path: Path) -> None:
    """The test above can fail: were the fsyncs left out, half a shard would be found."""
    folder, left = tmp_path / "store", tmp_path / "left"
    model = DiskModel(folder, is_deaf_to_fsync=True)
    with model.watch():
        run(folder, FEW)
    renamed = next(i for i in model.instants if "shards/00000.safetensors" in i.names)
    renamed.rebuild(left, "keep names")
    with pytest.raises(StoreCorruption, match=r"00000\.safetensors: it is cut"):
        published_ids(left)
