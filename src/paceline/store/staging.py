"""The stage folder of a store: a finished one that lacks samples goes on, and one whose `out` is a
URL is made in a folder of this machine and uploaded when it is finished.
"""

import logging
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paceline import fingerprint
from paceline.artefact import (
    COMPLETE,
    StageFolder,
    folder_size,
    load_manifest,
    open_stage,
    work_to_keep,
)
from paceline.cache import cache_folder
from paceline.contracts import MANIFEST_NAME, Overwrite
from paceline.errors import StoreError
from paceline.progress import progress_bar
from paceline.store.files import refuse_half_rewritten
from paceline.store.place import Place, is_remote
from paceline.store.reader import content_fingerprint
from paceline.store.remote import read_manifest
from paceline.store.shelf import STAGE
from paceline.store.upload import is_claimed_for, refuse_taken, upload

logger = logging.getLogger(__name__)

# In a store's result: ids of the samples that were taken out of it for good.
DELETED = "deleted"


@contextmanager
def open_local_store(
    out: str | Path,
    inputs: Mapping[str, Mapping[str, Any]],
    options: Mapping[str, Any],
    overwrite: Overwrite = False,
) -> Iterator[StageFolder]:
    """`open_stage` for a store in a folder of this machine. A finished one that does not hold what
    its manifest says, as when a damaged shard was removed, is not `done`: it goes on.

    Raises StoreError for such a one of which samples were deleted, since they would come back.
    """
    with open_stage(out, STAGE, inputs, options, overwrite) as stage:
        if stage.done:
            refuse_half_rewritten(stage.path)
            # From the index, or from the small tensors of the shards: no state is read.
            content = content_fingerprint(stage.path)
            if stage.manifest.of_content(content) != stage.manifest.fingerprint:
                _reopen(stage)
        yield stage


def _reopen(stage: StageFolder) -> None:
    if stage.result.get(DELETED):
        raise StoreError(
            f"{stage.path} lacks samples that it had. They cannot be made again without those that "
            "were deleted from it: start over with overwrite (--overwrite), and delete them again"
        )
    logger.warning("%s does not hold what it did: what is missing is made again", stage.path)
    stage.reopen()


@contextmanager
def open_store_stage(
    out: str,
    staging: str | None,
    inputs: Mapping[str, Mapping[str, Any]],
    options: Mapping[str, Any],
    overwrite: Overwrite = False,
) -> Iterator[StageFolder]:
    """`open_local_store` for an `out` that may be a URL. Its folder is then one in `staging`; on a
    clean exit of a finished stage it is uploaded, and goes. What was cut goes on where it was, the
    upload too.
    """
    if not is_remote(out):
        with open_local_store(out, inputs, options, overwrite) as stage:
            yield stage
        return
    place = Place(out)
    folder = Path(staging or cache_folder() / "staging") / fingerprint.of_json(place.url)
    there = place.files()
    if MANIFEST_NAME in there:
        read = lambda: read_manifest(place)
        found = work_to_keep(read, place.url, inputs, options, overwrite)
        if found is not None:
            shutil.rmtree(folder, ignore_errors=True)
            yield StageFolder(folder, found, resumed=True)
            return
    if not (_is_made(folder) and is_claimed_for(place, there, load_manifest(folder))):
        # Before hours of work are spent on what can then not be put there.
        refuse_taken(place, there, bool(overwrite))
    # A finished store in `staging` is one whose upload is not finished: that goes on.
    with open_local_store(folder, inputs, options, "other" if overwrite else False) as stage:
        yield stage
        if stage.done:
            total = folder_size(folder).num_bytes
            with progress_bar("upload", total, "B") as bar:
                upload(folder, place.url, overwrite=bool(overwrite), advance=bar.advance)
            shutil.rmtree(folder)


def _is_made(folder: Path) -> bool:
    """The staging folder holds a finished store, whose upload may have begun."""
    return (folder / MANIFEST_NAME).is_file() and load_manifest(folder).status == COMPLETE
