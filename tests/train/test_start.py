"""Starting values, and the head that stays the target's: against the target's own file."""

import pytest
import torch
from safetensors.torch import load_file

from paceline.errors import TrainingError
from paceline.vocab import load_vocabulary

from ..lines import trained


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
