"""Training goes on from a draft: paceline's own, or a server's checkpoint."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import paceline
from paceline.artefact import load_finished
from paceline.errors import FingerprintMismatch, UsageError
from tests.forms.making import change_config

LITTLE = {
    "dtype": "float32",
    "batch_rows": 64,
    "warmup_steps": 0,
    "max_steps": 1,
    "learning_rate": 1e-12,
}


def test_training_goes_on_where_the_draft_stands(tiny_run, tmp_path):
    """One step of next to no size: the same draft, with the loss that it had."""
    target = str(tiny_run.parent / "target")
    before = load_finished(tiny_run / "train", "train").result
    weights = load_file(tiny_run / "train" / "draft.safetensors")
    for name in ("train", "export/vllm"):
        out = tmp_path / name.replace("/", "-")
        after = paceline.train(
            store=str(tiny_run / "extract"),
            start_from=str(tiny_run / name),
            target=target,
            out=str(out),
            **LITTLE,
        )
        assert after["heldout"]["kl"] == pytest.approx(before["heldout"]["kl"], rel=1e-6)
        assert after["draft"] == {**before["draft"], "aux_layers": after["draft"]["aux_layers"]}
        for tensor, value in load_file(out / "draft.safetensors").items():
            torch.testing.assert_close(value, weights[tensor], rtol=0, atol=1e-9)


def test_a_draft_made_elsewhere_learns(tiny_run, tmp_path):
    """A foreign checkpoint with a vocabulary of its own and a residual after the norm."""
    folder = tmp_path / "foreign"
    folder.mkdir()
    source = tiny_run / "export" / "vllm"
    tensors = load_file(source / "model.safetensors")
    random = torch.Generator().manual_seed(0)
    keep = 40
    for name in ("lm_head.weight", "d2t"):
        tensors[name] = tensors[name][:keep].contiguous()
    tensors["lm_head.weight"] = torch.randn(tensors["lm_head.weight"].shape, generator=random) * 0.1
    del tensors["t2d"]
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())

    def foreign(values):
        del values["paceline"]
        values.update(draft_vocab_size=keep, norm_before_residual=True)

    change_config(folder, foreign)
    common = {
        "store": str(tiny_run / "extract"),
        "target": str(tiny_run.parent / "target"),
        "start_from": str(folder),
    }
    first = paceline.train(**common, out=str(tmp_path / "a"), **LITTLE)
    more = {**LITTLE, "max_steps": 40, "learning_rate": 4e-3}
    last = paceline.train(**common, out=str(tmp_path / "b"), **more)
    assert last["draft"]["norm_before_residual"] and last["draft"]["draft_vocab_size"] == keep
    assert last["heldout"]["loss"] < 0.8 * first["heldout"]["loss"]
    result = paceline.export(draft=str(tmp_path / "b"), out=str(tmp_path / "c"), dtype="float32")
    assert result["forms"]["vllm"]["replay"]["relative_error"] == 0.0


@pytest.mark.parametrize("inside", ["", "best"])
def test_a_draft_is_not_trained_over_itself(tiny_run, tmp_path, inside):
    """Starting over would empty the folder that the draft lies in."""
    out = tmp_path / "train"
    shutil.copytree(tiny_run / "train", out)
    before = sorted(path for path in out.rglob("*"))
    for overwrite in (False, True):
        with pytest.raises(UsageError, match="the input `start_from` of this work"):
            paceline.train(
                store=str(tiny_run / "extract"),
                start_from=str(out / inside),
                out=str(out),
                overwrite=overwrite,
            )
    assert sorted(path for path in out.rglob("*")) == before


def test_a_draft_that_reads_other_layers_is_refused(tiny_run, tmp_path):
    folder = tmp_path / "other"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes((tiny_run / "export" / "vllm" / name).read_bytes())
    ids = {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    change_config(folder, lambda values: values.update(ids))
    with pytest.raises(FingerprintMismatch, match=r"reads the layers \[1, 2, 3\]"):
        paceline.train(
            store=str(tiny_run / "extract"),
            target=str(tiny_run.parent / "target"),
            start_from=str(folder),
            out=str(tmp_path / "out"),
        )
    with pytest.raises(UsageError, match="or `start_from`"):
        paceline.train(store=str(tiny_run / "extract"), out=str(tmp_path / "out"))
