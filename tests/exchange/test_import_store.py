"""Other tools' files become a store: the same bits, every file accounted for, nothing run."""

import gzip
import io
import json
import logging
import pickle
import shutil
from pathlib import Path

import pytest
import torch

import paceline
from paceline.errors import DataError, FingerprintMismatch, LayerError, ProbeFailure, UsageError
from paceline.store import Store
from paceline.store.files import shard_path
from paceline.store.foreign.layouts import find_files
from paceline.target.model import TeacherHead
from paceline.target.spec import Target, TargetReference
from tests.tiny_line import program

from .foreign import (
    AUX,
    NUM_LAYERS,
    Told,
    assert_kept,
    eagle,
    listed,
    save_small_target,
    tell,
    write_joined,
    write_rows,
    write_torch,
)

COUNT = 5


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def told(target: Path) -> list[Told]:
    return tell(target, COUNT)


def rows_tree(folder: Path, told: list[Told], **how) -> Path:
    for i, sample in enumerate(told):
        write_torch(folder / f"rows_0-2000/data_{i}.ckpt", eagle(sample, **how))
    return folder


def take(source: Path, out: Path, target: Path, **options) -> dict:
    """Import a rows tree that is said in hidden-state indices, or as the options say."""
    said = {"layers": AUX, "layer_convention": "hidden_state_index", "last_norm": "pre"}
    return paceline.import_store(
        str(source), target=str(target), out=str(out), **{**said, **options}
    )


def test_a_rows_tree_gives_the_same_bits(tmp_path: Path, target: Path, told: list[Told]) -> None:
    source = rows_tree(tmp_path / "theirs", told)
    # The same again in the other endings; gzip and what is in it are told by content.
    data = (source / "rows_0-2000/data_3.ckpt").read_bytes()
    (source / "rows_0-2000/data_3.ckpt").unlink()
    (source / "rows_0-2000/data_3.ckpt.gz").write_bytes(gzip.compress(data))
    (source / "rows_0-2000/data_1.ckpt").rename(source / "rows_0-2000/data_1.pt")
    result = take(source, tmp_path / "store", target, heldout_share=0.0)
    assert result["accounting"] == {"in": COUNT, "done": COUNT, "quarantined": {}, "skipped": {}}
    assert set(result["imported"]["errors"]) == {"k=2", "k=4", "k=6", f"k={NUM_LAYERS}"}
    store = Store(tmp_path / "store")
    store.verify()
    assert [r.sample_id for r in store.records] == [f"rows_0-2000/data_{i}" for i in range(COUNT)]
    for i, sample in enumerate(told):
        assert_kept(store.read(i), sample)


def test_a_shard_that_was_removed_is_imported_again(
    tmp_path: Path, target: Path, told: list[Told]
) -> None:
    source = rows_tree(tmp_path / "theirs", told)
    take(source, tmp_path / "store", target, heldout_share=0.0, shard_bytes=1)
    shard_path(tmp_path / "store", 1).unlink()
    result = take(source, tmp_path / "store", target, heldout_share=0.0, shard_bytes=1)
    assert result["accounting"]["done"] == COUNT
    store = Store(tmp_path / "store")
    store.verify()
    for i, sample in enumerate(told):
        assert_kept(store.read(store.records.find(f"rows_0-2000/data_{i}")), sample)


def test_lists_of_layers_in_any_order(tmp_path: Path, target: Path, told: list[Told]) -> None:
    order = [6, NUM_LAYERS, 2, 4]
    for i, sample in enumerate(told):
        write_torch(tmp_path / f"theirs/data_{i}.pt", listed(sample, order))
    # As speculators 0.3 counts them, said by its data_config.json.
    config = {"hidden_states": {"layer_ids": [k - 1 for k in order]}, "version": "2.0"}
    (tmp_path / "theirs/data_config.json").write_text(json.dumps(config))
    take(
        *(tmp_path / "theirs", tmp_path / "store", target),
        layers=None,
        layer_convention="speculators_0.3",
        last_norm=None,
    )
    store = Store(tmp_path / "store")
    assert store.spec.layers.all == (*AUX, NUM_LAYERS)
    for i, sample in enumerate(told):
        assert_kept(store.read(i), sample)


