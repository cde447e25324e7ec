"""The stage as a whole: accounting, ids, splits, resuming, refusing, what later stages read."""

import errno
import importlib
import json
import shutil
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

import paceline
from paceline.artefact import load_finished
from paceline.dataset import TokenDataset
from paceline.errors import (
    DataError,
    DiskFullError,
    FingerprintMismatch,
    TargetError,
    UsageError,
)
from paceline.prepare.seen import SeenHashes
from tests.prepare import toys
from tests.prepare.toys import Prepared, chat, chatml_target, write_rows

# The package's attribute `run` is the function.
stage = importlib.import_module("paceline.prepare.run")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chatml_target(tmp_path_factory.mktemp("target"), toys.CHATML_PROMPT)


def many(count: int) -> list[dict[str, Any]]:
    return [chat(f"question {i}", f"answer {i}", id=f"r{i}") for i in range(count)]


def test_the_manifest_adds_up_and_names_the_target(tmp_path: Path, target: Path) -> None:
    rows = [*many(40), {"messages": []}, many(1)[0]]
    done = Prepared(tmp_path, target, rows, heldout_share=0.3)
    result = done.result
    assert result["target"] == {
        "target": str(target),
        "revision": None,
        "trust_remote_code": False,
    }
    assert (result["rows"], result["rows_kept"]) == (42, 40)
    assert result["skipped"] == {"empty": 1, "duplicate": 1}
    for split in ("train", "heldout"):
        samples = [s for s in done.samples if s.split == split]
        assert result["splits"][split] == {
            "samples": len(samples),
            "tokens": sum(s.num_tokens for s in samples),
            "supervised": sum(s.num_supervised for s in samples),
        }
    assert 0 < result["splits"]["heldout"]["samples"] < 30
    assert result["samples"] == result["conversations"] == len(done.samples) == 40
    assert result["tokens"] == sum(s.num_tokens for s in done.samples)
    assert result["sources"] == {
        "rows": {
            "samples": 40,
            "tokens": result["tokens"],
            "supervised": result["supervised_tokens"],
        }
    }
    assert result["vocab_size"] == len(done.tokenizer) + 4
    assert result["num_real_tokens"] == len(done.tokenizer)
    assert result["end_of_turn_ids"] == [done.tokenizer.eos_token_id]
    assert load_finished(done.folder, "prepare").result == result


def test_order_and_ids_of_rows_are_kept(tmp_path: Path, target: Path) -> None:
    done = Prepared(tmp_path, target, many(30))
    assert [s.sample_id for s in done.samples] == [f"r{i}" for i in range(30)]


def test_supervised_tokens_are_counted_over_the_training_split(
    tmp_path: Path, target: Path
) -> None:
    done = Prepared(tmp_path, target, many(40), heldout_share=0.5)
    counts = np.load(done.folder / done.result["supervised_token_counts_file"])
    wanted = Counter(
        int(token)
        for sample in done.samples
        if sample.split == "train"
        for token in sample.input_ids[sample.loss_mask]
    )
    assert counts.shape == (done.result["vocab_size"],)
    assert {i: int(n) for i, n in enumerate(counts) if n} == wanted


def test_the_end_that_the_template_prints_counts_among_the_ends(tmp_path: Path) -> None:
    template = toys.CHATML_PROMPT.replace("<|im_end|>", "<|eot_id|>")
    specials = ("<|im_start|>", "<|eot_id|>")
    folder = chatml_target(tmp_path / "t", template, specials=specials, eos="<eos>")
    done = Prepared(tmp_path, folder, [chat("q", "a")])
    ends = done.tokenizer.convert_tokens_to_ids(["<|eot_id|>", "<eos>"])
    assert done.decoded_spans() == ["a<|eot_id|>"]
    assert done.result["end_of_turn_ids"] == sorted(ends)


