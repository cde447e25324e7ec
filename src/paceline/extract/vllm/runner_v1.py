"""vLLM's V1 model runner (every version so far; the default up to 0.21 and on CPU builds)."""

from typing import Any

import numpy as np
import torch

from paceline.extract.vllm.batch import StepBatch
from paceline.extract.vllm.schedule import first_positions


class View:
    """See runners.RunnerView. The persistent batch stays as the step ran until the next one."""

    name = "V1"

    def fits(self, runner: Any) -> bool:
        return all(hasattr(runner, name) for name in ("input_batch", "query_start_loc"))

    def describe(self, runner: Any, scheduler_output: Any) -> StepBatch:
        batch = runner.input_batch
        ids = list(batch.req_ids[: batch.num_reqs])
        scheduled = scheduler_output.num_scheduled_tokens
        starts = first_positions(scheduler_output)
        return StepBatch(
            request_ids=ids,
            counts=np.asarray([scheduled.get(i, -1) for i in ids], np.int64),
            query_starts=runner.query_start_loc.np[: len(ids) + 1].astype(np.int64),
            starts=np.asarray([starts.get(i, -1) for i in ids], np.int64),
            computed=batch.num_computed_tokens_cpu[: len(ids)].astype(np.int64),
        )

    def fed_tokens(self, runner: Any, num_rows: int) -> torch.Tensor:
        """What the embeddings were made of, where the model itself got embeddings."""
        return runner.input_ids.gpu[:num_rows]

    def fed_positions(self, runner: Any, num_rows: int) -> torch.Tensor:
        # A plain tensor in newer versions, a CPU and device pair in older ones.
        positions = runner.positions
        whole = positions if isinstance(positions, torch.Tensor) else positions.gpu
        return whole[:num_rows]
