"""`import-store`: others' files into a store that is as good as one of `extract` for all that
reads it. Every file ends in the store, in quarantine with its reason, or skipped."""

import logging
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paceline import fingerprint
from paceline.artefact import StageFolder, describe_input
from paceline.contracts import Accounting, TokenSample
from paceline.dataset import TokenDataset
from paceline.errors import DataError, FingerprintMismatch, UsageError
from paceline.exchange.columns import Said, columns_of, said_of
from paceline.exchange.naming import DatasetNames, OwnNames, SkippedSample
from paceline.extract.guards import Guards, unusable
from paceline.extract.reference import choose_reference_layers, compare_with_plain_forward
from paceline.extract.sink import QUARANTINE_PATTERN, append_line, read_lines
from paceline.progress import progress_bar
from paceline.recipe import ImportStoreOptions
from paceline.store import ShardWriter, StoreSpec, content_fingerprint, published_ids
from paceline.store.foreign.layouts import (
    CONFIG_NAME,
    Columns,
    ForeignFile,
    find_files,
    holds_last_apart,
    read_sample,
)
from paceline.store.foreign.reading import ForeignFileError, read_config
from paceline.store.staging import open_local_store
from paceline.target.spec import Target, open_target
from paceline.verbs import make_callable

logger = logging.getLogger(__name__)

# Which file each stored sample is from, one line a sample (`_note`).
IMPORTED_PATTERN = "imported-{worker}.jsonl"
_BLAME = (
    "The files hold other layers than `layers` and `layer_convention` say, last states that are "
    "not as `last_norm` says, or states of another target."
)
# A causal target gives the first rows of a sample the same states, however long it is.
_MOST_CHECKED_TOKENS = 256
_DTYPE_NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


@dataclass(frozen=True)
class Captured:
    """A file's sample as a store wants it: aux [R, A, D], last [M, D]."""

    sample: TokenSample
    aux: torch.Tensor
    last: torch.Tensor


def run(options: ImportStoreOptions) -> dict[str, Any]:
    """Take others' hidden states into a store. Returns the manifest's result.

    Raises UsageError where it is not said which state is which, ProbeFailure where the states are
    not what is said, DataError where too many files are bad.
    """
    if not (options.source and options.out):
        raise UsageError("import-store: pass `source` (a folder of others' files) and `out`")
    data = TokenDataset(options.data) if options.data else None
    target = open_target(options, data.manifest.result["target"] if data else None)
    folder = Path(options.source)
    files = find_files(folder)
    config = read_config(folder / CONFIG_NAME)
    said = said_of(options, config)
    inputs = {
        "source": {
            "path": str(folder),
            "fingerprint": fingerprint.of_json([[file.relative for file in files], config]),
        },
        "target": target.describe_input(),
    }
    if data:
        target.check_made_by(data.manifest.inputs["target"]["fingerprint"], f"{options.data} is of")
        inputs["data"] = describe_input(options.data, data.manifest)
    identity = {**options.identity(), **asdict(said)}
    with open_local_store(options.out, inputs, identity, options.overwrite) as stage:
        stored = _stored_files(stage.path, files)
        if stage.done:
            logger.info("import-store: all is done, %d files were stored before", len(stored))
            return stage.result
        columns = columns_of(said, target.num_layers, _last_apart(files))
        names = DatasetNames(data) if data else OwnNames(options.heldout_share)
        reader = _Reader(target, columns, names)
        return _import(options, stage, files, stored, said, reader, data)


def _stored_files(folder: Path, files: list[ForeignFile]) -> dict[str, str]:
    """The files, by their paths below the folder, whose samples are published, and these. Raises
    FingerprintMismatch for one that has changed since."""
    published = published_ids(folder)
    lines = [e for e in read_lines(folder, IMPORTED_PATTERN) if e["sample_id"] in published]
    paths = {file.relative: file.path for file in files}
    for line in lines:
        if line["file"] not in paths or not _is_unchanged(paths[line["file"]], line):
            raise FingerprintMismatch(
                f"{line['file']} has changed since it was stored in {folder} as "
                f"{line['sample_id']}: choose another folder, or remove this one"
            )
    return {line["file"]: line["sample_id"] for line in lines}


