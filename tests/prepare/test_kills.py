"""kill -9 at random points of prepare and generate: the same command goes on to the same rows."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.dataset import TokenDataset
from tests.prepare import toys
from tests.prepare.killing import Killer
from tests.prepare.toys import chat, chatml_target, write_rows

# Of each stage: 24 in all.
KILLS = 12


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chatml_target(tmp_path_factory.mktemp("target"), toys.CHATML_PROMPT)


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fork server finds the tests' modules where pytest runs."""
    monkeypatch.setenv("PYTHONPATH", os.getcwd())


def published(folder: Path) -> dict[str, bytes]:
    files = [*folder.glob("data/[0-9]*.parquet"), *folder.glob("answers/[0-9]*.jsonl")]
    return {path.name: path.read_bytes() for path in files}


def kill_until_done(killer: Killer, options: dict[str, Any], most_steps: int) -> Path:
    out = Path(options["out"])
    before: dict[str, bytes] = {}
    while not killer.run_once(options, most_steps):
        now = published(out)
        # What was published keeps its bytes.
        assert before.items() <= now.items()
        before = now
    assert before.items() <= published(out).items()
    return out


def test_prepare(tmp_path: Path, target: Path) -> None:
    rows = [chat(f"q{i}" * (1 + i % 9), f"a{i % 50}" * (1 + i % 40)) for i in range(1200)]
    rows += rows[:100]
    options = {
        "target": str(target),
        "data": [write_rows(tmp_path / "rows.jsonl", rows)],
        "heldout_share": 0.2,
    }
    killer = Killer("prepare", 100, lambda out: len(list(out.glob("data/[0-9]*.parquet"))))
    unbroken = tmp_path / "unbroken"
    while not killer.run_once(options | {"out": str(unbroken)}, most_steps=1000):
        pass
    wanted = json.loads((unbroken / "manifest.json").read_text())
    round_number = killer.kills = 0
    while killer.kills < KILLS:
        round_number += 1
        folder = {"out": str(tmp_path / f"round{round_number}")}
        out = kill_until_done(killer, options | folder, most_steps=4)
        manifest = json.loads((out / "manifest.json").read_text())
        assert manifest["result"] == wanted["result"]
        assert manifest["fingerprint"] == wanted["fingerprint"]
        assert published(out) == published(unbroken)
        ids = [sample.sample_id for sample in TokenDataset(out)]
        assert len(ids) == len(set(ids)) == manifest["result"]["samples"] == 1200


def test_generate(tmp_path: Path, target: Path) -> None:
    rows = [chat(f"q{i}", "", f"more {i}", id=f"r{i}") for i in range(36)]
    options = {
        "target": str(target),
        "data": [write_rows(tmp_path / "rows.jsonl", rows)],
        "max_new_tokens": 8,
        "record_past_end": 2,
        "batch_size": 3,
        "dtype": "float32",
        "device": "cpu",
    }

    def progress(out: Path) -> int:
        try:
            lines = (out / "journal.jsonl").read_bytes().count(b"\n")
        except FileNotFoundError:  # not there yet, or gone: the writer ends its run meanwhile
            lines = 0
        return 100 * len(list(out.glob("answers/[0-9]*.jsonl"))) + lines

    paceline.generate(**options, out=str(tmp_path / "unbroken"))
    [whole] = published(tmp_path / "unbroken").values()
    killer = Killer("generate", 9, progress)
    round_number = 0
    while killer.kills < KILLS:
        round_number += 1
        folder = {"out": str(tmp_path / f"round{round_number}")}
        out = kill_until_done(killer, options | folder, most_steps=150)
        parts = published(out)
        assert len(parts) == 4
        # Every row once, in order, and the very answers of an unbroken run.
        assert b"".join(parts[name] for name in sorted(parts)) == whole
        result = json.loads((out / "manifest.json").read_text())["result"]
        assert (result["rows"], result["answered"]) == (36, 36)
        assert not (out / "journal.jsonl").exists()
