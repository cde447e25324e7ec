"""A draft in 8 bits: against rounding done by hand in float64, sizes counted, damage refused."""

import json
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline import fingerprint
from paceline.errors import ExportError, FingerprintMismatch, UsageError
from paceline.forms.compact import write_compact
from paceline.forms.source import open_draft
from paceline.target.model import load_embedding
from tests.export.making import trained_folder
from tests.forms.making import config_for, draft_for, tiny_target


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return tiny_target(tmp_path_factory.mktemp("target"))


def compact(tmp_path, target, draft):
    trained = open_draft(trained_folder(tmp_path / "train", draft, target)).trained
    return write_compact(tmp_path / "compact", draft, target, trained, None)


def matrices(draft):
    return {
        name: weight
        for name, weight in draft.state_dict().items()
        if weight.ndim == 2 and name != "embed_tokens.weight"
    }


@pytest.mark.parametrize(
    "changes",
    [{}, {"aux_norm": "static", "num_layers": 2, "qk_norm": True}, {"draft_vocab_size": 40}],
    ids=str,
)
def test_every_value_is_the_nearest_of_255_steps(tmp_path, target, changes):
    draft = draft_for(target, config_for(**changes))
    with torch.no_grad():
        draft.fc.weight[3] = 0.0
    compact(tmp_path, target, draft)
    loaded = open_draft(tmp_path / "compact").load(target)
    assert loaded.config == draft.config
    found, expected = loaded.state_dict(), draft.state_dict()
    assert found.keys() == expected.keys()
    for name, weight in matrices(draft).items():
        for ours, row in zip(found[name].double().tolist(), weight.double().tolist()):
            step = max(map(abs, row)) / 127 or 1.0
            for value, exact in zip(ours, row):
                assert abs(value - exact) <= step * 0.50001
                assert abs(value / step - round(value / step)) < 1e-4
        del found[name]
    for name, value in found.items():
        assert torch.equal(value, expected[name]), name


def test_the_file_holds_one_byte_a_weight_and_no_more_than_needed(tmp_path, target):
    draft = draft_for(target, config_for())
    result = compact(tmp_path, target, draft)
    path = tmp_path / "compact" / "compact.safetensors"
    raw = path.read_bytes()
    (header,) = struct.unpack("<Q", raw[:8])
    weights = matrices(draft).values()
    gains = [p for p in draft.parameters() if p.ndim == 1]
    counted = sum(w.numel() + 4 * len(w) for w in weights) + 4 * sum(map(len, gains)) + 4 * 12
    assert len(raw) == 8 + header + counted == result["bytes"]
    assert result["head"] == "own"


def test_a_head_that_is_the_targets_takes_no_room(tmp_path, target):
    draft = draft_for(target, config_for())
    head = load_file(target.folder / "model.safetensors")["lm_head.weight"]
    draft.lm_head.weight.data = head[torch.arange(12) + draft.d2t].clone()
    result = compact(tmp_path, target, draft)
    assert result["head"] == "target"
    assert "lm_head.weight" not in load_file(tmp_path / "compact" / "compact.safetensors")
    loaded = open_draft(tmp_path / "compact").load(target)
    assert torch.equal(loaded.lm_head.weight, draft.lm_head.weight)
    assert torch.equal(loaded.embed_tokens.weight, load_embedding(target, torch.float32))


def test_what_was_kept_is_kept_again_byte_by_byte(tmp_path, target):
    compact(tmp_path, target, draft_for(target, config_for()))
    source = open_draft(tmp_path / "compact")
    write_compact(tmp_path / "again", source.load(target), target, source.trained, None)
    for name in ("compact.safetensors", "compact.json"):
        assert (tmp_path / "again" / name).read_bytes() == (
            tmp_path / "compact" / name
        ).read_bytes()
    assert source.trained.options["ttt_steps"] == 3
    assert source.recorded_target["target"] == str(target.folder)


def changed(folder, change):
    """Change the tensors, and say so in the description."""
    path = folder / "compact.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    values = json.loads((folder / "compact.json").read_text())
    values["weights"] = fingerprint.of_bytes(path.read_bytes())
    (folder / "compact.json").write_text(json.dumps(values))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("fc.weight.scale"), "fc.weight has no finite scale for each of its 16"),
        (lambda t: t["fc.weight.scale"].fill_(float("nan")), "fc.weight has no finite scale"),
        (lambda t: t.pop("norm.weight"), r"missing \['norm.weight'\]"),
        (lambda t: t.update(extra=torch.ones(1)), r"unexpected \['extra'\]"),
        (lambda t: t.pop("d2t"), "no d2t"),
        (lambda t: t["d2t"].add_(100), "d2t points outside"),
    ],
    ids=["no scale", "nan scale", "missing", "unexpected", "no d2t", "wrong d2t"],
)
def test_tensors_that_do_not_fit_are_refused_by_name(tmp_path, target, change, message):
    compact(tmp_path, target, draft_for(target, config_for()))
    changed(tmp_path / "compact", change)
    with pytest.raises(ExportError, match=message):
        open_draft(tmp_path / "compact").load(target)


def test_damage_and_mix_ups_are_refused(tmp_path, target):
    compact(tmp_path, target, draft_for(target, config_for()))
    folder = tmp_path / "compact"
    with pytest.raises(FingerprintMismatch, match="was trained on another target: weights"):
        open_draft(folder).load(tiny_target(tmp_path / "other", seed=3))
    weights, said = folder / "compact.safetensors", folder / "compact.json"
    data = bytearray(weights.read_bytes())
    data[-5] ^= 1
    weights.write_bytes(data)
    with pytest.raises(ExportError, match="damaged, or is another draft's"):
        open_draft(folder).load(target)
    weights.unlink()
    with pytest.raises(ExportError, match=r"has no compact\.safetensors"):
        open_draft(folder).load(target)
    said.write_text(said.read_text().replace('"schema": 1', '"schema": 9'))
    with pytest.raises(ExportError, match="schema 9; this paceline reads 1"):
        open_draft(folder)
    said.write_text("[]")
    with pytest.raises(ExportError, match="not the description of a compact draft"):
        open_draft(folder)
    said.unlink()
    with pytest.raises(UsageError, match="holds no draft"):
        open_draft(folder)
