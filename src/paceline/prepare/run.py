"""The `prepare` stage: rows in, token data set out, part by part, resumable at any instant.

A part is a fixed range of input rows, so that an interrupted run and an unbroken one write the same
files. What a resumed run must know lies inside the parts.
"""

import logging
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

from paceline import fingerprint
from paceline.artefact import StageFolder, differences, load_finished, open_stage
from paceline.contracts import HELDOUT_SPLIT
from paceline.dataset import list_parts, read_record, write_part
from paceline.errors import DataError, UsageError
from paceline.prepare.convert import DELIBERATE, GIVEN_IDS, Converter
from paceline.prepare.reading import (
    RawRow,
    count_rows,
    files_of,
    find_entries,
    fingerprint_files,
    read_rows,
)
from paceline.prepare.summary import (
    COUNTS_FILE,
    SKIPPED_FILE,
    Totals,
    add_up,
    require_usable,
    write_counts,
    write_skipped,
)
from paceline.prepare.template import template_text
from paceline.progress import progress_bar
from paceline.recipe import PrepareOptions
from paceline.side_files import describe_side_files
from paceline.target.spec import Target, open_target

logger = logging.getLogger(__name__)

# A part is closed at whichever comes first; both depend on the data alone.
PART_ROWS = 2000
PART_BYTES = 8 << 20
# Options that `generate` has too, taken over from its folders where they are left open.
_SHAPING = ("chat_template_kwargs", "system_prompt")
# Before so many rows, a share says too little to stop a run.
_SHARE_MATTERS_AFTER = 1000


def run(options: PrepareOptions) -> dict[str, Any]:
    """Prepare a token data set; returns the manifest's result. See docs/prepare.md.

    Raises UsageError (missing files), DataError (too many rows skipped, nothing to learn),
    TargetError, FingerprintMismatch.
    """
    if not options.out:
        raise UsageError("prepare: no `out` given: name the folder to write")
    target = open_target(options, with_weights=False)
    entries = find_entries(options.data)
    files = files_of(entries)
    template = template_text(target, options.chat_template)
    inputs = _inputs(target, template, files)
    options = _agree(options, [entry for entry in entries if entry.is_dir()], inputs)
    identity = options.identity()
    # The template is compared by its text, wherever its file lies.
    identity.pop("chat_template")
    with open_stage(options.out, "prepare", inputs, identity, options.overwrite) as folder:
        if folder.done:
            result = folder.result
            num_bad = sum(n for why, n in result["skipped"].items() if why not in DELIBERATE)
            _check_bad(options, num_bad, result["rows"], folder.path)
            return result
        converter = Converter(options, target, template)
        try:
            _convert_all(options, files, converter, folder)
        finally:
            converter.close()
        return _finish(options, target, converter, folder)


def _inputs(target: Target, template: str | None, files: list[Path]) -> dict[str, dict[str, Any]]:
    # The weights do not shape token ids: a fine-tuned sibling may use the same data set.
    return {
        "target": {"path": target.reference.target, "fingerprint": target.text_fingerprints},
        "template": {"fingerprint": fingerprint.of_bytes((template or "").encode())},
        "data": {
            "path": [str(file) for file in files],
            "fingerprint": fingerprint_files(files),
        },
    }


def _agree(
    options: PrepareOptions, folders: Iterable[Path], inputs: dict[str, Any]
) -> PrepareOptions:
    """Options with what shaped the answers of `generate` folders where they leave it open.

    Raises UsageError where they, or two folders, say otherwise: the answers would stand in another
    context.
    """
    agreed = {name: value for name in _SHAPING if (value := getattr(options, name))}
    for folder in folders:
        manifest = load_finished(folder, "generate")
        found = {name: manifest.inputs[name]["fingerprint"] for name in ("target", "template")}
        wanted = {name: inputs[name]["fingerprint"] for name in ("target", "template")}
        found["target"] = {part: found["target"][part] for part in wanted["target"]}
        shaping = {name: manifest.options[name] for name in (*_SHAPING, "begin_token")}
        lines = differences(found, wanted)
        lines += differences({name: shaping[name] for name in agreed}, agreed)
        if lines:
            raise UsageError(
                f"data: the answers in {folder} were written with other settings than prepare's "
                "or those of a folder before it:\n  " + "\n  ".join(lines)
            )
        agreed = shaping
    return options.model_copy(update=agreed)


def _convert_all(
    options: PrepareOptions, files: list[Path], converter: Converter, folder: StageFolder
) -> None:
    rows_done = num_bad = num_parts = 0
    for part in list_parts(folder.path):
        record = read_record(part)
        converter.restore(record)
        rows_done += record["rows"]
        num_bad += _count_bad(record["skipped"])
        num_parts += 1
    if options.strict:
        _check_bad(options, num_bad, rows_done, folder.path)
    if rows_done:
        logger.info("%s: going on after %d rows", folder.path, rows_done)
    rows = islice(read_rows(files), rows_done, options.limit)
    total = count_rows(files)
    if options.limit is not None:
        total = min(total, options.limit) if total is not None else options.limit
    with progress_bar("prepare", total, "rows") as bar:
        bar.advance(rows_done)
        for number, batch in enumerate(_parts(rows), start=num_parts):
            samples, record = converter.convert(batch)
            write_part(folder.path, number, samples, record.as_dict())
            rows_done += len(batch)
            num_bad += _count_bad(record.skipped)
            bar.advance(len(batch), f"{num_bad} skipped" if num_bad else "")
            if rows_done >= _SHARE_MATTERS_AFTER:
                _check_share(options, num_bad, rows_done, folder.path)


