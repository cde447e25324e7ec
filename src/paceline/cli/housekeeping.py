"""`paceline merge-stores`, `subset-store`, `delete-samples`, `upgrade-store`: what a store holds
now."""

from typing import Any

from rich.console import Console

from paceline.cli.command import Command
from paceline.cli.extract import show
from paceline.cli.output import count, facts
from paceline.recipe import (
    DeleteSamplesOptions,
    MergeStoresOptions,
    SubsetStoreOptions,
    UpgradeStoreOptions,
)


def _show_upgraded(result: dict[str, Any], console: Console) -> None:
    pairs = [
        ("shards rewritten", count(result["shards_rewritten"])),
        ("manifest", "sealed now" if result["manifest_sealed"] else "as it was"),
    ]
    console.print(facts("Store is up to date", pairs))


COMMANDS = (
    Command("merge-stores", MergeStoresOptions, "paceline.housekeeping.merge_stores", show),
    Command("subset-store", SubsetStoreOptions, "paceline.housekeeping.subset_store", show),
    Command("delete-samples", DeleteSamplesOptions, "paceline.housekeeping.delete_samples", show),
    Command(
        "upgrade-store", UpgradeStoreOptions, "paceline.housekeeping.upgrade_store", _show_upgraded
    ),
)
