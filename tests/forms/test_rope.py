"""Rotary parameters in both spellings, against transformers' own reading and the formula."""

import json
import math

import pytest
import torch
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from paceline.errors import ExportError
from paceline.forms.config_json import Serving
from paceline.forms.load import load_exported
from paceline.forms.rope import both_spellings, read_rope, same_rope
from paceline.forms.write import write_draft
from tests.forms.making import LLAMA3, change_config, config_for, draft_for, tiny_target

THETA = 500000.0
ROPE = {"rope_theta": THETA, **LLAMA3}
# Widths and lengths at which the scaling changes every frequency band.
WIDE = {"head_dim": 8, "max_position_embeddings": 131072, "rope": ROPE}


def llama3_frequencies(width):
    """The Llama 3.1 rule, one frequency at a time."""
    low, high = 8192 / 1.0, 8192 / 4.0
    frequencies = []
    for i in range(width // 2):
        frequency = THETA ** (-2 * i / width)
        wave = 2 * math.pi / frequency
        if wave > low:
            frequency /= 8.0
        elif wave > high:
            smooth = (8192 / wave - 1.0) / (4.0 - 1.0)
            frequency = (1 - smooth) * frequency / 8.0 + smooth * frequency
        frequencies.append(frequency)
    return torch.tensor(frequencies, dtype=torch.float64)


@pytest.fixture
def exported(tmp_path):
    target = tiny_target(tmp_path / "target")
    draft = draft_for(target, config_for(**WIDE))
    folders = {}
    for form in ("vllm", "speculators", "sglang"):
        folders[form] = tmp_path / form
        write_draft(folders[form], draft, form, target, Serving("float32"))
    return target, folders


def test_X05_theta_and_all_scaling_keys_are_in_both_spellings(exported):
    _, folders = exported
    for form, folder in folders.items():
        values = json.loads((folder / "config.json").read_text())
        values = values["transformer_layer_config"] if form == "speculators" else values
        assert values["rope_theta"] == THETA
        assert values["rope_scaling"] == LLAMA3
        assert values["rope_parameters"] == ROPE
        assert values["max_position_embeddings"] == 131072


def test_X05_inverse_frequencies_are_equal_for_every_reader(exported):
    target, folders = exported
    expected = llama3_frequencies(8)
    plain = THETA ** (-torch.arange(4, dtype=torch.float64) / 4)
    assert not torch.allclose(expected, plain, rtol=1e-3)
    for form, folder in folders.items():
        got = load_exported(folder, target, torch.float32).rotary.inv_freq
        torch.testing.assert_close(got.double(), expected, rtol=1e-6, atol=0)
        if form != "speculators":
            theirs = LlamaRotaryEmbedding(AutoConfig.from_pretrained(folder)).inv_freq
            assert torch.equal(got, theirs)


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": THETA, "rope_scaling": LLAMA3},
        {"rope_parameters": ROPE},
        {"rope_parameters": LLAMA3, "rope_theta": THETA},
        {"rope_theta": THETA, "rope_scaling": {**LLAMA3, "type": "llama3"}},
        {"rope_theta": THETA, "rope_scaling": LLAMA3, "rope_parameters": ROPE},
    ],
    ids=str,
)
def test_X05_either_spelling_gives_the_source_frequencies(spelling, exported):
    target, folders = exported
    folder = folders["vllm"]

    def respell(values):
        for key in ("rope_theta", "rope_scaling", "rope_parameters"):
            del values[key]
        values.update(spelling)

    change_config(folder, respell)
    got = load_exported(folder, target, torch.float32).rotary.inv_freq
    torch.testing.assert_close(got.double(), llama3_frequencies(8), rtol=1e-6, atol=0)


def test_X05_theta_inside_rope_parameters_does_not_fall_back_to_10000():
    for rope in read_rope({"rope_parameters": {"rope_type": "default", "rope_theta": THETA}}):
        assert rope["rope_theta"] == THETA


@pytest.mark.parametrize(
    "values",
    [{}, {"rope_scaling": LLAMA3}, {"rope_parameters": LLAMA3}, {"rope_theta": None}],
    ids=str,
)
def test_X05_no_theta_at_all_is_an_error_and_not_10000(values):
    with pytest.raises(ExportError, match="take 10000 without a word"):
        read_rope(values)


def test_X05_spellings_that_disagree_are_refused(exported):
    target, folders = exported
    for lost in ({"rope_scaling": None}, {"rope_theta": 10000.0}):
        change_config(folders["vllm"], lambda values, lost=lost: values.update(lost))
        with pytest.raises(ExportError, match="do not agree"):
            load_exported(folders["vllm"], target, torch.float32)


@pytest.mark.parametrize("form", ["vllm", "speculators", "sglang"])
def test_an_original_length_that_servers_take_for_the_ropes_own_is_refused(form, exported):
    """transformers 5 puts the one beside the rotary parameters in the place of theirs."""
    target, folders = exported

    def add(length):
        return lambda values: values.get("transformer_layer_config", values).update(
            original_max_position_embeddings=length
        )

    change_config(folders[form], add(8192))
    load_exported(folders[form], target, torch.float32)
    change_config(folders[form], add(4096))
    with pytest.raises(ExportError, match="is 4096, but 8192 among the rotary"):
        load_exported(folders[form], target, torch.float32)


def test_plain_positions_have_no_scaling():
    plain = {"rope_type": "default", "rope_theta": 1e6}
    assert both_spellings(plain) == {
        "rope_theta": 1e6,
        "rope_scaling": None,
        "rope_parameters": plain,
    }
    assert read_rope(both_spellings(plain)) == [plain, plain]


def test_the_same_positions_are_recognised_by_value():
    config = config_for(**WIDE)
    assert same_rope(config, ROPE, dict(reversed(ROPE.items())))
    assert not same_rope(config, ROPE, {**ROPE, "factor": 4.0})
