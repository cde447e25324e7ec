"""`inspect`: says what a folder holds, finds a changed byte, refuses what is not paceline's."""

import json
import shutil

import numpy as np
import pyarrow.parquet as pq
import pytest

import paceline
from paceline.dataset import TokenDataset
from paceline.errors import PacelineError, StoreCorruption, UsageError
from paceline.vocab import load_vocabulary

STAGES = ("generate", "prepare", "extract", "align", "train", "evaluate", "export", "report")
# One file of each stage's own content.
CONTENT = {
    "generate": "answers/00000.jsonl",
    "prepare": "data/00000.parquet",
    "extract": "shards/00000.safetensors",
    "align": "vocab.npz",
    "train": "draft.safetensors",
    "evaluate": "result.json",
    "export": "vllm/model.safetensors",
    "report": "index.html",
}


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_s_folder_is_summed_up_and_verified(tiny_run, stage):
    found = paceline.inspect(str(tiny_run / stage), verify=True)
    assert (found["stage"], found["status"]) == (stage, "complete")
    assert found["verified"] == {"fingerprint": found["fingerprint"]}
    size = sum(p.stat().st_size for p in (tiny_run / stage).rglob("*") if p.is_file())
    assert 0 < found["files"]["bytes"] <= size


def test_a_long_check_of_a_store_tells_how_far_it_is(tiny_run, monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.setattr("paceline.progress._LOG_INTERVAL_S", 0.0)
    paceline.inspect(str(tiny_run / "extract"), verify=True)
    size = sum(path.stat().st_size for path in (tiny_run / "extract" / "shards").iterdir())
    assert f"verify: {size:,}/{size:,} B" in caplog.text


def _place_of_content(stage, path, data):
    """A byte in the middle of what the stage wrote."""
    if stage == "prepare":
        column = pq.ParquetFile(path).metadata.row_group(0).column(4)
        return column.data_page_offset + column.total_compressed_size // 2
    if stage == "evaluate":
        return next(i for i in range(len(data) // 2, len(data)) if data[i] in b"12345")
    return len(data) // 2


@pytest.mark.parametrize("stage", STAGES)
def test_a_changed_byte_is_found(tiny_run, tmp_path, stage):
    folder = tmp_path / stage
    shutil.copytree(tiny_run / stage, folder)
    path = folder / CONTENT[stage]
    data = bytearray(path.read_bytes())
    data[_place_of_content(stage, path, data)] ^= 1
    path.write_bytes(data)
    with pytest.raises(PacelineError):
        paceline.inspect(str(folder), verify=True)


# What is no result: locks, what a resumed run reads, an index that is made anew from the shards.
NO_RESULTS = {
    "extract": ("index.safetensors", "stream/"),
    "train": ("start.json", "heldout.json", "checkpoint", "best/"),
}


@pytest.mark.parametrize("stage", STAGES)
def test_no_result_file_can_change_unseen(tiny_run, tmp_path, stage):
    folder = tmp_path / stage
    shutil.copytree(tiny_run / stage, folder)
    names = [str(p.relative_to(folder)) for p in sorted(folder.rglob("*")) if p.is_file()]
    left_out = (".", *NO_RESULTS.get(stage, ()))
    looked_at = [name for name in names if not name.startswith(left_out)]
    assert CONTENT[stage] in looked_at
    for name in looked_at:
        path = folder / name
        data = path.read_bytes()
        path.write_bytes(data[:-2] or b"not empty any more")
        with pytest.raises(PacelineError):
            paceline.inspect(str(folder), verify=True)
            pytest.fail(f"{name} was changed, and nothing is said")
        path.write_bytes(data)
    assert paceline.inspect(str(folder), verify=True)["verified"]


def test_a_draft_s_shape_cannot_be_edited(tiny_run, tmp_path):
    folder = tmp_path / "train"
    shutil.copytree(tiny_run / "train", folder)
    path = folder / "draft.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rms_norm_eps": 0.5}))
    with pytest.raises(StoreCorruption, match=r"draft\.json: was"):
        paceline.inspect(str(folder), verify=True)


@pytest.mark.parametrize("change", [lambda data: data[:-3] + b"9" + data[-2:], None])
def test_a_changed_or_lost_file_beside_the_shards_is_found(tiny_run, tmp_path, change):
    folder = tmp_path / "extract"
    shutil.copytree(tiny_run / "extract", folder)
    path = folder / "start.json"
    if change:
        path.write_bytes(change(path.read_bytes()))
    else:
        path.unlink()
    with pytest.raises(StoreCorruption, match=r"start\.json: was"):
        paceline.inspect(str(folder), verify=True)


