"""Replicas as Ray actors on a real cluster of two nodes, both on this machine."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster

from paceline.contracts import TokenSample
from paceline.extract.engine import open_engine
from paceline.recipe import ExtractOptions
from tests.engines.common import ROW_BOUND, capture, capture_stream
from tests.engines.models import PLAN, WIDTH, errors_of, make, samples_of

pytestmark = pytest.mark.engine_vllm


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Two nodes with room for one worker each."""
    # Ray would end a worker for what other tests hold of this machine's memory.
    monkeypatch.setenv("RAY_memory_monitor_refresh_ms", "0")
    node = {"num_cpus": 1, "object_store_memory": 100 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    cluster.add_node(num_cpus=1, object_store_memory=100 << 20)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def test_a_node_that_dies_gives_its_samples_back(cluster: Cluster, tmp_path: Path) -> None:
    target, plain = make("llama", tmp_path)
    options = ExtractOptions(
        engine="vllm",
        workers=2,
        ray_address=cluster.address,
        layers=list(PLAN.aux),
        max_batch_tokens=64,
        engine_options={"max_model_len": 256},
    )
    samples = samples_of(60)
    shape = {"plan": PLAN, "width": WIDTH}
    pool = open_engine(options, target, "float32", tmp_path)
    try:
        both = capture(pool, samples, tmp_path / "both", **shape)
        assert max(errors_of(both, samples, plain).values()) <= ROW_BOUND
        assert len(list((tmp_path / "both" / "shards").iterdir())) == 2

        def a_node_dies() -> Iterator[TokenSample]:
            yield from samples[:40]
            cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)
            yield from samples[40:]

        one = capture_stream(pool, a_node_dies(), tmp_path / "one", **shape)
        assert max(errors_of(one, samples, plain).values()) <= ROW_BOUND
    finally:
        pool.close()
