"""The token data set on disk: what is written comes back, whole parts only."""

import errno
import json
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.artefact import open_stage
from paceline.contracts import TokenSample
from paceline.dataset import (
    SCHEMA,
    TokenDataset,
    list_parts,
    read_batches,
    read_part,
    read_record,
    source_of,
    write_part,
)
from paceline.errors import DataError, DiskFullError, PacelineError, StoreError, UsageError

samples = st.builds(
    lambda name, tokens, split, past, finished: TokenSample(
        sample_id=name,
        input_ids=np.array([t for t, _ in tokens], np.int32),
        loss_mask=np.array([m for _, m in tokens], bool),
        source="s" + name,
        split=split,
        conversation_id=name[:1],
        num_past_end=past,
        finished=finished,
    ),
    st.text(max_size=5),
    st.lists(st.tuples(st.integers(0, 2**31 - 1), st.booleans()), max_size=20),
    st.sampled_from(("train", "heldout")),
    st.integers(0, 9),
    st.sampled_from((True, False, None)),
)


def equal(a: TokenSample, b: TokenSample) -> bool:
    arrays = ("input_ids", "loss_mask")
    rest = [vars(s) | dict.fromkeys(arrays) for s in (a, b)]
    return rest[0] == rest[1] and all(
        np.array_equal(getattr(a, name), getattr(b, name)) for name in arrays
    )


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(written=st.lists(samples, max_size=8))
def test_samples_come_back_as_they_were(tmp_path: Path, written: list[TokenSample]) -> None:
    path = write_part(tmp_path, 3, written, {"rows": 5})
    found = list(read_part(path, batch_rows=3))
    assert len(found) == len(written)
    assert all(map(equal, found, written))
    assert all(s.input_ids.dtype == np.int32 and s.loss_mask.dtype == bool for s in found)
    assert read_record(path) == {"rows": 5}


def sample(name: str, length: int = 4) -> TokenSample:
    mask = np.arange(length) > 1
    return TokenSample(name, np.arange(length, dtype=np.int32), mask, split="train")


def finished(folder: Path, parts: list[list[TokenSample]]) -> Path:
    with open_stage(folder, "prepare", {}, {}) as stage:
        for number, part in enumerate(parts):
            write_part(stage.path, number, part)
        stage.finish({}, "content")
    return folder


def test_a_data_set_is_its_parts_in_order(tmp_path: Path) -> None:
    names = [f"s{i}" for i in range(25)]
    parts = [[sample(name) for name in names[i : i + 2]] for i in range(0, 25, 2)]
    dataset = TokenDataset(finished(tmp_path / "d", parts))
    assert len(dataset) == 25
    assert [s.sample_id for s in dataset] == names
    assert [s.sample_id for s in dataset.split("train")] == names
    assert list(dataset.split("heldout")) == []


def test_an_unfinished_data_set_is_not_read(tmp_path: Path) -> None:
    with open_stage(tmp_path / "d", "prepare", {}, {}) as stage:
        write_part(stage.path, 0, [sample("a")])
    with pytest.raises(UsageError, match="not finished"):
        TokenDataset(tmp_path / "d")


def test_parquet_tools_read_the_parts(tmp_path: Path) -> None:
    path = write_part(tmp_path, 0, [sample("a"), sample("b", 3)])
    table = pq.read_table(path)
    assert table.schema.remove_metadata() == SCHEMA
    assert table.column("input_ids").to_pylist() == [[0, 1, 2, 3], [0, 1, 2]]
    assert table.column("loss_mask").to_pylist() == [[False, False, True, True]] + [
        [False, False, True]
    ]


def test_scraps_of_a_killed_writer_are_no_parts(tmp_path: Path) -> None:
    write_part(tmp_path, 0, [sample("a")])
    (tmp_path / "data" / ".00001.parquet.123.tmp").write_bytes(b"half")
    assert [path.name for path in list_parts(tmp_path)] == ["00000.parquet"]


@pytest.mark.parametrize(
    ("code", "kind", "told"),
    [
        (errno.ENOSPC, DiskFullError, "no space left"),
        (errno.EIO, StoreError, "the file system refused"),
    ],
)
def test_a_part_that_cannot_be_written_says_why_and_leaves_no_scrap(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    code: int,
    kind: type[PacelineError],
    told: str,
) -> None:
    write_part(tmp_path, 0, [sample("a")])

    def fails(descriptor: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(PacelineError, match=rf"00001\.parquet: {told}") as caught:
        write_part(tmp_path, 1, [sample("b")])
    assert type(caught.value) is kind
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["00000.parquet"]


@pytest.mark.parametrize("damage", ["cut", "empty", "text", "columns"])
def test_a_damaged_part_is_an_error_that_names_it(tmp_path: Path, damage: str) -> None:
    path = write_part(tmp_path, 0, [sample("a")] * 100)
    data = path.read_bytes()
    if damage == "columns":
        pq.write_table(pa.table({"other": [1]}), path)
    else:
        path.write_bytes({"cut": data[:-9], "empty": b"", "text": b"hello, world"}[damage])
    with pytest.raises(DataError, match=r"00000\.parquet"):
        list(read_part(path))


def test_a_part_without_a_record_says_so(tmp_path: Path) -> None:
    path = write_part(tmp_path, 0, [sample("a")])
    with pytest.raises(DataError, match="no record of how it was made"):
        read_record(path)


def test_bytes_depend_on_the_samples_alone(tmp_path: Path) -> None:
    part = [sample("a"), sample("b", 9)]
    first = write_part(tmp_path / "x", 0, part, json.loads('{"b": 1, "a": 2}')).read_bytes()
    second = write_part(tmp_path / "y", 0, part, json.loads('{"b": 1, "a": 2}')).read_bytes()
    assert first == second


def test_columns_can_be_read_in_batches(tmp_path: Path) -> None:
    path = write_part(tmp_path, 0, [sample(str(i), i + 1) for i in range(10)])
    batches = list(read_batches(path, batch_rows=4))
    assert [batch.num_rows for batch in batches] == [4, 4, 2]
    lengths = [length for batch in batches for length in batch.column("input_ids").value_lengths()]
    assert [length.as_py() for length in lengths] == list(range(1, 11))


def test_a_source_is_named_by_its_file_or_a_question_file_by_its_folder(tmp_path):
    assert source_of(Path("chats.v2.jsonl.gz")) == "chats"
    assert source_of(tmp_path / "mt_bench" / "question.jsonl") == "mt_bench"
