"""Drafts read from servers' checkpoints: as a float64 forward of the files' own tensors says, and
refused where a server would go wrong without a word. Files are made by hand."""

import json
import pickle
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.draft.unroll import Unroll
from paceline.errors import ExportError, UsageError
from paceline.forms.config_json import Serving
from paceline.forms.load import load_exported
from paceline.forms.source import DraftSource, open_draft
from paceline.forms.write import write_draft
from paceline.target.model import load_embedding
from tests.draft import oracle
from tests.draft.tiny import random_doc
from tests.forms.making import (
    change_config,
    change_tensors,
    config_for,
    draft_for,
    tiny_target,
)

E, MLP, HEADS, GROUPS, WIDTH, V, W = 16, 24, 4, 2, 4, 40, 12
SERVING = Serving("float32")
SELECTED = [0, 1, 3, 4, 7, 8, 11, 20, 21, 30, 38, 39]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return tiny_target(tmp_path_factory.mktemp("target"))


def released_tensors(seed=0, **more) -> dict[str, torch.Tensor]:
    """The released EAGLE-3 tensor list with random values; `more`: name with _ for . -> shape."""
    random = torch.Generator().manual_seed(seed)
    shapes = {
        "fc.weight": (E, 3 * E),
        "norm.weight": (E,),
        "lm_head.weight": (W, E),
        "midlayer.hidden_norm.weight": (E,),
        "midlayer.input_layernorm.weight": (E,),
        "midlayer.post_attention_layernorm.weight": (E,),
        "midlayer.self_attn.q_proj.weight": (HEADS * WIDTH, 2 * E),
        "midlayer.self_attn.k_proj.weight": (GROUPS * WIDTH, 2 * E),
        "midlayer.self_attn.v_proj.weight": (GROUPS * WIDTH, 2 * E),
        "midlayer.self_attn.o_proj.weight": (E, HEADS * WIDTH),
        "midlayer.mlp.gate_proj.weight": (MLP, E),
        "midlayer.mlp.up_proj.weight": (MLP, E),
        "midlayer.mlp.down_proj.weight": (E, MLP),
        **more,
    }
    tensors = {
        name: torch.randn(shape, generator=random) * 0.3 + (len(shape) == 1)
        for name, shape in shapes.items()
    }
    selected = torch.tensor(SELECTED)
    tensors["d2t"] = selected - torch.arange(W)
    tensors["t2d"] = torch.zeros(V, dtype=torch.bool).index_fill(0, selected, True)
    return tensors


def released_config(**changes) -> dict:
    """A config as the first EAGLE-3 drafts had it: transformers-4 spelling, no layer ids."""
    values = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": E,
        "intermediate_size": MLP,
        "num_attention_heads": HEADS,
        "num_key_value_heads": GROUPS,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 128,
        "vocab_size": V,
        "draft_vocab_size": W,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    return {**values, **changes}


