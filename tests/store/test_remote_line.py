"""The stages with a store below a URL: extract to it, train, evaluate and inspect from it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import paceline
from paceline.artefact import load_finished
from paceline.errors import FingerprintMismatch, StoreError, UsageError
from paceline.report.gather import gather
from paceline.store import place

from ..lines import TINY_LAYERS, extracted, trained
from .s3 import BUCKET, ERROR_500, Proxy, object_store

URL = f"s3://{BUCKET}/line/extract"


@pytest.fixture(scope="module")
def server() -> Iterator[Proxy]:
    torch.set_num_threads(1)
    with object_store() as proxy:
        yield proxy


def test_a_line_over_an_object_store_is_that_of_a_folder(
    server: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place, "_FIRST_PAUSE_S", 0.01)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    near = str(extracted(tmp_path, shard_bytes=60_000))
    stored = load_finished(near, "extract").result
    options = {
        "data": str(tmp_path / "prepare"),
        "layers": TINY_LAYERS,
        "dtype": "float32",
        "shard_bytes": 60_000,
    }
    staging = tmp_path / "staging"
    server.choose = lambda number, seen: ERROR_500 if "manifest" in seen.path else None
    with pytest.raises(StoreError, match=r"line/extract/manifest\.json: tried 4 times"):
        paceline.extract(**options, out=URL, staging=str(staging))
    server.forget()
    (made,) = staging.iterdir()
    stamps = {p.name: p.stat().st_mtime_ns for p in made.rglob("*.safetensors")}
    assert len(stamps) > 3
    uploaded = paceline.extract(**options, out=URL, staging=str(staging), overwrite=True)
    # Though told to start over where work is finished: this was not, before its upload was.
    # Nothing was captured again, and of the shards nothing was sent again.
    assert [name for name in server.puts() if "shards" in name] == []
    assert list(staging.iterdir()) == []
    for key in ("accounting", "store", "probe"):
        assert uploaded[key] == stored[key]
    assert paceline.extract(**options, out=URL) == uploaded
    sent = paceline.upload_store(near, f"{URL}-by-hand")
    assert (sent["files_sent"], sent["files_kept"]) == (len(stamps) + 1, 0)
    with pytest.raises(UsageError, match="not '/tmp/far'"):
        paceline.upload_store(near, "/tmp/far")
    with pytest.raises(FingerprintMismatch, match="layers"):
        paceline.extract(**{**options, "layers": [1, 3, 6]}, out=URL)

    results = {}
    for name, store in (("near", near), ("far", URL)):
        trained(tmp_path, f"draft-{name}", store=store, max_steps=3)
        found = paceline.evaluate(
            draft=str(tmp_path / f"draft-{name}"),
            store=store,
            out=str(tmp_path / f"evaluate-{name}"),
            num_draft_tokens=[2],
            bootstrap=100,
            dtype="float32",
        )
        results[name] = found["results"]
    assert results["far"] == results["near"]
    assert list((tmp_path / "user/paceline/stores").rglob("*.sparse"))

    looked = paceline.inspect(URL, verify=True)
    there = paceline.inspect(near, verify=True)
    for key in ("status", "fingerprint", "sample", "verified"):
        assert looked[key] == there[key]
    assert looked["files"]["count"] == len(stamps) + len(("manifest.json", "start.json"))

    run = tmp_path / "far-run"
    run.mkdir()
    for stage in ("prepare", "draft-far", "evaluate-far"):
        (run / stage).symlink_to(tmp_path / stage)
    record = gather(run)
    for key in ("accounting", "store", "probe"):
        assert record.result("extract")[key] == stored[key]
    shards = sum(path.stat().st_size for path in Path(near).glob("shards/*"))
    assert shards < record.sizes["extract"].num_bytes < 1.5 * shards
    page = Path(paceline.report(run_dir=str(run))["page"]).read_text()
    assert "every sample accounted for" in page
    # A page can be made without the store that a draft came from.
    server.choose = lambda number, seen: ERROR_500
    assert gather(run).result("extract") is None
    server.forget()
