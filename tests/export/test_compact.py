"""A compact draft through the stages: exported, measured, exported again with its figures, trained
further."""

import json

import pytest
import torch
from safetensors.torch import load_file

import paceline
from paceline.errors import FingerprintMismatch
from paceline.report.charts import methods_of


def test_a_compact_draft_serves_every_stage(tiny_run, tmp_path):
    kept = str(tmp_path / "export" / "compact")
    first = paceline.export(
        draft=str(tiny_run / "train"), out=str(tmp_path / "export"), dtype="float32", compact=True
    )
    assert first["compact"]["folder"] == kept
    measured = paceline.evaluate(
        draft=kept,
        store=str(tiny_run / "extract"),
        out=str(tmp_path / "measured"),
        num_draft_tokens=[3],
        bootstrap=100,
    )
    both = paceline.evaluate(
        draft=str(tiny_run / "train"),
        beside=kept,
        store=str(tiny_run / "extract"),
        out=str(tmp_path / "both"),
        num_draft_tokens=[3],
        bootstrap=100,
    )
    assert both["beside"] == {"name": "compact", "results": measured["results"]}
    assert methods_of(both)["draft compact"] == measured["results"]
    whole = json.loads((tiny_run / "evaluate" / "result.json").read_text())
    lengths = [r["results"]["3"]["pooled"]["acceptance_length"] for r in (measured, whole)]
    assert lengths[0] == pytest.approx(lengths[1], rel=0.1)
    with pytest.raises(FingerprintMismatch, match="measured another draft"):
        paceline.export(
            draft=kept, out=str(tmp_path / "wrong"), evaluate=str(tiny_run / "evaluate")
        )
    again = paceline.export(
        draft=kept,
        out=str(tmp_path / "again"),
        evaluate=str(tmp_path / "measured"),
        dtype="float32",
        compact=True,
    )
    said = json.loads((tmp_path / "again" / "compact" / "compact.json").read_text())
    assert said["acceptance"]["results"] == measured["results"]
    assert said["trained"]["options"]["batch_rows"] == 64
    assert again["compact"]["bytes"] == first["compact"]["bytes"]
    exported = load_file(tmp_path / "again" / "vllm" / "model.safetensors")
    after = paceline.train(
        store=str(tiny_run / "extract"),
        start_from=kept,
        out=str(tmp_path / "further"),
        dtype="float32",
        warmup_steps=0,
        max_steps=1,
        learning_rate=1e-12,
    )
    assert after["steps"] == 1
    further = load_file(tmp_path / "further" / "draft.safetensors")
    torch.testing.assert_close(further["fc.weight"], exported["fc.weight"], rtol=0, atol=1e-9)
