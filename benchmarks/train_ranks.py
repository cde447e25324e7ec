"""One optimiser step on one GPU beside the same on several, each with documents of its own.

    torchrun --nproc-per-node 2 benchmarks/train_ranks.py

The shape is that of Llama-3.1-8B with a draft vocabulary of 32,000 and 3 TTT steps, 8,192 tokens in
a micro-batch, half of them supervised, bfloat16 with float32 masters, trained head. `alone` is
every rank for itself. Ways take turns, ROUND_STEPS steps at a stretch; figures are medians over
the rounds, of the slowest rank. Before that the first step of one rank over all documents is held
against that of all ranks: largest error of a weight's gradient, relative to its norm. The first
rank's last line on stdout is one JSON object.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist
from train_common import CHUNK, DECAY, LLAMA_8B, SMOLLM2, Shape, make_data, packed, random_draft

from paceline.draft.batch import PackedBatch
from paceline.recipe import TrainOptions
from paceline.train.optimiser import MasterAdamW
from paceline.train.parallel import Alone, share_draft, whole
from paceline.train.ranks import Ranks, open_ranks

LENGTH, STEPS = 1024, 3
ROUND_STEPS = 6
ALONE, SHARED = "alone", ("ddp", "fsdp2")


@dataclass(frozen=True)
class Work:
    """What a micro-batch is: documents of LENGTH tokens for a draft of a shape."""

    shape: Shape
    documents: int


@dataclass
class Step:
    """An optimiser step of one way. seconds: of a step, by rounds."""

    way: str
    batches: Sequence[PackedBatch]
    num_rows: int
    seconds: list[float] = field(default_factory=list)
    peak_gib: float = 0.0

    def build(self, shape: Shape, ranks: Ranks, dtype: torch.dtype) -> "Step":
        torch.manual_seed(0)
        self.draft, self.teacher = random_draft(shape, dtype, str(ranks.device), train_head=True)
        self.parallel = Alone()
        if self.way != ALONE:
            self.parallel = share_draft(self.draft, ranks, self.way, "adamw")
        options = TrainOptions(max_grad_norm=1e9)
        self.optimiser = MasterAdamW(self.draft, options, self.parallel)
        return self

    def __call__(self) -> None:
        for number, batch in enumerate(self.batches):
            arguments = self.teacher, STEPS, DECAY, self.num_rows, CHUNK
            loss, _ = self.parallel.distil(self.draft, batch, *arguments)
            self.parallel.backward(loss, number + 1 == len(self.batches))
            self.optimiser.accumulate()
        self.optimiser.step(1e-4)


def batches_of(
    work: Work, ranks: Ranks, seeds: Sequence[int], dtype: torch.dtype
) -> list[PackedBatch]:
    device, lengths = str(ranks.device), [LENGTH] * work.documents
    data = [make_data(work.shape, lengths, 0.5, dtype, device, seed) for seed in seeds]
    return [packed(work.shape, one).to(device, dtype) for one in data]


def wait(ranks: Ranks) -> None:
    if ranks.device.type == "cuda":
        torch.cuda.synchronize()


def moments(step: Step) -> dict[str, torch.Tensor]:
    """After one step without clipping, a tenth of the gradient."""
    state = step.optimiser.state_tensors()
    return {n: whole(t) for n, t in state.items() if n.startswith("adamw.exp_avg.")}


def errors(work: Work, ranks: Ranks, count: int, dtype: torch.dtype) -> dict[str, float]:
    """Of the gradients of all ranks, `count` micro-batches each."""
    seeds = list(range(count * ranks.count))
    everything = batches_of(work, ranks, seeds, dtype)
    num_rows = sum(batch.num_supervised_rows for batch in everything)
    own = everything[ranks.number * count : (ranks.number + 1) * count]
    one = Step(ALONE, everything, num_rows).build(work.shape, ranks, dtype)
    one()
    expected, found = moments(one), {}
    for way in SHARED:
        step = Step(way, own, num_rows).build(work.shape, ranks, dtype)
        step()
        given = moments(step)
        found[way] = max(
            float((given[n] - g).norm() / g.norm().clamp_min(1e-30)) for n, g in expected.items()
        )
    return found


def measure(
    work: Work, ranks: Ranks, count: int, rounds: int, dtype: torch.dtype
) -> dict[str, dict[str, float]]:
    own = batches_of(work, ranks, [ranks.number * count + i for i in range(count)], dtype)
    num_rows = ranks.count * sum(batch.num_supervised_rows for batch in own)
    steps = []
    for way in (ALONE, *SHARED):
        free = _allocated(ranks)
        step = Step(way, own, num_rows).build(work.shape, ranks, dtype)
        for _ in range(3):
            step()
        wait(ranks)
        if ranks.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            step()
            step.peak_gib = (torch.cuda.max_memory_allocated() - free) / 2**30
        steps.append(step)
    for _ in range(rounds):
        for step in steps:
            wait(ranks)
            dist.barrier()
            began = perf_counter()
            for _ in range(ROUND_STEPS):
                step()
            wait(ranks)
            step.seconds.append(ranks.largest((perf_counter() - began) / ROUND_STEPS))
    tokens = count * work.documents * LENGTH
    speed = {
        s.way: (1 if s.way == ALONE else ranks.count) * tokens / median(s.seconds) for s in steps
    }
    return {
        s.way: {
            "tokens_per_s": speed[s.way],
            "times_alone": speed[s.way] / speed[ALONE],
            "step_ms": 1000 * median(s.seconds),
            "peak_gib": ranks.largest(s.peak_gib),
        }
        for s in steps
    }


def _allocated(ranks: Ranks) -> int:
    return torch.cuda.memory_allocated() if ranks.device.type == "cuda" else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", choices=["llama-8b", "smollm2"], default="llama-8b")
    parser.add_argument("--documents", type=int, default=8, help="of a micro-batch")
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    work = Work({"llama-8b": LLAMA_8B, "smollm2": SMOLLM2}[args.shape], args.documents)
    with open_ranks(args.device) as ranks:
        dtype = torch.bfloat16 if ranks.device.type == "cuda" else torch.float32
        result = {"ranks": ranks.count, "device": ranks.device.type, "torch": torch.__version__}
        result["gradient_errors"] = errors(work, ranks, 1, dtype)
        for count in args.micro_batches:
            found = measure(work, ranks, count, args.rounds, dtype)
            result[f"{count} micro-batches"] = found
            if ranks.is_first:
                for way, values in found.items():
                    shown = ", ".join(f"{key} {value:,.2f}" for key, value in values.items())
                    print(f"{count} micro-batches, {way}: {shown}", file=sys.stderr)
        if ranks.is_first:
            print(json.dumps(result))


if __name__ == "__main__":
    main()
