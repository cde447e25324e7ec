"""Starting values, and the head that stays the target's: against the target's own file."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.draft.from_target import draft_config
from paceline.errors import TrainingError
from paceline.recipe import DraftOptions
from paceline.target.spec import Target, TargetReference
from paceline.train.start import new_draft
from paceline.vocab import DraftVocabulary, load_vocabulary

from ..lines import trained
from ..targets import FAMILIES, save_model

LAST = "model.layers.7."


def target_tensors(line):
    return load_file(line / "target" / "model.safetensors")


def untouched(line, out, **options):
    """The draft after one step at a rate that moves no float32 weight."""
    trained(line, str(out), max_steps=1, learning_rate=1e-30, **options)
    return load_file(out / "draft.safetensors")


@pytest.mark.parametrize("num_layers", [1, 2])
def test_the_layers_are_the_targets_last_ones(line, tmp_path, num_layers):
    draft = untouched(line, tmp_path, draft={"num_layers": num_layers})
    theirs = target_tensors(line)
    for i in range(num_layers):
        layer = f"model.layers.{8 - num_layers + i}."
        for name in ("q_proj", "k_proj", "v_proj"):
            ours = draft[f"layers.{i}.self_attn.{name}.weight"]
            state = theirs[f"{layer}self_attn.{name}.weight"]
            token = torch.zeros_like(state) if i == 0 else state[:, :0]
            torch.testing.assert_close(ours, torch.cat([token, state], 1))
        norm = "hidden_norm" if i == 0 else "input_layernorm"
        torch.testing.assert_close(
            draft[f"layers.{i}.{norm}.weight"], theirs[f"{layer}input_layernorm.weight"]
        )
        ratio = draft[f"layers.{i}.mlp.down_proj.weight"] / theirs[f"{layer}mlp.down_proj.weight"]
        torch.testing.assert_close(ratio, torch.full_like(ratio, ratio[0, 0].item()))


def started(folder, aux_rms=(1.0, 1.0, 1.0), from_target=True, train_head=True, **options):
    """The draft as it starts from a target in `folder`, and the target's tensors."""
    target = Target(TargetReference(str(folder)))
    config = draft_config(DraftOptions(**options), target.text_config, (2, 4, 5), 260)
    vocabulary = DraftVocabulary.from_selected(np.arange(260), target.vocab_size)
    given = config, vocabulary, target, torch.tensor(aux_rms), 0, from_target
    draft = new_draft(*given, train_head)
    return draft, load_file(folder / "model.safetensors")


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("family", ["gemma2", "gemma3_text"])
def test_gains_are_what_the_targets_norms_do_and_not_what_they_store(tmp_path, family, num_layers):
    has_head_norms = family == "gemma3_text"
    save_model(tmp_path, family)
    draft, theirs = started(tmp_path, qk_norm=has_head_norms, num_layers=num_layers)
    last = draft.layers[-1]
    reads_state = last.hidden_norm if num_layers == 1 else last.input_layernorm
    pairs = [
        (draft.norm, "model.norm.weight"),
        (reads_state, f"{LAST}input_layernorm.weight"),
        # What llama calls so is there the norm of what attention puts out.
        (last.post_attention_layernorm, f"{LAST}pre_feedforward_layernorm.weight"),
    ]
    if has_head_norms:
        attention = last.self_attn
        pairs += [(attention.q_norm, f"{LAST}self_attn.q_norm.weight")]
        pairs += [(attention.k_norm, f"{LAST}self_attn.k_norm.weight")]
    for ours, name in pairs:
        torch.testing.assert_close(ours.weight, 1 + theirs[name], rtol=0, atol=1e-4)


def test_what_a_layer_multiplies_beside_its_weights_is_in_the_drafts(tmp_path):
    usual = {"residual_multiplier": 1.0, "attention_multiplier": 8**-0.5}
    save_model(tmp_path / "plain", "granite", **usual)
    save_model(tmp_path / "scaled", "granite", residual_multiplier=0.25, attention_multiplier=0.1)
    # The same function: weights that undo the factors.
    tensors = load_file(tmp_path / "plain" / "model.safetensors")
    for name, tensor in tensors.items():
        if "o_proj" in name or "down_proj" in name:
            tensor *= 4
        if "q_proj" in name:
            tensor *= 8**-0.5 / 0.1
    save_file(tensors, tmp_path / "scaled" / "model.safetensors")
    (one, _), (other, _) = (started(tmp_path / name) for name in ("plain", "scaled"))
    torch.testing.assert_close(other.state_dict(), one.state_dict())


def test_attention_scores_of_normed_heads_have_the_targets_size(tmp_path):
    save_model(tmp_path, "gemma3_text", query_pre_attn_scalar=32)
    draft, theirs = started(tmp_path, qk_norm=True)
    attention = draft.layers[0].self_attn
    gain = 1 + theirs[f"{LAST}self_attn.q_norm.weight"]
    # The draft's scores are those of heads of width 8.
    torch.testing.assert_close(attention.q_norm.weight, gain / 2, rtol=0, atol=1e-4)
    state_half = attention.q_proj.weight[:, 32:]
    torch.testing.assert_close(state_half, theirs[f"{LAST}self_attn.q_proj.weight"])


