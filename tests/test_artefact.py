"""The life of an artefact folder: made, resumed, finished, refused, owned."""

import errno
import itertools
import json
import os
import signal
import subprocess
import sys

import pytest

from paceline import artefact
from paceline.artefact import (
    COMPLETE,
    RUNNING,
    describe_input,
    differences,
    load_finished,
    load_manifest,
    mend_folders,
    open_stage,
    replaced_folder,
    write_atomically,
    write_json,
)
from paceline.contracts import LOCK_NAME, MANIFEST_NAME, SCHEMA_VERSIONS, Accounting
from paceline.errors import (
    DiskFullError,
    FingerprintMismatch,
    LockedError,
    PacelineError,
    StoreCorruption,
    StoreError,
    UsageError,
)
from tests.store.children import in_child, wait, with_fuse

INPUTS = {"data": {"path": "/a", "fingerprint": "f1"}}
OPTIONS = {"size": 3, "group": {"deep": [1, 2]}}


def _work(folder, inputs=INPUTS, options=OPTIONS, content="c1", **more):
    with open_stage(folder, "align", inputs, options, **more) as stage:
        if not stage.done:
            (folder / "out.txt").write_text("result")
            stage.finish({"sum": 6}, content)
        return stage


def test_a_folder_is_made_once_and_then_does_nothing(tmp_path):
    folder = tmp_path / "deep" / "a"
    first = _work(folder)
    assert (first.resumed, first.done, first.result) == (False, True, {"sum": 6})
    written = (folder / MANIFEST_NAME).read_bytes()
    again = _work(folder)
    assert (again.resumed, again.done, again.result) == (True, True, {"sum": 6})
    assert (folder / MANIFEST_NAME).read_bytes() == written


def test_an_interrupted_run_goes_on_where_it_was(tmp_path):
    with pytest.raises(KeyboardInterrupt), open_stage(tmp_path / "a", "align", INPUTS, OPTIONS):
        (tmp_path / "a" / "half.txt").write_text("half")
        raise KeyboardInterrupt
    manifest = load_manifest(tmp_path / "a", "align")
    assert (manifest.status, manifest.fingerprint) == (RUNNING, None)
    with pytest.raises(UsageError, match="run `paceline align` with the same options to go on"):
        load_finished(tmp_path / "a", "align")
    with pytest.raises(UsageError, match="is not finished"):
        describe_input(tmp_path / "a", manifest)
    resumed = _work(tmp_path / "a")
    assert resumed.resumed
    assert (tmp_path / "a" / "half.txt").read_text() == "half"
    assert load_finished(tmp_path / "a", "align").status == COMPLETE


@pytest.mark.parametrize(
    ("inputs", "options", "says"),
    [
        ({"data": {"path": "/a", "fingerprint": "f2"}}, OPTIONS, "data.fingerprint: was 'f1', now"),
        (INPUTS, {**OPTIONS, "size": 4}, "size: was 3, now 4"),
        (INPUTS, {"size": 3, "group": {"deep": [2]}}, r"group.deep: was \[1, 2\], now \[2\]"),
        (INPUTS, {**OPTIONS, "new": True}, "new: was None, now True"),
    ],
)
def test_other_work_is_refused_by_name(tmp_path, inputs, options, says):
    _work(tmp_path / "a")
    with pytest.raises(FingerprintMismatch, match=says):
        _work(tmp_path / "a", inputs, options)
    assert load_finished(tmp_path / "a", "align").options == OPTIONS


def test_a_moved_input_is_the_same_input(tmp_path):
    _work(tmp_path / "a")
    assert _work(tmp_path / "a", {"data": {"path": "/moved", "fingerprint": "f1"}}).resumed


def test_tuples_and_lists_are_the_same_option(tmp_path):
    _work(tmp_path / "a", options={"betas": (0.9, 0.95)})
    assert _work(tmp_path / "a", options={"betas": [0.9, 0.95]}).resumed