def _parts(rows: Iterator[RawRow]) -> Iterator[list[RawRow]]:
    batch: list[RawRow] = []
    num_bytes = 0
    for row in rows:
        batch.append(row)
        num_bytes += row.num_bytes
        if len(batch) >= PART_ROWS or num_bytes >= PART_BYTES:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch


def _count_bad(skipped: list[dict[str, Any]]) -> int:
    return sum(entry["reason"] not in DELIBERATE for entry in skipped)


def _check_share(options: PrepareOptions, num_bad: int, num_rows: int, folder: Path) -> None:
    if num_bad > options.max_skipped_share * num_rows:
        write_skipped(folder)
        raise DataError(
            f"{num_bad} of {num_rows} rows had to be skipped, more than max_skipped_share = "
            f"{options.max_skipped_share}; {folder / SKIPPED_FILE} says why, row by row"
        )


def _check_bad(options: PrepareOptions, num_bad: int, num_rows: int, folder: Path) -> None:
    """What earlier runs skipped, by the options of this one."""
    if options.strict and num_bad:
        write_skipped(folder)
        raise DataError(
            f"{num_bad} of {num_rows} rows were skipped by an earlier run, and strict allows none; "
            f"{folder / SKIPPED_FILE} says why, row by row"
        )
    _check_share(options, num_bad, num_rows, folder)


def _check_weights(options: PrepareOptions, totals: Totals) -> None:
    """Raises UsageError where a weight is of no source. A `limit` may keep its rows from us."""
    unknown = sorted(set(options.source_weights) - set(totals.rows_of))
    if unknown and (options.limit is None or totals.rows < options.limit):
        raise UsageError(
            f"source_weights: no row is of source {', '.join(unknown)}; there are "
            f"{', '.join(sorted(totals.rows_of)) or 'none'}"
        )


def _finish(
    options: PrepareOptions, target: Target, converter: Converter, folder: StageFolder
) -> dict[str, Any]:
    totals = add_up(folder.path, target.vocab_size)
    write_skipped(folder.path)
    _check_weights(options, totals)
    require_usable(totals, folder.path)
    _check_share(options, totals.num_bad, totals.rows, folder.path)
    if options.split == "auto" and not totals.splits[HELDOUT_SPLIT]["samples"]:
        logger.warning(
            "prepare: no conversation is held out, and `evaluate` will find none: raise "
            "heldout_share, or give rows `split: heldout`"
        )
    write_counts(folder.path, totals)
    result = _result(options, target, totals, converter)
    result |= describe_side_files(folder.path, [COUNTS_FILE, SKIPPED_FILE])
    return folder.finish(result, totals.content)


def _result(
    options: PrepareOptions, target: Target, totals: Totals, converter: Converter
) -> dict[str, Any]:
    end_ids = set(target.end_of_turn_ids)
    if set(totals.methods) - {GIVEN_IDS}:
        end_ids.update(converter.template_end_ids())
    splits = {name: _amounts(counter) for name, counter in totals.splits.items()}
    return {
        "target": asdict(target.reference),
        "rows": totals.rows,
        "rows_kept": totals.kept,
        "skipped": dict(totals.skipped.most_common()),
        "conversations": len(converter.conversations),
        "samples": sum(split["samples"] for split in splits.values()),
        "tokens": sum(split["tokens"] for split in splits.values()),
        "supervised_tokens": sum(split["supervised"] for split in splits.values()),
        "splits": splits,
        "sources": {name: _amounts(c) for name, c in sorted(totals.sources.items())},
        "longest_sample": totals.longest,
        "past_end_tokens": totals.past_end,
        "unfinished": totals.unfinished,
        "mask_method": totals.methods.most_common(1)[0][0],
        "mask_methods": dict(totals.methods.most_common()),
        "notes": dict(totals.notes),
        "split_samples": totals.split_samples,
        "cut": totals.cut_samples,
        "cut_supervised_tokens": totals.cut_supervised,
        "chat_template_kwargs": options.chat_template_kwargs,
        "system_prompt": options.system_prompt,
        "end_of_turn_ids": sorted(end_ids),
        "num_real_tokens": target.num_real_tokens,
        "vocab_size": target.vocab_size,
        "supervised_token_counts_file": COUNTS_FILE,
    }


def _amounts(counter: dict[str, int]) -> dict[str, int]:
    return {name: counter[name] for name in ("samples", "tokens", "supervised")}
