"""The section on speed: measured with and without the draft, and predicted from timed steps."""

from typing import Any

from paceline.report.sections import Rows, Table


def speed(measured: dict[str, Any] | None) -> dict[str, Any] | None:
    """None where nothing was timed."""
    ran = (measured or {}).get("speed")
    foretold = (measured or {}).get("speedup")
    if not ran and not foretold:
        return None
    return {
        "measured": _measured(ran) if ran else None,
        "predicted": _predicted(foretold) if foretold else None,
        "about": _about(foretold) if foretold else "",
    }


def _measured(ran: dict[str, Any]) -> Table:
    lengths = sorted(ran, key=int)
    sizes = sorted({size for by_size in ran.values() for size in by_size}, key=int)
    rows: Rows = []
    for size in sizes:
        found = [ran[k][size] for k in lengths]
        plain = found[0]["plain_tokens_per_s"]
        rows.append(
            [
                size,
                "n/a" if plain is None else f"{plain:,.1f}",
                *((_times(f["ratio"]), f"{f['tokens_per_s']:,.1f} tokens/s") for f in found),
            ]
        )
    return Table(["requests at a time", "tokens/s alone", *(f"K = {k}" for k in lengths)], rows)


def _predicted(foretold: dict[str, Any]) -> Table:
    lengths = sorted(foretold["acceptance_lengths"], key=int)
    rows: Rows = [
        [
            f"{entry['batch_size']:,}",
            f"{entry['context']:,}",
            *(_times(entry["predicted"][k]) for k in lengths),
            str(entry["best"] or "none"),
        ]
        for entry in foretold["table"]
    ]
    columns = ["requests at a time", "context", *(f"K = {k}" for k in lengths), "best K"]
    return Table(columns, rows)


def _about(foretold: dict[str, Any]) -> str:
    steps = (
        f"Acceptance length x target step of one token / (target step of K + 1 tokens + K draft "
        f"steps), steps of {foretold['engine']} timed on this run's {foretold['device']}; prefill "
        "and scheduling are not in it."
    )
    left_out = ", ".join(f"{size:,} at {context:,}" for size, context in foretold["left_out"])
    return steps + (f" Not timed for want of memory: {left_out} tokens." if left_out else "")


def _times(ratio: float | None) -> str:
    return "n/a" if ratio is None else f"{ratio:.2f} x"
