"""A store as other tools' files: read here with torch and safetensors alone, and taken in again."""

import gzip
import io
import json
import logging
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import paceline
from paceline.errors import DiskFullError, StoreCorruption, UsageError
from paceline.store import Store
from paceline.store.files import shard_path

from .foreign import AUX, NUM_LAYERS, Told, assert_kept, eagle, save_small_target, tell, write_torch

COUNT = 4


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def told(target: Path) -> list[Told]:
    return tell(target, COUNT, torch.bfloat16)


def make_store(folder: Path, target: Path, told: list[Told], **options) -> Path:
    for i, sample in enumerate(told):
        values = eagle(sample, options.get("last_norm", "pre"))
        values["hidden_state"] = values["hidden_state"].bfloat16()
        write_torch(folder / f"theirs/data_{i}.pt", values)
    paceline.import_store(
        str(folder / "theirs"),
        **{
            "target": str(target),
            "out": str(folder / "store"),
            "layers": AUX,
            "layer_convention": "hidden_state_index",
            "last_norm": "pre",
            "heldout_share": 0.0,
            "waive_reference": True,
            **options,
        },
    )
    return folder / "store"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, target: Path, told: list[Told]) -> Path:
    return make_store(tmp_path_factory.mktemp("made"), target, told)


def expected(sample: Told) -> tuple[torch.Tensor, torch.Tensor]:
    """aux [T, A, D] and last [T, D] with zeros where a store has no row, row by row."""
    aux = torch.stack([sample.hidden[k] for k in AUX], 1).clone()
    last = sample.hidden[-1].clone()
    final = max(t for t in range(len(sample.ids)) if sample.mask[t])
    for t in range(len(sample.ids)):
        if t >= final:
            aux[t] = 0
        if not sample.mask[t]:
            last[t] = 0
    return aux, last


@pytest.mark.parametrize("compress", [False, True])
def test_eagle_files(tmp_path: Path, store: Path, told: list[Told], compress: bool) -> None:
    paceline.export_store(str(store), out=str(tmp_path), layout="eagle", compress=compress)
    ending = ".ckpt.gz" if compress else ".ckpt"
    for i, sample in enumerate(told):
        path = tmp_path / f"rows_0-2000/data_{i}{ending}"
        data = gzip.decompress(path.read_bytes()) if compress else path.read_bytes()
        values = torch.load(io.BytesIO(data), weights_only=True)
        aux, last = expected(sample)
        assert torch.equal(values["aux_hidden_state"], aux.flatten(1)[None])
        assert torch.equal(values["hidden_state"], last[None])
        assert values["input_ids"].tolist() == sample.ids.tolist()
        assert values["loss_mask"].tolist() == sample.mask.tolist()


def test_speculators_files(tmp_path: Path, store: Path, told: list[Told]) -> None:
    paceline.export_store(str(store), out=str(tmp_path / "a"), layout="speculators_0.3")
    paceline.export_store(str(store), out=str(tmp_path / "b"), layout="speculators_0.9")
    for i, sample in enumerate(told):
        aux, last = expected(sample)
        values = torch.load(tmp_path / f"a/data_{i}.pt", weights_only=True)
        assert all(
            torch.equal(a, b) for a, b in zip(values["hidden_states"], [*aux.unbind(1), last])
        )
        values = load_file(tmp_path / f"b/hs_{i}.safetensors")
        assert torch.equal(values["hidden_states"], torch.cat([aux, last[:, None]], 1))
        assert values["token_ids"].tolist() == sample.ids.tolist()
    ids = {
        name: json.loads((tmp_path / name / "data_config.json").read_text())["hidden_states"]
        for name in "ab"
    }
    # 0.3 counts outputs of layers, 0.9 counts as paceline.
    assert ids["a"]["layer_ids"] == [k - 1 for k in [*AUX, NUM_LAYERS]]
    assert ids["b"]["layer_ids"] == [*AUX, NUM_LAYERS]


