"""`delete-samples`: samples out of a store for good; no byte of the others changes."""

import logging
from pathlib import Path
from typing import Any

from paceline.artefact import StageFolder, load_finished, open_stage
from paceline.errors import UsageError
from paceline.housekeeping.ids import find_all, wanted_ids
from paceline.recipe import DeleteSamplesOptions
from paceline.store import ShardWriter, Store
from paceline.store.copying import copy_samples
from paceline.store.rewrite import finish_rewriting, rewrite_shards
from paceline.store.staging import DELETED
from paceline.verbs import make_callable

logger = logging.getLogger(__name__)


def run(options: DeleteSamplesOptions) -> dict[str, Any]:
    """Delete samples of a finished store. Returns the manifest's result.

    The other samples of a shard move to a new one; a run that is killed leaves the store as it was
    or is finished by the same command. Raises UsageError for ids that the store does not have.
    """
    ids = wanted_ids(options.ids, options.ids_file)
    if not (options.store and ids):
        raise UsageError("delete-samples: name a store, and `ids` or `ids_file`")
    folder = Path(options.store)
    found = load_finished(folder, "extract")
    with open_stage(folder, "extract", found.inputs, found.options) as stage:
        finish_rewriting(stage)
        gone = set(stage.result.get(DELETED, []))
        wanted = [sample_id for sample_id in ids if sample_id not in gone]
        if wanted:
            _delete(stage, wanted)
        logger.info(
            "delete-samples: %d deleted, %d were deleted before",
            len(wanted),
            len(ids) - len(wanted),
        )
        return stage.result


def _delete(stage: StageFolder, ids: list[str]) -> None:
    store = Store(stage.path)
    doomed = set(find_all(store, ids))
    numbers = sorted({store.records[index].shard for index in doomed})
    touched = store.records.in_shards(numbers).tolist()

    def write_others(writer: ShardWriter) -> None:
        copy_samples(store, (index for index in touched if index not in doomed), writer)

    accounting = dict(stage.result["accounting"])
    accounting["done"] -= len(ids)
    skipped = accounting["skipped"]
    accounting["skipped"] = {**skipped, DELETED: skipped.get(DELETED, 0) + len(ids)}
    gone = [*stage.result.get(DELETED, []), *ids]
    result = {**stage.result, "accounting": accounting, DELETED: gone}
    rewrite_shards(stage, store.spec, numbers, write_others, result)


VERB = (DeleteSamplesOptions, run)
make_callable(__name__)
