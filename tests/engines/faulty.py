"""The tap, and a way to make it fail: what the workers of these tests load instead."""

from dataclasses import replace
from typing import Any

import numpy as np

from paceline.extract.vllm.extension import PacelineTap

# Points of the tap and the method that runs there.
POINTS = {
    "begin": "_begin",
    "inputs": "_note_inputs",
    "stream": "_note_stream",
    "launch": "_launch",
    "harvest": "_harvest_one",
    "write": "_write_one",
}


class Planted(Exception):
    """What the tests plant."""


class FaultyTap(PacelineTap):
    """`paceline_plant` says what goes wrong in the next capture."""

    def paceline_settings(self: Any) -> dict[str, Any]:
        answer = PacelineTap.paceline_settings(self)
        if answer["stage"] > 0 and self.model_runner.intermediate_tensors is None:
            # vLLM makes them in a profiling run, which its CPU build leaves out: without them
            # pipeline stages fail there in their first step, tap or no tap.
            runner = self.model_runner
            runner.intermediate_tensors = runner.get_model().make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.dtype, device=runner.device
            )
        return answer

    def paceline_plant(self: Any, fault: str | None, times: int) -> dict[str, Any]:
        self.paceline_planted = [fault, times]
        return {}

    def paceline_open(self: Any, setup: dict[str, Any]) -> dict[str, Any]:
        answer = PacelineTap.paceline_open(self, setup)
        fault, times = self.__dict__.pop("paceline_planted", (None, 0))
        session = self.__dict__.get("paceline_session")
        if session is not None and fault is not None:
            budget = [times]
            if fault in POINTS:
                _raise_at(session.tap, POINTS[fault], fault, budget)
            else:
                session.tap._view = _LyingView(session.tap._view, fault, budget)
                self.paceline_liar = session.tap._view
        return answer

    def paceline_lies(self: Any) -> dict[str, Any]:
        return {"told": self.paceline_liar.told}

    def paceline_runner_state(self: Any) -> dict[str, Any]:
        """What a closed tap must have left as it was."""
        runner = self.model_runner
        hooks = sum(len(m._forward_hooks) for m in runner.get_model().modules())
        before = sum(len(m._forward_pre_hooks) for m in runner.get_model().modules())
        return {"shadowed": "execute_model" in vars(runner), "hooks": hooks + before}


def _raise_at(tap: Any, name: str, fault: str, budget: list[int]) -> None:
    method = getattr(tap, name)

    def failing(*args: Any) -> None:
        budget[0] -= 1
        if budget[0] == 0:
            raise Planted(f"planted at {fault}")
        method(*args)

    setattr(tap, name, failing)


class _LyingView:
    """A runner's description with labels swapped or positions off by one, a number of times."""

    def __init__(self, view: Any, fault: str, budget: list[int]) -> None:
        self._view, self._fault, self._budget = view, fault, budget
        self.told = 0
        self.fed_tokens, self.fed_positions = view.fed_tokens, view.fed_positions

    def describe(self, runner: Any, scheduler_output: Any) -> Any:
        batch = self._view.describe(runner, scheduler_output)
        lying = self._lie(batch)
        if lying is None or self._budget[0] <= 0:
            return batch
        self._budget[0] -= 1
        self.told += 1
        # The scheduler's own counts go along, so that only the proof of the rows can tell.
        scheduled = dict(zip(lying.request_ids, lying.counts.tolist(), strict=True))
        scheduler_output.num_scheduled_tokens.clear()
        scheduler_output.num_scheduled_tokens.update(scheduled)
        return lying

    def _lie(self, batch: Any) -> Any:
        if self._fault == "off by one":
            return replace(batch, starts=batch.starts + 1, computed=None)
        equal = np.flatnonzero(batch.counts == batch.counts[0])
        same = [i for i in equal if batch.starts[i] == batch.starts[0]]
        if self._fault == "swapped" and len(same) >= 2:
            ids = list(batch.request_ids)
            ids[same[0]], ids[same[1]] = ids[same[1]], ids[same[0]]
            return replace(batch, request_ids=ids)
        return None
