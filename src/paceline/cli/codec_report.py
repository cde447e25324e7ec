"""`paceline codec-report`: tables of bytes and KL, of errors by layer, of acceptance lengths."""

from typing import Any

from rich.console import Console

from paceline.cli.acceptance import length_text
from paceline.cli.command import Command
from paceline.cli.output import count, share, table
from paceline.recipe import CodecReportOptions


def show(result: dict[str, Any], console: Console) -> None:
    console.print(
        f"{count(result['samples'])} samples, {count(result['tokens'])} tokens, "
        f"{share(result['supervised_share'])} of them supervised, states in {result['dtype']}, "
        f"width {result['hidden_size']}"
    )
    codecs = result["codecs"]
    columns = ["codec", "bytes per token", "of four full states", "KL, nats", "same top token"]
    rows = [
        [
            name,
            f"{found['bytes_per_token']:,.1f}",
            f"{found['share_of_four_states']:.3f}",
            f"{found['kl']['mean']:.5f}" if "kl" in found else "",
            share(found["kl"]["top1_agreement"]) if "kl" in found else "",
        ]
        for name, found in codecs.items()
    ]
    console.print(table("", columns, rows))
    _show_errors(codecs, console)
    if result["steps"]:
        _show_acceptance(codecs, console)
        console.print(result["definition"], style="dim")


def _show_errors(codecs: dict[str, Any], console: Console) -> None:
    """Errors of rows relative to their norms."""
    rows = [
        [
            f"{name}, {layer}",
            *(f"{found[key]:.2%}" for key in ("median", "p99", "max")),
            f"{found['first_token_median']:.2%}" if "first_token_median" in found else "",
        ]
        for name, codec in codecs.items()
        for layer, found in codec.get("errors", {}).items()
    ]
    columns = ["relative error", "median", "99%", "max", "first token, median"]
    console.print(table("", columns, rows))


def _show_acceptance(codecs: dict[str, Any], console: Console) -> None:
    lengths = sorted(codecs["raw"]["acceptance"]["trained"], key=int)
    texts = {
        "trained": "draft trained on {}, measured on raw",
        "read": "draft trained on raw, reads {}",
    }
    rows = [
        [
            texts[how].format(name) + (" (same bits as raw)" if codec.get("same_bits") else ""),
            *(length_text({"pooled": found[k]}) for k in lengths),
        ]
        for name, codec in codecs.items()
        for how, found in codec["acceptance"].items()
    ]
    console.print(table("", ["acceptance length", *(f"K = {k}" for k in lengths)], rows))


COMMAND = Command("codec-report", CodecReportOptions, "paceline.codec_report", show)