def test_inspect_finds_a_changed_file(tmp_path: Path, store: Path) -> None:
    paceline.export_store(str(store), out=str(tmp_path), limit=2)
    assert paceline.inspect(str(tmp_path), verify=True)["verified"]
    with (tmp_path / "hs_1.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    with pytest.raises(StoreCorruption, match="holds other content than its manifest says"):
        paceline.inspect(str(tmp_path), verify=True)


def test_damaged_states_are_not_written_as_good_ones(tmp_path: Path, store: Path) -> None:
    folder = shutil.copytree(store, tmp_path / "store")
    path = shard_path(folder, 0)
    data = bytearray(path.read_bytes())
    aux = Store(folder).read(COUNT - 1).aux
    data[data.index(aux.view(torch.uint8).numpy().tobytes())] ^= 1
    path.write_bytes(data)
    out = tmp_path / "files"
    with pytest.raises(StoreCorruption, match=f"sample data_{COUNT - 1} is not what"):
        paceline.export_store(str(folder), out=str(out))
    assert [p.name for p in sorted(out.glob("hs_*"))] == [f"hs_{i}.safetensors" for i in range(3)]
    assert not [p for p in out.iterdir() if "rows" in p.name]


@pytest.mark.parametrize("layout", ["eagle", "speculators_0.3"])
def test_out_and_in_again_changes_no_bit(
    tmp_path: Path, store: Path, target: Path, told: list[Told], layout: str
) -> None:
    paceline.export_store(str(store), out=str(tmp_path / "files"), layout=layout)
    paceline.import_store(
        str(tmp_path / "files"),
        target=str(target),
        out=str(tmp_path / "again"),
        waive_reference=True,
    )
    again = Store(tmp_path / "again")
    assert again.spec.identity() == Store(store).spec.identity()
    for i, sample in enumerate(told):
        assert_kept(again.read(i), sample)


def test_joined_files_and_their_rows_come_back_through_prepare(
    tmp_path: Path, store: Path, target: Path, told: list[Told]
) -> None:
    paceline.export_store(str(store), out=str(tmp_path / "files"))
    paceline.prepare(
        target=str(target), data=[str(tmp_path / "files/rows.jsonl")], out=str(tmp_path / "data")
    )
    paceline.import_store(
        str(tmp_path / "files"),
        data=str(tmp_path / "data"),
        out=str(tmp_path / "again"),
        waive_reference=True,
    )
    again = Store(tmp_path / "again")
    for i, sample in enumerate(told):
        assert_kept(again.read(again.records.find(f"data_{i}")), sample)


@pytest.mark.parametrize("layout", ["speculators_0.9", "eagle"])
def test_what_was_recorded_past_an_answer_s_end_comes_back(
    tmp_path: Path, target: Path, layout: str
) -> None:
    told = {"past": (3, True), "cut": (0, False), "unknown": (0, None)}
    rows = [
        {"id": name, "prompt_ids": [5, i, 7], "response_ids": [9, 8, 1, 30, 31, 32]}
        | {"num_past_end": past, "finished": finished}
        for i, (name, (past, finished)) in enumerate(told.items(), start=40)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def prepared(data: Path, out: Path) -> str:
        paceline.prepare(target=str(target), data=[str(data)], out=str(out), heldout_share=0.0)
        return str(out)

    first = tmp_path / "first"
    data = prepared(tmp_path / "rows.jsonl", tmp_path / "data")
    paceline.extract(data=data, out=str(first), layers=AUX, dtype="float32")
    paceline.export_store(str(first), out=str(tmp_path / "files"), layout=layout)
    again = prepared(tmp_path / "files/rows.jsonl", tmp_path / "again-data")
    paceline.import_store(str(tmp_path / "files"), data=again, out=str(tmp_path / "again"))
    records = Store(tmp_path / "again").records
    found = {r.sample_id: (r.num_past_end, r.finished) for r in map(records.__getitem__, range(3))}
    assert found == told


def test_normed_states_are_exported_only_where_it_can_be_said(
    tmp_path: Path, target: Path, told: list[Told]
) -> None:
    store = make_store(tmp_path, target, told, last_norm="post")
    with pytest.raises(UsageError, match="layout speculators_0.9 has them before it"):
        paceline.export_store(str(store), out=str(tmp_path / "no"))
    paceline.export_store(str(store), out=str(tmp_path / "files"), layout="eagle")
    config = json.loads((tmp_path / "files/data_config.json").read_text())
    assert config["hidden_states"]["last_norm"] == "post"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A mounted tmpfs that holds two of the four files."""
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24k", "tmpfs", folder], check=True)
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_E11_a_full_disk_leaves_whole_files_and_the_rerun_goes_on(
    tmp_path: Path, small_disk: Path, store: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="paceline")
    out = small_disk / "files"
    with pytest.raises(DiskFullError, match="run the same command again"):
        paceline.export_store(str(store), out=str(out))
    made = sorted(out.glob("hs_*"))
    assert 0 < len(made) < COUNT
    assert not list(out.glob("*.tmp")) + list(out.glob(".*.tmp"))
    stamps = [(p.name, p.stat().st_mtime_ns, p.read_bytes()) for p in made]
    subprocess.run(["mount", "-o", "remount,size=4m", small_disk], check=True)
    paceline.export_store(str(store), out=str(out))
    assert f"{len(made)} of {COUNT} files were there before" in caplog.text
    assert [(p.name, p.stat().st_mtime_ns, p.read_bytes()) for p in made] == stamps
    paceline.export_store(str(store), out=str(tmp_path / "undisturbed"))
    for path in sorted((tmp_path / "undisturbed").glob("*.*")):
        if path.name != "manifest.json":
            assert (out / path.name).read_bytes() == path.read_bytes()
