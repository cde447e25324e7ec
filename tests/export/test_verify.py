"""Deliberately broken exports, each of which a server would take: every kind is caught."""

import json

import pytest
import torch

from paceline.errors import ExportError
from paceline.export import verify_exported
from paceline.export.verify import replay
from paceline.forms.config_json import Serving
from paceline.forms.write import write_draft
from tests.forms.making import (
    LLAMA3,
    change_config,
    change_tensors,
    config_for,
    draft_for,
    tiny_target,
)

# A draft with everything that can get lost: norms, scaled positions, layers of its own choice.
SCALED = {"rope_theta": 500000.0, **LLAMA3, "original_max_position_embeddings": 64}
CHANGES = {"head_dim": 8, "max_position_embeddings": 512, "rope": SCALED, "aux_layers": (2, 3, 6)}
FORMS = ["vllm", "speculators", "sglang"]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def draft(target):
    return draft_for(target, config_for(aux_norm="rms", norm_output=True, **CHANGES))


@pytest.fixture(params=FORMS)
def form(request):
    return request.param


@pytest.fixture
def exported(form, target, draft, tmp_path):
    write_draft(tmp_path, draft, form, target, Serving("float32"))
    return tmp_path


def layer_config(values, form):
    return values["transformer_layer_config"] if form == "speculators" else values


def break_tensors(change):
    return lambda folder, form: change_tensors(folder, lambda t: change(t, form))


def break_config(change):
    return lambda folder, form: change_config(folder, lambda values: change(values, form))


def shift_ids(values, form):
    key = "eagle_aux_hidden_state_layer_ids"
    if form == "sglang":
        values["eagle_config"][key] = [i + 1 for i in values["eagle_config"][key]]
    values[key] = [i + 1 for i in values[key]]


def lose_nested_ids(values, form):
    values.pop("eagle_config", None)
    del values["eagle_aux_hidden_state_layer_ids"]


def lose_flag(name):
    def lose(values, form):
        values[name] = False
        layer_config(values, form)[name] = False

    return lose


def lose_scaling(values, form):
    layer = layer_config(values, form)
    layer["rope_scaling"] = None
    layer["rope_parameters"] = {"rope_type": "default", "rope_theta": 500000.0}


def lose_scaling_in_one_spelling(values, form):
    layer_config(values, form)["rope_scaling"] = None


def lose_theta(values, form):
    layer = layer_config(values, form)
    layer["rope_theta"] = layer["rope_parameters"]["rope_theta"] = 10000.0


def random_embedding(tensors, form):
    tensors["embed_tokens.weight"] = torch.randn(40, 16)


def swap_halves(tensors, form):
    name = next(name for name in tensors if name.endswith("q_proj.weight"))
    tensors[name] = tensors[name].roll(16, dims=1).contiguous()


def nudge(tensors, form):
    tensors["lm_head.weight"][3, 5] += 1e-6


def another_vocabulary(tensors, form):
    chosen = torch.arange(12) + 20
    tensors["d2t"] = torch.full((12,), 20)
    tensors["t2d"] = torch.zeros(40, dtype=torch.bool).index_fill(0, chosen, True)


