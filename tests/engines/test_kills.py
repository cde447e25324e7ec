"""Killed in mid-run, three ways: the same command goes on, every sample once, nothing touched."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pytest

import paceline
from paceline.contracts import TokenSample
from paceline.store import Store, published_ids
from tests.engines.common import ROW_BOUND, SMOLLM2, Reference

pytestmark = pytest.mark.engine_vllm

NUM_SAMPLES = 40
TIMEOUT_S = 600.0


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Samples of 40 to 120 random tokens."""
    folder = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(1)
    with (folder / "rows.jsonl").open("w") as file:
        for i in range(NUM_SAMPLES):
            ids = rng.integers(5, 49000, int(rng.integers(40, 121))).tolist()
            mask = [int(t >= len(ids) // 2) for t in range(len(ids))]
            file.write(json.dumps({"id": f"row-{i}", "input_ids": ids, "loss_mask": mask}) + "\n")
    paceline.prepare(
        target=SMOLLM2,
        data=[str(folder / "rows.jsonl")],
        out=str(folder / "prepare"),
        max_length=128,
        heldout_share=0.0,
    )
    return folder / "prepare"


@pytest.fixture
def start() -> Iterator[Callable[[Path, Path], subprocess.Popen]]:
    """`start_extract`; what a failed test leaves running is ended."""
    drivers: list[subprocess.Popen] = []

    def start(data: Path, out: Path) -> subprocess.Popen:
        drivers.append(start_extract(data, out))
        return drivers[-1]

    yield start
    for driver in drivers:
        if driver.poll() is None:
            family = [*psutil.Process(driver.pid).children(recursive=True), driver]
            for process in family:
                process.kill()
            driver.wait()


def start_extract(data: Path, out: Path) -> subprocess.Popen:
    """`paceline extract` with small steps and shards, vLLM in processes of its own."""
    command = [sys.executable, "-m", "paceline.cli.main", "extract", "--engine", "vllm"]
    command += ["--data", str(data), "--out", str(out), "--dtype", "float32", "--json"]
    command += ["--max-batch-tokens", "64", "--shard-bytes", str(1 << 20)]
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    log = (out.parent / "log").open("a")
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env=environment, text=True)


def shards(out: Path) -> dict[str, str]:
    found = sorted((out / "shards").glob("*.safetensors"))
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in found}


def wait_for_shards(out: Path, count: int, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while len(list((out / "shards").glob("*.safetensors"))) < count:
        assert process.poll() is None, f"the run ended early: {process.returncode}"
        assert time.monotonic() < deadline, "no shard in time"
        time.sleep(0.05)


def wait_for_words(log: Path, words: str, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while words not in log.read_text():
        assert process.poll() is None, f"the run ended early: {process.returncode}"
        assert time.monotonic() < deadline, f"no {words!r} in time"
        time.sleep(0.02)


def wait_for_all_gone(family: list[psutil.Process]) -> None:
    # Helpers of multiprocessing end with vLLM's processes; what loads models must not stay.
    deadline = time.monotonic() + TIMEOUT_S
    while left := [process for process in family if loads_models(process)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def loads_models(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
        if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            return "resource_tracker" not in " ".join(process.cmdline())
    return False


def test_killed_driver_worker_and_sigterm(
    start: Callable[[Path, Path], subprocess.Popen],
    data: Path,
    reference: Reference,
    tmp_path: Path,
) -> None:
    out = tmp_path / "extract"
    kept: dict[str, str] = {}

    def unchanged() -> None:
        now = shards(out)
        assert {name: now.get(name) for name in kept} == kept
        kept.update(now)

    driver = start(data, out)
    wait_for_shards(out, 1, driver)
    family = psutil.Process(driver.pid).children(recursive=True)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    wait_for_all_gone(family)
    unchanged()

    driver = start(data, out)
    wait_for_shards(out, len(kept) + 1, driver)
    family = psutil.Process(driver.pid).children(recursive=True)
    worker = max(family, key=lambda p: p.memory_info().rss)
    worker.kill()
    stdout, _ = driver.communicate(timeout=TIMEOUT_S)
    assert driver.returncode == 1
    assert "vLLM" in json.loads(stdout)["error"]["message"]
    wait_for_all_gone(family)
    unchanged()

    driver = start(data, out)
    wait_for_shards(out, len(kept) + 1, driver)
    driver.terminate()
    driver.communicate(timeout=TIMEOUT_S)
    assert driver.returncode == 143
    unchanged()

    driver = start(data, out)
    stdout, _ = driver.communicate(timeout=TIMEOUT_S)
    assert driver.returncode == 0, (out.parent / "log").read_text()[-3000:]
    assert json.loads(stdout)["accounting"]["done"] == NUM_SAMPLES
    unchanged()
    assert published_ids(out) == {f"row-{i}" for i in range(NUM_SAMPLES)}
    store = Store(out)
    assert len(store) == NUM_SAMPLES
    for stored in map(store.read, range(0, NUM_SAMPLES, 7)):
        sample = TokenSample(
            "any", np.asarray(stored.input_ids, np.int32), np.asarray(stored.loss_mask, bool)
        )
        _, last = reference.rows(sample)
        error = (stored.last - last).norm(dim=-1) / last.norm(dim=-1)
        assert float(error.max()) <= ROW_BOUND


def test_a_driver_killed_while_the_model_is_loaded_leaves_no_process(
    start: Callable[[Path, Path], subprocess.Popen], data: Path, tmp_path: Path
) -> None:
    driver = start(data, tmp_path / "extract")
    wait_for_words(tmp_path / "log", "Starting to load model", driver)
    family = psutil.Process(driver.pid).children(recursive=True)
    driver.kill()
    driver.wait()
    wait_for_all_gone(family)
