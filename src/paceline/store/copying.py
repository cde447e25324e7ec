"""Copies samples from store to store: bit by bit, or decoded and stored anew in another codec."""

from collections.abc import Iterable
from typing import Any

from paceline.errors import UsageError
from paceline.side_files import SIDE_FILES
from paceline.store.reader import ShardReader, Store
from paceline.store.spec import StoreSpec
from paceline.store.staging import DELETED
from paceline.store.writer import ShardWriter

_LOSSLESS = ("raw", "lossless")


def refuse_second_loss(found: StoreSpec, codec: str) -> None:
    """Raises UsageError where states that have lost digits already are to be stored in another
    codec: a second loss, or bytes for digits that are gone."""
    if codec != found.codec and found.codec not in _LOSSLESS:
        raise UsageError(
            f"the states are stored as {found.codec}, which has lost digits: they cannot be stored "
            f"as {codec}. Extract them anew, or keep the codec."
        )


def copy_samples(store: ShardReader, indices: Iterable[int], writer: ShardWriter) -> None:
    """Add samples of a store, by index, to a writer. Raises StoreCorruption for damaged ones."""
    is_same = writer.spec.identity() == store.spec.identity()
    for index in indices:
        encoded = store.read_encoded(index)
        encoded.check()
        if is_same:
            writer.add_encoded(encoded)
            continue
        stored = store.read(index)
        writer.add(encoded.sample, stored.aux, stored.last)


def carried_result(store: Store) -> dict[str, Any]:
    """What a store's manifest says of its states, for a store made of them."""
    own = ("accounting", "timing", DELETED, SIDE_FILES)
    return {name: value for name, value in store.manifest.result.items() if name not in own}
