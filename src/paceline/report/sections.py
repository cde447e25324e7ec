"""What the page says in words and tables, out of what the stages reported."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from paceline.artefact import Manifest
from paceline.report.charts import METHOD_NAMES, methods_of
from paceline.report.gather import RunRecord
from paceline.runlog import throughput
from paceline.units import duration_text, size_text

_HEADLINE_LENGTH = 3
_MODES = {
    "chain": "server-free: the draft's chains against the target's recorded answers",
    "decode": "real speculative decoding with transformers",
    "served": "served by vLLM",
}


@dataclass(frozen=True)
class Tile:
    """A headline figure."""

    label: str
    value: str
    detail: str


@dataclass(frozen=True)
class Check:
    """One line of the verification table. ok: None where it is told and not judged."""

    name: str
    seen: str
    ok: bool | None


# A cell is a text, or a text and a small one under it.
Cell = str | tuple[str, str]
Rows = list[list[Cell]]


@dataclass(frozen=True)
class Table:
    """numeric: the first column alone is text; the others are numbers, flush right."""

    columns: list[str]
    rows: Rows
    numeric: bool = True


def target_name(run: RunRecord) -> str:
    """The target's short name, of the first stage that knows it."""
    for record in run.stages.values():
        if target := record.result.get("target"):
            return PurePosixPath(target["target"]).name.removesuffix(".gguf")
    return "unknown target"


def headline_length(lengths: Iterable[str]) -> str:
    """The K of the headline: 3 where it was measured, else the nearest to it."""
    return min(lengths, key=lambda k: (abs(int(k) - _HEADLINE_LENGTH), int(k)))


def tiles(run: RunRecord) -> list[Tile]:
    """The figures on top: the draft beside its baselines at one K."""
    measured = run.result("evaluate")
    if not measured:
        return []
    k = headline_length(measured["results"])
    found = []
    for name, tables in methods_of(measured).items():
        pooled = tables[k]["pooled"]
        found.append(Tile(f"{name}, K = {k}", length_text(pooled), interval_text(pooled)))
    return found


def verdict(run: RunRecord) -> str:
    """The draft against its best baseline, in a sentence that claims no more than was measured."""
    measured = run.result("evaluate")
    if not measured or not measured.get("baselines"):
        return ""
    k = headline_length(measured["results"])
    own = {name: value for name, value in measured.items() if name != "beside"}
    pooled = {name: tables[k]["pooled"] for name, tables in methods_of(own).items()}
    draft = pooled.pop("draft")
    known = {n: p for n, p in pooled.items() if p["acceptance_length"] is not None}
    if draft["acceptance_length"] is None or not known:
        return ""
    name, best = max(known.items(), key=lambda item: item[1]["acceptance_length"])
    difference = draft["acceptance_length"] - best["acceptance_length"]
    word = "above" if difference >= 0 else "below"
    told = f"At K = {k} the draft is {abs(difference):.2f} {word} the best baseline ({name})"
    if not (draft["interval"] and best["interval"]):
        return f"{told}; one conversation gives no interval."
    apart = draft["interval"][0] > best["interval"][1] or draft["interval"][1] < best["interval"][0]
    intervals = "do not overlap" if apart else "overlap"
    return f"{told}; their 95% intervals {intervals}."


def measured_on(measured: dict[str, Any]) -> str:
    """What an acceptance was measured on, and how."""
    pooled = next(iter(measured["results"].values()))["pooled"]
    answers = f"of split {measured['split']}" if measured.get("split") else "of a prompt set"
    sampled = measured.get("temperature")
    missing = measured.get("baselines_left_out", {}).items()
    return (
        f"{pooled['conversations']:,} conversations {answers}, {_MODES[measured['mode']]}; dtype "
        f"{measured['dtype']}"
        + (f"; temperature {sampled:g}" if sampled else "")
        + "".join(f"; no {METHOD_NAMES[name]}: {why}" for name, why in missing)
    )


