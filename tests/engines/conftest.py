"""Real vLLM in pytest's own process and in processes of its own; run by `make test-engines`."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.versions import runs_in_one_process, vllm_version

# vLLM in one process would bind that to a core each thread, and all that is started from it later.
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
# GiB of KV cache: two versions are tested side by side, each with several engines at a time.
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

if vllm_version() == (0, 0):
    # The main environment has no vLLM: these tests belong to `make test-engines`.
    collect_ignore_glob = ["test_*.py"]
else:
    if vllm_version() < (0, 22):
        # Families that older CPU builds lack; one version is enough for Ray.
        collect_ignore_glob = ["test_models.py", "test_ray.py"]
    elif not runs_in_one_process():
        collect_ignore_glob = ["test_models.py", "test_ray.py", "test_replicas.py", "test_step.py"]

    from paceline.extract.vllm.engine import VllmEngine
    from paceline.target.spec import Target, TargetReference
    from tests.engines.common import SMOLLM2, Reference, settings_of

    def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
        # What starts engines of its own has ended before the shared one takes memory.
        items.sort(key=lambda item: "engine" in getattr(item, "fixturenames", ()))

    @pytest.fixture(scope="session")
    def target() -> Target:
        return Target(TargetReference(SMOLLM2))

    @pytest.fixture(scope="session")
    def reference(target: Target) -> Reference:
        """transformers' own states."""
        return Reference(target)

    _WAYS = ["one process"] * runs_in_one_process() + ["several processes"]

    @pytest.fixture(scope="session", params=_WAYS)
    def engine(
        request: pytest.FixtureRequest, target: Target, tmp_path_factory: pytest.TempPathFactory
    ) -> Iterator[VllmEngine]:
        """SmolLM2 in float32, steps of 128 tokens, with an extension that can be made to fail."""
        one = request.param == "one process"
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if one else "1"
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
        scratch: Path = tmp_path_factory.mktemp("scratch")
        engine = VllmEngine(settings_of(target, scratch), target.num_layers, "float32")
        yield engine
        engine.close()
        if one:
            layers = [o for o in gc.get_objects() if type(o).__name__ == "LlamaDecoderLayer"]
            assert not [o for o in layers if "vllm" in type(o).__module__], "the model is kept"

    @pytest.fixture
    def own_processes(monkeypatch: pytest.MonkeyPatch) -> None:
        """vLLM in processes of its own: several engines one after the other in one test process
        would share its state."""
        monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
        monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
