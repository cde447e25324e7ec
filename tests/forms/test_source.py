"""A draft is found wherever it may be, and what holds none says what does."""

import os
import re
import subprocess
import sys

import pytest

import paceline
from paceline.errors import TrainingError, UsageError
from paceline.forms.compact import write_compact
from paceline.forms.config_json import Serving
from paceline.forms.source import open_draft
from paceline.forms.write import write_draft
from tests.export.making import trained_folder
from tests.forms.making import config_for, draft_for, tiny_target

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TELL = """
import sys
from paceline.errors import TargetError
from paceline.forms.source import open_draft
print(open_draft(sys.argv[1]).folder)
try:
    open_draft(sys.argv[2])
except TargetError as error:
    print(error)
"""


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def draft(target):
    return draft_for(target, config_for())


def test_what_export_wrote_names_one_of_its_forms(target, draft, tmp_path):
    trained = trained_folder(tmp_path / "train", draft, target)
    out = tmp_path / "export"
    paceline.export(draft=str(trained), out=str(out), server=["sglang"], dtype="float32")
    one = re.escape(str(out / "sglang"))
    with pytest.raises(
        UsageError, match=rf"holds a draft for each server: name one, such as {one}"
    ):
        open_draft(out)
    assert open_draft(out / "sglang").form == "sglang"


def test_a_runs_folder_names_that_of_its_draft(target, draft, tmp_path):
    trained = trained_folder(tmp_path / "train", draft, target)
    with pytest.raises(UsageError, match=rf"holds no draft.*; {re.escape(str(trained))} does"):
        open_draft(tmp_path)


def test_a_hugging_face_id_is_fetched(target, draft, tmp_path):
    """In a process of its own: the Hub's client reads its settings when it is imported."""
    cached = tmp_path / "hub" / "models--someone--draft"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text(COMMIT)
    snapshot = cached / "snapshots" / COMMIT
    write_draft(snapshot, draft, "vllm", target, Serving("float32"))
    told = subprocess.run(
        [sys.executable, "-c", TELL, "someone/draft", "someone/else"],
        env={**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    assert told[0] == str(snapshot)
    assert told[1].startswith("draft 'someone/else' is no local folder and could not be fetched")


def test_the_shape_is_told_without_the_weights(target, draft, tmp_path):
    trained = open_draft(trained_folder(tmp_path / "train", draft, target)).trained
    write_compact(tmp_path / "compact", draft, target, trained, None)
    for form in ("vllm", "speculators", "sglang"):
        write_draft(tmp_path / form, draft, form, target, Serving("float32"))
    for name in ("train", "compact", "vllm", "speculators", "sglang"):
        source = open_draft(tmp_path / name)
        assert source.load(target).config == draft.config
        for weights in (tmp_path / name).glob("*.safetensors"):
            weights.unlink()
        assert source.config(target) == draft.config


@pytest.mark.parametrize("name", ["draft.json", "draft.safetensors"])
@pytest.mark.parametrize("harm", ["cut", "removed"])
def test_a_damaged_file_of_a_trained_draft_is_named(target, draft, tmp_path, name, harm):
    path = trained_folder(tmp_path / "train", draft, target) / name
    if harm == "cut":
        os.truncate(path, 100)
    else:
        path.unlink()
    says = f"{re.escape(str(path))} cannot be read .*Train again with --overwrite"
    with pytest.raises(TrainingError, match=says):
        open_draft(tmp_path / "train").load(target)