def test_hs_files_take_names_splits_and_masks_from_a_data_set(
    tmp_path: Path, target: Path, told: list[Told]
) -> None:
    paceline.prepare(
        target=str(target),
        data=[str(write_rows(tmp_path / "rows.jsonl", told[1:]))],
        out=str(tmp_path / "prepared"),
        heldout_share=0.5,
    )
    layers = [*AUX, NUM_LAYERS]
    for i, sample in enumerate(told):
        write_joined(tmp_path / f"theirs/hs_{i}.safetensors", sample, layers)
    said = {"layers": layers, "layer_convention": "speculators_0.9", "last_norm": None}
    with pytest.raises(DataError, match="hs_0.safetensors: has no loss_mask"):
        take(tmp_path / "theirs", tmp_path / "none", target, **said)
    result = take(
        *(tmp_path / "theirs", tmp_path / "store", target),
        data=str(tmp_path / "prepared"),
        **said,
    )
    assert result["accounting"]["skipped"] == {"not in the data set": 1}
    store = Store(tmp_path / "store")
    assert sorted(store.records.sample_ids()) == [f"row-{i}" for i in range(COUNT - 1)]
    for i, sample in enumerate(told[1:]):
        assert_kept(store.read(store.records.find(f"row-{i}")), sample)


def test_E06_nothing_in_a_file_is_run(tmp_path: Path, target: Path, told: list[Told]) -> None:
    class Opens:
        def __reduce__(self):
            return (open, (str(tmp_path / "PWNED"), "w"))

    source = rows_tree(tmp_path / "theirs", told)
    plain = io.BytesIO()
    pickle.dump({"hidden_states": Opens()}, plain)
    bad = {
        "sample_0.pt": plain.getvalue(),
        "data_90.ckpt.gz": gzip.compress(plain.getvalue()),
        "data_91.safetensors": plain.getvalue(),
    }
    for name, data in bad.items():
        (source / name).write_bytes(data)
    write_torch(source / "data_92.pt", {**eagle(told[0]), "more": Opens()})
    result = take(source, tmp_path / "store", target, max_quarantined_share=0.5)
    assert not (tmp_path / "PWNED").exists()
    reason = "holds more than plain tensors and was not run"
    assert result["accounting"]["quarantined"] == {reason: 4}
    assert result["accounting"]["done"] == COUNT
    lines = (tmp_path / "store/quarantine-0.jsonl").read_text().splitlines()
    assert sorted(json.loads(line)["file"] for line in lines) == sorted([*bad, "data_92.pt"])
    # The test itself can fail: the same bytes, trusted, do make the file.
    pickle.loads(plain.getvalue())
    assert (tmp_path / "PWNED").exists()


def test_E07_conventions_are_told_by_name(tmp_path: Path, target: Path, told: list[Told]) -> None:
    source = rows_tree(tmp_path / "theirs", told)
    as_outputs = [k - 1 for k in AUX]
    take(source, tmp_path / "in", target)
    take(source, tmp_path / "out", target, layers=as_outputs, layer_convention="layer_output")
    assert Store(tmp_path / "in").spec == Store(tmp_path / "out").spec
    # The right numbers under the wrong name are another layer, and the states say so.
    with pytest.raises(ProbeFailure, match=r"layer k = 1 differs .*layer_convention"):
        take(source, tmp_path / "wrong", target, layers=as_outputs)
    assert not list((tmp_path / "wrong").glob("shards/*"))
    with pytest.raises(LayerError, match="id -1 does not exist"):
        take(source, tmp_path / "no", target, layers=[-1, 2], layer_convention="layer_output")


def test_E10_pre_and_post_norm_teach_the_same(
    tmp_path: Path, target: Path, told: list[Told]
) -> None:
    for norm in ("pre", "post"):
        source = rows_tree(tmp_path / norm, told, last_norm=norm)
        take(source, tmp_path / f"{norm}-store", target, last_norm=norm)
        assert Store(tmp_path / f"{norm}-store").spec.last_norm == norm
    with pytest.raises(ProbeFailure, match=rf"layer k = {NUM_LAYERS} differs .*last_norm"):
        take(tmp_path / "post", tmp_path / "wrong", target, last_norm="pre")
    opened = Target(TargetReference(str(target)))
    logits = []
    for norm in ("pre", "post"):
        store = Store(tmp_path / f"{norm}-store")
        head = TeacherHead(opened, torch.float32, is_normed=store.spec.last_is_normed)
        logits.append(head(torch.cat([store.read(i).last for i in range(COUNT)])))
    torch.testing.assert_close(*logits, rtol=1e-5, atol=1e-5)


