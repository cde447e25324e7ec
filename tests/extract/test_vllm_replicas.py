"""Engines that share a queue, as threads, with an engine that is written here. No vLLM."""

import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from paceline.artefact import open_stage
from paceline.contracts import LayerPlan, TokenSample
from paceline.errors import EngineError
from paceline.extract.engine import EngineInfo
from paceline.extract.guards import Guards
from paceline.extract.sink import Destination
from paceline.extract.vllm import opening, ray_hosts, replica, replicas
from paceline.extract.vllm.local_hosts import LocalHost
from paceline.extract.vllm.replicas import Launcher, ReplicaPool
from paceline.extract.vllm.settings import VllmSettings
from paceline.recipe import ExtractOptions
from paceline.store import StoreSpec, published_ids

PLAN = LayerPlan((1, 2), 4)
WIDTH = 8


class Engine:
    """Every row is all ones."""

    opened: list[VllmSettings] = []

    def __init__(self, settings: VllmSettings, num_layers: int, dtype: str) -> None:
        self.opened.append(settings)
        self._replica = settings.replica
        self.info = EngineInfo("vllm", "0.0", dtype, {})

    def capture(
        self,
        samples: Iterable[TokenSample],
        plan: LayerPlan,
        destination: Destination,
        on_tokens: Callable[[int], None],
    ) -> None:
        with destination.open(self._replica) as sink:
            for sample in samples:
                aux = torch.ones(sample.num_aux_rows, len(plan.aux), WIDTH)
                sink.add(sample, aux, torch.ones(sample.num_supervised, WIDTH))
                on_tokens(sample.num_tokens)

    def close(self) -> None:
        pass


class ThreadHost:
    def __init__(self, number: int, port: int, key: bytes) -> None:
        self.name = f"engine {number}"
        self._thread = threading.Thread(target=self._call, args=(port, key, number), daemon=True)
        self._thread.start()

    def _call(self, port: int, key: bytes, number: int) -> None:
        # It ends when the driver lets go of it.
        with suppress(SystemExit, EOFError, OSError):
            replica.call_driver("127.0.0.1", port, key, number)

    def needs(self) -> str:
        return "nothing"

    def alive(self) -> bool:
        return self._thread.is_alive()

    def fate(self) -> str:
        return "was struck by lightning"

    def end(self) -> None:
        self._thread.join(300)


class NoRoom:
    """What a full cluster gives: it lives and never calls."""

    def __init__(self, number: int) -> None:
        self.name = f"engine {number}"
        self.ended = False

    def needs(self) -> str:
        return "a node with 8 free GPUs"

    def alive(self) -> bool:
        return True

    def fate(self) -> str:
        return "waits"

    def end(self) -> None:
        self.ended = True


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    def leave(_: int) -> None:
        raise SystemExit  # of the thread

    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setattr(replica, "VllmEngine", Engine)
    monkeypatch.setattr(replica, "os", SimpleNamespace(environ=os.environ, _exit=leave))
    monkeypatch.setattr(replicas, "_ACCEPT_POLL_S", 0.01)
    (tmp_path / "target").mkdir()
    Engine.opened.clear()
    yield


def settings_in(folder: Path, **changes: Any) -> VllmSettings:
    return VllmSettings(**{"arguments": {"model": str(folder / "target")}, **changes})


def pool_of(settings: VllmSettings, launch: Launcher = ThreadHost, count: int = 2) -> ReplicaPool:
    return ReplicaPool(count, launch, settings, num_layers=4, dtype="float32")


def destination_in(folder: Path) -> Destination:
    return Destination(folder, StoreSpec(PLAN, WIDTH, "float32"), Guards(PLAN, WIDTH))


SAMPLES = [
    TokenSample(f"s{i}", np.arange(9, dtype=np.int32), np.arange(9) >= 4, finished=False)
    for i in range(7)
]


def test_two_engines_capture_every_sample_once(tmp_path: Path) -> None:
    pool = pool_of(settings_in(tmp_path, scratch=tmp_path / "scratch"))
    told: list[int] = []
    try:
        with open_stage(tmp_path / "store", "extract", {}, {}):
            pool.capture(SAMPLES, PLAN, destination_in(tmp_path / "store"), told.append)
    finally:
        pool.close()
    assert published_ids(tmp_path / "store") == {s.sample_id for s in SAMPLES}
    assert sum(told) == sum(s.num_tokens for s in SAMPLES)
    assert sorted(s.replica for s in Engine.opened) == [0, 1]
    assert {s.scratch for s in Engine.opened} == {tmp_path / "scratch"}


