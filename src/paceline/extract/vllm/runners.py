"""vLLM's model runners behind one interface, chosen by what the object has."""

from typing import Any, Protocol

import torch

from paceline.errors import EngineError
from paceline.extract.vllm import runner_v1, runner_v2
from paceline.extract.vllm.batch import StepBatch


class RunnerView(Protocol):
    """How a runner describes the step that its `execute_model` has just launched."""

    name: str

    def fits(self, runner: Any) -> bool: ...

    def describe(self, runner: Any, scheduler_output: Any) -> StepBatch: ...

    def fed_tokens(self, runner: Any, num_rows: int) -> torch.Tensor: ...

    def fed_positions(self, runner: Any, num_rows: int) -> torch.Tensor: ...


_VIEWS: tuple[RunnerView, ...] = (runner_v1.View(), runner_v2.View())


def view_of(runner: Any) -> RunnerView:
    """The view that fits; EngineError that says what was looked for where none does."""
    for view in _VIEWS:
        if view.fits(runner):
            return view
    raise EngineError(
        f"vLLM's model runner {type(runner).__module__}.{type(runner).__name__} is not known: it "
        "has neither `input_batch` and `query_start_loc` (V1) nor `req_states` and "
        "`execute_model_state` (V2). Use a vLLM from 0.16 to 0.32, or engine `transformers`."
    )
