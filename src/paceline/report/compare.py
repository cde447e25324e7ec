"""Several runs side by side: acceptance, paired differences, what was done otherwise."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from paceline.acceptance.counts import resampled_sums
from paceline.artefact import differences
from paceline.errors import FingerprintMismatch, UsageError
from paceline.report.charts import METHOD_NAMES, Figure, acceptance_figures, loss_figure
from paceline.report.gather import RunRecord
from paceline.report.sections import (
    Cell,
    Rows,
    Table,
    Tile,
    finished_text,
    headline_length,
    interval_text,
    length_text,
    measured_on,
    target_name,
)

CONVERSATIONS_FILE = "conversations.jsonl"
_RESAMPLES, _SEED = 2000, 0
_INTERVAL = (2.5, 97.5)
_MOST_RUNS = 6
# Its id, its source and a digest of its content: two sources may number their conversations alike,
# two data sets too.
_Conversation = tuple[str, str, str]
# Options of these stages say how a draft was made.
_SHAPING = ("generate", "prepare", "extract", "align", "train")


@dataclass(frozen=True)
class Comparison:
    """What the page shows, part by part."""

    names: list[str]
    target: str
    first: str
    about: str
    definition: str
    verdict: str
    tiles: list[Tile]
    figures: list[Figure]
    acceptance: Table
    differences: Table | None
    unpaired: list[str]
    drafts: Table
    training: list[Figure]
    provenance: Table


def comparison(records: Sequence[RunRecord]) -> Comparison:
    """Set runs side by side; the first is what the others are held against.

    Raises UsageError for a run without `evaluate` or more runs than can be told apart,
    FingerprintMismatch for runs of different targets.
    """
    if len(records) > _MOST_RUNS:
        raise UsageError(f"report: at most {_MOST_RUNS} runs can be told apart on one page")
    without = [str(record.folder) for record in records if record.result("evaluate") is None]
    if without:
        raise UsageError(f"report: {', '.join(without)}: no finished `evaluate` to compare")
    _refuse_other_targets(records)
    names = _names(records)
    measured = {n: r.stages["evaluate"].result for n, r in zip(names, records, strict=True)}
    lengths = _common_lengths(measured)
    paired = {
        name: _paired(records[0], record, lengths)
        for name, record in zip(names[1:], records[1:], strict=True)
    }
    return Comparison(
        names=names,
        target=target_name(records[0]),
        first=names[0],
        about=_about(measured),
        definition=measured[names[0]]["definition"],
        verdict=_verdict(names[0], paired, lengths),
        tiles=_tiles(measured, headline_length(lengths)),
        figures=acceptance_figures({n: m["results"] for n, m in measured.items()}, lengths),
        acceptance=_acceptance(measured, lengths),
        differences=_difference_table(paired, lengths),
        unpaired=[*_unpaired(names, records, lengths[-1])],
        drafts=_drafts(names, records),
        training=_training(names, records),
        provenance=_provenance(names, records),
    )


def paired_difference(
    ours: dict[_Conversation, tuple[int, int]], theirs: dict[_Conversation, tuple[int, int]]
) -> tuple[float, float, float] | None:
    """(theirs - ours, and its 95% interval) in acceptance length, over the conversations that both
    have; each resample takes the same conversations of both. None where they share fewer than two:
    one says nothing of how conversations differ.

    ours, theirs: conversation -> (verify steps, accepted draft tokens).
    """
    shared = sorted(ours.keys() & theirs.keys())
    counts = np.array([[ours[c], theirs[c]] for c in shared], float).reshape(-1, 2, 2)
    if len(shared) < 2 or not counts[:, :, 0].sum(0).all():
        return None
    sums = resampled_sums(counts.reshape(-1, 4), _RESAMPLES, _SEED).reshape(-1, 2, 2)
    sums = sums[(sums[:, :, 0] > 0).all(1)]
    ratios = sums[:, :, 1] / sums[:, :, 0]
    low, high = np.percentile(ratios[:, 1] - ratios[:, 0], _INTERVAL)
    total = counts.sum(0)
    rates = total[:, 1] / total[:, 0]
    return float(rates[1] - rates[0]), float(low), float(high)


def _names(records: Sequence[RunRecord]) -> list[str]:
    """Folder names, with as much of the path as tells them apart."""
    paths = [record.folder.resolve().parts for record in records]
    if len(set(paths)) < len(paths):
        raise UsageError("report: the same run is given twice")
    depth = 1
    while len({path[-depth:] for path in paths}) < len(paths):
        depth += 1
    return ["/".join(path[-depth:]) for path in paths]


def _refuse_other_targets(records: Sequence[RunRecord]) -> None:
    prints = [r.stages["evaluate"].manifest.inputs["target"]["fingerprint"] for r in records]
    for record, found in zip(records[1:], prints[1:], strict=True):
        if lines := differences(prints[0], found):
            raise FingerprintMismatch(
                f"{records[0].folder} and {record.folder} are of different targets: acceptance "
                "lengths cannot be compared:\n  " + "\n  ".join(lines)
            )


def _common_lengths(measured: dict[str, dict[str, Any]]) -> list[str]:
    shared = set.intersection(*(set(m["results"]) for m in measured.values()))
    if not shared:
        raise UsageError("report: the runs were measured with no chain length K in common")
    return sorted(shared, key=int)


def _tiles(measured: dict[str, dict[str, Any]], length: str) -> list[Tile]:
    pooled = {name: found["results"][length]["pooled"] for name, found in measured.items()}
    return [
        Tile(f"{name}, K = {length}", length_text(p), interval_text(p))
        for name, p in pooled.items()
    ]


def _about(measured: dict[str, dict[str, Any]]) -> str:
    told = {name: measured_on(found) for name, found in measured.items()}
    if len(set(told.values())) == 1:
        return f"{next(iter(told.values()))}. Whiskers and small figures: 95% intervals."
    return "; ".join(f"{name}: {text}" for name, text in told.items()) + "."


def _paired(
    first: RunRecord, other: RunRecord, lengths: list[str]
) -> dict[str, tuple[float, float, float] | None]:
    ours, theirs = _conversations(first), _conversations(other)
    return {k: paired_difference(ours.get(k, {}), theirs.get(k, {})) for k in lengths}


def _unpaired(names: list[str], records: Sequence[RunRecord], length: str) -> Iterator[str]:
    """What keeps runs from being compared in pairs, a sentence for each run but the first."""
    ours, *others = (_conversations(record).get(length, {}).keys() for record in records)
    for name, theirs in zip(names[1:], others, strict=True):
        if not (shared := len(ours & theirs)):
            yield (
                f"{name} was not measured on the conversations of {names[0]}: their lengths differ "
                "by the data too, and no paired difference can be given."
            )
        elif shared == 1:
            yield f"{name} and {names[0]} share one conversation, too few for a paired difference."
        elif shared < max(len(ours), len(theirs)):
            yield (
                f"{name} and {names[0]} share {shared:,} conversations of {len(theirs):,} and "
                f"{len(ours):,}; the paired difference is over these alone."
            )


def _conversations(record: RunRecord) -> dict[str, dict[_Conversation, tuple[int, int]]]:
    """K -> conversation -> (verify steps, accepted). Empty where they were not kept."""
    path = Path(record.stages["evaluate"].folder) / CONVERSATIONS_FILE
    found: dict[str, dict[_Conversation, tuple[int, int]]] = {}
    for row in map(json.loads, path.read_text().splitlines() if path.is_file() else ()):
        counts = found.setdefault(str(row["num_draft_tokens"]), {})
        # Rows of earlier versions do not say what was walked, so nothing is known to be the same.
        content = row.get("content", str(path))
        counts[row["conversation"], row["source"], content] = (row["verify_steps"], row["accepted"])
    return found


def _verdict(
    first: str, paired: dict[str, dict[str, tuple[float, float, float] | None]], lengths: list[str]
) -> str:
    k = headline_length(lengths)
    sentences = []
    for name, found in paired.items():
        if (difference := found[k]) is None:
            continue
        change, low, high = difference
        surely = "" if low > 0 or high < 0 else "; the interval holds zero: no difference is shown"
        word = "above" if change >= 0 else "below"
        sentences.append(
            f"At K = {k} {name} is {abs(change):.3f} {word} {first} "
            f"(95% interval {low:+.3f} to {high:+.3f}{surely})."
        )
    return " ".join(sentences)


def _acceptance(measured: dict[str, dict[str, Any]], lengths: list[str]) -> Table:
    rows: Rows = []
    for name, found in measured.items():
        pooled = [found["results"][k]["pooled"] for k in lengths]
        rows.append([name, *((length_text(p), interval_text(p)) for p in pooled)])
    baselines = next(iter(measured.values())).get("baselines", {})
    for name, tables in baselines.items():
        pooled = [tables[k]["pooled"] for k in lengths]
        label = f"{METHOD_NAMES.get(name, name)}, for comparison"
        rows.append([label, *((length_text(p), interval_text(p)) for p in pooled)])
    return Table(["acceptance length", *(f"K = {k}" for k in lengths)], rows)


def _difference_table(
    paired: dict[str, dict[str, tuple[float, float, float] | None]], lengths: list[str]
) -> Table | None:
    if not any(found for by_length in paired.values() for found in by_length.values()):
        return None
    rows: Rows = [
        [name, *(_difference(by_length[k]) for k in lengths)] for name, by_length in paired.items()
    ]
    return Table(["difference", *(f"K = {k}" for k in lengths)], rows)


def _difference(found: tuple[float, float, float] | None) -> Cell:
    if found is None:
        return "n/a"
    return f"{found[0]:+.3f}", f"{found[1]:+.3f} to {found[2]:+.3f}"


def _drafts(names: list[str], records: Sequence[RunRecord]) -> Table:
    """Options and inputs in which the runs differ, one a row."""
    told = [_told(record) for record in records]
    keys = list(dict.fromkeys(key for values in told for key in values))
    rows: Rows = [
        [key, *(values.get(key, "none") for values in told)]
        for key in keys
        if len({values.get(key) for values in told}) > 1
    ]
    return Table(["option", *names], rows, numeric=False)


def _told(record: RunRecord) -> dict[str, str]:
    values: dict[str, str] = {}
    for stage in _SHAPING:
        if stage in record.stages:
            _flatten(record.stages[stage].manifest.options, stage, values)
    if prepared := record.result("prepare"):
        values["supervised training tokens"] = f"{prepared['splits']['train']['supervised']:,}"
    if trained := record.result("train"):
        values["optimiser steps"] = f"{trained['steps']:,}"
    return values


def _flatten(options: dict[str, Any], prefix: str, values: dict[str, str]) -> None:
    for key, value in options.items():
        name = f"{prefix}.{key}"
        if isinstance(value, dict):
            _flatten(value, name, values)
        else:
            values[name] = value if isinstance(value, str) else json.dumps(value)


def _training(names: list[str], records: Sequence[RunRecord]) -> list[Figure]:
    logs = {n: r.log for n, r in zip(names, records, strict=True) if r.log.train}
    return [loss_figure(logs)] if len(logs) > 1 else []


def _provenance(names: list[str], records: Sequence[RunRecord]) -> Table:
    rows: Rows = [
        [
            f"{stage} of {name}",
            found.manifest.fingerprint or "",
            finished_text(found.manifest),
            found.manifest.versions.get("paceline", "unknown"),
        ]
        for name, record in zip(names, records, strict=True)
        for stage, found in record.stages.items()
    ]
    return Table(["stage", "fingerprint", "finished, UTC", "paceline"], rows, numeric=False)
