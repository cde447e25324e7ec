"""Two engines that share a queue: all rows once; one that dies gives its samples back."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.contracts import TokenSample
from paceline.errors import EngineError
from paceline.extract.vllm.local_hosts import LocalHost, launch_local
from paceline.extract.vllm.replicas import ReplicaPool
from paceline.target.spec import Target
from tests.engines.common import (
    Reference,
    assert_all_right,
    capture,
    capture_stream,
    mixed_samples,
    settings_of,
)

pytestmark = pytest.mark.engine_vllm


def test_shared_work_a_death_and_the_end_of_all(
    target: Target, reference: Reference, tmp_path: Path
) -> None:
    hosts: list[LocalHost] = []

    def launch(number: int, port: int, key: bytes) -> LocalHost:
        hosts.append(launch_local(number, port, key, None))
        return hosts[-1]

    pool = ReplicaPool(2, launch, settings_of(target, tmp_path), target.num_layers, "float32")
    try:
        samples = mixed_samples(30, longest=120)
        result = capture(pool, samples, tmp_path / "both")
        assert_all_right(result, samples, reference)
        assert len(list((tmp_path / "both" / "shards").iterdir())) == 2
        assert len(pool.greedy([samples[0].input_ids], 3)[0]) == 3

        def one_dies() -> Iterator[TokenSample]:
            yield from samples[:20]
            hosts[0].end()
            yield from samples[20:]

        survived = capture_stream(pool, one_dies(), tmp_path / "one")
        assert_all_right(survived, samples, reference)
        hosts[1].end()
        with pytest.raises(EngineError, match=r"all vLLM workers are gone"):
            capture_stream(pool, iter(samples), tmp_path / "none")
    finally:
        pool.close()
