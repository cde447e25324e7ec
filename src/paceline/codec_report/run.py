"""The `codec-report` verb: one store in every codec, and what each costs."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from paceline import fingerprint
from paceline.artefact import (
    StageFolder,
    describe_input,
    folder_size,
    load_finished,
    open_stage,
    write_json,
)
from paceline.codec_report.drafts import DraftLab
from paceline.codec_report.loss import Pairs, errors_of, kl_of
from paceline.contracts import ACCEPTANCE_DEFINITION, HELDOUT_SPLIT, TRAIN_SPLIT
from paceline.device import choose_device
from paceline.errors import UsageError
from paceline.housekeeping.subset_store import run as subset
from paceline.recipe import CodecReportOptions, SubsetStoreOptions
from paceline.store import Store
from paceline.target.model import TeacherHead
from paceline.target.spec import Target, open_target

RESULT_FILE = "result.json"
LOSSES_FILE = "losses-{codec}.json"
_RAW = "raw"


def run(options: CodecReportOptions) -> dict[str, Any]:
    """Measure codecs on a store. Returns what `result.json` holds; the stores and drafts that it
    took stay below `out`.

    Raises UsageError for a store that has lost digits already.
    """
    if not (options.store and options.out and (options.vocab or not options.steps)):
        raise UsageError(
            "codec-report: pass `store` (of `extract`), `vocab` (of `align`, or `steps` 0) and "
            "`out`"
        )
    store = Store(options.store)
    store.require_whole()
    target = open_target(options, store.manifest.result["target"])
    target.check_made_by(
        store.manifest.inputs["target"]["fingerprint"], f"{store.folder} holds states of"
    )
    inputs = {
        "store": describe_input(options.store, store.manifest),
        "target": target.describe_input(),
    }
    if options.steps:
        inputs["vocab"] = describe_input(options.vocab, load_finished(options.vocab, "align"))
    with open_stage(
        options.out, "codec-report", inputs, options.identity(), options.overwrite
    ) as stage:
        return stage.result if stage.done else _measure(options, stage, store, target)


def _measure(
    options: CodecReportOptions, stage: StageFolder, store: Store, target: Target
) -> dict[str, Any]:
    stores = _store_in_all_codecs(options, stage.path / "stores", store)
    plain = Store(stores[_RAW])
    codecs: dict[str, dict[str, Any]] = {_RAW: _sizes(plain)}
    for codec in options.codecs:
        coded = Store(stores[codec])
        codecs[codec] = {**_sizes(coded), **_losses(options, stage, target, Pairs(plain, coded))}
    lab = DraftLab(options, stage.path / "drafts", stores)
    if options.steps:
        for codec, found in codecs.items():
            # The same bits make the same draft: nothing would be learnt from training it again.
            found["acceptance"] = lab.acceptance(_RAW if found.get("same_bits") else codec)
    result = {
        "target": asdict(target.reference),
        "definition": ACCEPTANCE_DEFINITION,
        **_about(plain),
        "steps": options.steps,
        "codecs": codecs,
    }
    write_json(stage.path / RESULT_FILE, result)
    return stage.finish(result, content=fingerprint.of_json(result))


def _losses(
    options: CodecReportOptions, stage: StageFolder, target: Target, pairs: Pairs
) -> dict[str, Any]:
    """What a codec does to states; kept in a file, so that a second run need not look again."""
    path = stage.path / LOSSES_FILE.format(codec=pairs.coded.spec.codec)
    if path.is_file():
        return json.loads(path.read_text())
    errors, is_same = errors_of(pairs)
    head = TeacherHead(
        target,
        torch.float32,
        choose_device(options.device),
        is_normed=pairs.plain.spec.last_is_normed,
    )
    found = {
        "same_bits": is_same,
        "errors": errors,
        "kl": kl_of(pairs, head, options.kl_rows),
    }
    write_json(path, found)
    return found


def _store_in_all_codecs(
    options: CodecReportOptions, folder: Path, store: Store
) -> dict[str, Path]:
    ids = []
    if options.samples:
        for split in (TRAIN_SPLIT, HELDOUT_SPLIT):
            chosen = store.split(split)[: options.samples].tolist()
            ids += [store.records[index].sample_id for index in chosen]
    stores = {}
    for codec in (_RAW, *options.codecs):
        stores[codec] = folder / codec
        subset(
            SubsetStoreOptions(store=options.store, out=str(folder / codec), ids=ids, codec=codec)
        )
    return stores


def _about(store: Store) -> dict[str, Any]:
    num_tokens = int(store.records.num_tokens.sum())
    return {
        "samples": len(store),
        "tokens": num_tokens,
        "supervised_share": int(store.records.num_supervised.sum()) / num_tokens,
        "dtype": store.spec.dtype,
        "hidden_size": store.spec.hidden_size,
    }


def _sizes(store: Store) -> dict[str, float]:
    """Bytes of all files of a store's folder per token, and against those of four full states."""
    total = folder_size(store.folder).num_bytes
    per_token = total / int(store.records.num_tokens.sum())
    full = 4 * store.spec.hidden_size * store.spec.torch_dtype.itemsize
    return {"bytes_per_token": per_token, "share_of_four_states": per_token / full}
