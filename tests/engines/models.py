"""Tiny random targets of the families that vLLM must be right for, and one look at each.

Random, since no small real model of these families exists. Reference: transformers' own forward.
`python -m tests.engines.models FOLDER NAME...` looks at several one after the other in one process,
which starts vLLM once, and writes their errors to FOLDER/errors.json.
"""

import json
import sys
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from paceline.contracts import TokenSample
from paceline.extract.vllm.engine import VllmEngine
from paceline.target.layers import plan_layers
from paceline.target.spec import Target, TargetReference
from tests.engines.common import Outcome, capture, settings_of, worst_error
from tests.targets import save_model

NUM_LAYERS, WIDTH, VOCAB = 6, 128, 320
PLAN = plan_layers([0, 1, 3, 5], NUM_LAYERS)
_SHAPE = {
    "hidden_size": WIDTH,
    "intermediate_size": 192,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
_MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "head_dim": 64,
    "rope_parameters": _YARN,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}
_CPU_MLA = {"attention_backend": "CPU_MLA"}
_V3_KEYS = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
_KIMI = "KimiK25ForConditionalGeneration"

# Family of transformers, changes to its shape, arguments of vLLM, further keys of config.json.
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {}, {}, {}),
    "qwen3": ("qwen3", {}, {}, {}),
    "qwen3_moe": ("qwen3_moe", {"moe_intermediate_size": 64}, {}, {}),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 32}, {}, {}),
    "gemma3": ("gemma3_text", {"query_pre_attn_scalar": 32}, {}, {}),
    "gemma4": (
        "gemma4_text",
        {"global_head_dim": 32, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0},
        {},
        {},
    ),
    "exaone4": ("exaone4", {}, {}, {}),
    "gpt_oss": ("gpt_oss", {"head_dim": 64}, {}, {}),
    "deepseek_v2": ("deepseek_v2", _MLA, _CPU_MLA, {}),
    "deepseek_v3": ("deepseek_v3", _MLA, _CPU_MLA, _V3_KEYS),
    "kimi_k25": ("deepseek_v3", _MLA, {**_CPU_MLA, "language_model_only": True}, _V3_KEYS),
}


def make(name: str, folder: Path, **changes: Any) -> tuple[Target, Path]:
    """The target as vLLM loads it, and the folder that transformers loads."""
    family, shape, _, keys = MODELS[name]
    plain = save_model(folder / "plain", family, **{**_SHAPE, **shape, **changes})
    path = plain / "config.json"
    config = {**json.loads(path.read_text()), **keys}
    path.write_text(json.dumps(config))
    if name != "kimi_k25":
        return Target(TargetReference(str(plain))), plain
    return Target(TargetReference(str(_wrap(plain, config, folder / "wrapped")))), plain


def _wrap(plain: Path, config: dict[str, Any], folder: Path) -> Path:
    """The same weights inside the multimodal wrapper, under the names that it gives them."""
    folder.mkdir()
    weights = load_file(plain / "model.safetensors")
    renamed = {f"language_model.{name}": tensor for name, tensor in weights.items()}
    save_file(renamed, folder / "model.safetensors", {"format": "pt"})
    wrapper = {
        "architectures": [_KIMI],
        "model_type": "kimi_k25",
        "text_config": {**config, "model_type": "kimi_k2"},
        "vision_config": {},
        "dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(wrapper))
    return folder


def samples_of(count: int = 12) -> list[TokenSample]:
    rng = np.random.default_rng(5)
    samples = []
    for i in range(count):
        length = int(rng.integers(8, 90))
        ids = rng.integers(5, VOCAB, length).astype(np.int32)
        samples.append(TokenSample(f"sample-{i}", ids, np.arange(length) >= length // 2))
    return samples


def engine_of(name: str, target: Target, scratch: Path, **wanted: Any) -> VllmEngine:
    arguments = {"max_model_len": 256, "max_num_batched_tokens": 64, **MODELS[name][2], **wanted}
    if MODELS[name][2].get("attention_backend"):
        # This CPU backend runs prompts whole.
        arguments["max_num_batched_tokens"] = 256
    return VllmEngine(settings_of(target, scratch, **arguments), NUM_LAYERS, "float32")


def look_at_class_here(target: Target) -> None:
    """vLLM looks at a model's class in a process of its own, so that CUDA is left alone in this
    one; a class that it is given is looked at here."""
    from vllm import ModelRegistry

    (architecture,) = target.config.architectures
    known = ModelRegistry.models[architecture]
    ModelRegistry.register_model(architecture, known.load_model_cls())


def worst_row(name: str, folder: Path, **wanted: Any) -> dict[int, float]:
    """Capture k = 0, 1, 3, 5 and n and compare every row: the largest error by k."""
    target, plain = make(name, folder)
    look_at_class_here(target)
    engine = engine_of(name, target, folder, **wanted)
    samples = samples_of()
    try:
        result = capture(engine, samples, folder / "store", plan=PLAN, width=WIDTH)
    finally:
        engine.close()
    return errors_of(result, samples, plain)


def errors_of(result: Outcome, samples: list[TokenSample], plain: Path) -> dict[int, float]:
    """Every sample was stored once; its largest error by k against transformers on `plain`."""
    assert result.rejected == {}
    assert len(result.store) == len(samples)
    assert result.published == {sample.sample_id for sample in samples}
    model = AutoModelForCausalLM.from_pretrained(
        plain, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    before_norm: list[torch.Tensor] = []
    model.get_decoder().norm.register_forward_pre_hook(lambda _, args: before_norm.append(args[0]))
    errors = dict.fromkeys(PLAN.all, 0.0)
    with torch.inference_mode():
        for sample in samples:
            before_norm.clear()
            ids = torch.from_numpy(sample.input_ids.astype(np.int64))[None]
            hidden = model(ids, output_hidden_states=True, use_cache=False).hidden_states
            found = result.store.read(result.store.records.find(sample.sample_id))
            for i, k in enumerate(PLAN.aux):
                plain_rows = hidden[k][0][: sample.num_aux_rows]
                errors[k] = max(errors[k], worst_error(found.aux[:, i], plain_rows))
            last = before_norm[0][0][torch.from_numpy(sample.loss_mask)]
            errors[PLAN.last] = max(errors[PLAN.last], worst_error(found.last, last))
    return errors


def main(folder: Path, names: list[str]) -> None:
    found: dict[str, Any] = {}
    for name in names:
        try:
            found[name] = worst_row(name, folder / name)
        except Exception:  # told by the test of this family; the others are looked at all the same
            found[name] = traceback.format_exc()
    (folder / "errors.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