def test_overwrite_starts_over(tmp_path):
    folder = tmp_path / "a"
    _work(folder)
    (folder / "sub").mkdir()
    (folder / "sub" / "old.txt").write_text("old")
    stage = _work(folder, options={"size": 9}, overwrite=True)
    assert not stage.resumed
    assert not (folder / "sub").exists()
    assert load_finished(folder, "align").options == {"size": 9}


def test_overwrite_does_not_touch_a_folder_that_is_not_ours(tmp_path):
    (tmp_path / "precious.txt").write_text("mine")
    with pytest.raises(PacelineError, match="paceline did not make it"):
        _work(tmp_path, overwrite=True)
    assert (tmp_path / "precious.txt").read_text() == "mine"


def test_a_folder_with_strangers_is_refused(tmp_path):
    (tmp_path / "precious.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"not empty \(precious.txt"):
        _work(tmp_path)
    assert not (tmp_path / MANIFEST_NAME).exists()


def test_scraps_of_a_killed_start_are_no_strangers(tmp_path):
    (tmp_path / f".{MANIFEST_NAME}.99.tmp").write_text("{")
    assert not _work(tmp_path).resumed


def test_another_stage_s_folder_is_refused(tmp_path):
    _work(tmp_path / "a")
    with pytest.raises(UsageError, match="was made by `paceline align`, not by `train`"):
        load_manifest(tmp_path / "a", "train")
    with (
        pytest.raises(UsageError, match="was made by `paceline align`"),
        open_stage(tmp_path / "a", "train", {}, {}),
    ):
        pass


@pytest.mark.parametrize("text", ["", "{", "[]", '{"stage": "align"}', "\xff"])
def test_a_broken_manifest_is_a_clear_error(tmp_path, text):
    (tmp_path / MANIFEST_NAME).write_bytes(text.encode("latin-1"))
    with pytest.raises(UsageError, match=f"{MANIFEST_NAME} is not a manifest"):
        load_manifest(tmp_path)


def test_no_manifest_at_all(tmp_path):
    with pytest.raises(UsageError, match=f"it has no {MANIFEST_NAME}"):
        load_manifest(tmp_path)


def test_a_schema_that_is_not_known_is_refused(tmp_path):
    _work(tmp_path / "a")
    path = tmp_path / "a" / MANIFEST_NAME
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, "schema": 99, "checksum": None}))
    with pytest.raises(
        UsageError, match=f"version 99; this paceline reads {SCHEMA_VERSIONS['align']}"
    ):
        load_manifest(tmp_path / "a")


def test_an_edited_manifest_is_found(tmp_path):
    _work(tmp_path / "a")
    path = tmp_path / "a" / MANIFEST_NAME
    path.write_text(path.read_text().replace('"sum": 6', '"sum": 7'))
    with pytest.raises(StoreCorruption, match="damaged or edited"):
        load_manifest(tmp_path / "a")


def test_the_fingerprint_names_content_options_and_inputs(tmp_path):
    changes = [{}, {"content": "c2"}, {"options": {"size": 4}}, {"inputs": {}}]
    prints = [_work(tmp_path / str(i), **c).manifest.fingerprint for i, c in enumerate(changes)]
    assert len(set(prints)) == 4
    assert _work(tmp_path / "same").manifest.fingerprint == prints[0]


def test_one_run_at_a_time_owns_a_folder(tmp_path):
    """Another process holds the folder; the lock goes when it dies, however it dies."""
    code = (
        "import sys\nfrom paceline.artefact import open_stage\n"
        "with open_stage(sys.argv[1], 'align', {}, {}):\n"
        "    print('mine', flush=True)\n    sys.stdin.read()\n"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "a")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert other.stdout.readline() == "mine\n"
        with (
            pytest.raises(LockedError, match=f"another run \\(pid {other.pid}\\)"),
            open_stage(tmp_path / "a", "align", {}, {}),
        ):
            pass
    finally:
        other.kill()
        other.communicate()
    with open_stage(tmp_path / "a", "align", {}, {}) as stage:
        assert stage.resumed
        assert (tmp_path / "a" / LOCK_NAME).read_text() == str(os.getpid())


