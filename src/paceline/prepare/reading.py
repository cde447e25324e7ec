"""Raw rows out of JSONL, JSON and Parquet files, gzipped or not, one at a time.

What a file is, its first bytes say, not its name. A row that is not JSON is a row with an error,
not the end of the work.
"""

import codecs
import glob
import gzip
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from paceline import fingerprint
from paceline.artefact import load_finished
from paceline.contracts import MANIFEST_NAME
from paceline.errors import DataError, UsageError
from paceline.prepare.parts import list_answer_parts
from paceline.progress import progress_bar

_GZIP_MAGIC = b"\x1f\x8b"
_PARQUET_MAGIC = b"PAR1"
_BOM = b"\xef\xbb\xbf"
_CHUNK_CHARS = 1 << 20
_PARQUET_BATCH_ROWS = 256
_LONGEST_WORD = len("-Infinity")
# What may stand between the values of a JSON array.
_BETWEEN = re.compile(r"[ \t\r\n,]*")


@dataclass(frozen=True)
class RawRow:
    """One row, parsed when asked for. `number` counts from 1 within its file (a line of JSONL)."""

    file: Path
    number: int
    payload: bytes | dict[str, Any]

    def parse(self) -> Any:
        """The row's value. Raises ValueError as `from_json` does."""
        return from_json(self.payload) if isinstance(self.payload, bytes) else self.payload

    @property
    def num_bytes(self) -> int:
        """Size, near enough to bound the memory of a batch of rows."""
        return len(self.payload) if isinstance(self.payload, bytes) else _weigh(self.payload)