def acceptance_table(measured: dict[str, Any]) -> Table:
    lengths = sorted(measured["results"], key=int)
    rows: Rows = []
    for name, tables in methods_of(measured).items():
        pooled = [tables[k]["pooled"] for k in lengths]
        rows.append([name, *((length_text(p), interval_text(p)) for p in pooled)])
    steps = [f"{measured['results'][k]['pooled']['verify_steps']:,.0f}" for k in lengths]
    rows.append(["verify steps of the draft", *steps])
    left_out = [measured["results"][k]["pooled"]["left_out"] for k in lengths]
    if any(left_out):
        rows.append(["steps left out", *(f"{n:,.0f}" for n in left_out)])
    return Table(["acceptance length", *(f"K = {k}" for k in lengths)], rows)


def source_table(measured: dict[str, Any]) -> Table | None:
    """The draft by source, for every K; None where there is one source only."""
    lengths = sorted(measured["results"], key=int)
    sources = measured["results"][lengths[0]]["sources"]
    if len(sources) < 2:
        return None
    by_size = sorted(sources, key=lambda s: -sources[s]["conversations"])
    rows: Rows = [
        [
            f"{i}. {name}",
            *(
                (length_text(found), interval_text(found))
                for found in (measured["results"][k]["sources"][name] for k in lengths)
            ),
            f"{sources[name]['conversations']:,}",
        ]
        for i, name in enumerate(by_size, start=1)
    ]
    return Table(["source", *(f"K = {k}" for k in lengths), "conversations"], rows)


def data_table(prepared: dict[str, Any]) -> Table:
    groups = [(f"split {name}", amounts) for name, amounts in prepared["splits"].items()]
    groups += [(f"source {name}", amounts) for name, amounts in prepared["sources"].items()]
    rows: Rows = [
        [name, *(f"{amounts[key]:,}" for key in ("samples", "tokens", "supervised"))]
        for name, amounts in groups
    ]
    return Table(["", "samples", "tokens", "supervised"], rows)


def data_facts(run: RunRecord) -> list[tuple[str, str]]:
    """Name and value pairs on where the data came from and what became of them."""
    facts = []
    if generated := run.result("generate"):
        facts.append(("answers by the target", f"{generated['answers']:,}"))
        facts.append(("answers ended by", _counts(generated["finish_reasons"])))
    if prepared := run.result("prepare"):
        facts += [
            ("rows kept", f"{prepared['rows_kept']:,} of {prepared['rows']:,}"),
            ("rows skipped", _counts(prepared["skipped"])),
            ("conversations", f"{prepared['conversations']:,}"),
            ("loss mask from", _counts(prepared["mask_methods"])),
            ("longest sample", f"{prepared['longest_sample']:,} tokens"),
            ("cut to the longest length", f"{prepared['cut']:,} samples"),
        ]
    return facts


def checks(run: RunRecord) -> list[Check]:
    """The verification table: what was checked on the way, and what was seen."""
    return [*_extraction_checks(run), *_decoding_checks(run), *_export_checks(run)]


def _extraction_checks(run: RunRecord) -> Iterator[Check]:
    extracted = run.result("extract")
    if not extracted:
        return
    accounting = extracted["accounting"]
    lost = sum(accounting["quarantined"].values())
    skipped = sum(accounting["skipped"].values())
    yield Check(
        "every sample accounted for",
        f"{accounting['in']:,} in = {accounting['done']:,} stored + {lost:,} quarantined + "
        f"{skipped:,} skipped",
        accounting["in"] == accounting["done"] + lost + skipped and not lost,
    )
    yield Check("samples out of the probe's range (flagged)", f"{extracted['flagged']:,}", None)
    if probe := extracted.get("probe"):
        agree, rows = probe["num_greedy_agree"], probe["num_greedy_rows"]
        yield Check(
            "the engine's greedy tokens are the most likely of head(norm(last))",
            f"{agree} of {rows}",
            # In half precision the two passes round otherwise, and the probe allows for it.
            agree == rows or extracted["dtype"] != "float32",
        )
        waived = probe["errors"] is None
        seen = "waived" if waived else f"{probe['num_rows']:,} rows, see below"
        yield Check("states equal those of a plain transformers forward", seen, not waived)


