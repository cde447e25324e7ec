"""Config files of real targets as their makers publish them, as far as their shape goes."""

import json
from pathlib import Path
from typing import Any

QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
}
# Its own code is not beside it, and `auto_map` asks for that code.
KIMI_K25 = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "auto_map": {"AutoConfig": "configuration_kimi_k25.KimiK25Config"},
    "model_type": "kimi_k25",
    "text_config": {
        "model_type": "kimi_k2",
        "dtype": "bfloat16",
        "first_k_dense_replace": 1,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "kv_lora_rank": 512,
        "max_position_embeddings": 262144,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 384,
        "n_shared_experts": 1,
        "num_attention_heads": 64,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 61,
        "num_key_value_heads": 64,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {"type": "yarn", "factor": 64.0},
        "rope_theta": 50000.0,
        "tie_word_embeddings": False,
        "v_head_dim": 128,
        "vocab_size": 163840,
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 32}}},
        },
    },
}


def write_config(folder: Path, values: dict[str, Any]) -> Path:
    """A folder that holds a config and nothing else."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(values))
    return folder
