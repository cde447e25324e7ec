"""A finished `train` folder with a given draft in it."""

from dataclasses import asdict
from pathlib import Path

from paceline import fingerprint
from paceline.artefact import open_stage
from paceline.draft.checkpoint import WEIGHTS_FILE, draft_tensors, write_draft
from paceline.draft.model import Draft
from paceline.recipe import TrainOptions
from paceline.target.spec import Target


def trained_folder(folder: Path, draft: Draft, target: Target) -> Path:
    inputs = {
        "store": {"path": "store", "fingerprint": "5" * 32},
        "target": target.describe_input(),
    }
    with open_stage(folder, "train", inputs, TrainOptions().identity()) as stage:
        write_draft(stage.path, draft.config, draft_tensors(draft))
        result = {
            "target": asdict(target.reference),
            "draft": draft.config.to_dict(),
            "steps": 34,
            "dtype": "float32",
            "train_samples": 46,
        }
        stage.finish(result, content=fingerprint.of_file(stage.path / WEIGHTS_FILE))
    return folder