def _decoding_checks(run: RunRecord) -> Iterator[Check]:
    measured = run.result("evaluate")
    if measured and (lossless := measured.get("lossless")):
        equal = lossless["equal_outputs"] == lossless["outputs"]
        yield Check(
            "speculative decoding gives the target's own greedy tokens",
            f"{lossless['equal_outputs']:,} of {lossless['outputs']:,} outputs",
            equal if measured["dtype"] == "float32" else None,
        )


def _export_checks(run: RunRecord) -> Iterator[Check]:
    exported = run.result("export")
    for form, entry in exported["forms"].items() if exported else ():
        replay = entry["replay"]
        seen = f"{replay['steps']} steps in {entry['dtype']}: the same logits"
        if replay["relative_error"]:
            seen = (
                f"{replay['steps']} steps in {entry['dtype']}: logits off by "
                f"{replay['relative_error']:.1g} of their norm, allowed {replay['bound']:.1g}"
            )
        yield Check(
            f"exported form {form}, re-loaded, replays the trained draft",
            seen,
            replay["relative_error"] <= replay["bound"],
        )


def serving(run: RunRecord) -> list[tuple[str, str, str]]:
    """(form, lowest release of its server, command) of each exported form."""
    exported = run.result("export")
    return [
        (form, f"{entry['server']} {entry['lowest_version']} or newer", entry["command"])
        for form, entry in (exported["forms"].items() if exported else ())
    ]


def probe_table(run: RunRecord) -> Table | None:
    """Errors per captured layer against the plain forward, relative to each row's norm."""
    extracted = run.result("extract")
    probe = extracted.get("probe") if extracted else None
    if not extracted or not probe or not probe["errors"]:
        return None
    last = f"k={extracted['store']['last_layer']}"
    rows: Rows = [
        [
            f"{layer} (last)" if layer == last else layer,
            *(f"{found[name]:.1e}" for name in ("median", "p99", "max")),
        ]
        for layer, found in probe["errors"].items()
    ]
    return Table(["layer", "median", "99%", "max"], rows)


def stage_table(run: RunRecord) -> Table:
    """Provenance: each stage's folder, fingerprint and time."""
    rows: Rows = [
        [
            name,
            record.name,
            record.manifest.fingerprint or "",
            finished_text(record.manifest),
            duration_text(run.seconds[name]) if name in run.seconds else "not kept",
        ]
        for name, record in run.stages.items()
    ]
    return Table(["stage", "folder", "fingerprint", "finished, UTC", "time"], rows, numeric=False)


def input_table(run: RunRecord) -> Table:
    """Provenance: what came from outside the run (data, target), with its fingerprints."""
    made_here = {record.manifest.fingerprint for record in run.stages.values()}
    rows: Rows = []
    seen: set[str] = set()
    for name, record in run.stages.items():
        for kind, entry in record.manifest.inputs.items():
            prints = entry["fingerprint"]
            key = json.dumps([kind, prints], sort_keys=True)
            if key in seen or (isinstance(prints, str) and prints in made_here):
                continue
            seen.add(key)
            rows.append([f"{kind} of {name}", _paths(entry.get("path")), _prints(prints)])
    return Table(["input", "from", "fingerprint"], rows, numeric=False)


def versions(run: RunRecord) -> list[tuple[str, str]]:
    """Package versions; several where stages ran with different ones."""
    found: dict[str, list[str]] = {}
    for record in run.stages.values():
        for package, version in record.manifest.versions.items():
            if version not in found.setdefault(package, []):
                found[package].append(version)
    return [(package, ", ".join(values)) for package, values in found.items()]


