"""Greedy decoding with a draft gives the target's own tokens: all prompts of whole prompt sets.

    python benchmarks/lossless.py --prompts SETS/*/question.jsonl --draft DRAFT --out FOLDER

The first turn of each prompt is answered twice by transformers in float32, by the target alone and
with the draft (`paceline evaluate --mode decode`), the prompts dealt out to `--jobs` processes on
one device. Every answer that differs is shown with the log probability gap of the two tokens at
which they part; near ties are those that rounding of float32 in other batch shapes can turn. The
last line of stdout is one JSON object; exit status 1 where an answer differs otherwise.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.dataset import source_of


def main() -> int:
    options = parse()
    started = time.monotonic()
    shares = deal(options.prompts, options.jobs, options.out)
    results = answered(options, shares)
    result = joined(results) | {"seconds": round(time.monotonic() - started, 1)}
    (options.out / "lossless.json").write_text(json.dumps(result))
    for found in result["differences"]:
        print(
            f"{found['conversation']}: token {found['position']} is {found['other']} and not "
            f"{found['own']}, log p gap {found['gap']}",
            file=sys.stderr,
        )
    print(json.dumps({k: v for k, v in result.items() if k != "differences"}))
    return 0 if result["equal_outputs"] + result["near_ties"] == result["outputs"] else 1


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=Path, nargs="+", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--target", help="left out: the one that the draft names")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--chain", type=int, default=5)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    return parser.parse_args()


def deal(files: Sequence[Path], jobs: int, out: Path) -> list[list[Path]]:
    """Files of prompts for each job: every so-manyth prompt of each set, under the set's name."""
    shares: list[list[Path]] = [[] for _ in range(jobs)]
    for file in files:
        rows = [line for line in file.read_text().splitlines() if line.strip()]
        for number, share in enumerate(shares):
            if mine := rows[number::jobs]:
                path = out / f"share-{number}" / f"{source_of(file)}.jsonl"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text("".join(f"{row}\n" for row in mine))
                share.append(path)
    return [share for share in shares if share]


def answered(options: argparse.Namespace, shares: list[list[Path]]) -> list[dict[str, Any]]:
    """What `evaluate` returned for each share. Raises SystemExit where one failed."""
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    running = []
    for number, share in enumerate(shares):
        command = [sys.executable, "-m", "paceline.cli.main", "evaluate", "--json"]
        command += ["--mode", "decode", "--dtype", "float32", "--max-turns", "1", "--overwrite"]
        command += ["--draft", options.draft, "--num-draft-tokens", str(options.chain)]
        command += ["--target", options.target] if options.target else []
        command += ["--max-new-tokens", str(options.max_new_tokens)]
        command += ["--out", str(options.out / f"measured-{number}")]
        command += [word for path in share for word in ("--prompts", str(path))]
        with (options.out / f"share-{number}.txt").open("w") as messages:
            pipe = subprocess.PIPE
            running.append(
                subprocess.Popen(command, env=environment, stdout=pipe, stderr=messages, text=True)
            )
    outputs = [job.communicate()[0] for job in running]
    if failed := [i for i, job in enumerate(running) if job.returncode not in (0, 1)]:
        raise SystemExit(f"shares {failed} failed: see {options.out}/share-N.txt")
    return [json.loads(output) for output in outputs]


def joined(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Sums over the shares, and the acceptance length of all of them."""
    if broken := [found["error"] for found in results if "lossless" not in found]:
        raise SystemExit(f"evaluate: {broken[0]}")
    total: dict[str, Any] = {
        name: sum(found["lossless"][name] for found in results)
        for name in ("outputs", "equal_outputs", "near_ties")
    }
    differences = [d for found in results for d in found["lossless"]["differences"]]
    pooled = [next(iter(found["results"].values()))["pooled"] for found in results]
    steps, accepted = (sum(p[name] for p in pooled) for name in ("verify_steps", "accepted"))
    return total | {"acceptance_length": 1 + accepted / steps, "differences": differences}


if __name__ == "__main__":
    sys.exit(main())
