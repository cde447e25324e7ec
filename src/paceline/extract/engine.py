"""What extraction asks of an inference engine, and the table of engines."""

import importlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from paceline.contracts import LayerPlan, TokenSample
from paceline.extract.sink import Destination
from paceline.recipe import ExtractOptions
from paceline.target.spec import Target

# Engines by name, imported only when asked for: vLLM loads for those who use it.
_ENGINES = {
    "transformers": "paceline.extract.transformers_engine:open_engine",
    "vllm": "paceline.extract.vllm:open_engine",
}


@dataclass(frozen=True)
class EngineInfo:
    """Who computed the states: goes into the manifest."""

    name: str
    version: str
    dtype: str
    settings: dict[str, Any] = field(default_factory=dict)


class Engine(Protocol):
    """Runs a target and hands over its hidden states.

    `capture` runs every sample that the destination misses and writes it through a sink of the
    destination, in whatever process the states are in; what fails is rejected there with its
    reason. `on_tokens` is told of tokens done. `greedy` continues prompts (int32 arrays) by the
    engine's own most likely tokens, end of turn ignored, exactly `num_tokens` each.
    """

    info: EngineInfo

    def capture(
        self,
        samples: Iterable[TokenSample],
        plan: LayerPlan,
        destination: Destination,
        on_tokens: Callable[[int], None],
    ) -> None: ...

    def greedy(self, prompts: Sequence[np.ndarray], num_tokens: int) -> list[list[int]]: ...

    def close(self) -> None: ...


def num_needed_tokens(sample: TokenSample) -> int:
    """Tokens that must run: none after the last supervised one is ever read."""
    return sample.num_aux_rows + 1


def open_engine(options: ExtractOptions, target: Target, dtype: str, scratch: Path) -> Engine:
    """The engine that the options name. scratch: a folder that the engine may use and that is
    removed afterwards."""
    module_name, _, function = _ENGINES[options.engine].partition(":")
    return getattr(importlib.import_module(module_name), function)(options, target, dtype, scratch)