def _is_unchanged(path: Path, line: dict[str, Any]) -> bool:
    """By size and time; where the time differs (a copied folder), by content."""
    about = path.stat()
    if about.st_size != line["bytes"]:
        return False
    # The first stores wrote down the size alone.
    if "fingerprint" not in line or about.st_mtime_ns == line["mtime_ns"]:
        return True
    return fingerprint.of_file(path) == line["fingerprint"]


def _last_apart(files: list[ForeignFile]) -> bool:
    """Whether last states have a tensor of their own in these files, by the first that opens."""
    bad = None
    for file in files:
        try:
            return holds_last_apart(file.path)
        except ForeignFileError as error:
            bad = bad or error
    raise DataError(f"none of {len(files)} files can be read; the first: {bad}") from bad


class _Reader:
    """From a file to a sample that the guards have passed."""

    def __init__(self, target: Target, columns: Columns, names: DatasetNames | OwnNames) -> None:
        self.target = target
        self.columns = columns
        self._names = names
        self._guards = Guards(columns.plan, target.hidden_size)

    def read(self, file: ForeignFile, dtype: torch.dtype | None = None) -> Captured:
        """Raises ForeignFileError for a bad file, SkippedSample for one that is of no use.

        dtype: that of the store; None: any that a store can have.
        """
        found = read_sample(file.path, self.columns)
        sample = self._names.sample(file, found)
        if reason := unusable(sample, self.target):
            raise SkippedSample(reason)
        for states in (found.aux, found.last):
            if states.dtype not in ([dtype] if dtype else _DTYPE_NAMES):
                wanted = _DTYPE_NAMES[dtype] if dtype else ", ".join(_DTYPE_NAMES.values())
                raise ForeignFileError(file.path, f"states are {states.dtype}, not {wanted}")
        aux = found.aux[: sample.num_aux_rows]
        last = found.last[torch.from_numpy(sample.loss_mask)]
        if reason := self._guards.fault(sample, aux, last):
            raise ForeignFileError(file.path, reason)
        return Captured(sample, aux, last)

    def first_good(self, files: list[ForeignFile], count: int) -> list[Captured]:
        """Up to `count` good samples from the front. Raises DataError where there is none."""
        good: list[Captured] = []
        bad = None
        for file in files:
            try:
                good.append(self.read(file))
            except DataError as error:
                bad = bad or error  # each is told when its turn comes
            if len(good) == count:
                break
        if not good:
            raise DataError(f"none of {len(files)} files can be used; the first: {bad}") from bad
        return good


def _import(
    options: ImportStoreOptions,
    stage: StageFolder,
    files: list[ForeignFile],
    stored: dict[str, str],
    said: Said,
    reader: _Reader,
    data: TokenDataset | None,
) -> dict[str, Any]:
    first = reader.first_good(files, options.check_samples)
    spec = StoreSpec(
        layers=reader.columns.plan,
        hidden_size=reader.target.hidden_size,
        dtype=_DTYPE_NAMES[first[0].aux.dtype],
        codec=options.codec,
        last_norm=said.last_norm,
        shard_bytes=options.shard_bytes,
    )
    errors = None
    if not options.waive_reference:
        checked = [_shortened(captured) for captured in first]
        samples = [captured.sample for captured in checked]
        depth = choose_reference_layers(reader.target, spec.dtype, None)
        errors = compare_with_plain_forward(
            reader.target, spec, samples, checked, _BLAME, num_layers=depth
        )
    accounting, bad = _take(stage.path, spec, files, stored, reader)
    accounting.num_done = len(published_ids(stage.path))
    if not accounting.balanced:
        raise DataError(f"{stage.path}: files do not add up ({accounting.as_dict()})")
    if len(bad) > options.max_quarantined_share * len(files):
        raise DataError(
            f"{stage.path}: {len(bad)} of {len(files)} files are bad, more than "
            f"max_quarantined_share {options.max_quarantined_share}; the first: {bad[0]}. What is "
            "good is stored: mend the others or raise the share, and run the same command again."
        )
    result = {
        "target": asdict(reader.target.reference),
        "store": spec.to_dict(),
        "accounting": accounting.as_dict(),
        "flagged": 0,
        "chat_template_kwargs": data.manifest.result["chat_template_kwargs"] if data else {},
        "dtype": spec.dtype,
        "imported": {**asdict(said), "errors": errors},
    }
    return stage.finish(result, content=content_fingerprint(stage.path))


