"""Which files are a target's weights, and what is said of those that cannot be read."""

import argparse
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.errors import TargetError
from paceline.target.spec import Target, TargetReference
from paceline.target.weights import Weights

from ..targets import save_model


def as_bin(folder):
    """The folder's weights as torch saves them, with what a Trainer leaves beside them."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    torch.save(argparse.Namespace(lr=1.0), folder / "training_args.bin")
    return tensors


def in_parts(folder):
    """The folder's weights in two files and an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    where = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(tensors)}
    for file in set(where.values()):
        save_file({name: tensors[name] for name in tensors if where[name] == file}, folder / file)
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return tensors


@pytest.mark.parametrize("form", [as_bin, in_parts])
def test_every_tensor_is_read_from_the_models_own_files(tmp_path, form):
    tensors = form(save_model(tmp_path, "llama"))
    weights = Weights(tmp_path)
    assert all(torch.equal(weights.load(name), tensor) for name, tensor in tensors.items())
    assert not weights.has("lm_head.weight"), "tied"
    assert weights.total_bytes == sum(
        path.stat().st_size
        for path in tmp_path.iterdir()
        if path.name.startswith(("model-", "pytorch_model"))
    )


@pytest.mark.parametrize("form", [lambda folder: None, as_bin, in_parts])
def test_what_lies_beside_the_weights_does_not_make_another_target(tmp_path, form):
    form(save_model(tmp_path, "llama"))
    before = Target(TargetReference(str(tmp_path))).fingerprints
    save_file({"x": torch.zeros(2)}, tmp_path / "optimizer.safetensors")
    save_file({"x": torch.zeros(2)}, tmp_path / "adapter_model.safetensors")
    torch.save({"x": torch.zeros(2)}, tmp_path / "optimizer.bin")
    assert Target(TargetReference(str(tmp_path))).fingerprints == before


def test_a_part_that_is_missing_is_named(tmp_path):
    in_parts(save_model(tmp_path, "llama"))
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(TargetError, match="lacks 1 of the 2 weight files .*model-00002-of-00002"):
        Weights(tmp_path).fingerprint()
    assert Weights(tmp_path).total_bytes is None


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_weights_that_are_no_plain_tensors_are_refused_by_name(tmp_path, name):
    torch.save({"model.norm.weight": argparse.Namespace(lr=1.0)}, tmp_path / name)
    with pytest.raises(TargetError, match=f"{name} cannot be read as plain tensors"):
        Weights(tmp_path).load("model.norm.weight")
