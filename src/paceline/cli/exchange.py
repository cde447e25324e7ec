"""`paceline import-store` and `export-store`: print where every file went, and how it is read."""

from typing import Any

from rich.console import Console

from paceline.cli.command import Command
from paceline.cli.extract import show as show_store
from paceline.cli.output import count, counts, facts, table
from paceline.recipe import ExportStoreOptions, ImportStoreOptions


def _show_imported(result: dict[str, Any], console: Console) -> None:
    show_store(result, console)
    imported = result["imported"]
    ids = ", ".join(map(str, imported["ids"]))
    console.print(
        f"files read as: layer ids {ids} of {imported['convention']}, last state "
        f"{imported['last_norm']}-norm"
    )
    if imported["errors"] is None:
        console.print("comparison with a plain transformers forward WAIVED", style="yellow")
        return
    rows = [
        [layer, *(f"{found[name]:.2e}" for name in ("median", "p99", "max"))]
        for layer, found in imported["errors"].items()
    ]
    console.print(table("", ["error against a plain forward", "median", "99%", "max"], rows))


def _problems(result: dict[str, Any]) -> list[str]:
    """Files that are not in the store are never a full success."""
    accounting = result["accounting"]
    missing = accounting["in"] - accounting["done"]
    if not missing:
        return []
    return [
        f"import-store: {missing:,} of {accounting['in']:,} files are not in the store: "
        f"quarantined {counts(accounting['quarantined'])}; skipped {counts(accounting['skipped'])}"
    ]


def _show_exported(result: dict[str, Any], console: Console) -> None:
    pairs = [
        ("layout", result["layout"]),
        ("files", count(result["files"])),
        ("layer ids", f"{', '.join(map(str, result['layer_ids']))} ({result['layer_convention']})"),
        ("last state", f"{result['last_norm']}-norm"),
        ("rows not stored", result["rows_not_stored"]),
    ]
    console.print(facts("Files for other tools", pairs))


IMPORT_COMMAND = Command(
    "import-store",
    ImportStoreOptions,
    "paceline.exchange.import_store",
    _show_imported,
    _problems,
)
EXPORT_COMMAND = Command(
    "export-store", ExportStoreOptions, "paceline.exchange.export_store", _show_exported
)