def _shortened(captured: Captured) -> Captured:
    """The beginning of a sample, at least as far as its first two supervised tokens."""
    sample = captured.sample
    end = max(_MOST_CHECKED_TOKENS, int(np.flatnonzero(sample.loss_mask)[:2][-1]) + 1)
    mask = sample.loss_mask[:end]
    short = TokenSample(sample.sample_id, sample.input_ids[:end], mask)
    return Captured(short, captured.aux[: short.num_aux_rows], captured.last[: int(mask.sum())])


def _take(
    folder: Path,
    spec: StoreSpec,
    files: list[ForeignFile],
    stored: dict[str, str],
    reader: _Reader,
) -> tuple[Accounting, list[ForeignFileError]]:
    """Store what is not stored yet; what is wrong is written down and told."""
    skipped: Counter[str] = Counter()
    bad: list[ForeignFileError] = []
    # A shard is durable, a line is not until later: after a power cut samples may have none.
    seen = set(stored.values())
    untold = published_ids(folder) - seen
    logger.info("import-store: %d of %d files were stored before", len(stored), len(files))
    # Files that were bad before may have been mended.
    (folder / QUARANTINE_PATTERN.format(worker=0)).unlink(missing_ok=True)
    with (
        ShardWriter(folder, spec) as writer,
        progress_bar("import", len(files) - len(stored), "file") as bar,
    ):
        for file in files:
            if file.relative in stored:
                continue
            bar.advance(1)
            try:
                captured = reader.read(file, spec.torch_dtype)
                _refuse_second(file, captured.sample, seen)
                if captured.sample.sample_id in untold:
                    _note(folder, IMPORTED_PATTERN, file, captured.sample.sample_id)
                    continue
            except SkippedSample as error:
                skipped[str(error)] += 1
            except ForeignFileError as error:
                logger.warning("import-store: %s", error)
                bad.append(error)
                _note(folder, QUARANTINE_PATTERN, file, file.relative, reason=error.reason)
            else:
                _note(folder, IMPORTED_PATTERN, file, captured.sample.sample_id)
                writer.add(captured.sample, captured.aux, captured.last)
    quarantined = Counter(error.reason for error in bad)
    return Accounting(len(files), quarantined=dict(quarantined), skipped=dict(skipped)), bad


def _refuse_second(file: ForeignFile, sample: TokenSample, seen: set[str]) -> None:
    if sample.sample_id in seen:
        raise ForeignFileError(file.path, "a second file of one sample", sample.sample_id)
    seen.add(sample.sample_id)


def _note(folder: Path, pattern: str, file: ForeignFile, sample_id: str, **more: str) -> None:
    """A line for a file whose sample is about to be stored, or is not."""
    found = file.path.stat()
    about = {
        "sample_id": sample_id,
        "file": file.relative,
        "bytes": found.st_size,
        "mtime_ns": found.st_mtime_ns,
        "fingerprint": fingerprint.of_file(file.path),
    }
    append_line(folder / pattern.format(worker=0), {**about, **more})


VERB = (ImportStoreOptions, run)
make_callable(__name__)
