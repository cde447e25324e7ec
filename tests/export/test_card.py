"""The model card: what a reader of the folder needs."""

import pytest
import yaml

import paceline
from paceline.artefact import load_finished, open_stage
from paceline.draft.config import DraftConfig
from paceline.errors import FingerprintMismatch, UsageError
from paceline.export.card import model_card
from paceline.target.spec import TargetReference
from tests.export.making import trained_folder
from tests.forms.making import config_for, draft_for, tiny_target

FORM = {
    "form": "sglang",
    "lowest_version": "0.5.12",
    "command": "python -m sglang.launch_server --model-path org/model",
    "dtype": "bfloat16",
    "replay": {"steps": 3, "relative_error": 0.0125},
}


def head_of(card: str) -> dict:
    _, head, _ = card.split("---\n", 2)
    return yaml.safe_load(head)


def test_a_card_for_the_hub():
    card = model_card(
        TargetReference("org/model", "main"), config_for(), FORM, trained=None, evaluated=None
    )
    assert head_of(card) == {
        "base_model": "org/model",
        "pipeline_tag": "text-generation",
        "tags": ["eagle3", "speculative-decoding", "sglang"],
    }
    assert "# EAGLE-3 draft for org/model\n" in card
    assert "(revision `main`)" in card
    assert "Needs SGLang 0.5.12 or newer" in card
    assert "| auxiliary hidden states k | 2, 4, 5 |\n" in card
    assert "| draft vocabulary | 12 of 40 tokens |\n" in card
    assert "0.013 of their norm" in card
    assert "Acceptance" not in card and "trained" not in card.split("## Checked")[0]
    assert "\n\n\n" not in card


def test_the_acceptance_table_of_the_draft_that_was_measured(tiny_run):
    card = (tiny_run / "export" / "vllm" / "README.md").read_text()
    result = load_finished(tiny_run / "evaluate", "evaluate").result
    for k in ("1", "3"):
        pooled = result["results"][k]["pooled"]
        low, high = pooled["interval"]
        start = (
            f"| all | {k} | {pooled['acceptance_length']:.3f} | {low:.3f} to {high:.3f} | "
            f"{pooled['verify_steps']} |"
        )
        assert start in card
        assert f"| colours | {k} |" in card and f"| things | {k} |" in card
    assert "acceptance length = 1 + accepted draft tokens / verify steps" in card
    assert "| training-time-test steps | 3 |" in card
    assert "\n\n\n" not in card
    assert str(tiny_run) not in card


def test_another_drafts_acceptance_is_refused(tiny_run, tmp_path):
    target = tiny_target(tmp_path / "target")
    folder = trained_folder(tmp_path / "train", draft_for(target, config_for()), target)
    with pytest.raises(FingerprintMismatch, match="measured another draft"):
        paceline.export(
            draft=str(folder), out=str(tmp_path / "out"), evaluate=str(tiny_run / "evaluate")
        )


def test_a_card_says_the_scaling_of_positions():
    rope = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}
    config = DraftConfig(**{**config_for().to_dict(), "aux_layers": (2, 4, 5), "rope": rope})
    card = model_card(TargetReference("pkg:a/b.gguf"), config, FORM, None, None)
    assert "rope_type yarn, rope_theta 1000000.0, factor 4.0" in card
    assert "base_model" not in head_of(card)


def test_a_measurement_that_names_no_draft_is_not_put_on_a_card(tmp_path):
    """`evaluate --server URL` without a draft."""
    target = tiny_target(tmp_path / "target")
    folder = trained_folder(tmp_path / "train", draft_for(target, config_for()), target)
    with open_stage(tmp_path / "evaluate", "evaluate", {}, {}) as stage:
        stage.finish({}, "content")
    with pytest.raises(UsageError, match="was not told its draft"):
        paceline.export(
            draft=str(folder), out=str(tmp_path / "out"), evaluate=str(tmp_path / "evaluate")
        )
