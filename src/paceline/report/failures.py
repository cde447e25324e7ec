"""The section on where drafts fail, out of what `evaluate` counted."""

from typing import Any

from paceline.report.sections import Rows, Table

_ROWS = 12
# Whitespace and line ends must be seen: they are what many of these tokens are made of.
_SHOWN = {" ": "\u2423", "\n": "\u21b5", "\t": "\u21e5"}


def failures(measured: dict[str, Any] | None) -> dict[str, Any] | None:
    """Tables of tokens and passages with their misses; None where nothing was counted."""
    told = (measured or {}).get("failures")
    if not told or not told["points"]:
        return None
    return {
        "about": _about(told),
        "tokens": _tokens(told["tokens"], "token"),
        "after": _tokens(told["after"], "after"),
        "passages": [_passage(found) for found in told["passages"]],
    }


def shown(text: str | None, token_id: int) -> str:
    """A token as people can see it; its id where it cannot be decoded."""
    if text is None:
        return f"id {token_id}"
    return "".join(_SHOWN.get(c, c) for c in text) or f"id {token_id}"


def _about(told: dict[str, Any]) -> str:
    misses = told["points"] - told["right"]
    line = (
        f"At {told['points']:,} places of the answers the draft's first token is what the target "
        f"wrote {told['right']:,} times ({100 * told['right'] / told['points']:.1f}%). Lowest "
        "first, by the upper end of the share's 95% interval."
    )
    lost = told["rejected_outside_vocabulary"]
    if lost is None:
        return line
    return (
        f"{line} Of the {misses:,} misses, {100 * lost:.1f}% are tokens outside the draft "
        "vocabulary, which it can never say."
    )


def _tokens(entries: list[dict[str, Any]], name: str) -> Table | None:
    if not entries:
        return None
    rows: Rows = []
    for entry in entries[:_ROWS]:
        word = shown(entry["text"], entry["id"])
        note = "" if entry.get("reachable", True) else "outside the draft vocabulary"
        share = f"{100 * entry['right'] / entry['tries']:.0f}%"
        rows.append([(word, note) if note else word, share, f"{entry['tries']:,}"])
    return Table([name, "right", "places"], rows)


def _passage(found: dict[str, Any]) -> dict[str, Any]:
    source = f", source {found['source']}" if found["source"] else ""
    pieces = [
        {"text": _text(piece["text"], piece["id"]), "right": piece["right"]}
        for piece in found["pieces"]
    ]
    return {
        "share": f"{100 * found['share']:.0f}% right",
        "about": f"sample {found['sample_id']}{source}",
        "before": found["before"] or "",
        "pieces": pieces,
    }


def _text(text: str | None, token_id: int) -> str:
    return f"[{token_id}] " if text is None else text
