"""The draft of a target's config: every family gives one that trains and that a server can run."""

import math
from types import SimpleNamespace

import pytest
from transformers import CONFIG_MAPPING, PretrainedConfig

from paceline.draft.from_target import dense_width, draft_config, draft_rope
from paceline.draft.rope import Rotary
from paceline.errors import TrainingError
from paceline.forms.carry import FORMS, check_carried
from paceline.forms.config_json import Serving, read_config, write_config
from paceline.recipe import DraftOptions
from tests.plan.configs import KIMI_K25
from tests.targets import _COMMON, FAMILIES

# As transformers describes them unasked: rotary parameters for each kind of layer, partly rotated
# heads, heads that do not divide the width, mixtures without a dense width, MLA.
DEFAULTS = [
    "bamba",
    "deepseek_v32",
    "gemma3",
    "gemma3n_text",
    "gemma4_text",
    "glm",
    "glm4",
    "glm4_moe",
    "glm4_moe_lite",
    "longcat_flash",
    "ministral3",
    "mistral4",
    "mixtral",
    "olmo3",
    "phi3",
    "qwen2_5_vl",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_next",
    "qwen3_vl_moe",
    "seed_oss",
    "starcoder2",
]
LAYERS = (2, 3, 5)
YARN = {
    "rope_type": "yarn",
    "factor": 16.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
GLM_4_5_AIR = {
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151552,
    "max_position_embeddings": 131072,
    "rope_theta": 1000000.0,
}


def config_of(values, **options):
    """The draft of a config with exactly these values, whatever transformers makes of them."""
    said = SimpleNamespace(to_dict=lambda: dict(values))
    return draft_config(DraftOptions(**options), said, LAYERS, 100)


def check_that_servers_run_it(config):
    rotary = Rotary(config)
    assert len(rotary.inv_freq) * 2 == config.head_dim
    assert check_carried(FORMS["vllm"], config, num_layers=8).version == "0.22"
    target = SimpleNamespace(
        vocab_size=config.vocab_size, hidden_size=config.target_hidden_size, num_layers=8
    )
    written = write_config(config, "vllm", 8, Serving("bfloat16"))
    assert read_config(written, "vllm", target) == config


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_gives_a_draft_that_a_server_runs(family):
    values = CONFIG_MAPPING[family](**{**_COMMON, **FAMILIES[family]}).to_dict()
    config = config_of(values)
    check_that_servers_run_it(config)
    assert (config.hidden_size, config.intermediate_size) == (32, 48)


@pytest.mark.parametrize("family", [name for name in DEFAULTS if name in CONFIG_MAPPING])
def test_so_does_every_family_as_transformers_describes_it(family):
    text = CONFIG_MAPPING[family]().get_text_config()
    config = draft_config(DraftOptions(), text, LAYERS, 100)
    check_that_servers_run_it(config)
    assert config.hidden_size == text.hidden_size
    assert config.num_attention_heads * config.head_dim <= 4 * config.hidden_size


@pytest.mark.parametrize(
    ("values", "rope"),
    [
        ({"rope_theta": 5e5}, {"rope_type": "default", "rope_theta": 5e5}),
        (
            {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 8.0}},
            {"rope_type": "linear", "rope_theta": 5e5, "factor": 8.0},
        ),
        (
            {
                "rope_parameters": {
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                }
            },
            {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        ),
        (
            {"rope_parameters": {"main": {"rope_type": "default", "rope_theta": 7e4}}},
            {"rope_type": "default", "rope_theta": 7e4},
        ),
        (
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            {"rope_type": "default", "rope_theta": 1e4},
        ),
        (
            {"rope_theta": 1e6, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}},
            {"rope_type": "default", "rope_theta": 1e6},
        ),
        (
            {"rope_parameters": {**YARN, "rope_theta": 1e6, "mscale": 1.0, "mscale_all_dim": 1.0}},
            {**YARN, "rope_theta": 1e6},
        ),
        (
            {"rope_theta": 1e4, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
            {"rope_type": "default", "rope_theta": 1e4},
        ),
        (
            {"rope_theta": 1e4, "rope_scaling": {"type": "longrope", "short_factor": [1.0, 1.0]}},
            {"rope_type": "default", "rope_theta": 1e4},
        ),
        (
            {"kv_lora_rank": 512, "rope_parameters": {**YARN, "rope_theta": 5e4, "mscale": 1.0}},
            {"rope_type": "default", "rope_theta": 5e4},
        ),
        (KIMI_K25["text_config"], {"rope_type": "default", "rope_theta": 5e4}),
    ],
    ids=str,
)
def test_rotary_parameters_are_what_every_server_reads_alike(values, rope):
    assert draft_rope(values) == rope


def test_yarn_is_scaled_as_servers_that_read_no_mscale_do():
    scaled = {**YARN, "rope_theta": 1e6, "mscale": 1.0, "mscale_all_dim": 1.0}
    config = config_of({**GLM_4_5_AIR, "rope_parameters": scaled})
    assert Rotary(config).scaling == pytest.approx(0.1 * math.log(16) + 1)


@pytest.mark.parametrize("values", [{}, {"rope_parameters": {}}, {"rope_theta": None}], ids=str)
def test_without_a_theta_the_error_names_the_option_that_sets_one(values):
    with pytest.raises(TrainingError, match=r"no rope_theta.*train\.draft\.rope_theta"):
        draft_rope(values)
    assert draft_rope(values, 2e4) == {"rope_type": "default", "rope_theta": 2e4}


def test_a_theta_of_ones_own_leaves_the_targets_scaling_behind():
    config = config_of({**GLM_4_5_AIR, "rope_scaling": YARN, "rope_theta": 1e6}, rope_theta=3e4)
    assert config.rope == {"rope_type": "default", "rope_theta": 3e4}


@pytest.mark.parametrize(
    ("values", "options", "heads"),
    [
        ({}, {}, (32, 8, 128)),
        ({"head_dim": None}, {}, (32, 8, 128)),
        ({"num_attention_heads": 64}, {}, (64, 8, 128)),
        ({"num_attention_heads": 64, "head_dim": None}, {}, (64, 8, 64)),
        # 20 heads are the most up to 2880 / 128 that divide 2880; 8 key heads do not divide them.
        ({"hidden_size": 2880, "num_attention_heads": 7}, {}, (20, 4, 128)),
        ({"kv_lora_rank": 512, "head_dim": 64, "num_key_value_heads": 96}, {}, (32, 32, 128)),
        ({"kv_lora_rank": 512}, {"num_key_value_heads": 4}, (32, 4, 128)),
        ({}, {"head_dim": 64}, (64, 8, 64)),
        ({}, {"num_attention_heads": 16, "num_key_value_heads": 2}, (16, 2, 128)),
        ({}, {"hidden_size": 96}, (96, 8, 128)),
        ({}, {"hidden_size": 100}, (1, 1, 128)),
    ],
    ids=str,
)
def test_heads_are_the_targets_where_a_llama_can_have_them(values, options, heads):
    config = config_of({**GLM_4_5_AIR, **values}, **options)
    found = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    assert found == heads
    Rotary(config)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"num_attention_heads": 96}, "4096 is not a multiple of num_attention_heads 96"),
        ({"head_dim": 65}, "head_dim 65 is odd"),
    ],
    ids=str,
)
def test_heads_of_ones_own_that_no_draft_can_have_are_refused(options, says):
    with pytest.raises(TrainingError, match=says):
        config_of(GLM_4_5_AIR, **options)