def test_norms_that_take_off_the_mean_and_have_a_bias_keep_their_gain(tmp_path, monkeypatch):
    monkeypatch.setitem(FAMILIES, "stablelm", {})
    save_model(tmp_path, "stablelm")
    draft, theirs = started(tmp_path)
    for ours, name in (
        (draft.norm, "model.norm.weight"),
        (draft.layers[0].hidden_norm, f"{LAST}input_layernorm.weight"),
    ):
        torch.testing.assert_close(ours.weight, theirs[name], rtol=1e-4, atol=0)


def is_random_but_the_head(draft, theirs):
    """What a start from random values is, the head's rows apart: small weights, gains of one."""
    head = theirs.get("lm_head.weight", theirs["model.embed_tokens.weight"])
    assert torch.equal(draft.lm_head.weight, head[:260])
    for name, weight in draft.named_parameters():
        if name in ("lm_head.weight", "embed_tokens.weight"):
            continue
        if weight.ndim > 1:
            assert 0.015 < float(weight.detach().std()) < 0.025, name
        else:
            assert torch.equal(weight, torch.ones_like(weight)), name
    return True


def test_a_random_start_has_the_targets_head_rows(tmp_path):
    save_model(tmp_path, "llama")
    assert is_random_but_the_head(*started(tmp_path, from_target=False))


@pytest.mark.parametrize("from_target", [True, False])
@pytest.mark.parametrize("train_head", [True, False])
@pytest.mark.parametrize(
    ("family", "scale"),
    [
        ("granite", {"logits_scaling": 8.0}),
        ("cohere", {"logit_scale": 0.125}),
    ],
    ids=str,
)
def test_what_the_target_multiplies_its_logits_by_is_in_the_weights(
    tmp_path, family, scale, train_head, from_target
):
    plain = dict.fromkeys(scale, 1.0) | {"tie_word_embeddings": False}
    save_model(tmp_path / "plain", family, **plain)
    save_model(tmp_path / "scaled", family, **{**plain, **scale})
    # The same function: eight times the head, an eighth of its logits.
    tensors = load_file(tmp_path / "plain" / "model.safetensors")
    tensors["lm_head.weight"] *= 8
    save_file(tensors, tmp_path / "scaled" / "model.safetensors")
    (one, _), (other, theirs) = (
        started(tmp_path / name, from_target=from_target, train_head=train_head)
        for name in ("plain", "scaled")
    )
    state = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    assert torch.equal(one.logits(state), other.logits(state))
    if not train_head:
        assert torch.equal(other.lm_head.weight, theirs["lm_head.weight"][:260])


def test_layers_without_a_norm_in_front_are_no_start(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(FAMILIES, "olmo2", {})
    save_model(tmp_path, "olmo2")
    draft, theirs = started(tmp_path)
    assert "the target's layers have another form" in caplog.text
    assert is_random_but_the_head(draft, theirs)


def test_as_many_rows_in_heads_of_another_width_are_no_start(tmp_path, caplog):
    save_model(tmp_path, "llama")
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 4}
    draft, theirs = started(tmp_path, **heads)
    assert "the target's layers have another form" in caplog.text
    assert is_random_but_the_head(draft, theirs)


def test_codes_of_a_quantised_weight_are_no_start(tmp_path, caplog):
    save_model(tmp_path, "llama")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.norm.weight"] += 1
    name = f"{LAST}self_attn.q_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    save_file(tensors, tmp_path / "model.safetensors")
    # Of two layers the one before could be taken.
    draft, theirs = started(tmp_path, num_layers=2)
    assert "the target's layers have another form" in caplog.text
    assert is_random_but_the_head(draft, theirs)


def test_random_weights_meet_states_of_unit_scale(tmp_path):
    save_model(tmp_path, "deepseek_v3")
    normed, _ = started(tmp_path)
    plain, _ = started(tmp_path, (0.5, 4.0, 64.0), aux_norm="none")
    for k, rms in enumerate((0.5, 4.0, 64.0)):
        columns = slice(32 * k, 32 * (k + 1))
        torch.testing.assert_close(
            plain.fc.weight[:, columns] * rms, normed.fc.weight[:, columns], rtol=1e-6, atol=0
        )


@pytest.mark.parametrize("init", ["target", "random"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_head_that_is_not_trained_stays_the_targets_rows(line, tmp_path, init, dtype):
    options = {"train_head": False, "draft": {"init": init}, "dtype": dtype}
    trained(line, str(tmp_path), **options)
    draft = load_file(tmp_path / "draft.safetensors")
    vocabulary = load_vocabulary(line / "vocab")
    rows = target_tensors(line)["model.embed_tokens.weight"][vocabulary.selected]
    assert torch.equal(draft["lm_head.weight"], rows)
    start = untouched(line, tmp_path / "start", **options)
    assert not torch.equal(draft["fc.weight"], start["fc.weight"])


def test_a_frozen_head_needs_the_targets_width(line, tmp_path):
    with pytest.raises(TrainingError, match=r"width 32, the draft's hidden_size is 16"):
        trained(line, str(tmp_path), train_head=False, draft={"hidden_size": 16, "head_dim": 8})
