"""Stopped by a signal or by a full disk: the code says so, and the same command goes on."""

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest

import paceline
from paceline.artefact import load_manifest
from paceline.dataset import TokenDataset
from paceline.errors import DiskFullError
from tests.tiny_line import program, start

_DEADLINE_S = 300


def _until(condition, process):
    """Wait for a file of the process's own making; it must not end first."""
    deadline = time.monotonic() + _DEADLINE_S
    while not condition():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _training(tiny_run, out):
    """The command whose unbroken run is `tiny_run / "train"`."""
    return (
        *("train", "--json", "--store", tiny_run / "extract", "--vocab", tiny_run / "align"),
        *("--out", out, "--dtype", "float32", "--max-steps", "60", "--batch-rows", "64"),
        *("--warmup-steps", "5", "--checkpoint-every", "10"),
    )


def _stopped(tiny_run, out, number):
    process = start(*_training(tiny_run, out))
    _until(lambda: any((out / "checkpoints").glob("[0-9]*/state.json")), process)
    process.send_signal(number)
    printed, told = process.communicate(timeout=_DEADLINE_S)
    assert "stopped; what was finished is kept, the same command goes on" in told
    assert "Traceback" not in told
    assert load_manifest(out).status == "running"
    error = json.loads(printed)["error"]
    assert error["exit_code"] == process.returncode
    assert error["message"].startswith("stopped; what was finished is kept")
    return process.returncode


def test_sigterm_keeps_the_state_and_the_same_command_goes_on(tiny_run, tmp_path):
    """Stopped in the middle of training, then finished: the draft is that of the unbroken run."""
    out = tmp_path / "train"
    assert _stopped(tiny_run, out, signal.SIGTERM) == 143
    done = program(*_training(tiny_run, out))
    assert done.returncode == 0, done.stderr
    assert "(from step 0)" not in done.stderr
    assert load_manifest(out).fingerprint == load_manifest(tiny_run / "train").fingerprint


def test_sigint_is_code_130(tiny_run, tmp_path):
    assert _stopped(tiny_run, tmp_path / "train", signal.SIGINT) == 130


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "paceline-test", str(folder)], check=True
    )
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def _fill(folder: Path, left: int) -> Path:
    """Take all of the disk but `left` bytes."""
    path = folder / "filler"
    path.write_bytes(b"x" * ((1 << 20) - left))
    return path


def test_a_full_disk_is_said_and_loses_nothing(tiny_run, small_disk):
    """Too little room for a part; with more room the same command finishes."""
    filler = _fill(small_disk, left=16 << 10)
    out = small_disk / "prepared"
    command = (
        *("prepare", "--json", "--target", tiny_run.parent / "target"),
        *("--data", tiny_run / "generate", "--out", out, "--heldout-share", "0.25"),
    )
    done = program(*command)
    assert done.returncode == 1, done.stderr
    error = json.loads(done.stdout)["error"]
    assert error["kind"] == "DiskFullError"
    assert "same command" in error["message"]
    assert str(out) in error["message"]
    filler.unlink()
    done = program(*command)
    assert done.returncode == 0, done.stderr
    first, again = (
        [(s.sample_id, s.input_ids.tolist()) for s in TokenDataset(f)]
        for f in (out, tiny_run / "prepare")
    )
    assert first == again


def test_a_checkpoint_that_does_not_fit_leaves_the_one_before(tiny_run, small_disk):
    """Two checkpoints of about 200 KiB do not fit beside the log; the run can go on from one."""
    _fill(small_disk, left=320 << 10)
    out = small_disk / "train"
    with pytest.raises(DiskFullError, match=r"checkpoint cannot be written .* space"):
        paceline.train(
            store=str(tiny_run / "extract"),
            vocab=str(tiny_run / "align"),
            out=str(out),
            dtype="float32",
            max_steps=60,
            batch_rows=64,
            checkpoint_every=5,
        )
    # Nor does the one that did not fit keep the room that is wanted.
    (kept,) = (out / "checkpoints").iterdir()
    assert json.loads((kept / "state.json").read_text()) == {"next_step": 5}
    assert load_manifest(out).status == "running"


def test_a_store_that_cannot_fit_is_refused_before_it_starts(tiny_run, small_disk):
    out = small_disk / "store"
    done = program("extract", "--json", "--data", tiny_run / "prepare", "--out", out)
    assert done.returncode == 1, done.stderr
    error = json.loads(done.stdout)["error"]
    assert error["kind"] == "DiskFullError"
    assert "GB free" in error["message"]
    assert not (out / "shards").exists()