def test_training_reads_both_norms_alike(tmp_path: Path, target: Path, told: list[Told]) -> None:
    losses = []
    for norm in ("pre", "post"):
        source = rows_tree(tmp_path / norm, told, last_norm=norm)
        take(source, tmp_path / f"{norm}-store", target, last_norm=norm, heldout_share=0.0)
        store = str(tmp_path / f"{norm}-store")
        paceline.align(store=store, out=str(tmp_path / f"{norm}-vocab"), draft_vocab_size=64)
        paceline.train(
            store=store,
            vocab=str(tmp_path / f"{norm}-vocab"),
            out=str(tmp_path / f"{norm}-draft"),
            dtype="float32",
            max_steps=2,
            batch_rows=20,
            log_every=1,
        )
        log = (tmp_path / f"{norm}-draft/log.jsonl").read_text().splitlines()
        losses.append([json.loads(line)["loss"] for line in log])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


BAD = {
    "cut": lambda values: _bytes_of(values)[:-200],
    "empty": lambda values: b"",
    "no names": lambda values: _bytes_of([1, 2]),
    "no tokens": lambda values: _bytes_of({k: v for k, v in values.items() if k != "input_ids"}),
    "no last": lambda values: _bytes_of({k: v for k, v in values.items() if k != "hidden_state"}),
    "fewer rows": lambda values: _bytes_of(
        {**values, "aux_hidden_state": values["aux_hidden_state"][:, 1:]}
    ),
    "one layer less": lambda values: _bytes_of(
        {**values, "aux_hidden_state": values["aux_hidden_state"][..., :64]}
    ),
    "a width that no layers have": lambda values: _bytes_of(
        {**values, "aux_hidden_state": values["aux_hidden_state"][..., :95]}
    ),
    "a mask of other values": lambda values: _bytes_of(
        {**values, "loss_mask": values["loss_mask"] * 2}
    ),
    "a short mask": lambda values: _bytes_of({**values, "loss_mask": values["loss_mask"][1:]}),
    "not a number": lambda values: _bytes_of(
        {**values, "hidden_state": values["hidden_state"] * float("nan")}
    ),
    "zeros": lambda values: _bytes_of(
        {**values, "aux_hidden_state": values["aux_hidden_state"] * 0}
    ),
    "another dtype": lambda values: _bytes_of(
        {**values, "hidden_state": values["hidden_state"].bfloat16()}
    ),
    "words for ids": lambda values: _bytes_of({**values, "input_ids": ["a"]}),
}


def _bytes_of(values: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(values, buffer)
    return buffer.getvalue()


def test_every_bad_file_is_named_and_the_sums_are_whole(
    tmp_path: Path, target: Path, told: list[Told]
) -> None:
    source = rows_tree(tmp_path / "theirs", told)
    good = eagle(told[0])
    for number, make in enumerate(BAD.values()):
        (source / f"rows_0-2000/data_{100 + number}.pt").write_bytes(make(good))
    unsupervised = {**good, "loss_mask": torch.zeros_like(told[0].mask)}
    write_torch(source / "rows_0-2000/data_200.pt", unsupervised)
    write_torch(source / "rows_0-2000/data_2.pt", good)  # beside data_2.ckpt
    with pytest.raises(DataError, match=r"15 of 21 files are bad, .*the first: .*data_2\.pt|ckpt"):
        take(source, tmp_path / "store", target)
    # Mended (or allowed), the same command goes on; what was stored is not read again.
    (source / "rows_0-2000/data_100.pt").write_bytes(_bytes_of(eagle(told[1])))
    result = take(source, tmp_path / "store", target, max_quarantined_share=0.9)
    accounting = result["accounting"]
    assert (accounting["in"], accounting["done"]) == (21, COUNT + 1)
    assert accounting["skipped"] == {"no supervised token after the first": 1}
    assert sum(accounting["quarantined"].values()) == len(BAD)
    lines = (tmp_path / "store/quarantine-0.jsonl").read_text().splitlines()
    assert len({json.loads(line)["file"] for line in lines}) == len(BAD)


def test_all_that_is_not_said_is_told_at_once(
    tmp_path: Path, target: Path, told: list[Told]
) -> None:
    source = rows_tree(tmp_path / "theirs", told[:1])
    with pytest.raises(UsageError) as caught:
        paceline.import_store(str(source), target=str(target), out=str(tmp_path / "store"))
    for name in ("layers", "layer_convention", "last_norm"):
        assert f"  {name}: neither the options nor data_config.json say it" in str(caught.value)
    (source / "data_config.json").write_text(json.dumps({"hidden_states": {"last_norm": "post"}}))
    with pytest.raises(UsageError, match="last_norm: pre is asked for, data_config.json says post"):
        take(source, tmp_path / "store", target)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="holds no samples of other tools"):
        take(tmp_path / "empty", tmp_path / "store", target)


