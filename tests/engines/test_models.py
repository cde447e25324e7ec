"""Families of targets on the newest vLLM: dense, MoE, MLA, and wrapped in a multimodal model."""

from pathlib import Path

import pytest

from tests.engines.common import ROW_BOUND
from tests.engines.models import MODELS, worst_row

pytestmark = [pytest.mark.engine_vllm, pytest.mark.usefixtures("own_processes")]


@pytest.mark.parametrize("name", [name for name in MODELS if name != "llama"])
def test_every_row_of_a_tiny_target(name: str, tmp_path: Path) -> None:
    errors = worst_row(name, tmp_path)
    assert max(errors.values()) <= ROW_BOUND, errors


def test_tensor_parallel(tmp_path: Path) -> None:
    errors = worst_row("llama", tmp_path, tensor_parallel_size=2)
    assert max(errors.values()) <= ROW_BOUND, errors


def test_pipeline_parallel(tmp_path: Path) -> None:
    errors = worst_row("llama", tmp_path, pipeline_parallel_size=2)
    assert max(errors.values()) <= ROW_BOUND, errors
