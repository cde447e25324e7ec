"""Families of targets on the newest vLLM: dense, MoE, MLA, and wrapped in a multimodal model."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engines.common import ROW_BOUND
from tests.engines.models import MODELS, worst_row

pytestmark = pytest.mark.engine_vllm

# Llama is what the other tests run.
FAMILIES = [name for name in MODELS if name != "llama"]


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The largest error of each family by k, or the traceback of what failed."""
    folder = tmp_path_factory.mktemp("families")
    command = [sys.executable, "-m", "tests.engines.models", str(folder), *FAMILIES]
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    subprocess.run(command, env=environment, check=True, timeout=900)
    return json.loads((folder / "errors.json").read_text())


@pytest.mark.parametrize("name", FAMILIES)
def test_every_row_of_a_tiny_target(name: str, errors: dict[str, Any]) -> None:
    assert isinstance(errors[name], dict), errors[name]
    assert max(errors[name].values()) <= ROW_BOUND, errors[name]


@pytest.mark.parametrize("split", ["tensor_parallel_size", "pipeline_parallel_size"])
@pytest.mark.usefixtures("own_processes")
def test_a_target_over_two_ranks(split: str, tmp_path: Path) -> None:
    errors = worst_row("llama", tmp_path, **{split: 2})
    assert max(errors.values()) <= ROW_BOUND, errors
