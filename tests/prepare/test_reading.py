"""Files of every form give the same rows; what is broken is told by file and row."""

import gzip
import json
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from paceline import fingerprint
from paceline.errors import DataError, UsageError
from paceline.prepare import reading
from paceline.prepare.reading import count_rows, find_files, fingerprint_files, read_rows

ROWS = [
    {"id": "a", "messages": [{"role": "user", "content": "caf\u00e9 \u2028 ]"}]},
    {"id": "b", "messages": [{"role": "user", "content": "[{,"}, {"role": "assistant"}]},
    {"id": "c", "prompt_ids": [1, 2], "response_ids": [3]},
]


def as_lines(rows: list[dict]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def read(path: Path) -> list[object]:
    return [row.parse() for row in read_rows([path])]


def as_parquet(path: Path, rows: list[dict]) -> Path:
    message = pa.struct([("role", pa.string()), ("content", pa.string())])
    schema = pa.schema(
        [
            ("id", pa.string()),
            ("messages", pa.list_(message)),
            ("prompt_ids", pa.list_(pa.int32())),
            ("response_ids", pa.list_(pa.int32())),
        ]
    )
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), path)
    return path


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize(
    "content",
    [
        as_lines(ROWS),
        as_lines(ROWS).rstrip(b"\n"),
        b"\xef\xbb\xbf" + as_lines(ROWS),
        as_lines(ROWS).replace(b"\n", b"\r\n\n"),
        json.dumps(ROWS).encode(),
        json.dumps(ROWS, indent=2).encode(),
        b"\xef\xbb\xbf \n" + json.dumps(ROWS).encode(),
    ],
)
def test_json_lines_and_arrays(tmp_path: Path, content: bytes, zipped: bool) -> None:
    # The name says nothing: the first bytes do.
    path = tmp_path / "rows.data"
    path.write_bytes(gzip.compress(content) if zipped else content)
    assert read(path) == ROWS


@pytest.mark.parametrize("zipped", [False, True])
def test_parquet_leaves_out_what_was_never_there(tmp_path: Path, zipped: bool) -> None:
    path = as_parquet(tmp_path / "rows.parquet", ROWS)
    if zipped:
        path.write_bytes(gzip.compress(path.read_bytes()))
    assert read(path) == ROWS


def test_what_json_has_no_word_for_is_its_text(tmp_path: Path) -> None:
    moment = datetime(2023, 4, 9, 1, 2, 3, tzinfo=UTC)
    said = {"content": "q", "at": moment, "costs": Decimal("1.50"), "tags": {"seen": moment}}
    message = pa.struct(
        [
            ("content", pa.string()),
            ("at", pa.timestamp("us", "UTC")),
            ("costs", pa.decimal128(5, 2)),
            ("tags", pa.map_(pa.string(), pa.timestamp("us", "UTC"))),
        ]
    )
    schema = pa.schema(
        [("messages", pa.list_(message)), ("times", pa.list_(message.field(1).type))]
    )
    path = tmp_path / "rows.parquet"
    rows = [{"messages": [{"content": "r"}, said], "times": [None, moment]}]
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), path)
    text = "2023-04-09 01:02:03+00:00"
    told = {"content": "q", "at": text, "costs": "1.50", "tags": [["seen", text]]}
    assert read(path) == [{"messages": [{"content": "r"}, told], "times": [None, text]}]


def test_bytes_are_weighed_by_their_length(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"image": [b"x" * 5000], "more": [{"image": b"y" * 3000}]}), path)
    [row] = read_rows([path])
    assert row.num_bytes == 8000


def test_a_long_array_is_read_in_pieces(tmp_path: Path) -> None:
    rows = [{"id": i, "text": "\u00e9x" * (i % 7) * 40_000} for i in range(40)]
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(rows, ensure_ascii=False))
    assert path.stat().st_size > 4 << 20
    assert read(path) == rows


@pytest.mark.parametrize("indent", [None, 2])
def test_an_array_may_be_cut_anywhere_into_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, indent: int | None
) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(ROWS * 2, indent=indent, ensure_ascii=False))
    for size in range(4, 40):
        monkeypatch.setattr(reading, "_CHUNK_CHARS", size)
        assert read(path) == ROWS * 2


def test_rows_are_numbered_within_their_file(tmp_path: Path) -> None:
    first, second = tmp_path / "1.jsonl", tmp_path / "2.json"
    first.write_bytes(b"\n" + as_lines(ROWS[:2]))
    second.write_text(json.dumps(ROWS[2:]))
    rows = list(read_rows([first, second]))
    # Lines keep their number in the file, as an editor shows it.
    assert [(row.file, row.number) for row in rows] == [(first, 2), (first, 3), (second, 1)]


