"""The token data set on disk: what `prepare` writes and every later stage reads.

A folder of Parquet parts `data/NNNNN.parquet`, one row a sample, columns as `TokenSample`'s fields.
A part appears under its final name only when whole; it may carry a record of how it was made.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from paceline.artefact import Manifest, load_finished, replaced_file
from paceline.contracts import TokenSample
from paceline.errors import DataError

PARTS_FOLDER = "data"
_RECORD_KEY = b"paceline"

SCHEMA = pa.schema(
    [
        ("sample_id", pa.string()),
        ("conversation_id", pa.string()),
        ("source", pa.string()),
        ("split", pa.string()),
        ("input_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.bool_())),
        ("num_past_end", pa.int32()),
        ("finished", pa.bool_()),
    ]
)
PLAIN_COLUMNS = tuple(name for name in SCHEMA.names if name not in ("input_ids", "loss_mask"))


def source_of(file: Path) -> str:
    """The source of rows that name none: chats.jsonl.gz -> chats; mt_bench/question.jsonl ->
    mt_bench, since the field's question files are all called so."""
    stem = file.name.split(".")[0]
    return file.resolve().parent.name if stem == "question" else stem


def part_path(folder: Path, number: int) -> Path:
    return folder / PARTS_FOLDER / f"{number:05d}.parquet"


def list_parts(folder: Path) -> list[Path]:
    """The published parts, in order."""
    return sorted((folder / PARTS_FOLDER).glob("[0-9]*.parquet"))


def write_part(
    folder: Path, number: int, samples: list[TokenSample], record: Mapping[str, Any] | None = None
) -> Path:
    """Write one part aside, fsync, rename. Returns its final path.

    `record`: what the writer wants to know again of this part; it is published with the samples in
    one rename (see read_record). Raises DiskFullError or StoreError; what was published stays.
    """
    path = part_path(folder, number)
    path.parent.mkdir(parents=True, exist_ok=True)
    table = _table(samples)
    if record is not None:
        table = table.replace_schema_metadata({_RECORD_KEY: json.dumps(record)})
    with replaced_file(path) as aside:
        pq.write_table(table, aside, compression="zstd")
    return path


def read_record(path: Path) -> dict[str, Any]:
    """The record that write_part stored with a part."""
    metadata = _open(path).schema_arrow.metadata or {}
    if _RECORD_KEY not in metadata:
        raise DataError(f"{path} has no record of how it was made: `paceline prepare` did not")
    return json.loads(metadata[_RECORD_KEY])


class TokenDataset:
    """A finished token data set. Iterates samples in their order, one Parquet batch in memory."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.manifest: Manifest = load_finished(self.folder, "prepare")
        self.parts = list_parts(self.folder)

    def __len__(self) -> int:
        return sum(pq.read_metadata(part).num_rows for part in self.parts)

    def __iter__(self) -> Iterator[TokenSample]:
        for part in self.parts:
            yield from read_part(part)

    def split(self, name: str) -> Iterator[TokenSample]:
        return (sample for sample in self if sample.split == name)


def read_part(path: Path, batch_rows: int = 1024) -> Iterator[TokenSample]:
    """Samples of one part; DataError that names the file where it cannot be read."""
    for batch in read_batches(path, batch_rows):
        yield from _samples(batch)


def read_batches(path: Path, batch_rows: int = 1024) -> Iterator[pa.RecordBatch]:
    """Columns of one part, `batch_rows` samples at a time; DataError that names the file."""
    file = _open(path)
    missing = set(SCHEMA.names) - set(file.schema_arrow.names)
    if missing:
        raise DataError(f"{path} is no part of a token data set: it has no {sorted(missing)}")
    try:
        yield from file.iter_batches(batch_rows, columns=SCHEMA.names)
    except pa.ArrowException as error:
        raise DataError(f"{path} cannot be read as a token data set: {error}") from error


def _open(path: Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read as a token data set: {error}") from error


def _table(samples: list[TokenSample]) -> pa.Table:
    columns: dict[str, Any] = {name: [getattr(s, name) for s in samples] for name in PLAIN_COLUMNS}
    lengths = [sample.num_tokens for sample in samples]
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    for name, empty in (("input_ids", np.int32), ("loss_mask", np.bool_)):
        values = [getattr(sample, name) for sample in samples]
        flat = np.concatenate(values) if values else np.empty(0, empty)
        columns[name] = pa.ListArray.from_arrays(offsets, pa.array(flat))
    return pa.table({name: columns[name] for name in SCHEMA.names}, schema=SCHEMA)


def _samples(batch: pa.RecordBatch) -> Iterator[TokenSample]:
    plain = {name: batch.column(name).to_pylist() for name in PLAIN_COLUMNS}
    ids, masks = batch.column("input_ids"), batch.column("loss_mask")
    for i in range(batch.num_rows):
        yield TokenSample(
            input_ids=np.array(ids[i].values.to_numpy(), dtype=np.int32),
            loss_mask=np.array(masks[i].values.to_numpy(zero_copy_only=False), dtype=bool),
            **{name: values[i] for name, values in plain.items()},
        )
