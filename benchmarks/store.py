"""How fast the store writes and reads beside a plain file, and beside a file per sample.

    python benchmarks/store.py [--gib 2.0] [--rounds 5] [--folder FOLDER] [--million 1000000]

Samples of 500 tokens, half of them supervised, bfloat16, three auxiliary layers, hidden sizes 576
and 4096; all ways take turns in one process, a ratio is the median over the rounds, and what is
given is that of the worse hidden size.

`write_ratio`: against one plain write of the same bytes in blocks of 1 MiB and one fsync, as `dd
conv=fsync` does it. `read_ratio`: shuffled samples into packed batches, against a plain read of the
same files, one after the other, into memory of a batch's size; all from the page cache.
`peer_ratio`: samples a second, against the fastest of the ways of others: a safetensors or a torch
file per sample (all rows of four states), loaded, joined and padded as they do it, in this process
or in as many worker processes as the store's reader has threads. With --million: seconds and memory
that opening a store of so many (tiny) samples takes in a fresh process. A table goes to stderr, one
JSON object to stdout.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch.utils.data import DataLoader, Dataset

from paceline.artefact import open_stage
from paceline.contracts import LayerPlan, TokenSample
from paceline.store import (
    PackedReader,
    ShardWriter,
    Store,
    StoreSpec,
    content_fingerprint,
    iterate_packed,
)

NUM_TOKENS = 500
BATCH_TOKENS = 4096
MIN_BATCHES, MIN_PEER_BATCHES = 48, 16
NUM_AUX = 3
BLOCK_BYTES = 1 << 20
# A pool of states is written again and again: what is in it does not matter to a disk.
POOL = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", default=None, help="where files are written; /dev/shm is one")
    parser.add_argument("--threads", type=int, default=2, help="of the reader")
    parser.add_argument("--lanes", type=int, default=1, help="of the writer")
    parser.add_argument("--million", type=int, default=0)
    parser.add_argument("--only-open", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only_open:
        print(json.dumps(only_open(Path(arguments.only_open))))
        return
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        by_width = {width: measure(Path(name), width, arguments) for width in (576, 4096)}
        figures = {
            key: min(found[key] for found in by_width.values())
            for key in ("write_ratio", "read_ratio", "peer_ratio")
        }
        figures |= {
            f"{k}_{width}": v for width, found in by_width.items() for k, v in found.items()
        }
        if arguments.million:
            figures |= measure_open(Path(name), arguments.million)
    figures |= {"folder": arguments.folder, "gib": arguments.gib, "rounds": arguments.rounds}
    figures |= {"threads": arguments.threads, "lanes": arguments.lanes, "cpus": os.cpu_count()}
    for key, value in figures.items():
        print(f"{key:>28}  {value}", file=sys.stderr)
    print(json.dumps(figures))


def measure(folder: Path, width: int, arguments: argparse.Namespace) -> dict[str, float]:
    """GB/s and ratios of one hidden size."""
    spec = StoreSpec(LayerPlan((2, 15, 27), 30), width, "bfloat16", shard_bytes=256 << 20)
    pool = [make_sample(i, spec) for i in range(POOL)]
    num_samples = max(8, int(arguments.gib * 2**30 / pool[0][1].nbytes))
    write_both(folder, spec, pool, num_samples, arguments.lanes)
    written = [
        write_both(folder, spec, pool, num_samples, arguments.lanes)
        for _ in range(arguments.rounds)
    ]
    figures = rates("write", written)
    path = folder / "store"
    write_store(path, spec, pool, num_samples, arguments.lanes)
    store = Store(path)
    read_both(store, arguments.threads)
    figures |= rates("read", [read_both(store, arguments.threads) for _ in range(arguments.rounds)])
    figures |= beside_peers(folder, store, pool, arguments)
    shutil.rmtree(path)
    return figures


def make_sample(number: int, spec: StoreSpec) -> tuple[TokenSample, torch.Tensor]:
    """A sample that ends supervised, and its states [T, 4, D]."""
    rng = np.random.default_rng(number)
    mask = np.arange(NUM_TOKENS) >= NUM_TOKENS // 2
    ids = rng.integers(0, 30_000, NUM_TOKENS).astype(np.int32)
    states = torch.from_numpy(
        rng.standard_normal((NUM_TOKENS, NUM_AUX + 1, spec.hidden_size), np.float32)
    ).bfloat16()
    return TokenSample(f"s{number}", ids, mask), states


def named(sample: TokenSample, number: int) -> TokenSample:
    return TokenSample(f"s{number}", sample.input_ids, sample.loss_mask)


def write_store(path: Path, spec: StoreSpec, pool: list, num_samples: int, lanes: int) -> float:
    """Seconds of a writer's work from the first sample to the last folder fsync."""
    split = [
        (sample, states[:, :NUM_AUX].contiguous(), states[sample.loss_mask, NUM_AUX])
        for sample, states in pool
    ]
    with open_stage(path, "extract", {}, {}) as stage:
        started = time.perf_counter()
        with ShardWriter(path, spec, num_lanes=lanes) as writer:
            for number in range(num_samples):
                sample, aux, last = split[number % POOL]
                writer.add(named(sample, number), aux, last)
        seconds = time.perf_counter() - started
        stage.finish({"store": spec.to_dict()}, content_fingerprint(path))
    return seconds


