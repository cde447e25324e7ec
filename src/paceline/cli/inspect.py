"""`paceline inspect`: prints a folder's summary, a sample with its supervised tokens coloured, a
curve as a line of blocks."""

from typing import Any

from rich.console import Console
from rich.text import Text

from paceline.cli import (
    align,
    codec_report,
    evaluate,
    exchange,
    export,
    extract,
    generate,
    prepare,
    report,
    train,
)
from paceline.cli.command import Command
from paceline.cli.output import count, facts, sparkline, table
from paceline.recipe import InspectOptions

_STAGES = {
    command.name: command
    for command in (
        generate.COMMAND,
        prepare.COMMAND,
        extract.COMMAND,
        align.COMMAND,
        train.COMMAND,
        evaluate.COMMAND,
        export.COMMAND,
        report.COMMAND,
        exchange.EXPORT_COMMAND,
        codec_report.COMMAND,
    )
}
_STYLES = {"context": "dim", "supervised": "bold green", "past_end": "yellow"}
# Where there are no colours, marks stand around the same pieces.
_MARKS = {"context": ("", ""), "supervised": ("{+", "+}"), "past_end": ("{~", "~}")}


def show(result: dict[str, Any], console: Console) -> None:
    inputs = [f"{name} {entry['fingerprint']}" for name, entry in result["inputs"].items()]
    pairs = [
        ("made by", f"paceline {result['stage']}, {result['versions'].get('paceline', '?')}"),
        ("status", result["status"]),
        ("created", result["created"]),
        ("finished", result["finished"] or "not yet"),
        ("files", f"{count(result['files']['count'])}, {count(result['files']['bytes'])} bytes"),
        ("fingerprint", result["fingerprint"] or "none yet"),
        ("inputs", "\n".join(inputs)),
    ]
    if result["verified"]:
        pairs.append(("checksums", "all content is as it was written"))
    console.print(facts(result["folder"], pairs))
    if result["status"] == "complete":
        shown = {**result["result"], "page": f"{result['folder']}/index.html"}
        _STAGES[result["stage"]].show(shown, console)
    if sample := result.get("sample"):
        show_sample(sample, console)
    if vocabulary := result.get("vocabulary"):
        _show_vocabulary(vocabulary, console)
    if curve := result.get("curve"):
        _show_curve(curve, console)
    if tensors := result.get("tensors"):
        rows = [[t["name"], t["dtype"], str(t["shape"]), t["file"]] for t in tensors]
        console.print(table("", ["tensor", "dtype", "shape", "file"], rows))


def show_sample(sample: dict[str, Any], console: Console) -> None:
    """The sample's text; supervised tokens are green or between {+ and +}, tokens that were
    recorded past an answer's end yellow or between {~ and ~}."""
    about = [f"sample {sample['sample_id']}"]
    if sample["source"]:
        about.append(f"source {sample['source']}")
    if sample["split"]:
        about.append(f"split {sample['split']}")
    if "num_tokens" in sample:
        about.append(f"{sample['num_supervised']:,} of {sample['num_tokens']:,} tokens supervised")
    console.print("\n" + ", ".join(about), style="bold")
    text = Text()
    for piece in sample["pieces"]:
        before, after = ("", "") if console.is_terminal else _MARKS[piece["kind"]]
        text.append(f"{before}{piece['text']}{after}", style=_STYLES[piece["kind"]])
    console.print(text, soft_wrap=True)
    if sample["note"]:
        console.print(sample["note"], style="yellow")


def _show_curve(curve: list[dict[str, Any]], console: Console) -> None:
    losses = [point["loss"] for point in curve]
    console.print(
        f"loss {losses[0]:.3f} {sparkline(losses)} {losses[-1]:.3f}, "
        f"step {curve[0]['step'] + 1} to {curve[-1]['step'] + 1}"
    )


def _show_vocabulary(vocabulary: dict[str, Any], console: Console) -> None:
    words = [
        f"{token['id']}" if token["text"] is None else f"{token['id']} {token['text']!r}"
        for token in vocabulary["lowest"]
    ]
    console.print("lowest ids: " + ", ".join(words))
    if vocabulary["note"]:
        console.print(vocabulary["note"], style="yellow")


COMMAND = Command("inspect", InspectOptions, "paceline.inspect", show)
