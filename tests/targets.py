"""Tiny random targets of many architectures, as folders that transformers loads.

Random, since no small real model of these families exists; used where only the form matters.
"""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedTokenizerFast,
)

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_COMMON = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
_MLA = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
}
# What makes a family's norm, head or layers unlike llama's.
FAMILIES = {
    "llama": {"tie_word_embeddings": True},
    "qwen3": {},
    "phi3": {},
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "norm_topk_prob": True,
    },
    "gemma2": {"final_logit_softcapping": 5.0, "query_pre_attn_scalar": 8},
    "gemma3_text": {"query_pre_attn_scalar": 8},
    "cohere": {"logit_scale": 0.3},
    "granite": {"logits_scaling": 4.0, "embedding_multiplier": 2.0, "residual_multiplier": 0.7},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v2": _MLA,
    "deepseek_v3": _MLA,
}
# Layers of linear attention between those of attention, which few tests can do with.
HYBRID = {
    "qwen3_next": {
        **FAMILIES["qwen3_moe"],
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "shared_expert_intermediate_size": 16,
    },
}
_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_QWEN_TOWER = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 32,
}
_QWEN_ROPE = {"rope_scaling": {"rope_type": "default", "mrope_section": [2, 1, 1]}}
# Language models inside multimodal ones: (changes of the text config, the tower's config).
WRAPPED = {
    "gemma3": ({"query_pre_attn_scalar": 8, "sliding_window": 4}, _TOWER),
    "kimi_k25": (_MLA, {**_TOWER, "pos_emb_height": 4, "pos_emb_width": 4}),
    "llava": ({"model_type": "llama"}, {**_TOWER, "model_type": "clip_vision_model"}),
    "mistral3": ({"model_type": "mistral"}, {**_TOWER, "model_type": "pixtral"}),
    "qwen2_5_vl": (_QWEN_ROPE, _QWEN_TOWER),
    "qwen3_vl": (_QWEN_ROPE, {**_QWEN_TOWER, "deepstack_visual_indexes": [0]}),
}
# transformers 4 does not know all of them.
WRAPPED = {family: parts for family, parts in WRAPPED.items() if family in CONFIG_MAPPING}


def model_class(family: str) -> type:
    """transformers' own class for a family; which one paceline takes is for it to find out."""
    return AutoModelForImageTextToText if family in WRAPPED else AutoModelForCausalLM


def _config(family: str, changes: dict):
    if family not in WRAPPED:
        own = (FAMILIES | HYBRID).get(family, {})
        return CONFIG_MAPPING[family](**{**_COMMON, **own, **changes})
    text, tower = WRAPPED[family]
    text = {**_COMMON, **text, **changes}
    return CONFIG_MAPPING[family](text_config=text, vision_config=tower, **changes)


def save_model(folder: Path, family: str, seed: int = 0, **changes) -> Path:
    """changes: of the config; of a wrapped model's both.

    Random weights away from their starting values, so that every gain and bias matters."""
    torch.manual_seed(seed)
    model = model_class(family).from_config(_config(family, changes), dtype=torch.float32)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.1)
    model.save_pretrained(folder)
    return folder


def save_tokenizer(folder: Path, chat_template: str | None = CHAT_TEMPLATE) -> Path:
    """Bytes and a few markers: 256 + 4 ids."""
    markers = ["<|im_start|>", "<|im_end|>", "<think>", "</think>"]
    byte_level = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*markers, *byte_level])}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=markers[0],
        eos_token=markers[1],
        additional_special_tokens=markers[2:],
    )
    if chat_template:
        fast.chat_template = chat_template
    fast.save_pretrained(folder)
    return folder


def save_target(folder: Path, family: str = "llama", seed: int = 0, **changes) -> Path:
    """A whole target: model and tokenizer."""
    return save_tokenizer(save_model(folder, family, seed, **changes))


def save_long_rope(folder: Path, original: int) -> Path:
    """A target that turns to other rotary frequencies beyond so many tokens (Phi 3)."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
        "original_max_position_embeddings": original,
        "factor": 8.0,
    }
    return save_target(
        folder, "phi3", original_max_position_embeddings=original, rope_parameters=rope
    )


def edit_config(folder: Path, **changes) -> None:
    edit_json(folder / "config.json", **changes)


def edit_json(path: Path, **changes) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