def options(run: RunRecord) -> list[tuple[str, str]]:
    """The options that shaped each stage's result, as JSON."""
    return [
        (name, json.dumps(record.manifest.options, indent=2, ensure_ascii=False))
        for name, record in run.stages.items()
    ]


def draft_facts(run: RunRecord) -> list[tuple[str, str]]:
    """The draft's shape and how it was trained."""
    trained = run.result("train")
    if not trained:
        return []
    draft, chosen = trained["draft"], run.stages["train"].manifest.options
    return [
        ("layers", str(draft["num_layers"])),
        ("width", f"{draft['hidden_size']:,}"),
        ("reads hidden states k", ", ".join(map(str, draft["aux_layers"]))),
        ("norm of each of them", draft["aux_norm"]),
        ("training-time-test steps", str(chosen["ttt_steps"])),
        ("optimiser steps", f"{trained['steps']:,}, of {chosen['batch_rows']:,} rows each"),
        ("training samples", f"{trained['train_samples']:,}"),
        ("arithmetic", f"{trained['dtype']} on {trained['device']}"),
        *_speed_facts(run),
        *_best_facts(trained),
    ]


def _speed_facts(run: RunRecord) -> list[tuple[str, str]]:
    """Over all steps that were logged, waiting counted."""
    if not run.log.train:
        return []
    seen = throughput(run.log.train)
    facts = [
        ("tokens a second", f"{seen['tokens_per_s']:,.0f}, supervised {seen['rows_per_s']:,.0f}"),
        ("waiting for data", f"{100 * seen['wait_share']:.1f}% of the time"),
    ]
    if seen["mfu"] is not None:
        facts += [
            ("needed arithmetic (MFU)", f"{100 * seen['mfu']:.1f}% of matrix products alone"),
            ("peak memory", size_text(seen["peak_bytes"])),
        ]
    return facts


def _best_facts(trained: dict[str, Any]) -> list[tuple[str, str]]:
    best = trained.get("best")
    if not best:
        return []
    length = f"{best['acceptance_length']:.2f} at K = {best['num_draft_tokens']}"
    return [
        ("best held-out acceptance length", f"{length}, after step {best['step']:,}"),
        ("the draft is that after step", f"{trained['draft_step']:,}"),
    ]


def vocabulary_facts(aligned: dict[str, Any]) -> list[tuple[str, str]]:
    size = f"{aligned['draft_vocab_size']:,} of {aligned['vocab_size']:,} tokens"
    return [
        ("size", size),
        ("covers", f"{100 * aligned['coverage']:.2f}% of the supervised training tokens"),
        ("out of reach", f"{100 * aligned['lost_share']:.2f}% of the supervised training tokens"),
        ("fillers, never seen supervised", f"{aligned['num_filler']:,}"),
    ]


def finished_text(manifest: Manifest) -> str:
    """When a stage was finished, in UTC; empty for one that is not."""
    return (manifest.finished or "").replace("T", " ").removesuffix("+00:00")


def length_text(pooled: dict[str, Any]) -> str:
    value = pooled["acceptance_length"]
    return "n/a" if value is None else f"{value:.2f}"


def interval_text(pooled: dict[str, Any]) -> str:
    interval = pooled["interval"]
    return f"{interval[0]:.2f}\u2013{interval[1]:.2f}" if interval else ""


def _counts(mapping: dict[str, int]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {n:,}" for name, n in mapping.items()) or "none"


def _paths(path: str | list[str] | None) -> str:
    if path is None:
        return ""
    return path if isinstance(path, str) else ", ".join(path)


def _prints(prints: str | dict[str, str]) -> str:
    if isinstance(prints, str):
        return prints
    return ", ".join(f"{part} {value}" for part, value in prints.items())
