"""A store whose `out` is a URL: made in a folder of this machine, uploaded when it is finished."""

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
    refuse_other_work,
)
from paceline.contracts import MANIFEST_NAME
from paceline.progress import progress_bar
from paceline.store.cache import default_folder
from paceline.store.place import Place, is_remote
from paceline.store.remote import read_manifest
from paceline.store.shelf import STAGE
from paceline.store.upload import is_claimed_for, refuse_taken, upload


@contextmanager
def open_store_stage(
    out: str,
    staging: str | None,
    inputs: Mapping[str, Mapping[str, Any]],
    options: Mapping[str, Any],
    overwrite: bool = False,
) -> Iterator[StageFolder]:
    """`open_stage` for a store, whose `out` may be a URL. Its folder is then one in `staging`; on a
    clean exit of a finished stage it is uploaded, and goes. What was cut goes on where it was, the
    upload too.
    """
    if not is_remote(out):
        with open_stage(out, STAGE, inputs, options, overwrite) as stage:
            yield stage
        return
    place = Place(out)
    folder = Path(staging or default_folder() / "staging") / fingerprint.of_json(place.url)
    there = place.files()
    if MANIFEST_NAME in there and not overwrite:
        found = read_manifest(place)
        refuse_other_work(place.url, found, inputs, options)
        shutil.rmtree(folder, ignore_errors=True)
        yield StageFolder(folder, found, resumed=True)
        return
    if not (_is_made(folder) and is_claimed_for(place, there, load_manifest(folder))):
        # Before hours of work are spent on what can then not be put there.
        refuse_taken(place, there, overwrite)
    with open_stage(folder, STAGE, inputs, options, overwrite) as stage:
        yield stage
        if stage.done:
            total = folder_size(folder).num_bytes
            with progress_bar("upload", total, "B") as bar:
                upload(folder, place.url, overwrite=overwrite, advance=bar.advance)
            shutil.rmtree(folder)


def _is_made(folder: Path) -> bool:
    """The staging folder holds a finished store, whose upload may have begun."""
    return (folder / MANIFEST_NAME).is_file() and load_manifest(folder).status == COMPLETE
