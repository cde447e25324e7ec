"""What the GPU benchmarks of extraction share: shapes, samples, an engine, the disk's rate."""

import json
import os
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paceline.contracts import TokenSample
from paceline.extract.vllm.engine import VllmEngine
from paceline.extract.vllm.settings import VllmSettings, llm_arguments
from paceline.target.spec import Target, TargetReference

# Llama-3.1-8B, and a small model of DeepSeek-V3's make: MLA, a dense first layer, routed experts.
SHAPES: dict[str, dict[str, Any]] = {
    "llama-8b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": 32,
        "head_dim": 128,
        "hidden_act": "silu",
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
    },
    "deepseek-v3-small": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "moe_intermediate_size": 1024,
        "num_hidden_layers": 16,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "q_lora_rank": 768,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 64,
        "n_shared_experts": 1,
        "num_experts_per_tok": 6,
        "n_group": 4,
        "topk_group": 2,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "hidden_act": "silu",
        "vocab_size": 129280,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": {
            "type": "yarn",
            "rope_type": "yarn",
            "factor": 2.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        "tie_word_embeddings": False,
        "attention_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
    },
}


def make_target(shape: str, folder: Path) -> Target:
    """A folder with a config alone: vLLM fills in random weights (`load_format="dummy"`)."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {**SHAPES[shape], "torch_dtype": "bfloat16", "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    return Target(TargetReference(str(folder)))


def make_samples(count: int, shortest: int, longest: int, vocab: int) -> list[TokenSample]:
    """Random prompts, their second half supervised."""
    rng = random.Random(0)
    samples = []
    for i in range(count):
        length = rng.randrange(shortest, longest + 1)
        ids = np.asarray([rng.randrange(vocab) for _ in range(length)], np.int32)
        mask = np.zeros(length, bool)
        mask[length // 2 :] = True
        samples.append(TokenSample(f"sample-{i:05d}", ids, mask))
    return samples


def engine_settings(
    target: Target, dtype: str, scratch: Path, writers: int = 4, **wanted: Any
) -> VllmSettings:
    return VllmSettings(llm_arguments(target, dtype, wanted, None), scratch, writers=writers)


def plain_prefill(engine: VllmEngine, samples: list[TokenSample]) -> None:
    """The same prompts through the same engine with no tap: one token each, nothing kept."""
    for sample in samples:
        prompt = sample.input_ids[: sample.num_aux_rows + 1].tolist()
        engine.add(f"plain-{engine.next_number()}", prompt)
    while engine.busy():
        engine.step()


def write_rate(folder: Path, total_bytes: int) -> float:
    """Bytes per second of a plain write and fsync of so many bytes, in files of 1 GiB."""
    block = torch.randint(0, 256, (64 << 20,), dtype=torch.uint8).numpy()
    paths, left, start = [], total_bytes, time.perf_counter()
    while left > 0:
        path = folder / f"plain-{len(paths)}.bin"
        paths.append(path)
        with path.open("wb", buffering=0) as file:
            for _ in range(16):
                file.write(block[: min(left, len(block))])
                left -= len(block)
                if left <= 0:
                    break
            os.fsync(file.fileno())
    elapsed = time.perf_counter() - start
    for path in paths:
        path.unlink()
    return total_bytes / elapsed


def peak_host_bytes() -> int:
    """Most resident memory of this process so far (VmHWM)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) << 10
    raise RuntimeError("no VmHWM in /proc/self/status")
