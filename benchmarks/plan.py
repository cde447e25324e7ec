"""The plan of the demo held against the demo: bytes and time, foretold and found.

    python benchmarks/plan.py [--rows N] [--steps N] [--keep FOLDER]

`paceline plan --measure` first, then the demo's stages into a fresh folder, each in processes of
their own. --rows and --steps make both smaller. A table goes to stderr, one JSON object to stdout:
`bytes_ratio` and `time_ratio` are found over foretold; the bars are 0.9 to 1.1 and 0.7 to 1.3.
`memory_ratio` is the run's peak of resident memory over the host memory foretold.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from paceline.artefact import folder_size

ROOT = Path(__file__).parent.parent
PACELINE = Path(sys.executable).with_name("paceline")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--keep", type=Path, help="keep the run in this folder")
    parser.add_argument("overrides", nargs="*", help="further overrides of the recipe")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = arguments.keep or Path(name) / "run"
        overrides = [f"run_dir={folder}", *arguments.overrides]
        if arguments.rows:
            overrides.append(f"prepare.limit={arguments.rows}")
        if arguments.steps:
            overrides.append(f"train.max_steps={arguments.steps}")
        plan, _ = paceline("plan", *overrides, "--measure")
        run, peak_bytes = paceline("run", *overrides)
        sizes = {
            stage: folder_size(Path(told["folder"])).num_bytes
            for stage, told in run["stages"].items()
        }
    stages = {
        stage: {
            "planned_bytes": plan["stages"][stage]["bytes"],
            "bytes": sizes[stage],
            "planned_s": plan["stages"][stage]["seconds"],
            "s": run["stages"][stage]["seconds"],
        }
        for stage in run["stages"]
    }
    total = {key: sum(s[key] or 0 for s in stages.values()) for key in next(iter(stages.values()))}
    show(stages | {"in all": total})
    result = {
        "bytes_ratio": total["bytes"] / total["planned_bytes"],
        "time_ratio": total["s"] / total["planned_s"],
        "memory_ratio": peak_bytes / plan["total"]["host_bytes"],
        "peak_bytes": peak_bytes,
        "stages": stages,
        "measured": plan["measured"],
        "setting": plan["setting"],
    }
    print(json.dumps(result))


def paceline(command: str, *arguments: str) -> tuple[dict, int]:
    """Run the program on the demo's recipe, from the repository's root; its JSON result and its
    peak of resident memory in bytes."""
    line = [str(PACELINE), command, "recipes/demo.yaml", *arguments, "--json"]
    process = subprocess.Popen(line, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"paceline {command} ended with {process.returncode}")
    return json.loads(output), usage.ru_maxrss * 1024


def show(rows: dict[str, dict]) -> None:
    columns = ("planned MB", "MB", "ratio", "planned s", "s", "ratio")
    widths = (12, 10, 8, 12, 8, 8)
    heads = "".join(f"{name:>{width}}" for name, width in zip(columns, widths, strict=True))
    print(f"{'stage':10}{heads}", file=sys.stderr)
    for stage, row in rows.items():
        seconds = row["planned_s"] or 0.0
        by_time = f"{row['s'] / seconds:8.2f}" if seconds else f"{'-':>8}"
        print(
            f"{stage:10}{row['planned_bytes'] / 1e6:12.2f}{row['bytes'] / 1e6:10.2f}"
            f"{row['bytes'] / row['planned_bytes']:8.2f}{seconds:12.1f}{row['s']:8.1f}{by_time}",
            file=sys.stderr,
        )


if __name__ == "__main__":
    main()
