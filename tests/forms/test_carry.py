"""What each server carries; what it does not is refused by name."""

import pytest

from paceline.errors import ExportError
from paceline.forms.carry import FEATURES, FORMS, check_carried
from tests.forms.making import LLAMA3, NUM_LAYERS, config_for

THETA = {"rope_theta": 10000.0}
YARN = {**THETA, "rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096}
MSCALES = {"mscale": 1.0, "mscale_all_dim": 1.0}
DYNAMIC = {**THETA, "rope_type": "dynamic", "factor": 4.0}

# Read in the released sources; a server below fails, or drops the tensors without a word.
LOWEST = [
    ("vllm", {"aux_norm": "none"}, "0.16"),
    ("vllm", {"aux_norm": "static"}, "0.16"),
    ("vllm", {"aux_norm": "joint"}, "0.18"),
    ("vllm", {"aux_norm": "rms"}, "0.22"),
    ("vllm", {"aux_norm": "none", "norm_output": True}, "0.22"),
    ("vllm", {"aux_norm": "none", "aux_layers": (2, 5)}, "0.22"),
    ("vllm", {"aux_norm": "none", "aux_layers": (0, 4, 5)}, "0.18"),
    ("vllm", {"aux_norm": "none", "aux_layers": (2, 4, 8)}, "0.18"),
    ("vllm", {"aux_norm": "none", "aux_layers": (1, 4, 6)}, "0.16"),
    ("vllm", {"aux_norm": "rms", "qk_norm": True}, "0.24"),
    ("vllm", {"aux_norm": "none", "num_layers": 2}, "0.16"),
    ("vllm", {"aux_norm": "none", "rope": {**THETA, **LLAMA3}}, "0.16"),
    ("vllm", {"aux_norm": "none", "rope": YARN}, "0.16"),
    ("vllm", {"aux_norm": "none", "rope": {**YARN, "truncate": False}}, "0.16"),
    # transformers and vLLM read the two together or not at all.
    ("vllm", {"aux_norm": "none", "rope": {**YARN, "mscale": 0.7}}, "0.16"),
    # 0.1 ln(40) + 1, which the factor gives anyway.
    (
        "vllm",
        {"aux_norm": "none", "rope": {**YARN, "attention_factor": 1.3688879454113936}},
        "0.16",
    ),
    # Run: vLLM 0.16.0 scales cos and sin by 1.37 where training had 1, 0.32.0 as training.
    ("vllm", {"aux_norm": "none", "rope": {**YARN, **MSCALES}}, "0.32"),
    ("vllm", {"aux_norm": "none", "rope": {**YARN, "attention_factor": 1.0}}, "0.32"),
    ("vllm", {"aux_norm": "none", "rope": {**YARN, "attn_factor": 0.5}}, "0.32"),
    ("speculators", {"aux_norm": "rms"}, "0.22"),
    ("speculators", {"aux_norm": "rms", "rope": {**YARN, **MSCALES}}, "0.32"),
    ("sglang", {"aux_norm": "none"}, "0.5.6"),
    ("sglang", {"aux_norm": "static"}, "0.5.6"),
    ("sglang", {"aux_norm": "none", "rope": YARN}, "0.5.6"),
    ("sglang", {"aux_norm": "none", "rope": {**YARN, "truncate": True}}, "0.5.6"),
    # gpt-oss; 0.5.6 does not read the key, 0.5.11 does.
    ("sglang", {"aux_norm": "none", "rope": {**YARN, "truncate": False}}, "0.5.11"),
    ("sglang", {"aux_norm": "rms"}, "0.5.12"),
    ("sglang", {"aux_norm": "none", "norm_output": True}, "0.5.12"),
    ("sglang", {"aux_norm": "none", "num_layers": 2}, "0.5.12"),
    ("sglang", {"aux_norm": "none", "aux_layers": (2, 3, 4, 5)}, "0.5.12"),
    ("sglang", {"aux_norm": "joint"}, "0.5.23"),
]


@pytest.mark.parametrize(("form", "changes", "version"), LOWEST, ids=str)
def test_the_lowest_release_that_runs_a_draft(form, changes, version):
    assert check_carried(FORMS[form], config_for(**changes), NUM_LAYERS).version == version


@pytest.mark.parametrize(
    ("form", "changes", "words"),
    [
        ("sglang", {"qk_norm": True}, r"SGLang .*qk_norm \(norms on queries and keys\)"),
        ("sglang", {"norm_before_residual": True}, r"SGLang .*norm_before_residual"),
        ("sglang", {"aux_layers": (1, 4, 5)}, r"SGLang .*layer_list .*start at k = 2"),
        ("sglang", {"aux_layers": (3, 4, 5)}, r"SGLang .*layer_list"),
        ("sglang", {"aux_layers": (0, 4, 5)}, r"SGLang .*first_layer .*k = 0"),
        ("sglang", {"aux_layers": (2, 4, 8)}, r"SGLang .*last_layer .*k = n"),
        ("sglang", {"hidden_size": 48}, r"SGLang .*square_fc"),
        ("sglang", {"rope": {**YARN, **MSCALES}}, r"SGLang .*yarn_scale .*mscale"),
        ("vllm", {"rope": DYNAMIC}, r"vLLM .*rope_type .*otherwise than training"),
        ("vllm", {"hidden_act": "gelu"}, r"vLLM .*hidden_act"),
        ("speculators", {"hidden_act": "gelu"}, r"vLLM \(speculators form\) .*hidden_act"),
    ],
    ids=str,
)
def test_a_refusal_names_the_server_and_the_feature(form, changes, words):
    with pytest.raises(ExportError, match=words):
        check_carried(FORMS[form], config_for(**changes), NUM_LAYERS)


def test_all_that_is_lacking_is_named_at_once():
    config = config_for(qk_norm=True, aux_layers=(1, 4, 8))
    with pytest.raises(ExportError) as error:
        check_carried(FORMS["sglang"], config, NUM_LAYERS)
    assert all(name in str(error.value) for name in ("qk_norm", "layer_list", "last_layer"))


def test_a_server_that_is_too_old_is_refused_with_what_it_lacks():
    config = config_for(aux_norm="rms")
    with pytest.raises(ExportError, match=r"vLLM 0\.20\.2 .*aux_norm: rms .* needs 0\.22"):
        check_carried(FORMS["vllm"], config, NUM_LAYERS, at_most="0.20.2")
    with pytest.raises(ExportError, match=r"SGLang 0\.5\.9 .*needs 0\.5\.12"):
        check_carried(FORMS["sglang"], config, NUM_LAYERS, at_most="0.5.9")
    assert check_carried(FORMS["vllm"], config, NUM_LAYERS, at_most="0.22.1").version == "0.22"
    scaled = config_for(aux_norm="none", rope={**YARN, **MSCALES})
    with pytest.raises(ExportError, match=r"vLLM 0\.25\.0 .*yarn_scale .* needs 0\.32"):
        check_carried(FORMS["vllm"], scaled, NUM_LAYERS, at_most="0.25.0")
    with pytest.raises(ExportError, match="'new'"):
        check_carried(FORMS["vllm"], config, NUM_LAYERS, at_most="new")


@pytest.mark.parametrize("form", sorted(FORMS))
def test_every_form_answers_for_every_feature(form):
    assert set(FORMS[form].carries) == set(FEATURES)
