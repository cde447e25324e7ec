"""What the scheduler's output says; the same fields in every version from 0.16 to 0.32."""

from typing import Any


def first_positions(scheduler_output: Any) -> dict[str, int]:
    """For each scheduled request the position of its first row in this step."""
    cached = scheduler_output.scheduled_cached_reqs
    positions = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    for new in scheduler_output.scheduled_new_reqs:
        positions[new.req_id] = new.num_computed_tokens
    return positions
