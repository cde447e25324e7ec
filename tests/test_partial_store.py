"""A store of which a training let shards go: the rest is never taken for the whole."""

from pathlib import Path

import pytest

import paceline
from paceline.errors import StreamError
from paceline.report.sections import measured_on
from paceline.store import Store
from paceline.store.budget import let_go
from tests.lines import extracted, trained


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`store`, `vocab` and `draft` of a line whose store has lost two shards of training samples;
    `other` is a store of one sample."""
    folder = tmp_path_factory.mktemp("line")
    extracted(folder, shard_bytes=20_000)
    trained(folder, max_steps=2)
    store = Store(folder / "store")
    held = {store.records[i].shard for i in store.split("heldout").tolist()}
    gone = [n for n in sorted({record.shard for record in store.records}) if n not in held][:2]
    assert len(gone) == 2
    paceline.subset_store(store=str(folder / "store"), out=str(folder / "other"), limit=1)
    for number in gone:
        let_go(folder / "store", number)
    return folder


VERBS = {
    "subset": lambda line, out: paceline.subset_store(store=f"{line}/store", out=out),
    "subset_of_train": lambda line, out: paceline.subset_store(
        store=f"{line}/store", out=out, split="train"
    ),
    "merge": lambda line, out: paceline.merge_stores(
        stores=[f"{line}/other", f"{line}/store"], out=out
    ),
    "export": lambda line, out: paceline.export_store(store=f"{line}/store", out=out),
    "align": lambda line, out: paceline.align(store=f"{line}/store", out=out, draft_vocab_size=64),
    "codec_report": lambda line, out: paceline.codec_report(
        store=f"{line}/store", out=out, steps=0
    ),
    "evaluate": lambda line, out: paceline.evaluate(
        draft=f"{line}/draft", store=f"{line}/store", out=out, split="train", dtype="float32"
    ),
    "train": lambda line, out: paceline.train(
        store=f"{line}/store", vocab=f"{line}/vocab", out=out, dtype="float32", max_steps=1
    ),
}


@pytest.mark.parametrize("verb", VERBS)
def test_what_takes_the_rest_for_the_whole_is_refused(line: Path, tmp_path: Path, verb) -> None:
    with pytest.raises(StreamError, match="is not whole: 2 of its shards were let go"):
        VERBS[verb](line, str(tmp_path / "out"))


def test_held_out_samples_and_those_named_one_by_one_can_be_taken(
    line: Path, tmp_path: Path
) -> None:
    store = Store(line / "store")
    held = [store.records[i].sample_id for i in store.split("heldout").tolist()]
    common = {"store": str(line / "store")}
    paceline.subset_store(**common, out=str(tmp_path / "split"), split="heldout")
    paceline.subset_store(**common, out=str(tmp_path / "ids"), ids=held)
    for name in ("split", "ids"):
        assert sorted(Store(tmp_path / name).records.sample_ids()) == sorted(held)
    files = paceline.export_store(**common, out=str(tmp_path / "files"), split="heldout")
    assert files["files"] == len(held)


def test_no_bigram_table_is_made_of_a_part_of_the_answers(line: Path, tmp_path: Path) -> None:
    measured = paceline.evaluate(
        draft=str(line / "draft"),
        store=str(line / "store"),
        out=str(tmp_path / "out"),
        dtype="float32",
        num_draft_tokens=[3],
    )
    assert list(measured["baselines"]) == ["prompt_lookup"]
    why = "training samples were let go from the store"
    assert measured["baselines_left_out"] == {"bigram": why}
    assert f"no bigram table: {why}" in measured_on(measured)
