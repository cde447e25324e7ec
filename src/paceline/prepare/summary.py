"""What a prepared folder holds: its parts' records and columns added up, streamed part by part."""

import hashlib
import io
import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from paceline.artefact import replaced_file, write_atomically
from paceline.contracts import HELDOUT_SPLIT, TRAIN_SPLIT
from paceline.dataset import PLAIN_COLUMNS, list_parts, read_batches, read_record
from paceline.errors import DataError
from paceline.prepare.convert import DELIBERATE

COUNTS_FILE = "supervised_token_counts.npy"
SKIPPED_FILE = "skipped.jsonl"


@dataclass
class Totals:
    """Sums over all parts. rows_of: rows of each source, kept or not. `content` fingerprints every
    column of every sample."""

    vocab_size: int
    rows: int = 0
    kept: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    methods: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)
    rows_of: Counter[str] = field(default_factory=Counter)
    split_samples: int = 0
    cut_samples: int = 0
    cut_supervised: int = 0
    splits: dict[str, Counter[str]] = field(default_factory=dict)
    sources: dict[str, Counter[str]] = field(default_factory=dict)
    longest: int = 0
    past_end: int = 0
    unfinished: int = 0

    def __post_init__(self) -> None:
        self.counts = np.zeros(self.vocab_size, np.int64)
        self.splits = {name: Counter() for name in (TRAIN_SPLIT, HELDOUT_SPLIT)}
        self._digest = hashlib.sha256()

    @property
    def content(self) -> str:
        return self._digest.hexdigest()[:32]

    @property
    def num_bad(self) -> int:
        return sum(n for reason, n in self.skipped.items() if reason not in DELIBERATE)

    def add_record(self, record: dict[str, Any]) -> None:
        self.rows += record["rows"]
        self.kept += record["kept"]
        self.skipped.update(entry["reason"] for entry in record["skipped"])
        self.methods.update(record["methods"])
        self.notes.update(record["notes"])
        self.rows_of.update(record["sources"])
        self.split_samples += record["split_samples"]
        self.cut_samples += record["cut_samples"]
        self.cut_supervised += record["cut_supervised"]

    def add_batch(self, batch: pa.RecordBatch) -> None:
        """Token counts of some samples; numpy over whole columns, no loop over tokens."""
        lists = batch.column("input_ids")
        lengths = np.diff(lists.offsets.to_numpy())
        ids = lists.flatten().to_numpy()
        mask = batch.column("loss_mask").flatten().to_numpy(zero_copy_only=False)
        per_sample = np.add.reduceat(mask, np.cumsum(lengths) - lengths) if len(mask) else lengths
        splits = batch.column("split").to_pylist()
        sources = batch.column("source").to_pylist()
        for i, length in enumerate(lengths.tolist()):
            supervised = int(per_sample[i])
            amounts = {"samples": 1, "tokens": length, "supervised": supervised}
            self.splits[splits[i]].update(amounts)
            self.sources.setdefault(sources[i], Counter()).update(amounts)
        in_train = np.repeat([s == TRAIN_SPLIT for s in splits], lengths)
        self.counts += np.bincount(ids[mask & in_train], minlength=self.vocab_size)
        self.longest = max(self.longest, int(lengths.max(initial=0)))
        self.past_end += int(batch.column("num_past_end").to_numpy().sum())
        self.unfinished += batch.column("finished").to_pylist().count(False)
        plain = [batch.column(name).to_pylist() for name in PLAIN_COLUMNS]
        self._digest.update(json.dumps([plain, lengths.tolist()]).encode())
        self._digest.update(ids.tobytes() + np.packbits(mask).tobytes())


def add_up(folder: Path, vocab_size: int) -> Totals:
    """Read all parts of a folder once; one batch of samples in memory."""
    totals = Totals(vocab_size)
    for part in list_parts(folder):
        totals.add_record(read_record(part))
        for batch in read_batches(part):
            totals.add_batch(batch)
    return totals


def write_skipped(folder: Path) -> None:
    """All skipped rows of all parts, one JSON object a line, in the data's order."""
    # Half a surrogate pair becomes the escape that JSON has for it.
    how = {"encoding": "utf-8", "errors": "backslashreplace"}
    with replaced_file(folder / SKIPPED_FILE) as aside, aside.open("w", **how) as file:
        for part in list_parts(folder):
            for entry in read_record(part)["skipped"]:
                file.write(json.dumps(entry, ensure_ascii=False) + "\n")


def write_counts(folder: Path, totals: Totals) -> None:
    buffer = io.BytesIO()
    np.save(buffer, totals.counts)
    write_atomically(folder / COUNTS_FILE, buffer.getvalue())


def require_usable(totals: Totals, folder: Path) -> None:
    """Raises DataError where nothing would be learnt from the data set."""
    if not totals.kept:
        reasons = ", ".join(f"{n} {reason}" for reason, n in totals.skipped.most_common())
        raise DataError(
            f"none of the {totals.rows} rows can be used ({reasons or 'the files are empty'}); "
            f"{folder / SKIPPED_FILE} lists them"
        )
    if (
        not totals.splits[TRAIN_SPLIT]["supervised"]
        and not totals.splits[HELDOUT_SPLIT]["supervised"]
    ):
        raise DataError("no token of the data set is supervised: there is nothing to learn")
