"""States judged by a model's own rounding, on a target that makes much of it: what is right in the
next wider dtype passes, what is wrong does not."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.contracts import LayerPlan, TokenSample
from paceline.errors import ProbeFailure
from paceline.extract import reference
from paceline.store import StoreSpec
from paceline.target.spec import Target, TargetReference

DEPTH, AUX = 24, (10, 20)


@dataclass
class Captured:
    aux: torch.Tensor
    last: torch.Tensor


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=DEPTH,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=97,
        # Ten times the usual: every layer amplifies the rounding of those before it.
        initializer_range=0.2,
    )
    folder = tmp_path_factory.mktemp("deep")
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return Target(TargetReference(str(folder)))


@pytest.fixture(scope="module")
def samples():
    rng = np.random.default_rng(0)
    mask = np.arange(50) >= 20
    return [TokenSample(f"s{i}", rng.integers(0, 97, 50).astype(np.int32), mask) for i in range(3)]


@pytest.fixture(scope="module")
def states(target, samples):
    """By k, what transformers computes in float32 from the same weights, rounded once."""
    model = LlamaForCausalLM.from_pretrained(target.folder, dtype=torch.float32).eval()
    norm_inputs = []
    model.model.norm.register_forward_pre_hook(lambda _, args: norm_inputs.append(args[0][0]))
    found = []
    with torch.no_grad():
        for sample in samples:
            ids = torch.from_numpy(sample.input_ids.astype(np.int64))[None]
            hidden = model(ids, output_hidden_states=True).hidden_states
            layers = [h[0] for h in hidden[:DEPTH]] + [norm_inputs[-1]]
            found.append([layer.bfloat16() for layer in layers])
    return found


def captured(samples, states, at=lambda k: k, shift=0):
    taken = []
    for sample, layers in zip(samples, states):
        aux = torch.stack([layers[at(k)] for k in AUX], 1).roll(shift, 0)[: sample.num_aux_rows]
        taken.append(Captured(aux, layers[DEPTH][torch.from_numpy(sample.loss_mask)]))
    return taken


def compare(target, samples, taken):
    spec = StoreSpec(LayerPlan(AUX, DEPTH), 64, "bfloat16")
    return reference.compare_with_plain_forward(target, spec, samples, taken)


def test_what_is_right_passes_beyond_the_usual_bounds(target, samples, states):
    errors = compare(target, samples, captured(samples, states))
    assert list(errors) == ["k=10", "k=20", "k=24"]
    assert errors["k=10"]["median"] > 0.03 and errors["k=20"]["median"] > 0.05


@pytest.mark.parametrize(
    "fault",
    [{"at": lambda k: k + 1}, {"at": lambda k: k - 1}, {"shift": 1}],
    ids=["next layer", "layer before", "shifted rows"],
)
def test_what_is_wrong_does_not(target, samples, states, fault):
    with pytest.raises(ProbeFailure, match=r"layer k = 10 differs.*rounding alone makes"):
        compare(target, samples, captured(samples, states, **fault))


def test_one_wrong_row_in_fifty_does_not(target, samples, states):
    taken = captured(samples, states)
    for one in taken:
        one.aux[7] = one.aux[8]
    with pytest.raises(ProbeFailure, match="rounding alone makes"):
        compare(target, samples, taken)


def test_without_memory_for_the_wider_forward_the_usual_bounds_hold(
    target, samples, states, monkeypatch
):
    monkeypatch.setattr(reference, "free_host_bytes", lambda: 10_000)
    with pytest.raises(ProbeFailure, match=r"layer k = 10 differs.*usual in bfloat16 0.03"):
        compare(target, samples, captured(samples, states))
