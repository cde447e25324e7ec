"""Weights counted from a config alone, against transformers' own models and published figures."""

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from paceline.errors import TargetError
from paceline.plan.shape import shape_of
from paceline.target.spec import Target, TargetReference
from tests.plan.configs import KIMI_K25, QWEN3_8B, write_config
from tests.targets import _COMMON, FAMILIES

_WIDER = {
    "hidden_size": 256,
    "intermediate_size": 640,
    "num_attention_heads": 8,
    "head_dim": 32,
    "num_hidden_layers": 12,
}


def _shape(folder):
    return shape_of(Target(TargetReference(str(folder)), with_weights=False))


def _num_weights(config):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_those_of_transformers_model(tmp_path, family):
    config = CONFIG_MAPPING[family](**{**_COMMON, **FAMILIES[family], **_WIDER})
    config.save_pretrained(tmp_path)
    shape = _shape(tmp_path)
    assert shape.num_weights == pytest.approx(_num_weights(config), rel=0.01)
    assert (shape.num_layers, shape.hidden_size, shape.vocab_size) == (12, 256, 320)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_a_token_meets_its_experts_only(tmp_path, family):
    config = CONFIG_MAPPING[family](**{**_COMMON, **FAMILIES[family], **_WIDER})
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    experts = sum(p.numel() for n, p in model.named_parameters() if ".mlp.experts." in n)
    shape = _shape(tmp_path)
    assert shape.expert_weights == pytest.approx(experts, rel=0.02)
    idle = shape.layer_weights - shape.active_weights
    assert idle == shape.expert_weights // 2  # 2 of 4 experts


def test_a_number_of_layers_that_the_config_works_out(tmp_path):
    layers = {"hybrid_override_pattern": "M-M*"}
    config = CONFIG_MAPPING["nemotron_h"](**layers, hidden_size=64, vocab_size=320)
    config.save_pretrained(tmp_path)
    assert _shape(tmp_path).num_layers == config.num_hidden_layers > 0


def test_experts_by_longcats_names(tmp_path):
    config = CONFIG_MAPPING["longcat_flash"](n_routed_experts=512, moe_topk=12)
    config.save_pretrained(tmp_path)
    shape = _shape(tmp_path)
    expert = 3 * config.hidden_size * config.expert_ffn_hidden_size
    assert shape.expert_weights == shape.num_layers * 512 * expert
    idle = shape.layer_weights - shape.active_weights
    assert idle == shape.num_layers * (512 - 12) * expert


def test_qwen3_8b(tmp_path):
    folder = write_config(tmp_path / "qwen", QWEN3_8B)
    shape = _shape(folder)
    assert shape.num_weights == pytest.approx(
        _num_weights(AutoConfig.from_pretrained(folder)), 1e-3
    )
    assert shape.num_weights == pytest.approx(8.19e9, rel=0.001)
    assert shape.active_weights == pytest.approx(6.95e9, rel=0.001)
    assert shape.weight_bytes == 2 * shape.num_weights


def test_kimi_k25_from_a_config_whose_code_is_not_there(tmp_path):
    folder = write_config(tmp_path / "kimi", KIMI_K25)
    target = Target(TargetReference(str(folder), trust_remote_code=True), with_weights=False)
    shape = shape_of(target)
    # Published: 1.0 trillion weights, 32 billion activated; about 595 GB of files.
    assert shape.num_weights == pytest.approx(1.03e12, rel=0.01)
    activated = shape.active_weights + shape.embedding_weights
    assert activated == pytest.approx(32.9e9, rel=0.02)
    assert shape.weight_bytes == pytest.approx(595e9, rel=0.02)
    assert (shape.num_layers, shape.hidden_size, shape.dtype) == (61, 7168, "bfloat16")


def test_weight_files_tell_their_own_size(tmp_path):
    folder = write_config(tmp_path / "with", QWEN3_8B)
    (folder / "model.safetensors").write_bytes(b"x" * 12_345)
    assert _shape(folder).weight_bytes == 12_345


def test_a_config_without_a_width_is_named(tmp_path):
    values = {"model_type": "unheard_of", "num_hidden_layers": 4, "vocab_size": 10}
    folder = write_config(tmp_path / "bad", values)
    with pytest.raises(TargetError, match="no hidden_size"):
        _shape(folder)
