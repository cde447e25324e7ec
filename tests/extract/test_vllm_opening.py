"""What is looked at when vLLM has started. No vLLM."""

from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaModel

from paceline.errors import EngineError
from paceline.extract.vllm import opening
from paceline.recipe import ExtractOptions
from paceline.target.spec import Target, TargetReference
from tests.targets import save_model


class Started:
    """An engine that changes transformers' class as vLLM's Transformers backend does."""

    in_this_process = True

    def __init__(self, *_: Any) -> None:
        self.is_open = True

    def close(self) -> None:
        self.is_open = False


def test_classes_that_vllm_has_changed_are_told_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def changed(*_: Any, **__: Any) -> None:
        raise AssertionError("Current vLLM config is not set")

    started: list[Started] = []

    def start(*_: Any) -> Started:
        monkeypatch.setattr(LlamaModel, "__init__", changed)
        started.append(Started())
        return started[-1]

    monkeypatch.setattr(opening, "VllmEngine", start)
    monkeypatch.setattr(opening, "_on_cpu", lambda: True)
    target = Target(TargetReference(str(save_model(tmp_path / "target", "llama"))))
    with pytest.raises(EngineError, match="Unset VLLM_ENABLE_V1_MULTIPROCESSING"):
        opening.open_engine(ExtractOptions(), target, "float32", tmp_path)
    assert not started[0].is_open
    opening.open_engine(ExtractOptions(waive_reference=True), target, "float32", tmp_path)
    assert started[1].is_open
