"""`paceline merge-stores`, `subset-store`, `delete-samples`, `upgrade-store`: what a store holds
now; `upload-store`: what went where."""

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
    UploadStoreOptions,
)


def _show_upgraded(result: dict[str, Any], console: Console) -> None:
    pairs = [
        ("shards rewritten", count(result["shards_rewritten"])),
        ("manifest", "sealed now" if result["manifest_sealed"] else "as it was"),
    ]
    console.print(facts("Store is up to date", pairs))


def _show_uploaded(result: dict[str, Any], console: Console) -> None:
    pairs = [
        ("files sent", f"{count(result['files_sent'])}, {count(result['bytes_sent'])} bytes"),
        ("there already", count(result["files_kept"])),
    ]
    console.print(facts(result["url"], pairs))


COMMANDS = (
    Command("merge-stores", MergeStoresOptions, "paceline.housekeeping.merge_stores", show),
    Command("subset-store", SubsetStoreOptions, "paceline.housekeeping.subset_store", show),
    Command("delete-samples", DeleteSamplesOptions, "paceline.housekeeping.delete_samples", show),
    Command(
        "upgrade-store", UpgradeStoreOptions, "paceline.housekeeping.upgrade_store", _show_upgraded
    ),
    Command(
        "upload-store", UploadStoreOptions, "paceline.housekeeping.upload_store", _show_uploaded
    ),
)