def write_plain(path: Path, num_bytes: int) -> float:
    block = memoryview(np.random.default_rng(0).bytes(BLOCK_BYTES))
    started = time.perf_counter()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    for start in range(0, num_bytes, BLOCK_BYTES):
        os.write(descriptor, block[: min(BLOCK_BYTES, num_bytes - start)])
    os.fsync(descriptor)
    os.close(descriptor)
    return time.perf_counter() - started


def write_both(
    folder: Path, spec: StoreSpec, pool: list, num_samples: int, lanes: int
) -> tuple[int, float, float]:
    """Bytes, seconds of a plain write, seconds of ours; both files are removed again."""
    ours = write_store(folder / "written", spec, pool, num_samples, lanes)
    num_bytes = shard_bytes(folder / "written")
    shutil.rmtree(folder / "written")
    os.sync()
    plain = write_plain(folder / "plain", num_bytes)
    (folder / "plain").unlink()
    os.sync()
    return num_bytes, plain, ours


def shard_bytes(path: Path) -> int:
    return sum(p.stat().st_size for p in (path / "shards").iterdir())


def read_both(store: Store, threads: int) -> tuple[int, float, float]:
    """Bytes, seconds of a plain read, seconds of ours."""
    paths = sorted((Path(store.folder) / "shards").iterdir())
    room = memoryview(bytearray(batch_bytes(store)))
    started = time.perf_counter()
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.readinto(room):
                pass
    plain = time.perf_counter() - started
    return shard_bytes(Path(store.folder)), plain, read_packed(store, threads)


def batch_bytes(store: Store) -> int:
    sample_bytes = shard_bytes(Path(store.folder)) // len(store)
    return BATCH_TOKENS // NUM_TOKENS * sample_bytes


def read_packed(store: Store, threads: int) -> float:
    """Seconds of one epoch of ours."""
    epoch = list(iterate_packed(store, "train", BATCH_TOKENS, seed=0))
    read = lambda groups: PackedReader(store, groups, num_threads=threads)
    return seconds_in_stride(read, epoch, threads, MIN_BATCHES)