BROKEN = {
    "missing d2t": (break_tensors(lambda t, f: t.pop("d2t")), "d2t"),
    "missing d2t and t2d": (break_tensors(lambda t, f: (t.pop("d2t"), t.pop("t2d"))), "d2t"),
    "missing t2d": (break_tensors(lambda t, f: t.pop("t2d")), "t2d is missing"),
    "absolute d2t": (
        break_tensors(lambda t, f: t.update(d2t=t["d2t"] + torch.arange(12))),
        "d2t",
    ),
    "another vocabulary": (break_tensors(another_vocabulary), "d2t is not the draft's"),
    "shifted layer ids": (break_config(shift_ids), r"aux_layers = \(3, 4, 7\)"),
    "lost layer ids": (break_config(lose_nested_ids), r"aux_layers = \(2, 4, 5\)"),
    "random embedding": (break_tensors(random_embedding), "embedding"),
    "lost norm before fc": (break_config(lose_flag("fc_norm")), "does not say fc_norm"),
    "lost norm_output": (break_config(lose_flag("norm_output")), "norm_output is False"),
    "lost rope scaling": (break_config(lose_scaling), "rotary parameters"),
    "lost in one spelling": (break_config(lose_scaling_in_one_spelling), "do not agree"),
    "lost rope theta": (break_config(lose_theta), "rotary parameters"),
    "norm before the residual": (
        break_config(lambda v, f: v.update(norm_before_residual=True)),
        "norm_before_residual",
    ),
    "residual not said": (
        break_config(lambda v, f: v.pop("norm_before_residual")),
        "norm_before_residual",
    ),
    "tied head": (
        break_config(lambda v, f: layer_config(v, f).update(tie_word_embeddings=True)),
        "tie_word_embeddings",
    ),
    "shorter positions": (
        break_config(lambda v, f: layer_config(v, f).update(max_position_embeddings=256)),
        "max_position_embeddings",
    ),
    "another epsilon": (
        break_config(lambda v, f: layer_config(v, f).update(rms_norm_eps=1e-3)),
        "rms_norm_eps",
    ),
    "missing tensor": (break_tensors(lambda t, f: t.pop("norm.weight")), r"\['norm\.weight'\]"),
    "unknown tensor": (
        break_tensors(lambda t, f: t.update(spare=torch.ones(1))),
        r"unexpected \['spare'\]",
    ),
    "embedding and state swapped": (break_tensors(swap_halves), "q_proj.weight is not"),
    "one weight changed": (break_tensors(nudge), "lm_head.weight is not the draft's"),
    "mixed dtypes": (
        break_tensors(lambda t, f: t.update({"fc.weight": t["fc.weight"].half()})),
        "weights are of",
    ),
}


def test_a_whole_export_passes(exported, form, target, draft):
    checked = verify_exported(exported, target, draft)
    assert checked["replay"] == {"steps": 3, "relative_error": 0.0, "bound": 0.0}
    assert (checked["form"], checked["dtype"], checked["tensors"]) == (form, "float32", 18)


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_export_is_caught(kind, exported, form, target, draft):
    change, words = BROKEN[kind]
    change(exported, form)
    with pytest.raises(ExportError, match=words):
        verify_exported(exported, target, draft)


def test_everything_that_differs_is_named_at_once(exported, form, target, draft):
    break_config(lose_flag("norm_output"))(exported, form)
    break_config(shift_ids)(exported, form)
    break_tensors(nudge)(exported, form)
    with pytest.raises(ExportError) as error:
        verify_exported(exported, target, draft)
    message = str(error.value)
    assert str(exported) in message
    for words in ("norm_output", "aux_layers = (3, 4, 7)", "lm_head.weight", "replayed steps"):
        assert words in message, words


def test_another_draft_is_not_this_one(exported, target):
    other = draft_for(target, config_for(aux_norm="rms", norm_output=True, **CHANGES), seed=9)
    with pytest.raises(ExportError, match=r"fc\.weight is not the draft's"):
        verify_exported(exported, target, other)


@pytest.mark.parametrize(
    "change",
    [
        {"aux_norm": "none"},
        {"norm_output": False},
        {"rope": {"rope_type": "default", "rope_theta": 500000.0}},
        {"rope": {**SCALED, "factor": 4.0}},
        {"rms_norm_eps": 0.1},
        {"norm_before_residual": True},
    ],
    ids=str,
)
def test_the_replay_alone_sees_another_arithmetic(change, target, draft):
    """Same weights, one part of the shape changed: the logits differ by far more than rounding."""
    values = {"aux_norm": "rms", "norm_output": True, **CHANGES, **change}
    other = draft_for(target, config_for(**values))
    weights = other.state_dict()
    other.load_state_dict({name: draft.state_dict()[name] for name in weights})
    assert replay(draft, draft) == 0.0
    assert replay(draft, other) > 1e-3


def test_the_replay_does_not_touch_global_randomness(draft):
    torch.manual_seed(4)
    expected = torch.rand(3)
    torch.manual_seed(4)
    replay(draft, draft)
    assert torch.equal(torch.rand(3), expected)


def test_a_draft_of_another_number_of_states_does_not_replay(target, draft):
    values = {**CHANGES, "aux_layers": (2, 3), "aux_norm": "rms", "norm_output": True}
    assert replay(draft, draft_for(target, config_for(**values))) == float("inf")


def test_not_a_number_never_passes(exported, target, draft):
    values = json.loads((exported / "config.json").read_text())
    assert values["paceline"]["embedding"] == "shared"
    change_tensors(exported, lambda tensors: tensors["fc.weight"].fill_(float("nan")))
    with pytest.raises(ExportError, match="replayed steps differ by inf"):
        verify_exported(exported, target, draft)