def test_a_file_system_without_locks_is_no_other_run(tmp_path, monkeypatch):
    def refuse(_file, _how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(artefact.fcntl, "flock", refuse)
    with pytest.raises(StoreError, match=r"a/\.lock cannot be locked \(No locks available\)"):
        _work(tmp_path / "a")
    assert not (tmp_path / "a" / MANIFEST_NAME).exists()


def test_a_failed_write_leaves_the_old_file_whole(tmp_path, monkeypatch):
    path = tmp_path / "x.json"
    write_json(path, {"old": 1})

    def full(_descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(artefact.os, "fsync", full)
    with pytest.raises(DiskFullError, match="x.json: no space left"):
        write_atomically(path, b"new")
    assert json.loads(path.read_text()) == {"old": 1}


def _files(folder):
    """What stands in a folder, the lock apart: {path: text}."""
    paths = (path for path in folder.rglob("*") if path.is_file() and path.name != LOCK_NAME)
    return {str(path.relative_to(folder)): path.read_text() for path in paths}


def _killed_at_each_call(prepare, work, after=False):
    """Do work(folder) in a child that is killed at its n-th call to the file system, for every n
    until one comes to its end. Yields what each kill left, a folder that prepare(n) made."""
    for number in itertools.count():
        folder = prepare(number)
        status = wait(*in_child(with_fuse(lambda folder=folder: work(folder), number, after)))
        if status == 0:
            return
        assert status == -signal.SIGKILL
        yield folder


def _replace(folder, text):
    with replaced_folder(folder) as aside:
        (aside / "one.txt").write_text(text)
        (aside / "two.txt").write_text(text)


def test_a_folder_is_replaced_as_a_whole(tmp_path):
    for text in ("old", "new"):
        _replace(tmp_path / "deep" / "a", text)
        assert _files(tmp_path) == {"deep/a/one.txt": text, "deep/a/two.txt": text}


def test_an_error_leaves_the_old_folder_and_nothing_else(tmp_path):
    """What a full disk could not take must not keep the room that the user is told to make."""
    _replace(tmp_path / "a", "old")
    for name in ("a", "b"):
        with pytest.raises(OSError, match="No space"), replaced_folder(tmp_path / name) as aside:
            (aside / "one.txt").write_text("half")
            raise OSError(errno.ENOSPC, "No space left on device")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert _files(tmp_path / "a") == {"one.txt": "old", "two.txt": "old"}


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_kill_leaves_the_old_folder_or_the_new_one(tmp_path, after):
    def prepare(number):
        folder = tmp_path / str(number) / "a"
        _replace(folder, "old")
        return folder

    seen = []
    for folder in _killed_at_each_call(prepare, lambda folder: _replace(folder, "new"), after):
        mend_folders(folder.parent)
        assert [path.name for path in folder.parent.iterdir()] == ["a"]
        texts = _files(folder)
        assert texts in ({"one.txt": t, "two.txt": t} for t in ("old", "new"))
        seen.append(texts["one.txt"])
        _replace(folder, "newer")
        assert _files(folder)["two.txt"] == "newer"
    assert seen == sorted(seen, reverse=True) and {*seen} == {"old", "new"}


def test_differences_go_down_to_the_leaf():
    assert differences({"a": {"b": 1, "path": "x"}}, {"a": {"b": 2, "path": "y"}}) == [
        "a.b: was 1, now 2"
    ]
    assert differences({"a": {"b": 1}}, {"a": 3}) == ["a: was {'b': 1}, now 3"]
    assert differences({"a": [1]}, {"a": [1]}) == []


def test_accounting_balances_or_says_so():
    full = Accounting(num_in=5, num_done=3, quarantined={"zero row": 1}, skipped={"long": 1})
    assert full.balanced
    assert full.as_dict()["quarantined"] == {"zero row": 1}
    assert not Accounting(num_in=5, num_done=3).balanced