def put(folder: Path, config: dict, tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def assert_runs_like(draft, by_hand, shape, target, num_aux=3):
    """Three teacher-forced steps of a loaded draft against the float64 oracle of plain tensors."""
    config = draft.config
    doc = random_doc(config, [1] * 12, 5)
    assert doc.aux.shape[1] == num_aux
    weights = {name: tensor.double() for name, tensor in by_hand.items()}
    embedding = weights.get("embed_tokens.weight", load_embedding(target, torch.float64))
    expected = oracle.states_of_steps(weights, shape, doc, embedding, 3)
    rows = torch.arange(9)
    unroll = Unroll(
        draft, doc.aux[:9].float(), doc.ids[1:10], rows, torch.zeros(9, dtype=torch.int64)
    )
    with torch.no_grad():
        states = [unroll.first(rows), unroll.next(doc.ids[2:11]), unroll.next(doc.ids[3:12])]
        for state, reference in zip(states, expected, strict=True):
            wanted = oracle.logits_of(weights, shape, reference)[:9]
            torch.testing.assert_close(draft.logits(state).double(), wanted, rtol=1e-3, atol=1e-4)
    assert draft.target_ids(torch.arange(W)).tolist() == SELECTED


def by_hand(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """File names -> the oracle's, written out once more."""
    renamed = {}
    for name, tensor in tensors.items():
        name = name.removeprefix("model.").replace("midlayer.", "layers.0.")
        name = name.replace("fc_norm.", "aux_norm.norms.").replace("input_norm.", "aux_norm.norm.")
        if not name.startswith("layers.0."):
            name = name.replace("hidden_norm", "input_layernorm")
        renamed[name] = tensor
    return renamed


def shape(**changes) -> oracle.Shape:
    plain = oracle.Shape(HEADS, GROUPS, WIDTH, 1e-5, 10000.0, aux_norm="none")
    for name, value in changes.items():
        setattr(plain, name, value)
    return plain


def test_a_released_eagle3_draft_in_a_bin_file(target, tmp_path):
    tensors = released_tensors()
    (tmp_path / "config.json").write_text(json.dumps(released_config()))
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    draft = load_exported(tmp_path, target, torch.float32)
    assert draft.config.aux_layers == (2, 4, 5)
    assert_runs_like(draft, by_hand(tensors), shape(), target)


def test_a_specforge_draft_with_its_older_names_of_the_norms(target, tmp_path):
    tensors = released_tensors(**{f"fc_norm.{a}.weight": (E,) for a in range(3)})
    expected = by_hand(tensors)
    for a, old in enumerate(("low", "mid", "high")):
        tensors[f"aux_norm_{old}.weight"] = tensors.pop(f"fc_norm.{a}.weight")
    tensors = {f"model.{n}" if n not in ("d2t", "t2d") else n: t for n, t in tensors.items()}
    tensors["model.embed_tokens.weight"] = load_embedding(target, torch.float32)
    put(tmp_path, released_config(use_aux_norm=True, norm_output=True), tensors)
    draft = load_exported(tmp_path, target, torch.float32)
    assert_runs_like(draft, expected, shape(aux_norm="rms", norm_output=True), target)


def test_a_speculators_draft_that_norms_before_the_residual(target, tmp_path):
    tensors = {
        name.replace("midlayer.", "layers.0."): tensor
        for name, tensor in released_tensors(**{"input_norm.weight": (3 * E,)}).items()
    }
    tensors["embed_tokens.weight"] = load_embedding(target, torch.float32)
    layer = released_config(rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    for key in ("rope_theta", "draft_vocab_size", "architectures"):
        del layer[key]
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": W,
        "norm_before_residual": True,
        "norm_before_fc": True,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": [1, 4, 8],
        "transformer_layer_config": layer,
    }
    draft = load_exported(put(tmp_path, config, tensors), target, torch.float32)
    assert draft.config.aux_layers == (1, 4, 8)
    wanted = shape(aux_norm="joint", norm_before_residual=True)
    assert_runs_like(draft, by_hand(tensors), wanted, target)


@pytest.mark.parametrize(
    ("form", "changes"),
    [
        ("vllm", {"aux_norm": "rms"}),
        ("speculators", {"aux_norm": "rms", "norm_output": True}),
        ("sglang", {"aux_norm": "rms", "norm_output": True}),
        ("sglang", {"aux_norm": "none", "num_layers": 3}),
        ("vllm", {"aux_norm": "none", "num_layers": 3}),
        ("vllm", {"aux_norm": "rms", "qk_norm": True}),
        ("speculators", {"aux_norm": "none", "qk_norm": True, "num_layers": 2}),
        ("vllm", {"aux_norm": "joint", "norm_before_residual": True}),
        ("sglang", {"aux_norm": "rms", "aux_layers": (2, 3, 6, 7)}),
        ("vllm", {"aux_norm": "rms", "aux_layers": (0, 8)}),
        ("sglang", {"aux_norm": "none", "hidden_size": 12}),
    ],
    ids=str,
)
def test_what_paceline_writes_runs_like_the_tensors_in_the_file(form, changes, target, tmp_path):
    config = config_for(**changes)
    source = draft_for(target, config)
    source.d2t = torch.tensor(SELECTED) - torch.arange(W)
    source.t2d = torch.zeros(V, dtype=torch.bool).index_fill(0, torch.tensor(SELECTED), True)
    write_draft(tmp_path, source, form, target, Serving("float32"))
    draft = load_exported(tmp_path, target, torch.float32)
    assert draft.config == config
    wanted = shape(**{k: v for k, v in changes.items() if hasattr(oracle.Shape, k)})
    tensors = by_hand(load_file(tmp_path / "model.safetensors"))
    assert_runs_like(draft, tensors, wanted, target, config.num_aux)


def test_a_fixed_scale_is_folded_into_fc(target, tmp_path):
    source = draft_for(target, config_for(aux_norm="static"))
    source.aux_norm.scale = scale = torch.tensor([0.25, 3.0, 1.5])
    write_draft(tmp_path, source, "vllm", target, Serving("float32"))
    draft = load_exported(tmp_path, target, torch.float32)
    aux = torch.randn(7, 3, E, generator=torch.Generator().manual_seed(1))
    by_scale = (aux.double() * scale.double()[:, None]).flatten(1) @ source.fc.weight.double().T
    torch.testing.assert_close(draft.fuse(aux).double(), by_scale, rtol=1e-5, atol=1e-5)
    assert draft.config.aux_norm == "none"


def test_X03_a_norm_needs_its_flag_and_a_flag_its_norm(tmp_path):
    """fc.weight [4, 12], input_norm.weight [12]: with the flag read, without it refused."""
    target = tiny_target(tmp_path / "t", vocab_size=10, hidden_size=4, head_dim=2)
    small = {"hidden_size": 4, "intermediate_size": 6, "num_attention_heads": 2, "vocab_size": 10}
    config = released_config(**small, num_key_value_heads=1, draft_vocab_size=10)
    shapes = {
        "fc.weight": (4, 12),
        "input_norm.weight": (12,),
        "norm.weight": (4,),
        "lm_head.weight": (10, 4),
        "midlayer.hidden_norm.weight": (4,),
        "midlayer.input_layernorm.weight": (4,),
        "midlayer.post_attention_layernorm.weight": (4,),
        "midlayer.self_attn.q_proj.weight": (4, 8),
        "midlayer.self_attn.k_proj.weight": (2, 8),
        "midlayer.self_attn.v_proj.weight": (2, 8),
        "midlayer.self_attn.o_proj.weight": (4, 4),
        "midlayer.mlp.gate_proj.weight": (6, 4),
        "midlayer.mlp.up_proj.weight": (6, 4),
        "midlayer.mlp.down_proj.weight": (4, 6),
    }
    random = torch.Generator().manual_seed(3)
    tensors = {name: torch.randn(size, generator=random) for name, size in shapes.items()}

    put(tmp_path / "a", {**config, "norm_before_fc": True}, tensors)
    draft = load_exported(tmp_path / "a", target, torch.float32)
    aux = torch.randn(5, 3, 4, generator=random)
    joined = aux.double().flatten(1)
    normed = joined / (joined.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    expected = (normed * tensors["input_norm.weight"].double()) @ tensors["fc.weight"].double().T
    torch.testing.assert_close(draft.fuse(aux).double(), expected, rtol=1e-4, atol=1e-4)
    put(tmp_path / "n", {**config, "eagle_config": {"norm_before_fc": True}}, tensors)
    assert load_exported(tmp_path / "n", target, torch.float32).config.aux_norm == "joint"

    put(tmp_path / "b", config, tensors)
    with pytest.raises(ExportError, match=r"input_norm\.\* weights.*does not say norm_before_fc"):
        load_exported(tmp_path / "b", target, torch.float32)
    del tensors["input_norm.weight"]
    put(tmp_path / "c", {**config, "norm_before_fc": True}, tensors)
    with pytest.raises(ExportError, match=r"says norm_before_fc: true, but there are no"):
        load_exported(tmp_path / "c", target, torch.float32)


REFUSED = {
    "fc_norm without its flag": (
        {},
        {f"fc_norm.{a}.weight": torch.ones(E) for a in range(3)},
        r"does not say fc_norm: true",
    ),
    "its flag without fc_norm": ({"fc_norm": True}, {}, r"missing \['fc_norm\.0\.weight'"),
    "norms on queries in a llama": (
        {},
        {f"midlayer.self_attn.{n}_norm.weight": torch.ones(WIDTH) for n in "qk"},
        r'does not say model_type: "qwen3"',
    ),
    "a qwen3 without them": (
        {"model_type": "qwen3", "architectures": ["Eagle3Qwen3ForCausalLM"]},
        {},
        r"missing \['midlayer\.self_attn\.k_norm\.weight'",
    ),
    "two norms before fc": ({"fc_norm": True, "norm_before_fc": True}, {}, "both true"),
    "no d2t": ({}, {"d2t": None}, r"missing \['d2t'\].*accepts next to nothing"),
    "no map at all": ({}, {"d2t": None, "t2d": None}, r"missing \['d2t'\]"),
    "absolute d2t": ({}, {"d2t": torch.tensor(SELECTED)}, "absolute ids look like this"),
    "absolute d2t without t2d": (
        {},
        {"d2t": torch.arange(1, 13) * 2, "t2d": None},
        "looks like absolute target ids",
    ),
    "d2t of another vocabulary": ({}, {"d2t": torch.zeros(W, dtype=torch.int64)}, "do not agree"),
    "an embedding of its own": (
        {},
        {"embed_tokens.weight": torch.randn(V, E, generator=torch.Generator().manual_seed(8))},
        "not the target's embedding",
    ),
    "an unknown tensor": ({}, {"extra.weight": torch.ones(2)}, r"unexpected \['extra\.weight'\]"),
    "a bias": (
        {},
        {"midlayer.self_attn.q_proj.bias": torch.zeros(HEADS * WIDTH)},
        r"unexpected \['midlayer\.self_attn\.q_proj\.bias'\]",
    ),
    "missing and unexpected together": (
        {},
        {"norm.weight": None, "norm.gain": torch.ones(E)},
        r"missing \['norm\.weight'\], unexpected \['norm\.gain'\]",
    ),
    "a tensor of another shape": ({}, {"fc.weight": torch.ones(E, 2 * E)}, "wrong shapes"),
    "no theta": ({"rope_theta": None}, {}, "take 10000 without a word"),
    "scaled in one spelling only": (
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
        {},
        "do not agree",
    ),
    "half a head rotated": (
        {"rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
        {},
        "partial_rotary_factor",
    ),
    "another target's vocabulary": ({"vocab_size": 48}, {}, "vocab_size is 48, the target's is 40"),
    "another target's width": (
        {"target_hidden_size": 32},
        {},
        "target_hidden_size is 32, the target's is 16",
    ),
    "nested ids of an unknown server": (
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}},
        {},
        r"\[1, 3, 4\] to vLLM and \[2, 4, 5\] to SGLang",
    ),
    "layers that the target lacks": (
        {"eagle_aux_hidden_state_layer_ids": [2, 4, 9]},
        {},
        r"k = 9 is outside 0 \.\. 8",
    ),
    "no auxiliary states": ({"eagle_config": {"use_aux_hidden_state": False}}, {}, "no EAGLE-3"),
    "a sliding window": ({"layer_types": ["sliding_attention"]}, {}, "sliding_attention"),
    "scaled logits": ({"logit_scale": 0.5}, {}, "logit_scale is 0.5"),
    "biases": ({"attention_bias": True}, {}, "attention_bias is True"),
    "no width": ({"hidden_size": None}, {}, "has no hidden_size"),
    "heads that do not divide": ({"num_key_value_heads": 3}, {}, "not a multiple"),
    "heads of an odd width": ({"head_dim": 3}, {}, "head_dim 3 is odd"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_a_server_would_get_wrong_is_refused(kind, target, tmp_path):
    config, tensors, words = REFUSED[kind]
    found = {k: t for k, t in {**released_tensors(), **tensors}.items() if t is not None}
    put(tmp_path, released_config(**config), found)
    with pytest.raises(ExportError, match=words) as error:
        load_exported(tmp_path, target, torch.float32)
    assert str(tmp_path) in str(error.value)


IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.mark.parametrize(
    "config",
    [
        {"rope_scaling": {"rope_type": "mrope", "mrope_section": [1, 1]}},
        {"rope_scaling": {"rope_type": "yarn"}},
        {"rope_scaling": [1]},
        {"rope_theta": "10000"},
        {IDS: ["2", "4", "5"]},
        {IDS: 3},
        {"eagle_config": {IDS: ["1", "3", "6"]}},
        {"eagle_config": ["use_aux_hidden_state"]},
        {"paceline": "x"},
        {"num_attention_heads": "4"},
        {"rms_norm_eps": "1e-5"},
        {"max_position_embeddings": None},
    ],
    ids=str,
)
def test_fields_of_a_kind_that_no_draft_has_are_refused(config, target, tmp_path):
    put(tmp_path, released_config(**config), released_tensors())
    for read in (DraftSource.load, DraftSource.config):
        with pytest.raises(ExportError, match=f"^{re.escape(str(tmp_path))}: "):
            read(open_draft(tmp_path), target)


def test_forms_that_say_less_than_their_server_needs(target, tmp_path):
    layer = released_config()
    config = {"speculators_model_type": "eagle3", "transformer_layer_config": layer}
    put(tmp_path, config, released_tensors())
    with pytest.raises(ExportError, match="norm_before_residual is missing: vLLM takes true"):
        load_exported(tmp_path, target, torch.float32)
    put(tmp_path, {"speculators_model_type": "eagle3"}, released_tensors())
    with pytest.raises(ExportError, match="no transformer_layer_config"):
        load_exported(tmp_path, target, torch.float32)
    for wrong, words in (
        ({"tie_word_embeddings": True}, "takes the embedding for the head"),
        ({"norm_before_residual": True}, "SGLang does not read it"),
    ):
        put(tmp_path, released_config(**wrong), released_tensors())
        assert load_exported(tmp_path, target, torch.float32, form="vllm")
        with pytest.raises(ExportError, match=words):
            load_exported(tmp_path, target, torch.float32, form="sglang")


def test_nested_ids_are_read_once_the_server_is_named(target, tmp_path):
    nested = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 6]}}
    put(tmp_path, released_config(**nested), released_tensors())
    layers = {
        form: load_exported(tmp_path, target, torch.float32, form).config.aux_layers
        for form in ("vllm", "sglang")
    }
    assert layers == {"vllm": (1, 3, 6), "sglang": (2, 4, 7)}
    assert open_draft(tmp_path, "sglang").load(target).config.aux_layers == (2, 4, 7)
    with pytest.raises(ExportError, match="'trtllm' is none of"):
        load_exported(tmp_path, target, torch.float32, "trtllm")


def test_a_full_vocabulary_needs_no_maps(target, tmp_path):
    tensors = {**released_tensors(), "lm_head.weight": torch.randn(V, E)}
    del tensors["d2t"], tensors["t2d"]
    put(tmp_path, released_config(draft_vocab_size=None), tensors)
    draft = load_exported(tmp_path, target, torch.float32)
    assert draft.d2t.tolist() == [0] * V and draft.t2d.all()
    assert draft.target_ids(torch.arange(V)).tolist() == list(range(V))


def test_t2d_is_made_where_it_is_missing(target, tmp_path):
    tensors = released_tensors()
    del tensors["t2d"]
    put(tmp_path, released_config(), tensors)
    draft = load_exported(tmp_path, target, torch.float32)
    assert draft.t2d.nonzero().flatten().tolist() == SELECTED


def test_an_embedding_in_a_coarser_dtype_is_still_the_targets(target, tmp_path):
    tensors = {
        name: t.bfloat16() if t.is_floating_point() else t for name, t in released_tensors().items()
    }
    tensors["embed_tokens.weight"] = load_embedding(target, torch.bfloat16)
    put(tmp_path, released_config(), tensors)
    draft = load_exported(tmp_path, target, torch.float32)
    assert torch.equal(draft.embed_tokens.weight, load_embedding(target, torch.float32))
    assert draft.fc.weight.dtype == torch.float32


class _Planted:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def test_a_pickle_is_refused_and_never_run(target, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(released_config()))
    planted = tmp_path / "planted"
    (tmp_path / "pytorch_model.bin").write_bytes(
        pickle.dumps({"fc.weight": _Planted(planted)}, protocol=2)
    )
    with pytest.raises(ExportError, match="cannot be read as plain tensors"):
        load_exported(tmp_path, target, torch.float32)
    assert not planted.exists()


def test_broken_files_are_named(target, tmp_path):
    with pytest.raises(ExportError, match=r"has no config\.json"):
        load_exported(tmp_path, target, torch.float32)
    with pytest.raises(UsageError, match=r"holds no draft.*config\.json"):
        open_draft(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ExportError, match=r"config\.json is not JSON"):
        load_exported(tmp_path, target, torch.float32)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ExportError, match="not a JSON object"):
        load_exported(tmp_path, target, torch.float32)
    (tmp_path / "config.json").write_text(json.dumps(released_config()))
    with pytest.raises(ExportError, match="has no weights"):
        load_exported(tmp_path, target, torch.float32)
    put(tmp_path, released_config(), released_tensors())
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(ExportError, match=r"model\.safetensors cannot be read"):
        load_exported(tmp_path, target, torch.float32)


