"""The stage: what it writes, when it refuses, what it leaves behind."""

import hashlib
import json
import shlex
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import paceline
from paceline.errors import ExportError, FingerprintMismatch, TargetError, UsageError
from paceline.forms.load import load_exported
from paceline.target.model import load_embedding
from tests.export.making import trained_folder
from tests.forms.making import config_for, draft_for, tiny_target

FORMS = ["vllm", "speculators", "sglang"]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return tiny_target(tmp_path_factory.mktemp("target"))


def train(tmp_path: Path, target, **changes) -> Path:
    draft = draft_for(target, config_for(**changes))
    return trained_folder(tmp_path / "train", draft, target)


def files_of(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_X01_exports_do_not_depend_on_seeds_and_hold_no_embedding(tmp_path):
    """Train state without embed_tokens, target embedding [10, 4]."""
    target = tiny_target(tmp_path / "target", vocab_size=10, hidden_size=4, head_dim=2)
    shape = {"hidden_size": 4, "target_hidden_size": 4, "head_dim": 2, "vocab_size": 10}
    draft = draft_for(target, config_for(**shape, draft_vocab_size=6))
    folder = trained_folder(tmp_path / "train", draft, target)
    assert "embed_tokens.weight" not in load_file(folder / "draft.safetensors")
    written = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        result = paceline.export(draft=str(folder), out=str(tmp_path / f"{seed}"), server=FORMS)
        written.append({form: files_of(tmp_path / f"{seed}" / form) for form in FORMS})
        assert set(result["forms"]) == set(FORMS)
    assert written[0] == written[1]
    for form in FORMS:
        assert set(written[0][form]) == {"README.md", "config.json", "model.safetensors"}
        exported = tmp_path / "1" / form
        assert "embed_tokens.weight" not in load_file(exported / "model.safetensors")
        config = json.loads((exported / "config.json").read_text())
        assert config["paceline"] == {"form": form, "embedding": "shared"}


def test_X01_a_copied_embedding_is_the_targets_bit_for_bit(target, tmp_path):
    folder = train(tmp_path, target)
    paceline.export(draft=str(folder), out=str(tmp_path / "out"), server=FORMS, copy_embedding=True)
    theirs = load_file(target.folder / "model.safetensors")["model.embed_tokens.weight"]
    for form in FORMS:
        tensors = load_file(tmp_path / "out" / form / "model.safetensors")
        assert torch.equal(tensors["embed_tokens.weight"], theirs)


def test_X01_every_tensor_is_the_trained_one(target, tmp_path):
    folder = train(tmp_path, target)
    paceline.export(draft=str(folder), out=str(tmp_path / "out"), server=FORMS)
    trained = load_file(folder / "draft.safetensors")
    for form in FORMS:
        exported = load_file(tmp_path / "out" / form / "model.safetensors")
        assert len(exported) == len(trained) == 18
        for name, tensor in trained.items():
            theirs = name.replace("aux_norm.norms", "fc_norm")
            if form != "speculators":
                theirs = theirs.replace("layers.0.", "midlayer.")
            assert torch.equal(exported[theirs], tensor), (form, name)


def test_the_result_says_what_is_needed_and_how_to_serve(target, tmp_path):
    out = tmp_path / "out"
    result = paceline.export(
        draft=str(train(tmp_path, target)), out=str(out), server=FORMS, num_speculative_tokens=5
    )
    forms = result["forms"]
    assert forms["vllm"]["server"] == "vLLM" and forms["vllm"]["lowest_version"] == "0.22"
    assert forms["sglang"]["lowest_version"] == "0.5.12"
    assert forms["vllm"]["needs"] == {"aux_norm: rms": "0.22"}
    assert all(form["replay"]["relative_error"] == 0.0 for form in forms.values())
    words = shlex.split(forms["vllm"]["command"])
    assert words[:4] == ["vllm", "serve", str(target.folder), "--speculative-config"]
    assert json.loads(words[4]) == {
        "method": "eagle3",
        "model": str(out / "vllm"),
        "num_speculative_tokens": 5,
    }
    # SGLang's number of draft tokens counts the one that the target adds.
    assert shlex.split(forms["sglang"]["command"]) == [
        *("python", "-m", "sglang.launch_server", "--model-path", str(target.folder)),
        *("--speculative-algorithm", "EAGLE3"),
        *("--speculative-draft-model-path", str(out / "sglang")),
        *("--speculative-num-steps", "5", "--speculative-eagle-topk", "1"),
        *("--speculative-num-draft-tokens", "6"),
    ]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_holds_the_rounded_weights(dtype, target, tmp_path):
    folder = train(tmp_path, target, aux_norm="static")
    result = paceline.export(draft=str(folder), out=str(tmp_path / "out"), dtype=dtype)
    replay = result["forms"]["vllm"]["replay"]
    assert 0.0 < replay["relative_error"] < replay["bound"]
    exported = load_file(tmp_path / "out" / "vllm" / "model.safetensors")
    trained = load_file(folder / "draft.safetensors")
    rounded = trained["lm_head.weight"].to(getattr(torch, dtype))
    assert torch.equal(exported["lm_head.weight"], rounded)
    config = json.loads((tmp_path / "out" / "vllm" / "config.json").read_text())
    assert config["dtype"] == config["torch_dtype"] == dtype


def test_a_fixed_scale_replays_within_rounding(target, tmp_path):
    folder = train(tmp_path, target, aux_norm="static")
    result = paceline.export(draft=str(folder), out=str(tmp_path / "out"), server=FORMS)
    for form in result["forms"].values():
        assert form["replay"]["relative_error"] < 1e-5
    assert result["forms"]["sglang"]["lowest_version"] == "0.5.6"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"qk_norm": True}, "SGLang .*qk_norm"),
        ({"aux_layers": (1, 4, 5)}, "SGLang .*layer_list"),
    ],
    ids=str,
)
def test_nothing_is_written_where_one_server_cannot_carry_the_draft(
    changes, words, target, tmp_path
):
    folder = train(tmp_path, target, **changes)
    with pytest.raises(ExportError, match=words):
        paceline.export(draft=str(folder), out=str(tmp_path / "out"), server=["vllm", "sglang"])
    assert not (tmp_path / "out").exists()
    paceline.export(draft=str(folder), out=str(tmp_path / "out"), server=["vllm"])


