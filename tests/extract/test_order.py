"""The size of shards in a byte budget."""

import pytest

from paceline.extract.order import least_budget, shard_bytes_of
from paceline.recipe import ExtractOptions


@pytest.mark.parametrize("shard_bytes", [1, 5_000, 1 << 30])
@pytest.mark.parametrize("kept", [0, 1, 5, 1_000, 104_976])
def test_the_budget_that_is_told_holds_what_stays_and_two_of_its_shards(
    kept: int, shard_bytes: int
) -> None:
    def fits(budget: int) -> bool:
        options = ExtractOptions(shard_bytes=shard_bytes, stream_bytes=budget)
        return budget >= kept + 2 * shard_bytes_of(options)

    least = least_budget(ExtractOptions(shard_bytes=shard_bytes), kept)
    assert fits(least)
    # No much smaller one would do.
    assert least <= 8 or not fits(least - max(8, least // 100))
