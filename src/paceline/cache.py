"""The folder of what can be made again: converted targets, copies of remote stores, stores on their
way to a URL."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """$PACELINE_CACHE, else `paceline` in the user's cache folder."""
    if folder := os.environ.get("PACELINE_CACHE"):
        return Path(folder).expanduser().absolute()
    # The XDG rules: an empty or relative path counts for nothing.
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "paceline"