def test_a_release_that_is_too_old_is_refused_before_anything_is_written(target, tmp_path):
    folder = train(tmp_path, target)
    options = {"draft": str(folder), "out": str(tmp_path / "out")}
    with pytest.raises(ExportError, match=r"vLLM 0\.21\.0 cannot carry .*aux_norm: rms"):
        paceline.export(**options, server_version={"vllm": "0.21.0"})
    assert not (tmp_path / "out").exists()
    paceline.export(**options, server_version={"vllm": "0.32.0"})


def test_a_finished_export_is_left_alone_and_can_be_verified_again(target, tmp_path):
    options = {"draft": str(train(tmp_path, target)), "out": str(tmp_path / "out")}
    first = paceline.export(**options)
    before = files_of(tmp_path / "out")
    assert paceline.export(**options) == first
    assert paceline.export(**options, verify=True) == first
    assert files_of(tmp_path / "out") == before
    weights = tmp_path / "out" / "vllm" / "model.safetensors"
    broken = bytearray(weights.read_bytes())
    broken[len(broken) // 2] ^= 1  # somewhere in the float weights
    weights.write_bytes(broken)
    assert paceline.export(**options) == first
    with pytest.raises(ExportError, match="is not the draft's"):
        paceline.export(**options, verify=True)
    with pytest.raises(FingerprintMismatch, match="dtype"):
        paceline.export(**options, dtype="bfloat16")
    assert paceline.export(**options, overwrite=True) == first
    assert files_of(tmp_path / "out" / "vllm") == {
        name.removeprefix("vllm/"): value
        for name, value in before.items()
        if name.startswith("vllm/")
    }


def test_an_export_that_was_killed_goes_on(target, tmp_path):
    """What a kill leaves: a running manifest, one form whole, one half written aside."""
    out = tmp_path / "out"
    options = {"draft": str(train(tmp_path, target)), "out": str(out), "server": FORMS}
    first = paceline.export(**options)
    whole = {form: files_of(out / form) for form in FORMS}
    manifest = json.loads((out / "manifest.json").read_text())
    manifest.update(status="running", result={}, checksum=None, fingerprint=None, finished=None)
    (out / "manifest.json").write_text(json.dumps(manifest))
    (out / "sglang").rename(out / ".sglang.tmp")
    (out / ".sglang.tmp" / "model.safetensors").write_bytes(b"half")
    (out / "speculators" / "config.json").unlink()
    assert paceline.export(**options) == first
    assert {form: files_of(out / form) for form in FORMS} == whole
    assert {path.name for path in out.iterdir()} == {".lock", "manifest.json", *FORMS}


def test_forms_can_be_turned_into_each_other(target, tmp_path):
    folder = train(tmp_path, target)
    paceline.export(draft=str(folder), out=str(tmp_path / "a"), server=["speculators"])
    options = {"draft": str(tmp_path / "a" / "speculators"), "out": str(tmp_path / "b")}
    with pytest.raises(TargetError, match="no target given"):
        paceline.export(**options)
    paceline.export(**options, target=str(target.folder), server=["sglang"])
    turned = load_exported(tmp_path / "b" / "sglang", target, torch.float32).state_dict()
    for name, tensor in load_file(folder / "draft.safetensors").items():
        assert torch.equal(turned[name], tensor)


def test_another_target_is_refused(target, tmp_path):
    folder = train(tmp_path, target)
    other = tiny_target(tmp_path / "other", seed=5)
    with pytest.raises(FingerprintMismatch, match="trained on another target: weights"):
        paceline.export(draft=str(folder), out=str(tmp_path / "out"), target=str(other.folder))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "pass `draft`"),
        ({"draft": "somewhere"}, "and `out`"),
        ({"draft": "nowhere", "out": "x"}, "nowhere holds no draft"),
        ({"server": []}, "server"),
        ({"server": ["tensorrt"]}, "server"),
        ({"server_version": {"vllm": 0.2}}, "write three, such as"),
        ({"server_version": {"sglang": "0.5.5"}}, "sglang is not among `server`"),
    ],
    ids=str,
)
def test_wrong_requests_are_usage_errors(options, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=words):
        paceline.export(**options)


def test_an_exported_draft_is_measured_like_the_trained_one(tiny_run, tmp_path):
    target = str(tiny_run.parent / "target")
    values = {"store": str(tiny_run / "extract"), "num_draft_tokens": [1, 3], "bootstrap": 200}
    results = {}
    for name, draft in (("train", tiny_run / "train"), ("vllm", tiny_run / "export" / "vllm")):
        results[name] = paceline.evaluate(
            draft=str(draft), target=target, out=str(tmp_path / name), dtype="float32", **values
        )
    assert results["train"]["results"] == results["vllm"]["results"]
    assert results["train"]["results"]["3"]["pooled"]["verify_steps"] > 20


def test_the_embedding_is_loaded_from_the_target(target, tmp_path):
    paceline.export(draft=str(train(tmp_path, target)), out=str(tmp_path / "out"))
    draft = load_exported(tmp_path / "out" / "vllm", target, torch.float32)
    assert torch.equal(draft.embed_tokens.weight, load_embedding(target, torch.float32))
