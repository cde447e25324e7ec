"""`export-store`: a store as files that other tools read, one a sample, and what they mean."""

import json
import logging
from pathlib import Path
from typing import Any, TextIO

from paceline import fingerprint
from paceline.artefact import (
    StageFolder,
    describe_input,
    open_stage,
    replaced_file,
    write_json,
)
from paceline.errors import UsageError
from paceline.progress import progress_bar
from paceline.recipe import ExportStoreOptions
from paceline.store import Store, StoredSample
from paceline.store.foreign.layouts import CONFIG_NAME, find_files
from paceline.store.foreign.writing import LAYOUTS, Layout, write_sample
from paceline.target.layers import to_convention
from paceline.verbs import make_callable

logger = logging.getLogger(__name__)

# Names, splits and masks of the samples, a line a file: `prepare` reads it as data.
ROWS_NAME = "rows.jsonl"
_NOT_STORED = (
    "zeros: last states where nothing is supervised, auxiliary states from the last supervised "
    "position on; no draft step reads them"
)


def run(options: ExportStoreOptions) -> dict[str, Any]:
    """Write a store in the layout of another tool. Returns the manifest's result.

    Raises UsageError for a store that the layout cannot say, StreamError for one of which parts
    were let go.
    """
    if not (options.store and options.out):
        raise UsageError("export-store: pass `store` (a folder of `extract`) and `out`")
    store = Store(options.store)
    store.require_whole(options.split)
    layout = _layout(options)
    config = _config(store, layout, options)
    inputs = {"store": describe_input(options.store, store.manifest)}
    with open_stage(
        options.out, "export-store", inputs, options.identity(), options.overwrite
    ) as stage:
        if stage.done:
            return stage.result
        return _export(options, stage, store, layout, config)


def _layout(options: ExportStoreOptions) -> Layout:
    if not options.compress:
        return LAYOUTS[options.layout]
    if options.layout != "eagle":
        raise UsageError("export-store: `compress` is for layout eagle (.ckpt.gz)")
    return LAYOUTS["eagle.gz"]


def _config(store: Store, layout: Layout, options: ExportStoreOptions) -> dict[str, Any]:
    """What data_config.json says: by it, the files can be imported again without an option."""
    spec = store.spec
    is_apart = options.layout == "eagle"
    if spec.last_is_normed and not is_apart:
        raise UsageError(
            f"export-store: {options.store} holds last states after the final norm; layout "
            f"{options.layout} has them before it. Use layout eagle, which says which."
        )
    shown = spec.layers.aux if is_apart else spec.layers.all
    return {
        "model": {
            "target_model_path": store.manifest.result["target"]["target"],
            "hidden_size": spec.hidden_size,
        },
        "hidden_states": {
            "layer_ids": list(to_convention(shown, layout.convention, spec.layers.last)),
            "layer_convention": layout.convention,
            "last_norm": spec.last_norm,
            "dtype": spec.dtype,
            "rows_not_stored": _NOT_STORED,
        },
        "format": {"layout": options.layout, "first_file": layout.path(0)},
    }


def _export(
    options: ExportStoreOptions,
    stage: StageFolder,
    store: Store,
    layout: Layout,
    config: dict[str, Any],
) -> dict[str, Any]:
    chosen = range(len(store)) if options.split is None else store.split(options.split).tolist()
    chosen = list(chosen)[: options.limit]
    if not chosen:
        raise UsageError(f"export-store: {options.store} has no sample of split {options.split!r}")
    write_json(stage.path / CONFIG_NAME, config)
    with replaced_file(stage.path / ROWS_NAME) as aside, aside.open("w", encoding="utf-8") as rows:
        num_before = _write_files(stage.path, store, layout, chosen, rows)
    logger.info("export-store: %d of %d files were there before", num_before, len(chosen))
    result = {
        "target": store.manifest.result["target"],
        "layout": options.layout,
        "files": len(chosen),
        **config["hidden_states"],
    }
    return stage.finish(result, content=content_of(stage.path))


def _write_files(
    folder: Path, store: Store, layout: Layout, chosen: list[int], rows: TextIO
) -> int:
    """Write what is not there yet, and a row for each. Returns how many were there."""
    num_before = 0
    with progress_bar("export", len(chosen), "file") as bar:
        for number, index in enumerate(chosen):
            store.read_encoded(index).check()
            sample = store.read(index)
            path = folder / layout.path(number)
            # A name of this folder appears only with a whole file, so it is done.
            if path.is_file():
                num_before += 1
            else:
                write_sample(path, layout.values(sample))
            rows.write(json.dumps(_row(layout.path(number), sample), ensure_ascii=False) + "\n")
            bar.advance(1)
    return num_before


def _row(path: str, sample: StoredSample) -> dict[str, Any]:
    record = sample.record
    return {
        "file": path,
        "id": record.sample_id,
        "conversation_id": record.conversation_id,
        "source": record.source,
        "split": record.split,
        "input_ids": sample.input_ids.tolist(),
        "loss_mask": sample.loss_mask.int().tolist(),
        "num_past_end": record.num_past_end,
        "finished": record.finished,
    }


def content_of(folder: Path) -> str:
    """The fingerprint of an exported folder's files."""
    paths = [file.path for file in find_files(folder)] + [folder / CONFIG_NAME, folder / ROWS_NAME]
    return fingerprint.of_json({str(p.relative_to(folder)): fingerprint.of_file(p) for p in paths})


VERB = (ExportStoreOptions, run)
make_callable(__name__)
