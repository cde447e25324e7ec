"""The life of an artefact folder: made, resumed, finished, refused, owned."""

import errno
import itertools
import json
import os
import re
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
            (stage.path / "out.txt").write_text("result")
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


def test_a_folder_that_is_none_of_a_stage_s_is_told_from_one_that_is_not_there(tmp_path):
    with pytest.raises(UsageError, match=f"{tmp_path / 'none'}: no such folder"):
        load_manifest(tmp_path / "none", "extract")
    with pytest.raises(UsageError, match="is not a folder of `paceline extract`: it has no"):
        load_manifest(tmp_path, "extract")


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


@pytest.mark.parametrize("has_written", [False, True])
def test_work_that_failed_before_it_wrote_anything_stands_in_nobodys_way(tmp_path, has_written):
    with pytest.raises(KeyError), open_stage(tmp_path, "align", INPUTS, OPTIONS) as stage:
        (stage.path / ".out.1.tmp").touch()
        if has_written:
            (stage.path / "part").touch()
        raise KeyError
    other = {**OPTIONS, "size": 4}
    if has_written:
        with pytest.raises(FingerprintMismatch, match="size: was 3, now 4"):
            _work(tmp_path, options=other)
    else:
        assert _work(tmp_path, options=other).result == {"sum": 6}


def test_a_moved_input_is_the_same_input(tmp_path):
    _work(tmp_path / "a")
    assert _work(tmp_path / "a", {"data": {"path": "/moved", "fingerprint": "f1"}}).resumed


def test_tuples_and_lists_are_the_same_option(tmp_path):
    _work(tmp_path / "a", options={"betas": (0.9, 0.95)})
    assert _work(tmp_path / "a", options={"betas": [0.9, 0.95]}).resumed


@pytest.mark.parametrize("overwrite", [True, "other"])
def test_overwrite_starts_over_where_there_is_other_work(tmp_path, overwrite):
    folder = tmp_path / "a"
    _work(folder)
    (folder / "sub").mkdir()
    (folder / "sub" / "old.txt").write_text("old")
    stage = _work(folder, options={"size": 9}, overwrite=overwrite)
    assert not stage.resumed
    assert _files(folder).keys() == {MANIFEST_NAME, "out.txt"}
    assert load_finished(folder, "align").options == {"size": 9}


def test_overwrite_makes_finished_work_again_unless_it_is_for_other_work_alone(tmp_path):
    folder = tmp_path / "a"
    _work(folder)
    (folder / "out.txt").write_text("damaged")
    assert _work(folder, overwrite="other").resumed
    assert (folder / "out.txt").read_text() == "damaged"
    assert not _work(folder, overwrite=True).resumed
    assert (folder / "out.txt").read_text() == "result"


@pytest.mark.parametrize("overwrite", [True, "other"])
def test_the_same_command_with_overwrite_goes_on_after_a_kill(tmp_path, overwrite):
    """Over other work, and over the same work that was finished; what it did itself is kept."""
    folder = tmp_path / "a"
    for options in [OPTIONS, {"size": 9}] + [{"size": 9}] * (overwrite is True):
        with (
            pytest.raises(KeyboardInterrupt),
            open_stage(folder, "align", INPUTS, options, overwrite) as stage,
        ):
            assert not stage.resumed
            (folder / "half.txt").write_text(str(options))
            raise KeyboardInterrupt
        assert _work(folder, options=options, overwrite=overwrite).resumed
        assert (folder / "half.txt").read_text() == str(options)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_start_over_that_was_killed_is_finished_by_the_same_command(tmp_path, after):
    """At each call to the file system. Until the first removal the old work is whole; from then on
    nobody takes what is left for an artefact, and only overwrite removes the rest."""

    def prepare(number):
        folder = tmp_path / str(number) / "a"
        _work(folder)
        (folder / "sub").mkdir()
        (folder / "sub" / "old.txt").write_text("old")
        return folder

    def start_over(folder):
        with open_stage(folder, "align", INPUTS, {"size": 9}, overwrite=True):
            pass

    old = {"sub/old.txt", "out.txt"}
    num_refused = 0
    for folder in _killed_at_each_call(prepare, start_over, after):
        there = _files(folder)
        if MANIFEST_NAME in there and load_manifest(folder).status == COMPLETE:
            assert old <= there.keys() and load_manifest(folder).options == OPTIONS
        elif MANIFEST_NAME in there:
            assert not old & there.keys() and load_manifest(folder).options == {"size": 9}
        elif old & there.keys():
            num_refused += 1
            with pytest.raises(FingerprintMismatch, match=r"was being emptied"):
                _work(folder, options={"size": 9})
            assert _files(folder) == there
            with (
                pytest.raises(UsageError, match="not of `paceline train`"),
                open_stage(folder, "train", {}, {}, overwrite=True),
            ):
                pass
            assert _files(folder) == there
        _work(folder, options={"size": 9}, overwrite=True)
        # The scrap of a write that was killed hurts nobody.
        left = {name for name in _files(folder) if not re.search(r"json\.\d+\.tmp$", name)}
        assert left == {MANIFEST_NAME, "out.txt"}
    assert num_refused > 1


