"""`paceline doctor`: prints what was found; problems make the exit code 1."""

from typing import Any

from rich.console import Console

from paceline.cli.command import Command
from paceline.cli.output import facts
from paceline.recipe import DoctorOptions
from paceline.units import size_text


def show(result: dict[str, Any], console: Console) -> None:
    packages = [f"{name} {p['version']}" for name, p in result["packages"].items() if p["version"]]
    pairs = [
        ("paceline", f"{result['paceline']}, Python {result['python']}, {result['platform']}"),
        ("packages", ", ".join(packages)),
        *((f"extra {name}", _extra(entry)) for name, entry in result["extras"].items()),
        *((f"engine {name}", _engine(entry)) for name, entry in result["engines"].items()),
        ("CPU", _cpu(result["cpu"])),
        *((f"GPU {i}", _gpu(gpu)) for i, gpu in enumerate(result["gpus"])),
        ("memory", _memory(result["memory"])),
        ("disk", _disk(result["disk"])),
    ]
    if not result["gpus"]:
        pairs.insert(-2, ("GPU", "none"))
    console.print(facts("This machine", pairs))
    for note in result["notes"]:
        console.print(note, style="yellow", soft_wrap=True)
    if not result["problems"]:
        console.print("nothing keeps paceline from working here")


def problems(result: dict[str, Any]) -> list[str]:
    return result["problems"]


def _extra(entry: dict[str, Any]) -> str:
    if entry["installed"]:
        return ", ".join(f"{name} {version}" for name, version in entry["packages"].items())
    missing = [name for name, version in entry["packages"].items() if version is None]
    purpose = f" (for {entry['for']})" if entry["for"] else ""
    return f"not installed: {', '.join(missing)}{purpose}"


def _engine(entry: dict[str, Any]) -> str:
    version = f"{entry['version']}, " if entry["version"] else ""
    return f"{'works' if entry['works'] else 'does not work'}: {version}{entry['detail']}"


def _cpu(cpu: dict[str, Any]) -> str:
    return (
        f"{cpu['cores']} cores, torch uses {cpu['torch_uses']} with {cpu['threads']} threads; has "
        f"{', '.join(cpu['features']) or 'none of the looked for features'}; dtype auto means "
        f"{cpu['fast_dtype']} here"
    )


def _gpu(gpu: dict[str, Any]) -> str:
    free = f", {size_text(gpu['free_bytes'])} free" if "free_bytes" in gpu else ""
    state = "computes" if gpu["works"] else "does not compute"
    memory = size_text(gpu["memory_bytes"])
    return f"{gpu['name']}, {memory}{free}, compute capability {gpu['capability']}, {state}"


def _memory(memory: dict[str, Any]) -> str:
    locked, shm = memory["locked_limit_bytes"], memory["shm_free_bytes"]
    return ", ".join(
        (
            size_text(memory["total_bytes"]),
            f"{size_text(memory['available_bytes'])} not in use",
            "lockable without limit" if locked is None else f"{size_text(locked)} lockable",
            "no /dev/shm" if shm is None else f"/dev/shm {size_text(shm)} free",
            f"{memory['open_files_limit']:,} open files",
        )
    )


def _disk(disk: dict[str, Any]) -> str:
    free, total = size_text(disk["free_bytes"]), size_text(disk["total_bytes"])
    return (
        f"{free} of {total} free at {disk['folder']}; cache {disk['cache']}, "
        f"{size_text(disk['cache_free_bytes'])} free"
    )


COMMAND = Command("doctor", DoctorOptions, "paceline.doctor", show, problems)