def test_what_the_config_says_of_the_embedding_must_be_so(target, tmp_path):
    draft = draft_for(target, config_for())
    write_draft(tmp_path, draft, "vllm", target, Serving("float32", copies_embedding=True))
    loaded = load_exported(tmp_path, target, torch.float32)
    assert torch.equal(loaded.embed_tokens.weight, load_embedding(target, torch.float32))
    change_config(tmp_path, lambda values: values["paceline"].update(embedding="shared"))
    with pytest.raises(ExportError, match="the embedding is shared, but there is one"):
        load_exported(tmp_path, target, torch.float32)
    change_tensors(tmp_path, lambda tensors: tensors.pop("embed_tokens.weight"))
    change_config(tmp_path, lambda values: values["paceline"].update(embedding="copied"))
    with pytest.raises(ExportError, match="the embedding is copied, but there is none"):
        load_exported(tmp_path, target, torch.float32)


@pytest.mark.parametrize(
    ("changes", "flag"),
    [({"norm_output": True}, "norm_output"), ({"aux_norm": "joint"}, "norm_before_fc")],
    ids=str,
)
def test_flags_of_the_speculators_form_that_releases_read_otherwise_are_refused(
    tmp_path, target, changes, flag
):
    """vLLM 0.32 takes them from the top level alone, 0.22 to 0.24 from the layer's config too."""
    write_draft(tmp_path, draft_for(target, config_for(**changes)), "speculators", target, SERVING)
    change_config(tmp_path, lambda values: values.pop(flag))
    with pytest.raises(ExportError, match=rf"{flag} is True in transformer_layer_config"):
        load_exported(tmp_path, target, torch.float32)