def from_json(text: bytes | str) -> Any:
    """The value. Raises ValueError where it is not JSON, not UTF-8, or too deep to be read."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def find_entries(patterns: Iterable[str]) -> list[Path]:
    """The files and folders that paths and glob patterns name, in the order given.

    Raises UsageError.
    """
    entries: list[Path] = []
    for pattern in patterns:
        path = Path(pattern).expanduser()
        found = [path] if path.exists() else [Path(p) for p in sorted(glob.glob(str(path)))]
        if not found:
            raise UsageError(f"data: {pattern}: no such file")
        entries += found
    return entries


def files_of(entries: Iterable[Path]) -> list[Path]:
    """Files as they are, and those of the answers in folders of `generate`. Raises UsageError."""
    files: list[Path] = []
    for entry in entries:
        files += _inside(entry) if entry.is_dir() else [entry]
    if not files:
        raise UsageError("no data given: pass files of conversations as `data`")
    return files


def find_files(patterns: Iterable[str]) -> list[Path]:
    """The files that paths, glob patterns and folders of `generate` name. Raises UsageError."""
    return files_of(find_entries(patterns))


def fingerprint_files(files: Sequence[Path]) -> str:
    """Fingerprint of files by name, content and order. Of all their bytes: rows are edited in
    place, and samples of a large file would miss that."""
    with progress_bar("fingerprint", sum(file.stat().st_size for file in files), "B") as bar:
        found = [[file.name, fingerprint.of_whole_file(file, bar.advance)] for file in files]
    return fingerprint.of_json(found)


def _inside(folder: Path) -> list[Path]:
    """The answers in a folder that `generate` wrote. Raises UsageError."""
    if not (folder / MANIFEST_NAME).is_file():
        raise UsageError(f"data: {folder} is a folder: name files, or {folder}/*.jsonl")
    load_finished(folder, "generate")
    return list_answer_parts(folder)


def read_rows(files: Iterable[Path]) -> Iterator[RawRow]:
    """All rows of all files, in order. Raises DataError for a file that cannot be read on."""
    for path in files:
        try:
            yield from _read_file(path)
        except (OSError, EOFError, zlib.error, UnicodeError, pa.ArrowException) as error:
            raise DataError(f"{path} cannot be read: {error}") from error


def count_rows(files: Iterable[Path]) -> int | None:
    """How many rows there are, where that is cheap to say (for a progress bar)."""
    total = 0
    for path in files:
        start = _first_bytes(path)
        if start.startswith(_PARQUET_MAGIC):
            total += pq.read_metadata(path).num_rows
        elif start.startswith(_GZIP_MAGIC) or start.lstrip().startswith(b"["):
            return None
        else:
            with path.open("rb") as file:
                total += sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))
    return total


def _read_file(path: Path) -> Iterator[RawRow]:
    start = _first_bytes(path)
    if start.startswith(_PARQUET_MAGIC):
        yield from _read_parquet(path, path)
        return
    with gzip.open(path) if start.startswith(_GZIP_MAGIC) else path.open("rb") as file:
        head = file.read(4096)
        file.seek(0)
        if head.startswith(_PARQUET_MAGIC):
            yield from _read_parquet(path, file)
        elif head.removeprefix(_BOM).lstrip().startswith(b"["):
            yield from _read_array(path, file)
        else:
            yield from _read_lines(path, file)


def _first_bytes(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(64)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def _read_lines(path: Path, file: IO[bytes]) -> Iterator[RawRow]:
    # Lines of bytes end at \n alone; str.splitlines would also cut at U+2028 inside a string.
    for number, line in enumerate(file, start=1):
        line = line.removeprefix(_BOM) if number == 1 else line
        if line.strip():
            yield RawRow(path, number, line)


def _read_array(path: Path, file: IO[bytes]) -> Iterator[RawRow]:
    """The elements of one JSON array, without holding the array."""
    decoder = json.JSONDecoder()
    chunks = _text_chunks(file)
    text = next(chunks, "").lstrip("\ufeff \t\r\n")
    number, at = 0, 1
    while True:
        # By place, not by cutting off what was read: a copy of the rest for every row is slow.
        at = _BETWEEN.match(text, at).end()
        if text.startswith("]", at):
            if (text[at + 1 :] + "".join(chunks)).strip():
                raise DataError(f"{path}: text follows the JSON array of {number} rows")
            return
        try:
            value, at = decoder.raw_decode(text, at)
        except json.JSONDecodeError as error:
            more = next(chunks, None) if _is_cut_off(error) else None
            if more is None:
                raise DataError(
                    f"{path}: the JSON array breaks off or is broken after row {number}: {error}"
                ) from error
            text, at = text[at:] + more, 0
            continue
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}: row {number + 1} of the JSON array: {error}") from error
        number += 1
        yield RawRow(path, number, value)


def _is_cut_off(error: json.JSONDecodeError) -> bool:
    """Whether more text may mend it: the error is at the very end, or a string has none."""
    at_end = error.pos >= len(error.doc.rstrip()) - _LONGEST_WORD
    return at_end or error.msg.startswith("Unterminated string")


def _text_chunks(file: IO[bytes]) -> Iterator[str]:
    decode = codecs.getincrementaldecoder("utf-8")().decode
    while block := file.read(_CHUNK_CHARS):
        yield decode(block)


def _read_parquet(path: Path, source: Path | IO[bytes]) -> Iterator[RawRow]:
    number = 0
    for batch in pq.ParquetFile(source).iter_batches(_PARQUET_BATCH_ROWS):
        for row in batch.to_pylist():
            number += 1
            yield RawRow(path, number, _as_json_has_it(row))


def _as_json_has_it(value: Any) -> Any:
    """Parquet gives every struct all fields of its column; those that were never there are null.
    What JSON has no word for (times, decimals) is its text."""
    if isinstance(value, dict):
        return {key: _as_json_has_it(v) for key, v in value.items() if v is not None}
    if isinstance(value, list) and value and not isinstance(value[0], str | int | float):
        return [_as_json_has_it(v) for v in value]
    if isinstance(value, tuple):  # an entry of a map
        return [_as_json_has_it(v) for v in value]
    if value is None or isinstance(value, str | int | float | list | bytes):
        return value
    return str(value)


def _weigh(value: Any) -> int:
    # Without recursion: what was read may be nested as deep as Python's stack.
    num_bytes, waiting = 0, [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str | bytes):
            num_bytes += len(value)
        elif isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, list) and value and isinstance(value[0], int):
            num_bytes += 6 * len(value)
        elif isinstance(value, list):
            waiting += value
        else:
            num_bytes += 8
    return num_bytes
