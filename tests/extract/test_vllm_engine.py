"""The engine around a vLLM that is written here: what it does when it cannot be used."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from paceline.errors import EngineError
from paceline.extract.vllm.engine import VllmEngine
from paceline.extract.vllm.settings import VllmSettings

GOOD = {
    "enforce_eager": True,
    "prefix_caching": False,
    "speculative": False,
    "dtype": "float32",
    "architecture": "LlamaForCausalLM",
}


class OneWorker:
    """vLLM's engine, whose one worker gives a fixed answer to each method."""

    def __init__(self, answers: dict[str, Any]) -> None:
        self._answers = answers
        self.is_open = True
        self.engine_core = SimpleNamespace(shutdown=self._shut_down)

    def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        answer = self._answers.get(method, {})
        if isinstance(answer, BaseException):
            raise answer
        return [answer]

    def _shut_down(self) -> None:
        self.is_open = False


def engine_with(
    monkeypatch: pytest.MonkeyPatch, scratch: Path, **answers: Any
) -> tuple[OneWorker, Any]:
    """The worker, and a function that opens paceline's engine on it."""
    worker = OneWorker(answers)
    vllm, distributed = ModuleType("vllm"), ModuleType("vllm.distributed")
    vllm.__version__ = "0.0"
    vllm.LLM = lambda **_: SimpleNamespace(llm_engine=worker)
    distributed.cleanup_dist_env_and_memory = lambda: None
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, "vllm.distributed", distributed)
    settings = VllmSettings({"model": "nowhere"}, scratch)
    return worker, lambda: VllmEngine(settings, 4, "float32")


@pytest.mark.parametrize(
    ("answers", "error", "message"),
    [
        ({"paceline_settings": {**GOOD, "dtype": "float16"}}, EngineError, "dtype is float16"),
        (
            {"paceline_settings": {"error": {"type": "TypeError", "text": "odd", "trace": ""}}},
            EngineError,
            "TypeError: odd",
        ),
        ({"paceline_settings": KeyboardInterrupt("now")}, KeyboardInterrupt, "now"),
    ],
)
def test_an_engine_that_cannot_be_used_lets_go_of_the_model(
    answers: dict[str, Any],
    error: type[BaseException],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker, start = engine_with(monkeypatch, tmp_path, **answers)
    with pytest.raises(error, match=message):
        start()
    assert not worker.is_open


def test_an_engine_that_can_be_used_stays_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, start = engine_with(monkeypatch, tmp_path, paceline_settings=GOOD)
    engine = start()
    assert worker.is_open
    engine.close()
    assert not worker.is_open
