"""The key maps, against lists written by hand."""

import pytest
from safetensors.torch import load_file

from paceline.draft.model import Draft
from paceline.errors import ExportError
from paceline.forms.config_json import Serving
from paceline.forms.names import FORM_NAMES, from_form, is_ignored, to_form
from paceline.forms.write import write_draft
from tests.forms.making import config_for, draft_for, tiny_target

# The tensors of the EAGLE-3 drafts that its authors released.
RELEASED = {
    "d2t",
    "t2d",
    "fc.weight",
    "lm_head.weight",
    "norm.weight",
    "midlayer.hidden_norm.weight",
    "midlayer.input_layernorm.weight",
    "midlayer.mlp.down_proj.weight",
    "midlayer.mlp.gate_proj.weight",
    "midlayer.mlp.up_proj.weight",
    "midlayer.post_attention_layernorm.weight",
    "midlayer.self_attn.k_proj.weight",
    "midlayer.self_attn.o_proj.weight",
    "midlayer.self_attn.q_proj.weight",
    "midlayer.self_attn.v_proj.weight",
}
IN_SPECULATORS = {name.replace("midlayer.", "layers.0.") for name in RELEASED}
FC_NORM = {"fc_norm.0.weight", "fc_norm.1.weight", "fc_norm.2.weight"}
SECOND_LAYER = {
    "layers.1.mlp.down_proj.weight",
    "layers.1.mlp.gate_proj.weight",
    "layers.1.mlp.up_proj.weight",
    "layers.1.post_attention_layernorm.weight",
    "layers.1.self_attn.k_proj.weight",
    "layers.1.self_attn.o_proj.weight",
    "layers.1.self_attn.q_proj.weight",
    "layers.1.self_attn.v_proj.weight",
}
VLLM_SECOND = SECOND_LAYER | {"layers.1.input_layernorm.weight"}
SGLANG_SECOND = SECOND_LAYER | {"layers.1.hidden_norm.weight"}
QK = {"midlayer.self_attn.q_norm.weight", "midlayer.self_attn.k_norm.weight"}
WITHOUT_MAPS = RELEASED - {"d2t", "t2d"}


@pytest.mark.parametrize(
    ("form", "changes", "names"),
    [
        ("vllm", {"aux_norm": "none"}, RELEASED),
        ("sglang", {"aux_norm": "none"}, RELEASED),
        ("speculators", {"aux_norm": "none"}, IN_SPECULATORS),
        ("vllm", {"aux_norm": "rms"}, RELEASED | FC_NORM),
        ("sglang", {"aux_norm": "rms"}, RELEASED | FC_NORM),
        ("speculators", {"aux_norm": "rms"}, IN_SPECULATORS | FC_NORM),
        ("vllm", {"aux_norm": "joint"}, RELEASED | {"input_norm.weight"}),
        ("vllm", {"aux_norm": "static"}, RELEASED),
        ("sglang", {"aux_norm": "static"}, RELEASED),
        ("vllm", {"aux_norm": "none", "qk_norm": True}, RELEASED | QK),
        ("vllm", {"aux_norm": "none", "num_layers": 2}, RELEASED | VLLM_SECOND),
        ("speculators", {"aux_norm": "none", "num_layers": 2}, IN_SPECULATORS | VLLM_SECOND),
        ("sglang", {"aux_norm": "none", "num_layers": 2}, RELEASED | SGLANG_SECOND),
        ("vllm", {"aux_norm": "none", "draft_vocab_size": 40}, WITHOUT_MAPS),
        ("vllm", {"aux_norm": "none", "hidden_size": 12}, RELEASED | {"embed_tokens.weight"}),
    ],
)
def test_a_checkpoint_has_exactly_the_servers_tensors(form, changes, names, tmp_path):
    target = tiny_target(tmp_path / "target")
    draft = draft_for(target, config_for(**changes))
    write_draft(tmp_path / "out", draft, form, target, Serving("float32"))
    assert set(load_file(tmp_path / "out" / "model.safetensors")) == names


@pytest.mark.parametrize("form", FORM_NAMES)
def test_both_directions_are_inverse(form):
    shapes = ({"num_layers": 3, "qk_norm": True}, {"aux_norm": "joint"})
    names = {name for shape in shapes for name in Draft(config_for(**shape)).state_dict()}
    assert len(names) > 40
    for name in names:
        assert from_form(to_form(name, form), form) == name


@pytest.mark.parametrize(
    ("found", "own"),
    [
        ("model.midlayer.mlp.up_proj.weight", "layers.0.mlp.up_proj.weight"),
        ("layers.0.mlp.up_proj.weight", "layers.0.mlp.up_proj.weight"),
        ("model.fc_norm.2.weight", "aux_norm.norms.2.weight"),
        ("aux_norm_mid.weight", "aux_norm.norms.1.weight"),
        ("layers.1.input_layernorm.weight", "layers.1.input_layernorm.weight"),
        ("layers.1.hidden_norm.weight", None),
        ("fc.bias", None),
        ("midlayer.self_attn.q_proj.bias", None),
        ("fc_norm.weight", None),
        ("xfc.weight", None),
    ],
)
def test_other_spellings_are_read_and_strangers_are_not(found, own):
    assert from_form(found, "vllm") == own


def test_only_computed_tensors_are_passed_over():
    assert is_ignored("midlayer.self_attn.rotary_emb.inv_freq")
    assert not is_ignored("midlayer.self_attn.rotary_emb.inv_freq.weight")


def test_a_tensor_without_a_name_is_an_error():
    with pytest.raises(ExportError, match=r"aux_norm\.scale"):
        to_form("aux_norm.scale", "vllm")
