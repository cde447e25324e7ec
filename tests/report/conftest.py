"""A second run beside the tiny one, for pages that compare."""

import shutil
from pathlib import Path

import pytest

import paceline


@pytest.fixture(scope="session")
def other_run(tiny_run, tmp_path_factory) -> Path:
    """The same line, its draft trained for fewer steps at another rate."""
    folder = tmp_path_factory.mktemp("other") / "short"
    for stage in ("generate", "prepare", "extract", "align"):
        shutil.copytree(tiny_run / stage, folder / stage)
    changes = [f"run_dir={folder}", "train.max_steps=15", "train.learning_rate=1e-3"]
    paceline.run(str(tiny_run.parent / "recipe.yaml"), changes)
    return folder


@pytest.fixture(scope="session")
def compare_page(tiny_run, other_run, tmp_path_factory) -> Path:
    """The page that sets both side by side."""
    out = tmp_path_factory.mktemp("page")
    result = paceline.report(compare=True, runs=[str(tiny_run), str(other_run)], out=str(out))
    return Path(result["page"])