def seconds_in_stride(
    read: Callable[[list[list[int]]], Iterable], epoch: list[list[int]], threads: int, least: int
) -> float:
    """Seconds of one epoch out of a longer reading, of at least so many batches: a reader is made
    once, so that batches before and after the epoch keep it in its stride."""
    # Batches come in bunches, one from each thread; over many of them that does not matter.
    num_epochs = -(-least // len(epoch))
    # As many as are read ahead: two for each worker of a DataLoader.
    stride = [epoch[0]] * (2 * threads + 1)
    groups = [*stride, *epoch * num_epochs, *stride]
    times = [time.perf_counter() for _ in read(groups)]
    return (times[-len(stride) - 1] - times[len(stride) - 1]) / num_epochs


def rates(what: str, measured: list[tuple[int, float, float]]) -> dict[str, float]:
    """Medians over the rounds of (bytes, seconds plain, seconds of ours)."""
    ratios = [plain / ours for _, plain, ours in measured]
    return {
        f"{what}_ratio": statistics.median(ratios),
        f"{what}_ratios": [round(ratio, 3) for ratio in ratios],
        f"plain_{what}_gb_s": statistics.median(n / plain / 1e9 for n, plain, _ in measured),
        f"{what}_gb_s": statistics.median(n / ours / 1e9 for n, _, ours in measured),
    }


class FilePerSample(Dataset):
    """Others' layouts: hs_N.safetensors (hidden_states [T, L, H], token_ids), or data_N.pt (a dict
    with the auxiliary states side by side and the last one)."""

    def __init__(self, folder: Path, form: str, num_samples: int) -> None:
        self.folder, self.form, self.num_samples = folder, form, num_samples

    def __len__(self) -> int:
        return self.num_samples

    def path(self, number: int) -> Path:
        return self.folder / f"hs_{number}.{self.form}"

    def write(self, pool: list) -> None:
        self.folder.mkdir()
        for number in range(self.num_samples):
            sample, states = pool[number % POOL]
            ids = torch.from_numpy(sample.input_ids).long()
            if self.form == "safetensors":
                save_file({"hidden_states": states, "token_ids": ids}, self.path(number))
            else:
                fields = {
                    "input_ids": ids,
                    "loss_mask": torch.from_numpy(sample.loss_mask).long(),
                    "hidden_state": states[:, NUM_AUX].clone(),
                    "aux_hidden_state": states[:, :NUM_AUX].flatten(1),
                }
                torch.save(fields, self.path(number))

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if self.form == "safetensors":
            found = load_file(self.path(number))
            states = found["hidden_states"]
            return found["token_ids"], states[:, :NUM_AUX].flatten(1), states[:, NUM_AUX]
        found = torch.load(self.path(number), weights_only=True)
        return found["input_ids"], found["aux_hidden_state"], found["hidden_state"]


def collate(samples: list) -> list[torch.Tensor]:
    """Joined, and padded to the length of all batches."""
    joined = [torch.cat(tensors) for tensors in zip(*samples, strict=True)]
    return [
        F.pad(tensor, [0, 0] * (tensor.dim() - 1) + [0, BATCH_TOKENS - len(tensor)])
        for tensor in joined
    ]


def read_peers(data: FilePerSample, workers: int) -> float:
    """Seconds of one epoch of others', without the start of their workers."""
    order = np.random.default_rng(0).permutation(len(data)).tolist()
    size = BATCH_TOKENS // NUM_TOKENS
    epoch = [order[start : start + size] for start in range(0, len(order), size)]
    read = lambda groups: DataLoader(
        data, batch_sampler=groups, num_workers=workers, collate_fn=collate
    )
    return seconds_in_stride(read, epoch, workers, MIN_PEER_BATCHES)


def beside_peers(
    folder: Path, store: Store, pool: list, arguments: argparse.Namespace
) -> dict[str, float]:
    """Samples a second of ours over that of the fastest way of others."""
    ways = {}
    for form in ("safetensors", "pt"):
        data = FilePerSample(folder / form, form, len(store))
        data.write(pool)
        for workers in (0, arguments.threads):
            ways[f"{form}_{workers}_workers"] = (data, workers)
    seconds: dict[str, list[float]] = {name: [] for name in ("ours", *ways)}
    for _ in range(arguments.rounds):
        seconds["ours"].append(read_packed(store, arguments.threads))
        for name, way in ways.items():
            seconds[name].append(read_peers(*way))
    for form in ("safetensors", "pt"):
        shutil.rmtree(folder / form)
    per_way = {
        name: statistics.median(
            theirs / ours for theirs, ours in zip(seconds[name], seconds["ours"], strict=True)
        )
        for name in ways
    }
    ratios = {f"peer_ratio_{name}": ratio for name, ratio in per_way.items()}
    return {"peer_ratio": min(per_way.values()), **ratios}


def measure_open(folder: Path, num_samples: int) -> dict[str, float]:
    """Seconds and memory of opening a store of so many samples in a fresh process."""
    path = folder / "many"
    spec = StoreSpec(LayerPlan((1,), 2), 1, "bfloat16", shard_bytes=8 << 20)
    ids, mask = np.arange(2, dtype=np.int32), np.asarray([False, True])
    aux, last = torch.zeros(1, 1, 1).bfloat16(), torch.zeros(1, 1).bfloat16()
    with open_stage(path, "extract", {}, {}) as stage:
        with ShardWriter(path, spec) as writer:
            for number in range(num_samples):
                sample = TokenSample(
                    f"sample-{number:010}", ids, mask, conversation_id=f"c{number}"
                )
                writer.add(sample, aux, last)
        stage.finish({"store": spec.to_dict()}, content_fingerprint(path))
    command = [sys.executable, __file__, "--only-open", str(path)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return json.loads(output.splitlines()[-1])


def only_open(path: Path) -> dict[str, float]:
    # From here on the kernel's peak is that of opening, not of the imports before it.
    Path("/proc/self/clear_refs").write_text("5")
    before = memory_mib("VmRSS")
    started = time.perf_counter()
    store = Store(path)
    store.read(len(store) - 1)
    store.split("train")
    seconds = time.perf_counter() - started
    peak = memory_mib("VmHWM")
    return {
        "open_samples": len(store),
        "open_s": seconds,
        "open_mib": peak - before,
        "open_process_mib": peak,
    }


def memory_mib(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1024


if __name__ == "__main__":
    main()