def test_engines_of_a_cluster_use_a_folder_of_their_own_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = settings_in(tmp_path, scratch=tmp_path / "of the driver's machine")
    monkeypatch.setattr(ray_hosts, "connect", lambda address: "127.0.0.1")
    monkeypatch.setattr(
        ray_hosts, "launch_ray", lambda number, port, key, **_: ThreadHost(number, port, key)
    )
    monkeypatch.setattr(opening, "_on_cpu", lambda: True)
    options = ExtractOptions(engine="vllm", workers=2, ray_address="auto")
    target = SimpleNamespace(num_layers=4)
    opening._ray_pool(options, here, target, "float32", per_worker=1).close()
    assert [s.scratch for s in Engine.opened] == [None, None]


def test_a_target_that_another_machine_does_not_see_is_named(tmp_path: Path) -> None:
    gone = VllmSettings({"model": str(tmp_path / "elsewhere")})
    with pytest.raises(EngineError, match=r"target's folder, .*elsewhere, is not to be seen on"):
        pool_of(gone)
    assert Engine.opened == []


def test_a_store_that_another_machine_does_not_see_is_named_and_not_made(tmp_path: Path) -> None:
    pool = pool_of(settings_in(tmp_path))
    unseen = tmp_path / "only on the driver's machine"
    try:
        with pytest.raises(EngineError, match=r"manifest, .*driver's machine.* not to be seen on"):
            pool.capture(SAMPLES, PLAN, destination_in(unseen), lambda _: None)
    finally:
        pool.close()
    assert not unseen.exists()


def test_engines_that_find_no_room_are_told_of_and_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(replicas, "_TELL_EVERY_S", 0.0)
    monkeypatch.setattr(replicas, "_START_TIMEOUT_S", 0.05)
    hosts: list[Any] = []

    def launch(number: int, port: int, key: bytes) -> Any:
        hosts.append(ThreadHost(number, port, key) if number == 0 else NoRoom(number))
        return hosts[-1]

    # The other may be late too.
    waits = r"[12] of 2 engines still wait: .*engine 1 for a node with 8 free GPUs"
    with pytest.raises(EngineError, match=rf"after 0 minutes {waits}\. Lower `workers`"):
        pool_of(settings_in(tmp_path), launch)
    assert hosts[1].ended
    assert not hosts[0].alive()
    assert re.search(waits, caplog.text)


class Mortal(Engine):
    """Ends with its process: the first when it is opened, or all when they have captured a row."""

    dies_at = ""

    def __init__(self, settings: VllmSettings, num_layers: int, dtype: str) -> None:
        super().__init__(settings, num_layers, dtype)
        if self.dies_at == "start" and settings.replica == 0:
            raise SystemExit

    def capture(self, samples: Iterable[TokenSample], *rest: Any) -> None:
        next(iter(samples))
        raise SystemExit


def test_an_engine_that_dies_while_it_starts_is_told_of_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Mortal, "dies_at", "start")
    monkeypatch.setattr(replica, "VllmEngine", Mortal)
    with pytest.raises(EngineError, match=r"^engine 0 was struck by lightning$"):
        pool_of(settings_in(tmp_path))


def test_when_all_engines_are_dead_the_reason_of_each_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(replica, "VllmEngine", Mortal)
    pool = pool_of(settings_in(tmp_path))
    struck = r"engine [01] was struck by lightning"
    try:
        with (
            open_stage(tmp_path / "store", "extract", {}, {}),
            pytest.raises(EngineError, match=rf"workers are gone \({struck}; {struck}\)"),
        ):
            pool.capture(SAMPLES, PLAN, destination_in(tmp_path / "store"), lambda _: None)
    finally:
        pool.close()
    assert len(re.findall(rf"{struck}; [12] samples go back into the queue", caplog.text)) == 2


@pytest.mark.parametrize(
    ("ending", "told"),
    [
        ("sys.exit(3)", "died with exit code 3; its own words are above"),
        ("os.kill(os.getpid(), 11)", "died with exit code -11; its own words are above"),
        ("os.kill(os.getpid(), 9)", "died with exit code -9: SIGKILL, by the kernel where"),
    ],
)
def test_how_a_process_has_ended_is_told(ending: str, told: str) -> None:
    program = f"import os, sys; {ending}"
    process = subprocess.Popen([sys.executable, "-c", program], start_new_session=True)
    host = LocalHost(process, 0)
    assert host.fate().startswith(told)
    assert not host.alive()
    host.end()
