"""`upload-store`: a finished store of this machine below a URL."""

from pathlib import Path
from typing import Any

from paceline.artefact import folder_size
from paceline.errors import UsageError
from paceline.progress import progress_bar
from paceline.recipe import UploadStoreOptions
from paceline.store.place import is_remote
from paceline.store.upload import upload
from paceline.verbs import make_callable


def run(options: UploadStoreOptions) -> dict[str, Any]:
    """Upload a store; one that was cut goes on. Returns `url`, `files_sent`, `bytes_sent` and
    `files_kept`, those that were there already.

    Raises what paceline.store.upload.upload does.
    """
    if not (options.store and is_remote(options.url)):
        raise UsageError(
            f"upload-store: name a store and a URL of fsspec, such as s3://bucket/store, not "
            f"{options.url!r}"
        )
    folder = Path(options.store)
    total = folder_size(folder).num_bytes
    with progress_bar("upload", total, "B") as bar:
        sent = upload(folder, options.url, overwrite=options.overwrite, advance=bar.advance)
    return {
        "url": options.url,
        "files_sent": sent.num_files,
        "bytes_sent": sent.num_bytes,
        "files_kept": sent.num_kept,
    }


VERB = (UploadStoreOptions, run)
make_callable(__name__)
