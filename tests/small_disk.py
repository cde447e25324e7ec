"""A real file system of a few KiB or MiB, to be filled."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """A tmpfs of `size` (as mount says it: `480k`, `1m`) at `folder`, which is made.

    Mounting takes root, as CI's containers have it; where it is refused the test fails, since a
    full disk that was not tried is no success.
    """
    folder.mkdir()
    _mount(folder, f"size={size}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def resize(folder: Path, size: str) -> None:
    _mount(folder, f"remount,size={size}")


def _mount(folder: Path, options: str) -> None:
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.fail(
            f"a small file system cannot be mounted ({done.stderr.strip()}); run the tests as root "
            "in a container that may mount (CAP_SYS_ADMIN)"
        )
