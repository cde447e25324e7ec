"""`merge-stores`: several stores of one target as one."""

from collections.abc import Iterator
from typing import Any

from paceline.artefact import StageFolder, describe_input, differences
from paceline.contracts import Accounting
from paceline.errors import FingerprintMismatch, StoreError, UsageError
from paceline.progress import progress_bar
from paceline.recipe import MergeStoresOptions
from paceline.store import ShardWriter, Store, StoreSpec, content_fingerprint, published_ids
from paceline.store.copying import carried_result, copy_samples
from paceline.store.staging import open_local_store
from paceline.verbs import make_callable

_TWICE = "in an earlier store too"


def run(options: MergeStoresOptions) -> dict[str, Any]:
    """Merge stores; samples keep their bytes. Returns the manifest's result.

    Raises FingerprintMismatch that names what two stores do not share, StoreError for two different
    samples of one id, StreamError for a store of which parts were let go.
    """
    if len(options.stores) < 2 or not options.out:
        raise UsageError("merge-stores: name two stores or more, and `out`")
    stores = [Store(folder) for folder in options.stores]
    for store in stores:
        store.require_whole()
    for other in stores[1:]:
        _refuse_other(stores[0], other)
    inputs: dict[str, Any] = {"target": stores[0].manifest.inputs["target"]}
    for number, store in enumerate(stores):
        inputs[f"store_{number}"] = describe_input(store.folder, store.manifest)
    with open_local_store(options.out, inputs, options.identity(), options.overwrite) as stage:
        return stage.result if stage.done else _merge(options, stage, stores)


def _refuse_other(first: Store, other: Store) -> None:
    if lines := differences(_shared(first), _shared(other)):
        raise FingerprintMismatch(
            f"{first.folder} and {other.folder} are not of one kind:\n  " + "\n  ".join(lines)
        )


def _shared(store: Store) -> dict[str, Any]:
    """What all samples of one store have in common."""
    return {
        "store": store.spec.identity(),
        "target": store.manifest.inputs["target"]["fingerprint"],
        "chat_template_kwargs": store.manifest.result["chat_template_kwargs"],
    }


def _merge(options: MergeStoresOptions, stage: StageFolder, stores: list[Store]) -> dict[str, Any]:
    shared = {**stores[0].spec.to_dict(), "shard_bytes": options.shard_bytes}
    spec = StoreSpec.from_dict(shared)
    chosen = [list(_new_samples(stores, number)) for number in range(len(stores))]
    published = published_ids(stage.path)
    with (
        ShardWriter(stage.path, spec) as writer,
        progress_bar("merge", sum(map(len, chosen)), "sample") as bar,
    ):
        for store, indices in zip(stores, chosen, strict=True):
            for index in indices:
                bar.advance(1)
                if store.records[index].sample_id not in published:
                    copy_samples(store, [index], writer)
    accounting = Accounting(sum(map(len, stores)), sum(map(len, chosen)))
    if accounting.num_in > accounting.num_done:
        accounting.skipped = {_TWICE: accounting.num_in - accounting.num_done}
    result = {
        **carried_result(stores[0]),
        "store": spec.to_dict(),
        "flagged": sum(store.manifest.result["flagged"] for store in stores),
        "accounting": accounting.as_dict(),
        "merged": [{"path": str(store.folder), **_origin(store)} for store in stores],
    }
    return stage.finish(result, content=content_fingerprint(stage.path))


def _new_samples(stores: list[Store], number: int) -> Iterator[int]:
    """Indices of a store's samples that no store before it has. Raises StoreError where another
    has one of the same id that is not the same."""
    store = stores[number]
    for index, sample_id in enumerate(store.records.sample_ids()):
        twin = _find(stores[:number], sample_id)
        if twin is None:
            yield index
        elif twin[0].read_encoded(twin[1]).checksum != store.read_encoded(index).checksum:
            raise StoreError(
                f"sample {sample_id!r} is in {twin[0].folder} and, different, in {store.folder}: "
                "take one of them out (`paceline delete-samples`)"
            )


def _find(stores: list[Store], sample_id: str) -> tuple[Store, int] | None:
    for store in stores:
        try:
            return store, store.records.find(sample_id)
        except KeyError:
            continue
    return None


def _origin(store: Store) -> dict[str, Any]:
    manifest = store.manifest
    return {
        "fingerprint": manifest.fingerprint,
        "versions": manifest.versions,
        "engine": manifest.result.get("engine"),
        "probe": manifest.result.get("probe"),
        "later_engines": manifest.result.get("later_engines", []),
    }


VERB = (MergeStoresOptions, run)
make_callable(__name__)