def test_E11_a_second_run_makes_nothing_again(
    tmp_path: Path, target: Path, told: list[Told], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="paceline")
    source = rows_tree(tmp_path / "theirs", told)
    late = source / "rows_0-2000/data_3.ckpt"
    whole = late.read_bytes()
    late.write_bytes(whole[:-100])
    out = tmp_path / "store"
    with pytest.raises(DataError, match="1 of 5 files are bad"):
        take(source, out, target)
    first = shard_path(out, 0)
    before = first.stat().st_mtime_ns, first.read_bytes()
    late.write_bytes(whole)
    take(source, out, target)
    assert "4 of 5 files were stored before" in caplog.text
    assert (first.stat().st_mtime_ns, first.read_bytes()) == before
    shards = sorted((out / "shards").iterdir())
    assert len(shards) == 2
    take(source, out, target)
    assert "all is done, 5 files were stored before" in caplog.text
    assert sorted((out / "shards").iterdir()) == shards
    # A file that changed after it was taken is noticed, also where all is done.
    late.write_bytes(_bytes_of(eagle(told[0])) + b"more")
    with pytest.raises(FingerprintMismatch, match=r"data_3\.ckpt has changed since it was stored"):
        take(source, out, target)


def test_a_file_is_known_again_by_its_content_not_by_its_name_and_size(
    tmp_path: Path, target: Path, told: list[Told]
) -> None:
    source = rows_tree(tmp_path / "theirs", told)
    first = take(source, tmp_path / "store", target)
    copied = shutil.copytree(source, tmp_path / "copied", copy_function=shutil.copyfile)
    assert take(copied, tmp_path / "store", target) == first
    sizes = [p.stat().st_size for p in sorted(copied.rglob("*.ckpt"))]
    rows_tree(copied, told, aux=[k - 1 for k in AUX])
    assert [p.stat().st_size for p in sorted(copied.rglob("*.ckpt"))] == sizes
    with pytest.raises(FingerprintMismatch, match=r"data_0\.ckpt has changed since it was stored"):
        take(copied, tmp_path / "store", target)


def test_lines_that_a_power_cut_took_are_written_again(
    tmp_path: Path, target: Path, told: list[Told]
) -> None:
    """A shard is durable before the lines that say which files its samples are from."""
    source = rows_tree(tmp_path / "theirs", told)
    late = source / "rows_0-2000/data_3.ckpt"
    whole = late.read_bytes()
    late.write_bytes(whole[:-100])
    with pytest.raises(DataError, match="1 of 5 files are bad"):
        take(source, tmp_path / "store", target)
    late.write_bytes(whole)
    lines = tmp_path / "store/imported-0.jsonl"
    lines.write_text(lines.read_text().splitlines(keepends=True)[0])
    for _ in range(2):
        result = take(source, tmp_path / "store", target)
        accounting = {"in": COUNT, "done": COUNT, "quarantined": {}, "skipped": {}}
        assert result["accounting"] == accounting
    files = [json.loads(line)["file"] for line in lines.read_text().splitlines()]
    assert sorted(files) == [f"rows_0-2000/data_{i}.ckpt" for i in range(COUNT)]
    store = Store(tmp_path / "store")
    store.verify()
    for i, sample in enumerate(told):
        assert_kept(store.read(store.records.find(f"rows_0-2000/data_{i}")), sample)


@pytest.mark.parametrize("ending", [".pt", ".ckpt.gz"])
def test_a_sample_is_called_as_its_file_up_to_the_ending(tmp_path: Path, ending: str) -> None:
    (tmp_path / "v0.1").mkdir()
    (tmp_path / f"v0.1/qwen2.5-7b_000001{ending}").touch()
    assert [file.name for file in find_files(tmp_path)] == ["v0.1/qwen2.5-7b_000001"]


def test_the_program_says_where_every_file_went(
    tmp_path: Path, target: Path, told: list[Told]
) -> None:
    source = rows_tree(tmp_path / "theirs", told)
    (source / "rows_0-2000/data_9.pt").write_bytes(b"nothing")
    done = program(
        *("import-store", source, "--target", target, "--out", tmp_path / "store", "--json"),
        *(word for k in AUX for word in ("--layers", str(k))),
        *("--layer-convention", "hidden_state_index", "--last-norm", "pre"),
        *("--max-quarantined-share", "0.5"),
    )
    assert done.returncode == 1
    accounting = json.loads(done.stdout)["accounting"]
    reason = "is neither safetensors nor of torch.save"
    assert accounting == {"in": 6, "done": 5, "quarantined": {reason: 1}, "skipped": {}}
    assert "data_9.pt: is neither safetensors" in done.stderr
    assert "1 of 6 files are not in the store" in done.stderr