def test_overwrite_does_not_touch_a_folder_that_is_not_ours(tmp_path):
    (tmp_path / "precious.txt").write_text("mine")
    with pytest.raises(PacelineError, match="paceline did not make it"):
        _work(tmp_path, overwrite=True)
    assert (tmp_path / "precious.txt").read_text() == "mine"


@pytest.mark.parametrize(
    "manifest", ['{"name": "an extension", "manifest_version": 3}', "[]", "no JSON", "\xff"]
)
def test_overwrite_does_not_touch_a_folder_with_a_manifest_of_another_kind(tmp_path, manifest):
    (tmp_path / MANIFEST_NAME).write_text(manifest, encoding="latin-1")
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a.js").write_text("years of work")
    with pytest.raises(UsageError, match="is not of `paceline align`, so its folder is not"):
        _work(tmp_path, overwrite=True)
    assert (tmp_path / "src" / "a.js").read_text() == "years of work"
    assert (tmp_path / MANIFEST_NAME).read_text(encoding="latin-1") == manifest


def test_overwrite_does_not_touch_another_stage_s_folder(tmp_path):
    _work(tmp_path / "a")
    before = _files(tmp_path / "a")
    with (
        pytest.raises(UsageError, match="is not of `paceline train`"),
        open_stage(tmp_path / "a", "train", {}, {}, overwrite=True),
    ):
        pass
    assert _files(tmp_path / "a") == before


@pytest.mark.parametrize(
    ("out", "given"),
    [
        ("a", "a"),
        ("a", "a/out.txt"),
        ("a", ["b", "a/out.txt"]),
        ("link", "a"),
        ("a", "link/out.txt"),
    ],
)
def test_overwrite_does_not_remove_what_the_work_reads(tmp_path, monkeypatch, out, given):
    monkeypatch.chdir(tmp_path)
    _work(tmp_path / "a")
    (tmp_path / "link").symlink_to("a")
    before = _files(tmp_path / "a")
    inputs = {"data": {"path": given, "fingerprint": "f2"}}
    with pytest.raises(UsageError, match=f"{out} holds .*, the input `data` of this work"):
        _work(out, inputs, overwrite=True)
    assert _files(tmp_path / "a") == before


@pytest.mark.parametrize("change", [{"result": {"sum": 7}}, {"schema": 0, "checksum": None}])
def test_overwrite_removes_what_is_ours_though_damaged_or_old(tmp_path, change):
    _work(tmp_path / "a")
    path = tmp_path / "a" / MANIFEST_NAME
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    # It may be what is wanted, so leave to start over where there is other work is not enough.
    for overwrite in (False, "other"):
        with pytest.raises((StoreCorruption, UsageError)):
            _work(tmp_path / "a", overwrite=overwrite)
        assert (tmp_path / "a" / "out.txt").exists()
    assert not _work(tmp_path / "a", overwrite=True).resumed
    assert load_finished(tmp_path / "a", "align").result == {"sum": 6}


def test_a_folder_with_strangers_is_refused(tmp_path):
    (tmp_path / "precious.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"not empty \(precious.txt"):
        _work(tmp_path)
    assert not (tmp_path / MANIFEST_NAME).exists()


@pytest.mark.parametrize(
    ("out", "says"),
    [("s3://bucket/a", "writes into a folder of this machine"), ("notes.txt", "is a file")],
)
def test_what_can_be_no_folder_is_refused(tmp_path, monkeypatch, out, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match=f"{out}.* {says}"):
        _work(out)
    assert _files(tmp_path) == {"notes.txt": "mine"}
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


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
