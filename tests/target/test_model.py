"""Norm and head loaded alone against the whole model's own logits, family by family."""

import json
import os

import pytest
import torch

from paceline.contracts import LayerPlan
from paceline.errors import TargetError
from paceline.target.model import (
    TeacherHead,
    final_norm_of,
    load_embedding,
    load_model,
    num_parameters,
)
from paceline.target.spec import Target, TargetReference
from paceline.target.tap import LayerTap

from ..targets import FAMILIES, WRAPPED, model_class, save_model

ALL_FAMILIES = sorted([*FAMILIES, *WRAPPED])


def plain_model(folder, family):
    """transformers' own, loaded by the class that wrote it."""
    return model_class(family).from_pretrained(folder, dtype=torch.float32).eval()


def whole_forward(model, num_layers):
    """Plain logits, and the last state before the norm taken where the norm receives it."""
    seen = []
    handle = final_norm_of(model, num_layers).register_forward_pre_hook(
        lambda _, args: seen.append(args[0])
    )
    output = model(torch.arange(12)[None] * 7, output_hidden_states=True)
    handle.remove()
    return output.logits[0], output.hidden_states, seen[0][0]


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_teacher_logits_are_the_targets_own(family, tmp_path):
    target = Target(TargetReference(str(save_model(tmp_path, family))))
    model = plain_model(tmp_path, family)
    with torch.no_grad():
        logits, _, last = whole_forward(model, 8)
    torch.testing.assert_close(TeacherHead(target, torch.float32)(last), logits)
    rows = torch.tensor([3, 17, 300])
    part = TeacherHead(target, torch.float32, rows=rows)(last)
    torch.testing.assert_close(part, logits[:, rows])
    stored = model.get_input_embeddings().weight
    assert torch.equal(load_embedding(target, torch.float32), stored)
    assert num_parameters(target) == sum(weight.numel() for weight in model.parameters())


def test_a_forward_may_read_numbers_of_its_decoder(tmp_path, monkeypatch):
    mamba = {"d_ssm": 32, "n_heads": 4, "d_head": 8, "d_state": 8, "n_groups": 1}
    falcon = {"lm_head_multiplier": 0.4, **{f"mamba_{key}": n for key, n in mamba.items()}}
    monkeypatch.setitem(FAMILIES, "falcon_h1", falcon)
    target = Target(TargetReference(str(save_model(tmp_path, "falcon_h1"))))
    with torch.no_grad():
        logits, _, last = whole_forward(plain_model(tmp_path, "falcon_h1"), 8)
    torch.testing.assert_close(TeacherHead(target, torch.float32)(last), logits)


@pytest.mark.parametrize("family", sorted(WRAPPED))
def test_a_stored_head_is_taken_whatever_the_outer_config_leaves_unsaid(family, tmp_path):
    """transformers' default for most of these classes is tied, and it takes the head all the
    same."""
    save_model(tmp_path, family, tie_word_embeddings=False)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["tie_word_embeddings"]
    config["text_config"]["tie_word_embeddings"] = False
    (tmp_path / "config.json").write_text(json.dumps(config))
    with torch.no_grad():
        logits, _, last = whole_forward(plain_model(tmp_path, family), 8)
    target = Target(TargetReference(str(tmp_path)))
    torch.testing.assert_close(TeacherHead(target, torch.float32)(last), logits)


def test_a_model_that_writes_no_text_is_refused_by_name(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit"}))
    target = Target(TargetReference(str(tmp_path)))
    for use in (num_parameters, lambda t: TeacherHead(t, torch.float32)):
        with pytest.raises(TargetError, match=f"{tmp_path}: transformers cannot load it: .*ViT"):
            use(target)


def test_weights_that_were_cut_off_are_told_with_the_folder(tmp_path):
    save_model(tmp_path, "llama")
    os.truncate(tmp_path / "model.safetensors", 3000)
    target = Target(TargetReference(str(tmp_path)))
    with pytest.raises(TargetError, match=f"{tmp_path}: transformers cannot load it: .*header"):
        load_model(target, torch.float32, "cpu")


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_the_tap_sees_every_k_as_transformers_reports_it(family, tmp_path):
    target = Target(TargetReference(str(save_model(tmp_path, family))))
    model = load_model(target, torch.float32, "cpu")
    plain = plain_model(tmp_path, family)
    tap = LayerTap(model, LayerPlan(tuple(range(8)), 8), 8)
    with torch.no_grad():
        model(torch.arange(12)[None] * 7)
        _, hidden, last = whole_forward(plain, 8)
    for k in range(8):
        torch.testing.assert_close(tap.states[k], hidden[k], msg=f"k = {k}")
    torch.testing.assert_close(tap.states[8][0], last)
    assert not torch.allclose(tap.states[8], hidden[8]), "transformers' last entry is normed"
    tap.close()
    assert not tap.states


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_a_copy_cut_down_to_its_first_layers_has_the_same_states(family, tmp_path):
    target = Target(TargetReference(str(save_model(tmp_path, family))))
    tokens = torch.randint(0, 300, (1, 12))
    with torch.no_grad():
        whole = load_model(target, torch.float32, "cpu")(tokens, output_hidden_states=True)
        cut = load_model(target, torch.float32, "cpu", 3)(tokens, output_hidden_states=True)
    assert target.num_layers == 8
    assert len(cut.hidden_states) == 4
    for k in range(3):
        assert torch.equal(cut.hidden_states[k], whole.hidden_states[k])


def test_E10_the_norm_is_applied_once_and_its_gain_counts(tmp_path):
    save_model(
        tmp_path,
        "llama",
        hidden_size=2,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=2,
        vocab_size=2,
        rms_norm_eps=0.0,
        tie_word_embeddings=False,
    )
    target = Target(TargetReference(str(tmp_path)))
    head = TeacherHead(target, torch.float64)
    head.norm.weight.data = torch.tensor([2.0, 1.0], dtype=torch.float64)
    head.head.weight.data = torch.eye(2, dtype=torch.float64)
    logits = head(torch.tensor([[3.0, 4.0]], dtype=torch.float64))[0]
    torch.testing.assert_close(
        logits, torch.tensor([1.697, 1.131], dtype=torch.float64), atol=5e-4, rtol=0
    )
    assert int(logits.argmax()) == 0
    # The same token from a store of normed states: the norm is not applied a second time.
    normed = TeacherHead(target, torch.float64, is_normed=True)
    normed.head.weight.data = torch.eye(2, dtype=torch.float64)
    torch.testing.assert_close(normed(torch.tensor([[1.697, 1.131]]))[0], logits, atol=5e-4, rtol=0)
