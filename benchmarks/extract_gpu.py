"""What a capture costs on a GPU: tokens/s of extraction beside plain prefill in the same process.

    python benchmarks/extract_gpu.py --out FOLDER [--shape llama-8b|deepseek-v3-small]
        [--prompts 256] [--repeats 3] [--tensor-parallel 1] [--workers 1]

Dummy weights, prompts of 512 to 2,048 random tokens, half of them supervised. Extraction runs with
every check on and ends when the last shard is published (fsync, rename). Beside it: the rate of a
plain write + fsync of the same bytes. With --workers N a pool of N engines is timed beside a pool
of one. VLLM_USE_V2_MODEL_RUNNER chooses vLLM's runner. One JSON object on stdout.
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpu_common import (
    engine_settings,
    make_samples,
    make_target,
    peak_host_bytes,
    plain_prefill,
    write_rate,
)

from paceline.artefact import folder_size, open_stage
from paceline.contracts import LayerPlan, TokenSample
from paceline.extract.guards import Guards
from paceline.extract.sink import QUARANTINE_PATTERN, Destination, read_lines
from paceline.extract.vllm.engine import VllmEngine
from paceline.extract.vllm.local_hosts import launch_local, share_devices
from paceline.extract.vllm.replicas import ReplicaPool
from paceline.store import StoreSpec, published_ids
from paceline.target.layers import plan_layers
from paceline.target.spec import Target

RMS_RANGE = (1e-3, 1e3)


def main() -> None:
    options = parse()
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    with tempfile.TemporaryDirectory() as scratch:
        target = make_target(options.shape, Path(scratch) / options.shape)
        samples = make_samples(options.prompts, 512, 2048, 128000)
        plan = plan_layers(None, target.num_layers)
        measure = of_pools if options.workers > 1 else of_one_engine
        result = measure(options, target, samples, plan, Path(scratch))
    print(json.dumps({"shape": options.shape, "prompts": options.prompts, **result}))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder on the disk to measure")
    parser.add_argument("--shape", default="llama-8b")
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--batched-tokens", type=int, default=8192)
    parser.add_argument("--shard-mib", type=int, default=256)
    parser.add_argument("--writers", type=int, default=4)
    return parser.parse_args()


def settings_of(options: argparse.Namespace, target: Target, scratch: Path):
    return engine_settings(
        target,
        "bfloat16",
        scratch,
        options.writers,
        load_format="dummy",
        max_model_len=4096,
        max_num_batched_tokens=options.batched_tokens,
        gpu_memory_utilization=0.85,
        tensor_parallel_size=options.tensor_parallel,
    )


def of_one_engine(
    options: argparse.Namespace,
    target: Target,
    samples: list[TokenSample],
    plan: LayerPlan,
    scratch: Path,
) -> dict[str, Any]:
    engine = VllmEngine(settings_of(options, target, scratch), target.num_layers, "bfloat16")
    loaded_bytes = peak_host_bytes()
    destination = destination_in(options, target, plan)
    tokens = sum(s.num_aux_rows + 1 for s in samples)
    plain_prefill(engine, samples)
    timed_capture(engine, samples, plan, destination)
    plain, tapped, stored = [], [], 0
    for _ in range(options.repeats):
        plain.append(seconds(lambda: plain_prefill(engine, samples)))
        tapped.append(timed_capture(engine, samples, plan, destination))
        stored = folder_size(destination.folder).num_bytes
    settings = engine.call("paceline_settings")[0]
    result = {
        "settings": engine.info.settings,
        "vllm": engine.info.version,
        "tokens": tokens,
        "plain_tokens_per_s": [tokens / s for s in plain],
        "extract_tokens_per_s": [tokens / s for s in tapped],
        "ratio": statistics.median(plain) / statistics.median(tapped),
        "stored_bytes": stored,
        "write_bytes_per_s": stored / statistics.median(tapped),
        "plain_write_bytes_per_s": write_rate(options.out, stored),
        "peak_host_gib": peak_host_bytes() / 2**30,
        "peak_host_gib_before_capture": loaded_bytes / 2**30,
        "kv_blocks_unchanged": settings["kv_blocks"] == engine.settings["kv_blocks"],
        "kv_blocks": settings["kv_blocks"],
    }
    engine.close()
    tell(result)
    return result


def of_pools(
    options: argparse.Namespace,
    target: Target,
    samples: list[TokenSample],
    plan: LayerPlan,
    scratch: Path,
) -> dict[str, Any]:
    """Tokens/s of a pool of one and of a pool of `workers`, each timed after one capture."""
    devices = share_devices(options.workers, options.tensor_parallel)
    tokens = sum(s.num_aux_rows + 1 for s in samples)
    rates = {}
    for count in (1, options.workers):
        pool = ReplicaPool(
            count,
            lambda number, port, key: launch_local(number, port, key, devices[number]),
            settings_of(options, target, scratch),
            target.num_layers,
            "bfloat16",
        )
        destination = destination_in(options, target, plan)
        timed_capture(pool, samples, plan, destination)
        times = [timed_capture(pool, samples, plan, destination) for _ in range(options.repeats)]
        rates[count] = tokens / statistics.median(times)
        pool.close()
        print(f"{count} workers: {rates[count]:,.0f} tokens/s", file=sys.stderr)
    stored = folder_size(destination.folder).num_bytes
    return {
        "tokens": tokens,
        "workers": options.workers,
        "tokens_per_s": rates,
        "speedup": rates[options.workers] / rates[1],
        "plain_write_bytes_per_s": write_rate(options.out, stored),
        "stored_bytes": stored,
    }


def destination_in(options: argparse.Namespace, target: Target, plan: LayerPlan) -> Destination:
    shard_bytes = options.shard_mib << 20
    spec = StoreSpec(plan, target.hidden_size, "bfloat16", shard_bytes=shard_bytes)
    guards = Guards(plan, target.hidden_size, (RMS_RANGE,) * len(plan.all))
    return Destination(options.out / "store", spec, guards)


def timed_capture(
    engine: VllmEngine | ReplicaPool,
    samples: list[TokenSample],
    plan: LayerPlan,
    destination: Destination,
) -> float:
    """Seconds until the last shard is published; every sample must be there."""
    shutil.rmtree(destination.folder, ignore_errors=True)
    with open_stage(destination.folder, "extract", inputs={}, options={}):
        elapsed = seconds(lambda: engine.capture(samples, plan, destination, lambda _: None))
    rejected = read_lines(destination.folder, QUARANTINE_PATTERN)
    stored = published_ids(destination.folder)
    if rejected or stored != {s.sample_id for s in samples}:
        raise SystemExit(f"{len(stored)} of {len(samples)} stored; rejected: {rejected[:3]}")
    return elapsed


def seconds(action: Callable[[], None]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def tell(result: dict[str, Any]) -> None:
    plain = statistics.median(result["plain_tokens_per_s"])
    tapped = statistics.median(result["extract_tokens_per_s"])
    print(
        f"plain prefill      {plain:12,.0f} tokens/s\n"
        f"extraction         {tapped:12,.0f} tokens/s  ({result['ratio']:.3f} of plain)\n"
        f"written            {result['write_bytes_per_s'] / 1e9:12.2f} GB/s\n"
        f"plain write, fsync {result['plain_write_bytes_per_s'] / 1e9:12.2f} GB/s\n"
        f"peak host memory   {result['peak_host_gib']:12.2f} GiB",
        file=sys.stderr,
    )


if __name__ == "__main__":
    main()