def test_the_split_goes_by_the_prompt(tmp_path: Path, target: Path) -> None:
    """The same question with another answer, id, system turn or as ids falls on one side, and so
    does a data set whose answers were generated anew."""
    before = [chat(f"q{i}", "old", id=f"a{i}") for i in range(60)]
    after = [chat(f"q{i}", "new", f"more{i}", "x", id=f"b{i}") for i in range(60)]
    system = [
        {"id": f"c{i}", "messages": [{"role": "system", "content": "s"}, *row["messages"]]}
        for i, row in enumerate(before)
    ]
    ids = [
        row | {"id": f"d{i}", "prompt_ids": [i % 7, 1], "response_ids": [i, 2]}
        for i, row in enumerate(after)
    ]
    done = Prepared(tmp_path, target, [*before, *after, *system, *ids], heldout_share=0.4)
    splits = {sample.sample_id: sample.split for sample in done.samples}
    assert len(splits) == 240
    for i in range(60):
        assert len({splits[f"{name}{i}"] for name in "abcd"}) == 1
    assert 10 < sum(splits[f"a{i}"] == "heldout" for i in range(60)) < 40


def test_rows_of_one_conversation_stand_on_one_side(tmp_path: Path, target: Path) -> None:
    """Also where each begins at another turn of it, as words or as ids."""
    words = [
        chat(f"turn {turn} of {i}", "a", id=f"w{i}.{turn}", conversation_id=f"w{i}")
        for i in range(60)
        for turn in range(3)
    ]
    ids = [
        {"conversation_id": i, "prompt_ids": [*range(i, i + turn)], "response_ids": [turn, 2]}
        for i in range(60)
        for turn in range(1, 4)
    ]
    done = Prepared(tmp_path, target, [*words, *ids], heldout_share=0.4)
    assert len(done.samples) == 360
    splits: dict[str, set[str]] = {}
    for sample in done.samples:
        splits.setdefault(sample.conversation_id, set()).add(sample.split)
    assert len(splits) == 120
    assert all(len(sides) == 1 for sides in splits.values())
    assert 24 < sum("heldout" in sides for sides in splits.values()) < 72


def test_a_row_may_name_its_split(tmp_path: Path, target: Path) -> None:
    named = {"a": "train", "b": "heldout", "c": "validation"}
    rows = [
        chat(f"q{i}", "x", id=f"{key}{i}") | {"split": split}
        for i, (key, split) in enumerate(list(named.items()) * 20)
    ]
    for share in (0.0, 1.0):
        done = Prepared(tmp_path, target, rows, heldout_share=share, overwrite=True)
        splits = {(sample.sample_id[0], sample.split) for sample in done.samples}
        by_share = "heldout" if share else "train"
        assert splits == {("a", "train"), ("b", "heldout"), ("c", by_share)}
    done = Prepared(tmp_path, target, rows, split="train", overwrite=True)
    assert {sample.split for sample in done.samples} == {"train"}


def test_prompts_are_supervised_where_that_is_asked_for(tmp_path: Path, target: Path) -> None:
    """All before the last supervised token but the first one; held-out samples, whose rows are the
    same either way, keep to their answers."""
    rows = many(60)
    common = {"target": target, "rows": rows, "heldout_share": 0.3}
    plain = Prepared(tmp_path, **common).samples
    taught = Prepared(tmp_path, **common, train_on_prompts=True, overwrite=True).samples
    assert {sample.split for sample in plain} == {"train", "heldout"}
    for before, after in zip(plain, taught, strict=True):
        assert (before.sample_id, before.split) == (after.sample_id, after.split)
        assert np.array_equal(before.input_ids, after.input_ids)
        expected = list(before.loss_mask)
        if before.split == "train":
            last = max(i for i, is_supervised in enumerate(expected) if is_supervised)
            expected = [i == last or 0 < i < last for i in range(len(expected))]
            assert sum(expected) > before.loss_mask.sum()
        assert list(after.loss_mask) == expected


def test_a_split_can_be_given(tmp_path: Path, target: Path) -> None:
    done = Prepared(tmp_path, target, many(20), heldout_share=0.9, split="heldout")
    assert {sample.split for sample in done.samples} == {"heldout"}