def test_a_decoded_sample_says_which_tokens_are_supervised(tiny_run):
    sample = next(iter(TokenDataset(tiny_run / "prepare")))
    found = paceline.inspect(str(tiny_run / "prepare"), sample=sample.sample_id)["sample"]
    kinds = [piece["kind"] for piece in found["pieces"]]
    assert kinds == ["context", "supervised", "past_end"]
    question = json.loads((tiny_run.parent / "prompts.jsonl").read_text().splitlines()[0])
    assert question["messages"][0]["content"] in found["pieces"][0]["text"]
    assert found["pieces"][0]["text"].endswith("<|im_start|>assistant\n")
    assert found["num_supervised"] == int(sample.loss_mask.sum())
    assert found["num_tokens"] == len(sample.input_ids)


def test_a_store_shows_the_same_sample(tiny_run):
    sample = list(TokenDataset(tiny_run / "prepare"))[5]
    prepared, stored = (
        paceline.inspect(str(tiny_run / stage), sample=sample.sample_id)["sample"]
        for stage in ("prepare", "extract")
    )
    assert stored == prepared


def test_answers_are_shown_as_turns(tiny_run):
    found = paceline.inspect(str(tiny_run / "generate"), sample="q3")["sample"]
    assert found["sample_id"] == "q3"
    assert [piece["kind"] for piece in found["pieces"]] == ["context", "supervised"]


@pytest.mark.parametrize("stage", ["generate", "prepare", "extract"])
def test_a_sample_that_is_not_there(tiny_run, stage):
    with pytest.raises(UsageError, match="has no sample 'nobody'"):
        paceline.inspect(str(tiny_run / stage), sample="nobody")


def test_the_vocabulary_s_lowest_tokens(tiny_run):
    lowest = paceline.inspect(str(tiny_run / "align"))["vocabulary"]["lowest"]
    selected = load_vocabulary(tiny_run / "align").selected
    assert [token["id"] for token in lowest] == selected[:32].tolist()
    assert all(isinstance(token["text"], str) for token in lowest)


def test_the_curve_and_the_tensors_of_a_draft(tiny_run):
    found = paceline.inspect(str(tiny_run / "train"))
    assert [point["step"] for point in found["curve"]] == [9, 19, 29, 39, 49, 59]
    tensors = {t["name"]: t for t in found["tensors"] if t["file"] == "draft.safetensors"}
    assert tensors["fc.weight"]["shape"] == [32, 96]
    assert tensors["d2t"]["dtype"] == "I64"


def test_the_tensors_of_an_export(tiny_run):
    tensors = {t["name"] for t in paceline.inspect(str(tiny_run / "export"))["tensors"]}
    assert {"fc.weight", "lm_head.weight", "d2t", "norm.weight"} <= tensors


def test_a_folder_outlives_its_target(tiny_run, tmp_path):
    folder = tmp_path / "prepare"
    shutil.copytree(tiny_run / "prepare", folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["result"]["target"]["target"] = str(tmp_path / "gone")
    manifest["checksum"] = None
    (folder / "manifest.json").write_text(json.dumps(manifest))
    found = paceline.inspect(str(folder))["sample"]
    assert found["pieces"] == []
    assert found["note"].startswith("not decoded: ")
    assert str(tmp_path / "gone") in found["note"]


def test_an_unfinished_folder_is_shown_and_not_verified(tiny_run, tmp_path):
    folder = tmp_path / "extract"
    shutil.copytree(tiny_run / "extract", folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest |= {"status": "running", "fingerprint": None, "result": {}, "checksum": None}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    found = paceline.inspect(str(folder))
    assert found["status"] == "running"
    assert found["sample"]["pieces"]
    with pytest.raises(UsageError, match="is not finished"):
        paceline.inspect(str(folder), verify=True)


def test_what_is_not_a_stage_s_folder(tiny_run, tmp_path):
    (tmp_path / "data.bin").write_bytes(b"x")
    for folder, says in (
        (tmp_path, "is not a paceline folder"),
        (tmp_path / "none", "no such folder"),
        (tmp_path / "data.bin", "a file, not a folder"),
        (tiny_run, "inspect one of align, evaluate, export, extract, generate, prepare"),
    ):
        with pytest.raises(UsageError, match=says):
            paceline.inspect(str(folder))
    with pytest.raises(UsageError, match="name a folder"):
        paceline.inspect()


def test_a_vocabulary_that_was_swapped_is_found(tiny_run, tmp_path):
    """Valid in itself, and yet not what `align` chose."""
    folder = tmp_path / "align"
    shutil.copytree(tiny_run / "align", folder)
    vocabulary = load_vocabulary(folder)
    chosen = vocabulary.selected.copy()
    unused = np.flatnonzero(~vocabulary.t2d)
    chosen[-1] = unused[-1]
    type(vocabulary).from_selected(chosen, len(vocabulary.t2d)).save(folder)
    with pytest.raises(StoreCorruption, match="other content than its manifest says"):
        paceline.inspect(str(folder), verify=True)
