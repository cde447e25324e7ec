"""`subset-store`: some samples of a store as a store of their own, or all in another codec."""

from typing import Any

import numpy as np

from paceline import fingerprint
from paceline.artefact import StageFolder, describe_input
from paceline.contracts import Accounting
from paceline.errors import UsageError
from paceline.housekeeping.ids import find_all, wanted_ids
from paceline.progress import progress_bar
from paceline.recipe import SubsetStoreOptions
from paceline.store import ShardWriter, Store, StoreSpec, content_fingerprint, published_ids
from paceline.store.copying import carried_result, copy_samples, refuse_second_loss
from paceline.store.staging import open_local_store
from paceline.verbs import make_callable


def run(options: SubsetStoreOptions) -> dict[str, Any]:
    """Copy the chosen samples, in the order of the store. Returns the manifest's result.

    Raises UsageError where nothing is left, for ids that the store does not have, and for a codec
    that cannot follow the store's own; StreamError where parts of what is wanted were let go.
    """
    if not (options.store and options.out):
        raise UsageError("subset-store: pass `store` and `out`")
    store = Store(options.store)
    refuse_second_loss(store.spec, options.codec or store.spec.codec)
    ids = wanted_ids(options.ids, options.ids_file)
    if not ids:
        store.require_whole(options.split)
    chosen = _choose(options, store, ids)
    inputs = {
        "target": store.manifest.inputs["target"],
        "store": describe_input(store.folder, store.manifest),
    }
    identity = {**options.identity(), "ids": fingerprint.of_json(ids), "ids_file": ""}
    with open_local_store(options.out, inputs, identity, options.overwrite) as stage:
        return stage.result if stage.done else _copy(options, stage, store, chosen)


def _choose(options: SubsetStoreOptions, store: Store, ids: list[str]) -> np.ndarray:
    """int64 indices of what all given options want, ascending."""
    chosen = np.arange(len(store))
    if options.split:
        chosen = np.intersect1d(chosen, store.split(options.split))
    if options.sources:
        of_sources = [store.records.source(name) for name in options.sources]
        chosen = np.intersect1d(chosen, np.concatenate(of_sources))
    if ids:
        chosen = np.intersect1d(chosen, find_all(store, ids))
    chosen = chosen[: options.limit]
    if not len(chosen):
        raise UsageError(f"subset-store: {store.folder} has no sample that all options want")
    return chosen


def _copy(
    options: SubsetStoreOptions, stage: StageFolder, store: Store, chosen: np.ndarray
) -> dict[str, Any]:
    changes = {"codec": options.codec or store.spec.codec, "shard_bytes": options.shard_bytes}
    spec = StoreSpec.from_dict({**store.spec.to_dict(), **changes})
    published = published_ids(stage.path)
    with (
        ShardWriter(stage.path, spec) as writer,
        progress_bar("subset", len(chosen), "sample") as bar,
    ):
        for index in chosen.tolist():
            if store.records[index].sample_id not in published:
                copy_samples(store, [index], writer)
            bar.advance(1)
    accounting = Accounting(len(chosen), len(published_ids(stage.path)))
    result = {
        **carried_result(store),
        "store": spec.to_dict(),
        "accounting": accounting.as_dict(),
        "subset_of": {"path": str(store.folder), "samples": len(store)},
    }
    return stage.finish(result, content=content_fingerprint(stage.path))


VERB = (SubsetStoreOptions, run)
make_callable(__name__)
