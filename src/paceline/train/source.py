"""Where training reads from: a finished store, or one that is still being written."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from paceline.artefact import (
    COMPLETE,
    describe_growing,
    describe_input,
    load_manifest,
    work_to_keep,
)
from paceline.contracts import MANIFEST_NAME, TRAIN_SPLIT
from paceline.errors import StoreCorruption, StreamError, TrainingError, UsageError
from paceline.recipe import TrainOptions
from paceline.store import Follower, Store, follow
from paceline.store.cache import Cache
from paceline.store.place import is_remote
from paceline.train.balance import RankShare
from paceline.train.batches import StepPlan
from paceline.train.length import RunLength
from paceline.train.ranks import Ranks

logger = logging.getLogger(__name__)

# The order in which a stream was read. A training that began on a stream keeps to it.
ORDER_FILE = "order.json"


@contextmanager
def open_store(
    options: TrainOptions, ranks: Ranks
) -> Iterator[tuple[Store | Follower, dict[str, Any]]]:
    """The store, and its entry among the inputs of the stage. All ranks enter."""
    order = Path(options.out) / ORDER_FILE
    look = lambda: (_goes_on_with_stream(options), _status(options.store))
    began_on_stream, status = ranks.from_first(look)
    if began_on_stream or (options.follow and status != COMPLETE):
        waits = options.follow_wait_s
        with follow(options.store, order, rank=ranks.number, wait_s=waits) as store:
            yield store, describe_growing(options.store, store.manifest)
        return
    if status not in (None, COMPLETE):
        raise UsageError(
            f"{options.store} is not finished: run `paceline extract` with the same options to go "
            "on, and --follow here to train meanwhile"
        )
    store = Store(options.store, cache=Cache(options.cache_dir, options.cache_bytes))
    yield store, describe_input(options.store, store.manifest)


def _goes_on_with_stream(options: TrainOptions) -> bool:
    """The training began on a stream, and does not start over."""
    if not _began_on_stream(options.out):
        return False
    if not options.overwrite:
        return True
    if is_remote(options.store) or _status(options.store) is None:
        return False
    # A manifest that cannot be read is no work to go on with.
    with suppress(UsageError, StoreCorruption):
        begun = load_manifest(options.out, "train")
        stream = describe_growing(options.store, load_manifest(options.store, "extract"))
        inputs = {**begun.inputs, "store": stream}
        read = lambda: begun
        return bool(work_to_keep(read, options.out, inputs, options.identity(), options.overwrite))
    return False


def _began_on_stream(out: str) -> bool:
    if (Path(out) / ORDER_FILE).is_file():
        return True
    # One that was killed before the first shard came has only said what it reads.
    with suppress(UsageError, StoreCorruption):
        return isinstance(load_manifest(out, "train").inputs["store"]["fingerprint"], dict)
    return False


def _status(store: str) -> str | None:
    """Of a store's manifest; None where there is none yet."""
    if is_remote(store):
        return COMPLETE
    if not (Path(store) / MANIFEST_NAME).is_file():
        return None
    return load_manifest(store, "extract").status


def plan_of(options: TrainOptions, store: Store | Follower, share: RankShare) -> StepPlan:
    """share: what this rank does of each step. Raises TrainingError where there is no sample."""
    epoch_rows = store.expected_rows(TRAIN_SPLIT, options.batch_rows)
    if not epoch_rows:
        raise TrainingError(f"{store.folder} has no sample of the training split to learn from")
    length = RunLength.of(options, epoch_rows)
    return StepPlan(
        store=store,
        length=length,
        micro_batch_tokens=options.micro_batch_tokens,
        num_epochs=length.num_epochs(epoch_rows),
        seed=options.seed,
        share=share,
    )


def leave(store: Store | Follower, options: TrainOptions) -> None:
    """What a training owes its writer: one that read all of its first epoch makes room for what is
    still to come, so that the store gets finished."""
    if isinstance(store, Follower) and options.max_steps is None and options.epochs >= 1:
        try:
            store.drain()
        except StreamError as error:
            logger.warning("the draft is finished, the store is not: %s", error)
