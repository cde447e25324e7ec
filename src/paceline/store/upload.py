"""Sends a finished store below a URL. A cut upload goes on: what is there and is what was written
is not sent again. The manifest goes last, so that half a store never looks like one.
"""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from paceline.artefact import Manifest
from paceline.contracts import MANIFEST_NAME
from paceline.errors import FingerprintMismatch, StoreError, UsageError
from paceline.store.files import SHARDS_FOLDER
from paceline.store.place import Place, RemoteFile
from paceline.store.presence import STREAM_FOLDER
from paceline.store.reader import Store
from paceline.store.remote import read_manifest
from paceline.store.shard import Shard

# Stands below the URL while an upload is under way, and says of what.
CLAIM_NAME = "upload.json"


@dataclass(frozen=True)
class Sent:
    """Files and bytes that were sent, and files that were there already."""

    num_files: int
    num_bytes: int
    num_kept: int


def upload(
    folder: str | Path,
    url: str,
    *,
    overwrite: bool = False,
    num_threads: int = 2,
    advance: Callable[[int], None] = lambda num_bytes: None,
) -> Sent:
    """Send the finished store in `folder` below `url`; advance: told the bytes of each file done.

    overwrite: remove what another store or another upload left there. Raises UsageError or
    FingerprintMismatch where the place is taken, StoreCorruption where a local shard is damaged
    (it is not sent), StoreError where the server fails for good.
    """
    folder, place = Path(folder), Place(url)
    # Opened as a reader would: what is missing, or half rewritten, must not be taken for whole.
    manifest = Store(folder).manifest
    there = place.files()
    names = _names(folder)
    if _is_whole(place, there, manifest, folder, names):
        return Sent(0, 0, len(names))
    if not is_claimed_for(place, there, manifest):
        refuse_taken(place, there, overwrite)
        # Before anything is removed: cut from here on, the place is still known to be ours.
        claim = json.dumps({"fingerprint": manifest.fingerprint})
        place.write(CLAIM_NAME, claim.encode())
    # The manifest goes first: from then on nobody takes what is left for a store.
    strange = there.keys() - {*names, CLAIM_NAME}
    place.remove(sorted(strange, key=lambda name: name != MANIFEST_NAME))
    task = lambda name: _bring(place, folder, name, there.get(name))
    num_files = num_bytes = 0
    with ThreadPoolExecutor(num_threads, thread_name_prefix="store-upload") as pool:
        try:
            for name, is_sent in zip(names, pool.map(task, names), strict=True):
                size = (folder / name).stat().st_size
                num_files += is_sent
                num_bytes += is_sent * size
                advance(size)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    place.write(MANIFEST_NAME, (folder / MANIFEST_NAME).read_bytes())
    place.remove([CLAIM_NAME])
    return Sent(num_files, num_bytes, len(names) - num_files)


def refuse_taken(place: Place, there: dict[str, RemoteFile], overwrite: bool) -> None:
    """Raises where files below a URL are of something else than the upload that is to be made."""
    if not there:
        return
    if MANIFEST_NAME not in there and CLAIM_NAME not in there:
        raise UsageError(
            f"{place} is not empty ({min(there)} ...) and no store: choose another place"
        )
    if not overwrite:
        what = "another store" if MANIFEST_NAME in there else "a part of another upload"
        raise FingerprintMismatch(
            f"{place} holds {what}.", "Choose another place, or pass overwrite (--overwrite)."
        )


def is_claimed_for(place: Place, there: dict[str, RemoteFile], manifest: Manifest) -> bool:
    """An upload of the store with this manifest was begun there."""
    if CLAIM_NAME not in there:
        return False
    return json.loads(place.read(CLAIM_NAME))["fingerprint"] == manifest.fingerprint


def _names(folder: Path) -> list[str]:
    """What a store consists of besides its manifest."""
    paths = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return sorted(
        str(path)
        for path in paths
        if path.parts[0] != STREAM_FOLDER
        and not any(part.startswith(".") for part in path.parts)
        and str(path) != MANIFEST_NAME
    )


def _is_whole(
    place: Place,
    there: dict[str, RemoteFile],
    manifest: Manifest,
    folder: Path,
    names: list[str],
) -> bool:
    """The same store was uploaded to its end."""
    if MANIFEST_NAME not in there or CLAIM_NAME in there:
        return False
    if read_manifest(place).checksum != manifest.checksum:
        return False
    return all(
        name in there and there[name].num_bytes == (folder / name).stat().st_size for name in names
    )


def _bring(place: Place, folder: Path, name: str, found: RemoteFile | None) -> bool:
    """Make sure that a file is there. Returns whether it had to be sent."""
    path = folder / name
    if found and place.holds(path, name, found):
        return False
    if Path(name).parts[0] == SHARDS_FOLDER:
        Shard(path).verify()
    if not place.holds(path, name, place.send(path, name)):
        raise StoreError(f"{place.name_of(name)} is not what was sent; run the same command again")
    return True
