"""`paceline import-store` and `export-store`: print where every file went, and how it is read."""

from typing import Any

from rich.console import Console

from paceline.cli.command import Command
from paceline.cli.extract import error_table, not_stored
from paceline.cli.extract import show as show_store
from paceline.cli.output import count, facts
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
    console.print(error_table(imported["errors"]))


def _problems(result: dict[str, Any]) -> list[str]:
    return not_stored("import-store", "files", result["accounting"])


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