def test_equal_contents_are_kept_once_whatever_their_ids(tmp_path: Path, target: Path) -> None:
    sharegpt = {"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}
    rows = [chat("q", "a", id="1"), chat("q", "b", id="2"), {"id": "3", "conversations": sharegpt}]
    done = Prepared(tmp_path, target, rows)
    assert [s.sample_id for s in done.samples] == ["1", "2"]
    assert [(e["id"], e["reason"]) for e in done.skipped] == [("3", "duplicate")]
    (tmp_path / "all").mkdir()
    assert len(Prepared(tmp_path / "all", target, rows, deduplicate=False).samples) == 3


def test_ids_that_are_used_twice_are_told_apart(tmp_path: Path, target: Path) -> None:
    rows = [chat("q", "a", id=1), chat("q", "b", id=1), chat("q", "c")]
    done = Prepared(tmp_path, target, rows)
    ids = [s.sample_id for s in done.samples]
    assert ids[0] == "1"
    assert ids[1].startswith("1~")
    assert len(ids[2]) == 16  # of the content
    assert len(set(ids)) == 3
    # Rows of one conversation say so by `conversation_id`.
    assert [s.conversation_id for s in done.samples] == ids
    assert done.result["conversations"] == 3


def test_no_sample_id_is_given_twice(tmp_path: Path) -> None:
    target = chatml_target(tmp_path / "t", toys.THINK_STRIP)
    split = chat("u1", "<think>r</think>a1", "u2", "a2", id="c")
    rows = [
        *[chat("q", "a", id="x")] * 3,
        *[chat("q2", "a")] * 3,
        chat("q3", "a", id="c#2"),
        *[split] * 2,
        chat("q4", "a", id="c#1"),
    ]
    done = Prepared(tmp_path, target, rows, deduplicate=False)
    ids = [sample.sample_id for sample in done.samples]
    assert len(ids) == len(set(ids)) == 12
    assert ids[0] == "x"
    assert [name[:2] for name in ids[1:3]] == ["x~", "x~"]
    assert ids[6] == "c#2"
    # Nothing of two rows has one conversation's name.
    assert len({sample.conversation_id for sample in done.samples}) == len(rows)
    assert done.result["conversations"] == len(rows)


def test_content_that_is_there_often_is_named_in_one_go(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried, add = [], SeenHashes.add
    monkeypatch.setattr(SeenHashes, "add", lambda seen, name: tried.append(name) or add(seen, name))
    done = Prepared(tmp_path, target, [chat("q", "a")] * 100, deduplicate=False)
    ids = [sample.sample_id for sample in done.samples]
    assert len(set(ids)) == 100 and ids[-1] == f"{ids[1]}~99"
    # The first two names and one more, and the conversation.
    assert len(tried) <= 4 * len(ids)


def test_conversations_of_two_sources_may_have_the_same_names(tmp_path: Path, target: Path) -> None:
    rows = [
        chat(f"q{i}", "a", conversation_id=i // 2, source=source)
        for i, source in enumerate(["x"] * 4 + ["y"] * 4)
    ]
    rows += [chat(f"more {i}", "a", conversation_id=i // 2, source="y") for i in range(4)]
    done = Prepared(tmp_path, target, rows)
    told = {(s.source, s.conversation_id) for s in done.samples}
    assert told == {("x", "0"), ("x", "1"), ("y", "0"), ("y", "1"), ("y", "2"), ("y", "3")}
    assert done.result["conversations"] == 6


def test_sources_are_mixed_by_weight(tmp_path: Path, target: Path) -> None:
    rows = [chat(f"q{i}", "a", source=("x", "y", "z")[i % 3]) for i in range(300)]
    weights = {"x": 0.5, "y": 0.0}
    done = Prepared(tmp_path, target, rows, source_weights=weights, max_skipped_share=0.0)
    kept = Counter(sample.source for sample in done.samples)
    assert kept["z"] == 100
    assert "y" not in kept
    assert 30 < kept["x"] < 70
    assert done.result["skipped"] == {"source_weight": 300 - sum(kept.values())}


def test_weights_of_sources_that_are_not_there_are_refused(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage, "PART_ROWS", 8)
    rows = [chat(f"q{i}", "a", source="xyz"[i // 10]) for i in range(30)]
    prepared = partial(Prepared, tmp_path, target, rows, overwrite=True)
    with pytest.raises(UsageError, match="no row is of source u, v; there are x, y, z"):
        prepared(source_weights={"v": 0.5, "x": 0.0, "u": 0.5})
    # A source of which nothing is kept was there, and one after the limit may be.
    assert len(prepared(source_weights={"x": 0.0, "y": 0.0}).samples) == 10
    assert len(prepared(source_weights={"z": 0.5}, limit=10).samples) == 10
    for weight in (7.0, -0.1):
        with pytest.raises(UsageError, match=r"source_weights\.x"):
            prepared(source_weights={"x": weight})


def test_a_limit_takes_the_first_rows(tmp_path: Path, target: Path) -> None:
    done = Prepared(tmp_path, target, many(20), limit=7)
    assert [s.sample_id for s in done.samples] == [f"r{i}" for i in range(7)]
    assert done.result["rows"] == 7


def test_system_prompt_and_variables_reach_the_template(tmp_path: Path) -> None:
    template = toys.CHATML_PROMPT + "{{ mood }}"
    folder = chatml_target(tmp_path / "t", template)
    own = {"messages": [{"role": "system", "content": "own"}, *chat("q", "a")["messages"]]}
    variables = {"mood": "glad"}
    done = Prepared(
        tmp_path, folder, [chat("q", "a"), own], system_prompt="S", chat_template_kwargs=variables
    )
    assert done.text(0).startswith("<|im_start|>system\nS<|im_end|>\n")
    assert done.text(1).startswith("<|im_start|>system\nown<|im_end|>\n")
    assert done.text(0).endswith("<|im_end|>\nglad")
    assert done.result["chat_template_kwargs"] == variables
    assert done.result["system_prompt"] == "S"


def test_a_template_in_a_file_takes_the_place_of_the_targets(tmp_path: Path, target: Path) -> None:
    path = tmp_path / "mine.jinja"
    path.write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}")
    done = Prepared(tmp_path, target, [chat("q", "a")], chat_template=str(path))
    assert done.text() == "user: q<|im_end|>assistant: a<|im_end|>"
    assert done.decoded_spans() == ["a<|im_end|>"]


def run(target: Path, data: str, out: Path, **options: Any) -> dict[str, Any]:
    return paceline.prepare(target=str(target), data=[data], out=str(out), **options)


def files_of(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.rglob("*") if p.suffix in (".parquet", ".npy")}


def test_a_finished_folder_is_left_alone(tmp_path: Path, target: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", many(10))
    first = run(target, data, tmp_path / "out")
    stamps = {p: p.stat().st_mtime_ns for p in (tmp_path / "out").rglob("*.parquet")}
    assert run(target, data, tmp_path / "out", num_workers=1) == first
    assert {p: p.stat().st_mtime_ns for p in stamps} == stamps


def test_a_target_needs_no_weights_here(tmp_path: Path, target: Path) -> None:
    ignored = shutil.ignore_patterns("model.safetensors")
    bare = shutil.copytree(target, tmp_path / "bare", ignore=ignored)
    data = write_rows(tmp_path / "rows.jsonl", many(10))
    run(bare, data, tmp_path / "a")
    first = run(target, data, tmp_path / "b")
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")
    # It is the same target: what was made with it is taken.
    assert run(bare, data, tmp_path / "b") == first


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"max_length": 99}, "max_length: was 4096, now 99"),
        ({"heldout_share": 0.5}, "heldout_share"),
        ({"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
    ],
)
def test_other_work_in_a_folder_is_refused_by_name(
    tmp_path: Path, target: Path, change: dict[str, Any], named: str
) -> None:
    data = write_rows(tmp_path / "rows.jsonl", many(10))
    run(target, data, tmp_path / "out")
    with pytest.raises(FingerprintMismatch, match=named):
        run(target, data, tmp_path / "out", **change)
    run(target, data, tmp_path / "out", overwrite=True, **change)


def test_other_data_or_another_target_is_refused(tmp_path: Path, target: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", many(10))
    run(target, data, tmp_path / "out")
    write_rows(tmp_path / "rows.jsonl", many(11))
    with pytest.raises(FingerprintMismatch, match=r"data\.fingerprint"):
        run(target, data, tmp_path / "out")
    write_rows(tmp_path / "rows.jsonl", many(10))
    other = chatml_target(tmp_path / "t", toys.CHATML_GEN)
    with pytest.raises(FingerprintMismatch, match=r"template\.fingerprint"):
        run(other, data, tmp_path / "out")


def test_an_interrupted_run_goes_on_where_it_was(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Duplicates and ids are known over the border, and the files are those of an unbroken run."""
    rows = [*many(30), *many(5), chat("other", "x", id="r3"), {"messages": []}]
    data = write_rows(tmp_path / "rows.jsonl", rows)
    monkeypatch.setattr(stage, "PART_ROWS", 8)
    unbroken = run(target, data, tmp_path / "a")
    written = []

    def breaks_off(*arguments: Any) -> Path:
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(arguments)
        return write_part(*arguments)

    write_part = stage.write_part
    monkeypatch.setattr(stage, "write_part", breaks_off)
    with pytest.raises(KeyboardInterrupt):
        run(target, data, tmp_path / "b")
    monkeypatch.setattr(stage, "write_part", write_part)
    parts = sorted((tmp_path / "b").rglob("*.parquet"))
    stamps = {p: p.stat().st_mtime_ns for p in parts}
    assert len(parts) == 2
    resumed = run(target, data, tmp_path / "b")
    assert {p: p.stat().st_mtime_ns for p in parts} == stamps
    assert resumed == unbroken
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")
    assert resumed["skipped"] == {"duplicate": 5, "empty": 1}
    ids = [s.sample_id for s in TokenDataset(tmp_path / "b")]
    assert len(set(ids)) == len(ids) == 31


def test_a_full_disk_is_an_error_and_loses_no_part(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write_rows(tmp_path / "rows.jsonl", many(30))
    monkeypatch.setattr(stage, "PART_ROWS", 8)
    write_table = pq.write_table

    def fills_up(table: Any, path: Path, **options: Any) -> None:
        write_table(table, path, **options)
        if "00002" in path.name:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pq, "write_table", fills_up)
    with pytest.raises(DiskFullError, match=r"00002\.parquet: no space left"):
        run(target, data, tmp_path / "out")
    monkeypatch.setattr(pq, "write_table", write_table)
    names = sorted(p.name for p in (tmp_path / "out" / "data").iterdir())
    assert names == ["00000.parquet", "00001.parquet"]
    assert run(target, data, tmp_path / "out")["samples"] == 30


def test_too_many_bad_rows_stop_the_run_early(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage, "PART_ROWS", 500)
    rows = [{"messages": []}] * 1200 + many(300)
    data = write_rows(tmp_path / "rows.jsonl", rows)
    with pytest.raises(DataError, match=r"1000 of 1000 rows had to be skipped"):
        run(target, data, tmp_path / "out", max_skipped_share=0.3)
    assert (tmp_path / "out" / "skipped.jsonl").read_text().count('"empty"') == 1000
    # Another limit, and the same command goes on.
    assert run(target, data, tmp_path / "out", max_skipped_share=1.0)["rows_kept"] == 300


@pytest.mark.parametrize(
    ("first_share", "options", "told"),
    [
        (1.0, {"strict": True}, "1 of 12 rows were skipped by an earlier run"),
        (0.0, {"strict": True}, "1 of 12 rows were skipped by an earlier run"),
        (1.0, {"max_skipped_share": 0.05}, "1 of 12 rows had to be skipped"),
    ],
)
def test_rows_that_an_earlier_run_skipped_count(
    tmp_path: Path, target: Path, first_share: float, options: dict[str, Any], told: str
) -> None:
    """Whether that run was finished (where it allowed them) or stopped with all its parts written;
    a row that was left out on purpose is none of them."""
    data = write_rows(tmp_path / "rows.jsonl", [{"messages": []}, *many(10), many(1)[0]])
    lenient = {"max_skipped_share": 1.0}
    if first_share:
        run(target, data, tmp_path / "out", **lenient)
    else:
        with pytest.raises(DataError, match="had to be skipped"):
            run(target, data, tmp_path / "out", max_skipped_share=first_share)
    for _ in range(2):
        with pytest.raises(DataError, match=told):
            run(target, data, tmp_path / "out", **options)
        assert '"empty"' in (tmp_path / "out" / "skipped.jsonl").read_text()
    result = run(target, data, tmp_path / "out", **lenient)
    assert result["skipped"] == {"empty": 1, "duplicate": 1}


def test_a_target_without_a_template_is_an_error_for_conversations_alone(tmp_path: Path) -> None:
    target = chatml_target(tmp_path / "t", None)
    ids = {"prompt_ids": [1], "response_ids": [2, 3]}
    assert len(Prepared(tmp_path, target, [ids]).samples) == 1
    (tmp_path / "x").mkdir()
    with pytest.raises(TargetError, match=r"no chat template.*as `chat_template`"):
        Prepared(tmp_path / "x", target, [chat("q", "a")])


def test_a_template_that_is_not_jinja_is_an_error_with_its_line(tmp_path: Path) -> None:
    target = chatml_target(tmp_path / "t", "{% for m in messages %}\n{{ m.content }")
    with pytest.raises(TargetError, match="not Jinja, line 2"):
        Prepared(tmp_path, target, [chat("q", "a")])


def test_a_template_that_hides_what_was_said_is_refused(tmp_path: Path) -> None:
    hides = "{% for m in messages %}{{ m.content | length }}<|im_end|>{% endfor %}"
    with pytest.raises(TargetError, match="the chat template is refused"):
        Prepared(tmp_path, chatml_target(tmp_path / "t", hides), [chat("q", "a")])


def test_wrong_requests(tmp_path: Path, target: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", many(2))
    with pytest.raises(UsageError, match="no `out`"):
        paceline.prepare(target=str(target), data=[data])
    with pytest.raises(UsageError, match="no such file"):
        run(target, f"{tmp_path}/nothing.jsonl", tmp_path / "out")
    with pytest.raises(UsageError, match=r"chat_template: /nowhere"):
        run(target, data, tmp_path / "out", chat_template="/nowhere")
    with pytest.raises(TargetError, match="no target given"):
        paceline.prepare(data=[data], out=str(tmp_path / "out"))
    with pytest.raises(UsageError, match="max_length"):
        run(target, data, tmp_path / "out", max_length=1)
    assert not (tmp_path / "out" / "data").exists()


def test_an_empty_file_is_an_error(tmp_path: Path, target: Path) -> None:
    with pytest.raises(DataError, match="the files are empty"):
        Prepared(tmp_path, target, [])


def test_skipped_rows_are_listed_in_order_with_their_files(tmp_path: Path, target: Path) -> None:
    first = write_rows(tmp_path / "one.jsonl", [{"messages": []}, *many(2)])
    second = write_rows(tmp_path / "two.jsonl", [*many(1), {"id": "z"}])
    paceline.prepare(target=str(target), data=[first, second], out=str(tmp_path / "out"))
    entries = [json.loads(line) for line in (tmp_path / "out/skipped.jsonl").open()]
    assert [(Path(e["file"]).name, e["row"], e["id"], e["reason"]) for e in entries] == [
        ("one.jsonl", 1, None, "empty"),
        ("two.jsonl", 1, "r0", "duplicate"),
        ("two.jsonl", 2, "z", "missing_key"),
    ]


@pytest.mark.parametrize(
    ("options", "is_told"),
    [({"heldout_share": 0.0}, True), ({"heldout_share": 0.5}, False), ({"split": "train"}, False)],
)
def test_that_nothing_is_held_out_is_told(
    tmp_path: Path,
    target: Path,
    caplog: pytest.LogCaptureFixture,
    options: dict[str, Any],
    is_told: bool,
) -> None:
    Prepared(tmp_path, target, many(40), **options)
    assert ("no conversation is held out, and `evaluate` will find none" in caplog.text) == is_told