@pytest.mark.parametrize(
    ("values", "width"),
    [
        ({"hidden_size": 10, "intermediate_size": 48}, 48),
        ({"hidden_size": 10, "intermediate_size": [16, 64, 32]}, 64),
        ({"hidden_size": 10, "ffn_hidden_size": 24}, 24),
        ({"hidden_size": 10, "moe_intermediate_size": 5}, 40),
        ({"hidden_size": 10, "intermediate_size": None}, 40),
    ],
    ids=str,
)
def test_the_dense_width_of_a_target(values, width):
    assert dense_width(values) == width


def test_the_longest_position_has_two_spellings_and_an_option():
    values = {k: v for k, v in GLM_4_5_AIR.items() if k != "max_position_embeddings"}
    with pytest.raises(TrainingError, match=r"train\.draft\.max_position_embeddings"):
        config_of(values)
    assert config_of({**values, "model_max_length": 777}).max_position_embeddings == 777
    assert config_of(values, max_position_embeddings=55).max_position_embeddings == 55


def test_names_of_a_familys_own_are_read():
    text = CONFIG_MAPPING["gpt2"](n_embd=96, n_head=6, n_positions=300, vocab_size=500)
    config = draft_config(DraftOptions(rope_theta=1e4), text, LAYERS, 100)
    check_that_servers_run_it(config)
    assert (config.hidden_size, config.num_attention_heads, config.head_dim) == (96, 6, 16)
    assert (config.max_position_embeddings, config.intermediate_size) == (300, 384)


def test_widths_that_no_option_can_give_are_named_together():
    with pytest.raises(TrainingError, match="no hidden_size, vocab_size"):
        draft_config(DraftOptions(), PretrainedConfig(), LAYERS, 100)
