"""Waits until one side of a stream is at work."""

import time
from pathlib import Path

from paceline.store.presence import RUNNING, look


def wait_until_present(folder: Path, side: str) -> None:
    """To a side that begins later, one that is gone already is of an earlier run: what is to be
    missed must not go before the other is there."""
    while not ((peer := look(folder, side)) and peer.state == RUNNING):
        time.sleep(0.01)
