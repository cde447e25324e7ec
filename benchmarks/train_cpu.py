"""One optimiser step of paceline beside the eager EAGLE-3 trainer of speculators 0.9.0 on the CPU.

    python benchmarks/train_cpu.py

SmolLM2-135M's shapes, draft vocabulary 8,192, three TTT steps, 4,096 tokens in four documents, the
later half of each supervised; the head frozen as in speculators; torch's fused AdamW for both. Each
runs in its faster dtype, timed first. The peer's wheels are put into a folder of their own (made
once, `--peers`), beside this environment's torch and transformers. Rounds in turns, one process a
side; the last line of stdout is one JSON object with `ratio_vs_speculators`.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median

import torch
from train_common import SMOLLM2, PacelineStep, make_data, median_seconds, packed
from train_peers import speculators_step

# What speculators' EAGLE-3 model imports and this environment may lack; torch is left as it is.
PEER = "speculators==0.9.0 hs-connectors==0.9.0"
ITS_NEEDS = (
    "pydantic-settings python-dotenv loguru openai==2.8.0 jiter distro sniffio anyio httpx "
    "httpcore h11 datasets dill multiprocess pandas python-dateutil six tzdata aiohttp "
    "multidict yarl frozenlist aiosignal attrs propcache aiohappyeyeballs"
)
STEPS, SHARE, DOCUMENTS = 3, 0.5, 4


def peer_folder(folder: Path) -> Path:
    """A folder with the peer's wheels, made where it is missing."""
    done = folder / "done"
    if not done.exists():
        names = [*PEER.split(), *ITS_NEEDS.split()]
        install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--upgrade"]
        subprocess.run([*install, "--target", str(folder), *names], check=True, stdout=sys.stderr)
        done.touch()
    return folder


def seconds_a_step(side: str, dtype: str, tokens: int, count: int) -> float:
    """In this process."""
    kind = getattr(torch, dtype)
    data = make_data(SMOLLM2, [tokens // DOCUMENTS] * DOCUMENTS, SHARE, kind, "cpu")
    if side == "speculators":
        peer = speculators_step(SMOLLM2, [data], STEPS, kind, "cpu")
        step = lambda: peer(0)
    else:
        own = PacelineStep(SMOLLM2, kind, "cpu", STEPS, train_head=False)
        batch = packed(SMOLLM2, data)
        step = lambda: own(batch)
    return median_seconds(step, count, 1, lambda: None)


def measured(side: str, dtype: str, args: argparse.Namespace, count: int, tokens: int) -> float:
    """Seconds a step, in a process of its own: neither side works in the other's memory."""
    command = [sys.executable, __file__, "--one", side, "--dtype", dtype, "--count", str(count)]
    command += ["--tokens", str(tokens)]
    path = [str(Path("src").resolve()), *(p for p in (os.environ.get("PYTHONPATH"),) if p)]
    if side == "speculators":
        path.append(str(args.peers))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    done = subprocess.run(command, check=True, env=environment, stdout=subprocess.PIPE, text=True)
    return float(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peers", type=Path, default=Path("runs/peers"))
    parser.add_argument("--one", choices=["paceline", "speculators"], help="used by itself")
    parser.add_argument("--dtype", default="float32", help="used by itself")
    parser.add_argument("--count", type=int, default=3, help="steps timed in a round")
    args = parser.parse_args()
    if args.one:
        print(seconds_a_step(args.one, args.dtype, args.tokens, args.count))
        return
    args.peers = peer_folder(args.peers.resolve())
    dtypes = {}
    for side in ("paceline", "speculators"):
        # A short trial is enough: without units for bfloat16 it is several times as slow.
        trial = lambda dtype, side=side: measured(side, dtype, args, 1, args.tokens // 16)
        seen = {dtype: trial(dtype) for dtype in ("float32", "bfloat16")}
        dtypes[side] = min(seen, key=seen.get)
        print(f"{side}: {seen} s a step in a trial", file=sys.stderr)
    rounds = [
        {
            side: measured(side, dtype, args, args.count, args.tokens)
            for side, dtype in dtypes.items()
        }
        for _ in range(args.rounds)
    ]
    speed = {side: args.tokens / median(r[side] for r in rounds) for side in dtypes}
    ratio = median(r["speculators"] / r["paceline"] for r in rounds)
    for side, value in speed.items():
        print(f"{side:12s} {dtypes[side]:9s} {value:8,.0f} tokens/s", file=sys.stderr)
    print(f"ratio {ratio:.2f}", file=sys.stderr)
    result = {"tokens_per_s": speed, "dtypes": dtypes, "rounds_s": rounds}
    result |= {"threads": torch.get_num_threads(), "ratio_vs_speculators": ratio}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
