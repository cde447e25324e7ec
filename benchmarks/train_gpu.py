"""One optimiser step of paceline beside the EAGLE-3 trainers of speculators 0.9.0 and SpecForge
0.2.0 on one GPU: tokens/s, peak memory, share of the matrix-product rate.

    python benchmarks/train_gpu.py --ttt 3 7

needs both peers on the path (`pip install --no-deps speculators==0.9.0 hs-connectors==0.9.0
specforge==0.2.0`, and of what they ask for pydantic-settings, loguru, openai, datasets, yunchang).
The shape is that of Llama-3.1-8B with a draft vocabulary of 32,000, three auxiliary states and no
norm in front of `fc`; random data, 8,192 tokens a step in documents of 1,024 (`--lengths equal`) or
as long as chats are (`log_normal`; SpecForge pads and is left out); `long` is one document of
32,768 tokens without peers. All train in bfloat16 with torch's fused AdamW on bfloat16 weights, and
the same weights: speculators freezes the head, SpecForge trains it. Each round times every trainer
in turn, ROUND_STEPS steps at a stretch; ratios are medians over the rounds. The last line of stdout
is one JSON object.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from statistics import median
from time import perf_counter

import torch
from train_common import (
    LLAMA_8B,
    PacelineStep,
    log_normal_lengths,
    make_data,
    packed,
)
from train_peers import specforge_step, speculators_step

from paceline.device import product_flops
from paceline.train.flops import needed_flops

# With what each does to the draft's head.
PEERS = {"speculators": (speculators_step, "frozen"), "SpecForge": (specforge_step, "trained")}
ROUND_STEPS = 8
TOKENS = 8192
EQUAL, LONG = [1024] * 8, 32768
DEVICE, DTYPE = "cuda", torch.bfloat16


@dataclass
class Trainer:
    """run(i): step i. peak_gib: most memory that its steps took, its weights included."""

    name: str
    run: Callable[[int], None]
    needed_flops: float | None = None
    peak_gib: float = 0.0


def paceline(
    steps: int,
    share: float,
    train_head: bool,
    batches: Sequence[list[int]],
    masters: bool = False,
) -> Trainer:
    data = [make_data(LLAMA_8B, lengths, share, DTYPE, DEVICE) for lengths in batches]
    step = PacelineStep(LLAMA_8B, DTYPE, DEVICE, steps, train_head, masters)
    ready = [packed(LLAMA_8B, one) for one in data]
    flops = sum(
        needed_flops(
            LLAMA_8B.config(),
            batch,
            steps,
            trains_head=train_head,
            teacher_width=LLAMA_8B.draft_vocab,
        )
        for batch in ready
    ) / len(ready)
    name = f"paceline, {share:.0%} supervised, head {'trained' if train_head else 'frozen'}"
    name += ", float32 masters" if masters else ""
    return Trainer(name, lambda i: step(ready[i % len(ready)]), flops)


def peer(name: str, make: Callable, steps: int, batches: Sequence[list[int]]) -> Trainer:
    """What a peer computes does not depend on how much is supervised."""
    data = [make_data(LLAMA_8B, lengths, 0.5, DTYPE, DEVICE) for lengths in batches]
    run = make(LLAMA_8B, data, steps, DTYPE, DEVICE)
    return Trainer(name, run)


def warmed(make: Callable[[], Trainer]) -> Trainer:
    """A trainer that has compiled all it compiles, and its memory above what others hold."""
    torch.cuda.empty_cache()
    before, started = torch.cuda.memory_allocated(), perf_counter()
    trainer = make()
    for i in range(5):
        trainer.run(i)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    for i in range(5):
        trainer.run(i)
    torch.cuda.synchronize()
    trainer.peak_gib = (torch.cuda.max_memory_allocated() - before) / 2**30
    print(f"  {trainer.name}: ready in {perf_counter() - started:.0f} s", file=sys.stderr)
    return trainer


def compare(
    trainers: Sequence[Trainer], rounds: int, product_rate: float, tokens: int = TOKENS
) -> list[dict]:
    """Tokens/s of each trainer by rounds in turns; tokens: of one step."""
    speeds: list[list[float]] = [[] for _ in trainers]
    for _ in range(rounds):
        for trainer, seen in zip(trainers, speeds, strict=True):
            trainer.run(0)
            torch.cuda.synchronize()
            started = perf_counter()
            for i in range(ROUND_STEPS):
                trainer.run(i)
            torch.cuda.synchronize()
            seen.append(tokens * ROUND_STEPS / (perf_counter() - started))
    rows = []
    for trainer, seen in zip(trainers, speeds, strict=True):
        row = {
            "trainer": trainer.name,
            "tokens_per_s": median(seen),
            "rounds": seen,
            "peak_gib": trainer.peak_gib,
        }
        if trainer.needed_flops:
            rate = trainer.needed_flops * median(seen) / tokens
            row |= {"needed_tflops_per_s": rate / 1e12, "of_product_rate": rate / product_rate}
        rows.append(row)
    return rows


def ratios(rows: list[dict], ours: str, theirs: str) -> dict:
    """Median over rounds of ours / theirs, and of the memory."""
    a, b = (next(r for r in rows if r["trainer"].startswith(n)) for n in (ours, theirs))
    speed = median(x / y for x, y in zip(a["rounds"], b["rounds"], strict=True))
    return {"speed": speed, "memory": a["peak_gib"] / b["peak_gib"]}


def equal_documents(steps: int, rounds: int, peers: Sequence[str]) -> dict:
    rate = product_flops(torch.device(DEVICE), DTYPE)
    trainers = [
        warmed(lambda: paceline(steps, 0.5, False, [EQUAL])),
        warmed(lambda: paceline(steps, 0.5, True, [EQUAL])),
        warmed(lambda: paceline(steps, 0.5, True, [EQUAL], masters=True)),
        warmed(lambda: paceline(steps, 1.0, False, [EQUAL])),
        warmed(lambda: paceline(steps, 1.0, True, [EQUAL])),
        *(warmed(lambda name=name: peer(name, PEERS[name][0], steps, [EQUAL])) for name in peers),
    ]
    rows = compare(trainers, rounds, rate)
    half, whole = "paceline, 50% supervised, head ", "paceline, 100% supervised, head "
    pairs = {
        f"{share}_vs_{name.lower()}": (ours + PEERS[name][1], name)
        for name in peers
        for share, ours in (("half", half), ("all", whole))
    }
    return {
        "ttt": steps,
        "product_tflops": rate / 1e12,
        "rows": rows,
        "ratios": {key: ratios(rows, *names) for key, names in pairs.items()},
    }


def real_lengths(steps: int, rounds: int) -> dict:
    """Documents of log-normal lengths, another batch each step."""
    batches = [log_normal_lengths(TOKENS, seed) for seed in range(4)]
    trainers = [
        warmed(lambda: paceline(steps, 0.5, False, batches)),
        warmed(lambda: peer("speculators", speculators_step, steps, batches)),
    ]
    rows = compare(trainers, rounds, product_flops(torch.device(DEVICE), DTYPE))
    return {"ttt": steps, "rows": rows, "ratios": ratios(rows, "paceline", "speculators")}


def one_document(steps: int, rounds: int) -> dict:
    """A whole step, paceline's own optimiser included."""
    trainer = warmed(lambda: paceline(steps, 0.5, True, [[LONG]], masters=True))
    rate = product_flops(torch.device(DEVICE), DTYPE)
    return {"ttt": steps, "rows": compare([trainer], rounds, rate, LONG)}


MEASUREMENTS = {"equal": equal_documents, "log_normal": real_lengths, "long": one_document}


def show(title: str, measured: dict) -> None:
    print(title, file=sys.stderr)
    for row in measured["rows"]:
        share = row.get("of_product_rate")
        print(
            f"  {row['trainer']:56s} {row['tokens_per_s']:9,.0f} tokens/s  "
            f"{row['peak_gib']:5.1f} GiB" + (f"  {share:.2f} of products" if share else ""),
            file=sys.stderr,
        )
    if "ratios" in measured:
        print(json.dumps(measured["ratios"]), file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ttt", type=int, nargs="+", default=[3, 7])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS), help="of `equal`")
    parser.add_argument("--lengths", nargs="+", choices=MEASUREMENTS, default=list(MEASUREMENTS))
    args = parser.parse_args()
    results = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    results |= {name: [] for name in args.lengths}
    measurements = MEASUREMENTS | {"equal": partial(equal_documents, peers=args.peers)}
    for steps, name in product(args.ttt, args.lengths):
        measured = measurements[name](steps, args.rounds)
        torch.compiler.reset()
        show(f"TTT {steps}, lengths: {name}", measured)
        results[name].append(measured)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
