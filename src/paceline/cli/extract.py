"""`paceline extract`: prints where every sample went, and what the probe saw."""

from typing import Any

from rich.console import Console
from rich.table import Table

from paceline.cli.command import Command
from paceline.cli.output import count, counts, facts, table
from paceline.recipe import ExtractOptions


def show(result: dict[str, Any], console: Console) -> None:
    accounting, store = result["accounting"], result["store"]
    engine = result.get("engine", {})
    pairs = [
        ("samples in", count(accounting["in"])),
        ("stored", count(accounting["done"])),
        ("quarantined", counts(accounting["quarantined"])),
        ("skipped", counts(accounting["skipped"])),
        ("flagged", count(result["flagged"])),
        (
            "layers k",
            f"{', '.join(map(str, store['aux_layers']))} and {store['last_layer']} (last)",
        ),
        ("stored as", f"{store['dtype']}, codec {store['codec']}"),
    ]
    if engine:
        pairs.append(("engine", _named(engine)))
    for later in result.get("later_engines", []):
        pairs.append(("then, probed too", _named(later["engine"])))
    console.print(facts("Hidden states", pairs))
    show_probe(result.get("probe"), console)


def _named(engine: dict[str, Any]) -> str:
    return f"{engine['name']} {engine['version']}, {engine['dtype']}"


def show_probe(probe: dict[str, Any] | None, console: Console) -> None:
    """The probe's verdict: errors per layer, and the engine's own greedy tokens."""
    if not probe:
        return
    console.print(
        f"probe: {probe['num_greedy_agree']} of {probe['num_greedy_rows']} greedy tokens of the "
        "engine are the most likely of head(norm(last))"
    )
    if probe["errors"] is None:
        console.print("probe: comparison with a plain transformers forward WAIVED", style="yellow")
        return
    console.print(error_table(probe["errors"]))


def error_table(errors: dict[str, dict[str, float]]) -> Table:
    """Of each layer's rows, relative to their norms."""
    rows = [
        [layer, *(f"{found[name]:.2e}" for name in ("median", "p99", "max"))]
        for layer, found in errors.items()
    ]
    return table("", ["error against a plain forward", "median", "99%", "max"], rows)


def problems(result: dict[str, Any]) -> list[str]:
    return not_stored("extract", "samples", result["accounting"])


def not_stored(command: str, what: str, accounting: dict[str, Any]) -> list[str]:
    """What came in and is not in the store is never a full success."""
    missing = accounting["in"] - accounting["done"]
    if not missing:
        return []
    return [
        f"{command}: {missing:,} of {accounting['in']:,} {what} are not in the store: quarantined "
        f"{counts(accounting['quarantined'])}; skipped {counts(accounting['skipped'])}"
    ]


COMMAND = Command("extract", ExtractOptions, "paceline.extract", show, problems)
