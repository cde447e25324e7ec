"""Wrong input through the real program: a clear error, the right code, nothing lost."""

import errno
import json
import os
import shutil

import pytest
import yaml

import paceline
from paceline.cli.main import main
from tests.targets import save_tokenizer
from tests.tiny_line import program, save_tiny_target, write_recipe

GOOD = {
    "id": "a",
    "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "r"}],
}


def _failure(done, code):
    """The error object of a run with --json; people's message is on stderr."""
    assert done.returncode == code, done.stderr
    error = json.loads(done.stdout)["error"]
    assert error["exit_code"] == code
    assert error["message"].splitlines()[0] in done.stderr
    assert "Traceback" not in done.stderr
    return error


def _target(tiny_run):
    return tiny_run.parent / "target"


def test_a_missing_file(tiny_run, tmp_path):
    missing, out = tmp_path / "none.jsonl", tmp_path / "out"
    done = program(
        *("prepare", "--json", "--target", _target(tiny_run), "--data", missing, "--out", out)
    )
    error = _failure(done, 2)
    assert error["kind"] == "UsageError"
    assert f"{missing}: no such file" in error["message"]
    assert not out.exists()


def test_a_folder_below_a_file(tiny_run, tmp_path):
    (tmp_path / "file").touch()
    out = tmp_path / "file" / "out"
    done = program("align", "--json", "--data", tiny_run / "prepare", "--out", out)
    error = _failure(done, 2)
    assert error["message"].startswith(f"{out}: Not a directory: name another path")


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EROFS])
def test_a_folder_where_this_user_may_not_write(monkeypatch, capsys, number):
    def refuse(_options):
        raise OSError(number, os.strerror(number), "runs/x")

    monkeypatch.setattr(paceline.align, "VERB", (paceline.align.VERB[0], refuse))
    with pytest.raises(SystemExit) as stop:
        main(["align", "--json"])
    assert stop.value.code == 2
    message = json.loads(capsys.readouterr().out)["error"]["message"]
    assert message.startswith(f"runs/x: {os.strerror(number)}: name another path")


def test_a_target_that_is_nowhere(tmp_path):
    done = program("prepare", "--json", "--target", tmp_path / "no", "--data", "x", "--out", "y")
    error = _failure(done, 1)
    assert error["kind"] == "TargetError"
    assert str(tmp_path / "no") in error["message"]


def test_a_bad_row_is_named_and_the_others_are_kept(tiny_run, tmp_path):
    data, out = tmp_path / "rows.jsonl", tmp_path / "out"
    data.write_text(json.dumps(GOOD) + "\n{broken\n" + json.dumps({**GOOD, "id": "b"}) + "\n")
    arguments = ["prepare", "--json", "--target", _target(tiny_run), "--data", data, "--out", out]
    options = ["--no-deduplicate", "--max-skipped-share", "0.5", "--heldout-share", "0"]
    done = program(*arguments, *options)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["rows"], result["rows_kept"]) == (3, 2)
    (skipped,) = map(json.loads, (out / "skipped.jsonl").read_text().splitlines())
    assert (skipped["file"], skipped["row"]) == (str(data), 2)


def test_a_bad_row_fails_a_strict_run_and_says_where(tiny_run, tmp_path):
    data, out = tmp_path / "rows.jsonl", tmp_path / "out"
    data.write_text(json.dumps(GOOD) + "\n{broken\n")
    done = program(
        *("prepare", "--json", "--strict", "--target", _target(tiny_run)),
        *("--data", data, "--out", out),
    )
    error = _failure(done, 1)
    assert error["kind"] == "DataError"
    assert "row 2" in error["message"]
    assert str(data) in error["message"]


def test_wrong_layer_ids(tiny_run, tmp_path):
    out = tmp_path / "store"
    done = program(
        *("extract", "--json", "--data", tiny_run / "prepare", "--out", out),
        *("--layers", "1", "--layers", "9", "--layers", "3"),
    )
    error = _failure(done, 1)
    assert error["kind"] == "LayerError"
    assert "9" in error["message"]
    assert not out.exists()


def test_a_target_without_chat_template(tmp_path):
    target = save_tiny_target(tmp_path / "target")
    for name in ("chat_template.jinja", "tokenizer_config.json", "tokenizer.json"):
        (target / name).unlink(missing_ok=True)
    save_tokenizer(target, chat_template=None)
    data = tmp_path / "rows.jsonl"
    data.write_text(json.dumps(GOOD) + "\n")
    done = program(
        *("prepare", "--json", "--target", target, "--data", data, "--out", tmp_path / "out")
    )
    error = _failure(done, 1)
    assert "chat template" in error["message"]
    assert "chat_template" in error["message"]  # the option that helps


def test_a_store_of_another_target(tiny_run, tmp_path):
    other = save_tiny_target(tmp_path / "other", seed=7)
    out = tmp_path / "draft"
    done = program(
        *("train", "--json", "--store", tiny_run / "extract", "--vocab", tiny_run / "align"),
        *("--target", other, "--out", out),
    )
    error = _failure(done, 1)
    assert error["kind"] == "FingerprintMismatch"
    assert "weights" in error["message"]
    assert not out.exists()


def test_a_folder_of_another_stage(tiny_run, tmp_path):
    done = program(
        *("train", "--json", "--store", tiny_run / "prepare", "--vocab", tiny_run / "align"),
        *("--out", tmp_path / "draft"),
    )
    error = _failure(done, 2)
    assert "was made by `paceline prepare`, not by `extract`" in error["message"]


def test_other_work_in_the_same_folder_is_refused(tiny_run, tmp_path):
    out = tmp_path / "align"
    shutil.copytree(tiny_run / "align", out)
    done = program(
        *("align", "--json", "--data", tiny_run / "prepare", "--out", out),
        *("--draft-vocab-size", "50"),
    )
    error = _failure(done, 1)
    assert error["kind"] == "FingerprintMismatch"
    assert "draft_vocab_size: was 96, now 50" in error["message"]
    assert "--overwrite" in error["message"]


@pytest.mark.parametrize("as_json", [False, True])
def test_unknown_options_of_a_recipe_are_told_together(tmp_path, as_json):
    recipe = write_recipe(tmp_path, target=tmp_path / "t")
    values = yaml.safe_load(recipe.read_text())
    values["train"]["epoch"] = 3
    values["align"]["draft_vocab_sise"] = 5
    recipe.write_text(yaml.safe_dump(values))
    done = program("run", recipe, "evaluate.limits=3", *(["--json"] if as_json else []))
    assert done.returncode == 2
    told = json.loads(done.stdout)["error"]["message"] if as_json else done.stderr
    for line in (
        "train.epoch: no such option; did you mean epochs?",
        "align.draft_vocab_sise: no such option; did you mean draft_vocab_size?",
        "evaluate.limits: no such option; did you mean limit?",
    ):
        assert line in told
    assert not (tmp_path / "run").exists()
