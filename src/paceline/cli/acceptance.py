"""Acceptance lengths for people, beside their baselines and with their definition."""

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console

from paceline.cli.output import count, share, table

_NAMES = {"bigram": "bigram table", "prompt_lookup": "prompt lookup"}
# The quotients that servers report of whole requests, each under its own name.
_QUOTIENTS = {
    "tokens_per_verify_step": "tokens per verify step, the prefill token taken off (pooled)",
    "completion_tokens_per_verify_step": "completion tokens / verify steps, as servers report it",
    "mean_of_request_ratios": "mean over requests of their own ratios",
}
_LISTED_DIFFERENCES = 10


def show_acceptance(measured: Mapping[str, Any], console: Console) -> None:
    """measured: what `evaluate` returns (`definition`, `results`, `baselines`, ...)."""
    methods = {"draft": measured["results"], **measured.get("baselines", {})}
    if beside := measured.get("beside"):
        methods[f"draft {beside['name']}"] = beside["results"]
    lengths = sorted(measured["results"], key=int)
    columns = ["acceptance length"] + [f"K = {k}" for k in lengths]
    rows = [
        [_NAMES.get(name, name), *(length_text(found.get(k)) for k in lengths)]
        for name, found in methods.items()
    ]
    console.print(table("", columns, rows))
    _show_positions(methods, lengths[-1], console)
    _show_sources(measured["results"], lengths, console)
    _show_speed(measured.get("speed", {}), console)
    _show_predicted(measured.get("speedup"), console)
    console.print(measured["definition"], style="dim")
    for line in _notes(measured):
        console.print(line, style="dim")


def length_text(found: Mapping[str, Any] | None) -> str:
    """`1.62 [1.55, 1.70]` of {"pooled": ...}; n/a where nothing was measured."""
    pooled = found["pooled"] if found else {}
    if pooled.get("acceptance_length") is None:
        return "n/a"
    interval = pooled.get("interval")
    around = f" [{interval[0]:.2f}, {interval[1]:.2f}]" if interval else ""
    return f"{pooled['acceptance_length']:.3f}{around}"


def _show_positions(methods: Mapping[str, Any], longest: str, console: Console) -> None:
    columns = [f"accepted at position, K = {longest}"] + [str(i + 1) for i in range(int(longest))]
    rows = [
        [_NAMES.get(name, name), *map(share, found[longest]["pooled"]["per_position"])]
        for name, found in methods.items()
        if longest in found
    ]
    console.print(table("", columns, rows))


def _show_sources(results: Mapping[str, Any], lengths: list[str], console: Console) -> None:
    sources = results[lengths[-1]]["sources"]
    if len(sources) < 2:
        return
    columns = ["draft, by source"] + [f"K = {k}" for k in lengths] + ["conversations"]
    rows = [
        [
            name,
            *(length_text({"pooled": results[k]["sources"][name]}) for k in lengths),
            count(sources[name]["conversations"]),
        ]
        for name in sources
    ]
    console.print(table("", columns, rows))


def _show_speed(speed: Mapping[str, Any], console: Console) -> None:
    if not speed:
        return
    columns = ["tokens per second", "requests at a time", "without", "with", "ratio"]
    number = lambda value, form: "n/a" if value is None else format(value, form)
    rows = [
        [
            f"K = {k}",
            size,
            number(found["plain_tokens_per_s"], ",.1f"),
            number(found["tokens_per_s"], ",.1f"),
            number(found["ratio"], ".2f"),
        ]
        for k, by_size in speed.items()
        for size, found in by_size.items()
    ]
    console.print(table("", columns, rows))


def _show_predicted(speedup: Mapping[str, Any] | None, console: Console) -> None:
    if speedup is None:
        return
    lengths = sorted(speedup["acceptance_lengths"], key=int)
    columns = ["predicted speed-up", "context", *(f"K = {k}" for k in lengths), "best K"]
    rows = [
        [
            f"{found['batch_size']} at a time",
            count(found["context"]),
            *(f"{found['predicted'][k]:.2f}" for k in lengths),
            str(found["best"]) if found["best"] else "none",
        ]
        for found in speedup["table"]
    ]
    console.print(table("", columns, rows))


def _differences(lossless: Mapping[str, Any]) -> Iterator[str]:
    for found in lossless["differences"][:_LISTED_DIFFERENCES]:
        gap = found["gap"]
        how = "unknown" if gap is None else f"{gap:.2g}"
        yield (
            f"  {found['conversation']}, turn {found['turn'] + 1}, K = "
            f"{found['num_draft_tokens']}: token {found['position']} is {found['other']} and not "
            f"{found['own']}, log p gap {how}"
        )


def _notes(measured: Mapping[str, Any]) -> Iterator[str]:
    pooled = {k: found["pooled"] for k, found in measured["results"].items()}
    first = next(iter(pooled.values()))
    yield (
        f"{first['conversations']:,} conversations, mode {measured['mode']}, dtype "
        f"{measured['dtype']}; intervals: 95%, bootstrap over conversations"
    )
    if temperature := measured.get("temperature"):
        yield f"temperature {temperature:g}: acceptance of speculative sampling" + (
            ", as expected from both models' distributions; exact for answers sampled so"
            if measured["mode"] == "chain"
            else ""
        )
    left_out = {k: p["left_out"] for k, p in pooled.items() if p["left_out"]}
    if left_out:
        steps = ", ".join(f"{n:,.0f} at K = {k}" for k, n in left_out.items())
        yield (
            f"steps left out, since they need tokens past the end of an answer: {steps}; "
            f"`record_past_end: {max(map(int, left_out))}` of `generate` records them"
        )
    for name, why in measured.get("baselines_left_out", {}).items():
        yield f"no {_NAMES[name]}: {why}"
    if lossless := measured.get("lossless"):
        yield (
            f"outputs equal to the target's own greedy ones: {lossless['equal_outputs']:,} of "
            f"{lossless['outputs']:,}; of the others {lossless['near_ties']:,} differ at a near tie"
        )
        yield from _differences(lossless)
    if speedup := measured.get("speedup"):
        yield (
            f"predicted from steps of {speedup['engine']} timed on this {speedup['device']}; "
            "prefill and scheduling are not in it"
        )
        for batch_size, context in speedup["left_out"]:
            yield f"{batch_size} at a time with {context:,} tokens do not fit into memory"
    if short := measured.get("short_drafts"):
        steps = ", ".join(f"{n:,} at K = {k}" for k, n in short.items())
        yield f"the server drafted fewer tokens than K per step, so many are missing: {steps}"
    quotients = measured.get("quotients", {})
    for name, text in _QUOTIENTS.items():
        for k, found in quotients.items():
            value = found.get(name)
            yield f"K = {k}: {text}: {'n/a' if value is None else f'{value:.3f}'}"
