"""The token data set on disk: what `prepare` writes and every later stage reads.

A folder of Parquet parts `data/NNNNN.parquet`, one row a sample, columns as `TokenSample`'s fields.
A part appears under its final name only when whole.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from paceline.artefact import Manifest, fsync_folder, load_finished
from paceline.contracts import TokenSample
from paceline.errors import DataError

PARTS_FOLDER = "data"

SCHEMA = pa.schema(
    [
        ("sample_id", pa.string()),
        ("conversation_id", pa.string()),
        ("source", pa.string()),
        ("split", pa.string()),
        ("input_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.bool_())),
        ("num_past_end", pa.int32()),
    ]
)


def part_path(folder: Path, number: int) -> Path:
    return folder / PARTS_FOLDER / f"{number:05d}.parquet"


def write_part(folder: Path, number: int, samples: list[TokenSample]) -> Path:
    """Write one part aside, fsync, rename. Returns its final path."""
    path = part_path(folder, number)
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = {name: [getattr(sample, name) for sample in samples] for name in SCHEMA.names}
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    pq.write_table(pa.table(columns, schema=SCHEMA), aside, compression="zstd")
    with aside.open("rb+") as file:
        os.fsync(file.fileno())
    os.replace(aside, path)
    fsync_folder(path.parent)
    return path


class TokenDataset:
    """A finished token data set. Iterates samples in their order, one Parquet batch in memory."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.manifest: Manifest = load_finished(self.folder, "prepare")
        self.parts = sorted((self.folder / PARTS_FOLDER).glob("[0-9]*.parquet"))

    def __len__(self) -> int:
        return sum(pq.read_metadata(part).num_rows for part in self.parts)

    def __iter__(self) -> Iterator[TokenSample]:
        for part in self.parts:
            yield from read_part(part)

    def split(self, name: str) -> Iterator[TokenSample]:
        return (sample for sample in self if sample.split == name)


def read_part(path: Path, batch_rows: int = 1024) -> Iterator[TokenSample]:
    """Samples of one part; DataError that names the file where it cannot be read."""
    try:
        file = pq.ParquetFile(path)
        for batch in file.iter_batches(batch_rows, columns=SCHEMA.names):
            yield from _samples(batch)
    except pa.ArrowException as error:
        raise DataError(f"{path} cannot be read as a token data set: {error}") from error


def _samples(batch: pa.RecordBatch) -> Iterator[TokenSample]:
    plain = {
        name: batch.column(name).to_pylist()
        for name in ("sample_id", "conversation_id", "source", "split", "num_past_end")
    }
    ids, masks = batch.column("input_ids"), batch.column("loss_mask")
    for i in range(batch.num_rows):
        yield TokenSample(
            input_ids=np.asarray(ids[i].values.to_numpy(), dtype=np.int32),
            loss_mask=np.asarray(masks[i].values.to_numpy(zero_copy_only=False), dtype=bool),
            **{name: values[i] for name, values in plain.items()},
        )