@pytest.mark.parametrize(
    ("qk_norm", "model_type"), [(False, "qwen3"), (True, "llama")], ids=["llama", "qwen3"]
)
def test_the_architecture_and_not_the_model_type_says_whether_heads_are_normed(
    tmp_path, target, qk_norm, model_type
):
    """Servers choose the class by its name; configs copied from the target keep its model type."""
    draft = draft_for(target, config_for(qk_norm=qk_norm))
    write_draft(tmp_path, draft, "vllm", target, SERVING)
    change_config(tmp_path, lambda values: values.update(model_type=model_type))
    assert load_exported(tmp_path, target, torch.float32).config.qk_norm is qk_norm


def test_eagle_config_outside_the_layer_config_of_the_speculators_form_counts_for_nothing(
    tmp_path, target
):
    """vLLM takes over the layer's config; it drops the weights of a norm that it does not see."""
    draft = draft_for(target, config_for(aux_norm="joint"))
    write_draft(tmp_path, draft, "speculators", target, SERVING)

    def move(values):
        values["norm_before_fc"] = values["transformer_layer_config"]["norm_before_fc"] = False
        values["eagle_config"] = {"norm_before_fc": True}

    change_config(tmp_path, move)
    with pytest.raises(ExportError, match=r"unexpected \['input_norm.weight'\]"):
        load_exported(tmp_path, target, torch.float32)
