"""`paceline plan`: prints a table of the stages, and under it the arithmetic of each figure."""

from typing import Any

from rich.console import Console

from paceline.cli.command import Command
from paceline.cli.output import count, facts, table
from paceline.recipe import PlanOptions
from paceline.units import duration_text, size_text


def show(result: dict[str, Any], console: Console) -> None:
    target, data = result["target"], result["data"]
    console.print(
        facts(
            f"Plan of {result['run_dir']}",
            [
                ("target", _target(target)),
                ("data", _data(data)),
                ("runs on", _setting(result)),
            ],
        )
    )
    rows = [
        [
            name,
            size_text(stage["bytes"]),
            count(stage["files"]),
            _time(stage["seconds"]),
            size_text(stage["host_bytes"]),
            size_text(stage["device_bytes"]) if stage["device_bytes"] else "-",
        ]
        for name, stage in result["stages"].items()
    ]
    total = result["total"]
    rows.append(
        ["in all", size_text(total["bytes"]), count(total["files"]), _time(total["seconds"])]
    )
    columns = ["stage", "on disk", "files", "time", "host memory", "device memory"]
    console.print(table("", columns, rows))
    for name, stage in result["stages"].items():
        console.print(f"{name}: bytes: {stage['how']['bytes']}", style="dim", soft_wrap=True)
        console.print(f"{name}: time: {stage['how']['seconds']}", style="dim", soft_wrap=True)
    console.print(_memory(result), style="dim", soft_wrap=True)
    for line in _notes(result):
        console.print(line, soft_wrap=True)


def problems(result: dict[str, Any]) -> list[str]:
    disk = result["disk"]
    if disk["fits"]:
        return []
    return [
        f"plan: {disk['folder']} has {size_text(disk['free'])} free, the run needs "
        f"{size_text(disk['needed'])} at its largest: make room, or choose a smaller codec or less "
        "data"
    ]


def _time(seconds: float | None) -> str:
    return "not foretold" if seconds is None else duration_text(seconds)


def _target(target: dict[str, Any]) -> str:
    weights, active = target["weights"] / 1e9, target["active_weights"] / 1e9
    return (
        f"{target['target']}: {target['layers']} layers, width {target['hidden_size']:,}, "
        f"{weights:,.2f} billion weights ({active:,.2f} billion met by a token, embedding and head "
        f"apart), {size_text(target['weight_bytes'])}"
    )


def _data(data: dict[str, Any]) -> str:
    return (
        f"{data['origin']}; in all {data['samples']:,} samples, {data['tokens']:,} tokens, "
        f"{data['supervised_tokens']:,} supervised"
    )


def _setting(result: dict[str, Any]) -> str:
    setting, devices = result["setting"], result["total"]["devices"]
    rates = "measured rates" if result["measured"] else "arithmetic, right to a factor of two"
    return (
        f"{devices} x {setting['device']}, {setting['extract_flops'] / 1e12:.3g} TFLOP/s in "
        f"{setting['extract_dtype']}; times by {rates}"
    )


def _memory(result: dict[str, Any]) -> str:
    stages = result["stages"]
    lines = []
    for name in ("extract", "train"):
        for place, parts in stages[name]["memory"].items():
            words = ", ".join(f"{part} {size_text(value)}" for part, value in parts.items())
            if words:
                lines.append(f"{name}: memory of the {place}: {words}")
    return "\n".join(lines)


def _notes(result: dict[str, Any]) -> list[str]:
    total, disk = result["total"], result["disk"]
    needed, free = size_text(disk["needed"]), size_text(disk["free"])
    lines = [f"disk: {needed} needed at the largest, {free} free in {disk['folder']}"]
    if total["cost"] is not None:
        hours = total["seconds"] / 3600 * total["devices"]
        lines.append(
            f"cost: {total['cost']:,.2f}, in the unit of --price-per-hour: {hours:,.2f} hours of a "
            "device"
        )
    lines.append(f"kept in {result['file']}")
    return lines


COMMAND = Command("plan", PlanOptions, "paceline.plan", show, problems)
