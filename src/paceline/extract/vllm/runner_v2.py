"""vLLM's V2 model runner (the default on CUDA for some models from 0.22, for all from 0.29)."""

from typing import Any

import numpy as np
import torch

from paceline.extract.vllm.batch import StepBatch
from paceline.extract.vllm.schedule import first_positions


class View:
    """See runners.RunnerView. The batch is in the state that `execute_model` leaves behind; its
    rows may run in another order than the scheduler's."""

    name = "V2"

    def fits(self, runner: Any) -> bool:
        return not hasattr(runner, "input_batch") and all(
            hasattr(runner, name) for name in ("req_states", "execute_model_state")
        )

    def describe(self, runner: Any, scheduler_output: Any) -> StepBatch:
        batch = runner.execute_model_state.input_batch
        ids = list(batch.req_ids[: batch.num_reqs])
        starts = first_positions(scheduler_output)
        return StepBatch(
            request_ids=ids,
            counts=np.asarray(batch.num_scheduled_tokens[: len(ids)], np.int64),
            query_starts=np.asarray(batch.query_start_loc_np[: len(ids) + 1], np.int64),
            starts=np.asarray([starts.get(i, -1) for i in ids], np.int64),
        )

    def fed_tokens(self, runner: Any, num_rows: int) -> torch.Tensor:
        return runner.execute_model_state.input_batch.input_ids[:num_rows]

    def fed_positions(self, runner: Any, num_rows: int) -> torch.Tensor:
        return runner.execute_model_state.input_batch.positions[:num_rows]