def test_a_bad_line_is_an_error_of_its_row_alone(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a": 1}\n{"a": \n\xff\xfe\n[1]\n{"a": 2}\n')
    rows = list(read_rows([path]))
    assert [row.number for row in rows] == [1, 2, 3, 4, 5]
    for bad in (rows[1], rows[2]):
        with pytest.raises(ValueError):
            bad.parse()
    assert rows[4].parse() == {"a": 2}


@pytest.mark.parametrize("cut", [40, 100])
def test_an_array_that_breaks_off_is_an_error_of_the_file(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(ROWS)[:cut])
    with pytest.raises(DataError, match=r"rows\.json: the JSON array breaks off"):
        read(path)


@pytest.mark.parametrize("bad", ["oops", '{"b": 1 "c": 2}', '{"b": "\\q"}', "{'b': 1}", '{"b": 1]'])
def test_a_mistake_in_an_array_is_told_without_reading_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: str
) -> None:
    monkeypatch.setattr(reading, "_CHUNK_CHARS", 64)
    path = tmp_path / "rows.json"
    # Whoever reads to the end falls over the last bytes.
    path.write_bytes(f'[{{"a": 1}}, {bad}, '.encode() + b'{"a": 2}, ' * 40 + b"\xff]")
    with pytest.raises(DataError, match=r"rows\.json: the JSON array .* is broken after row 1: "):
        read(path)


def test_text_after_an_array_is_an_error_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(ROWS) + '\n{"id": "d"}\n')
    with pytest.raises(DataError, match="text follows the JSON array of 3 rows"):
        read(path)


def test_a_gzip_file_that_breaks_off_is_an_error_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(as_lines(ROWS * 200))[:-40])
    with pytest.raises(DataError, match=r"rows\.jsonl\.gz cannot be read"):
        read(path)


def test_a_damaged_gzip_file_is_an_error_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl.gz"
    data = bytearray(gzip.compress(as_lines(ROWS * 200)))
    for place in range(60, 80):
        data[place] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"rows\.jsonl\.gz cannot be read"):
        read(path)


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        (b'{"a": "\xff"}', "cannot be read.*utf-8"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "row 2 of the JSON array.*recursion"),
        (b'{"a": ' + b"9" * 10_000 + b"}", "row 2 of the JSON array.*digits"),
    ],
)
def test_what_cannot_be_read_in_an_array_is_an_error_of_the_file(
    tmp_path: Path, bad: bytes, told: str
) -> None:
    path = tmp_path / "rows.json"
    path.write_bytes(b'[{"a": 1}, ' + bad + b"]")
    with pytest.raises(DataError, match=rf"rows\.json:? {told}"):
        read(path)


def test_broken_parquet_is_an_error_of_the_file(tmp_path: Path) -> None:
    path = as_parquet(tmp_path / "rows.parquet", ROWS)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"rows\.parquet cannot be read"):
        read(path)


def test_files_are_found_by_path_and_pattern(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "c.txt"):
        (tmp_path / name).write_bytes(as_lines(ROWS))
    found = find_files([f"{tmp_path}/c.txt", f"{tmp_path}/*.jsonl"])
    assert [file.name for file in found] == ["c.txt", "a.jsonl", "b.jsonl"]
    assert count_rows(found) == 9


def test_every_byte_of_a_large_file_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("_WHOLE_FILE_BYTES", 100), ("_SAMPLE_BYTES", 2), ("_NUM_SAMPLES", 3)):
        monkeypatch.setattr(fingerprint, name, value)
    path = tmp_path / "rows.jsonl"
    found = set()
    for place in (None, 10, 70, 170):
        content = bytearray(b"x" * 200)
        if place is not None:
            content[place] = ord("y")
        path.write_bytes(content)
        found.add(fingerprint_files([path]))
    assert len(found) == 4


def test_the_reading_of_large_files_for_their_fingerprint_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr("paceline.progress._LOG_INTERVAL_S", 0.0)
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for file in files:
        file.write_bytes(b"x" * 1000)
    fingerprint_files(files)
    assert "fingerprint: 2,000/2,000 B" in caplog.text


def test_missing_files_and_folders_are_usage_errors(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nothing\.jsonl: no such file"):
        find_files([f"{tmp_path}/nothing.jsonl"])
    with pytest.raises(UsageError, match="is a folder"):
        find_files([str(tmp_path)])
    with pytest.raises(UsageError, match="no data given"):
        find_files([])


def test_rows_are_counted_where_that_is_cheap(tmp_path: Path) -> None:
    lines = tmp_path / "rows.jsonl"
    lines.write_bytes(as_lines(ROWS))
    table = as_parquet(tmp_path / "rows.parquet", ROWS)
    assert count_rows([lines, table]) == 6
    zipped = tmp_path / "rows.jsonl.gz"
    zipped.write_bytes(gzip.compress(as_lines(ROWS)))
    assert count_rows([lines, zipped]) is None
