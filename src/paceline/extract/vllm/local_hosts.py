"""Replicas as processes of this machine, each with its share of the GPUs."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

from paceline.errors import UsageError
from paceline.extract.vllm.liveness import exit_words
from paceline.extract.vllm.replica import KEY_VARIABLE

_REPLICA = "paceline.extract.vllm.replica"
_END_TIMEOUT_S = 60.0
# Of waiting for the end of a process that has let go of its connection.
_GONE_TIMEOUT_S = 10.0
_POLL_S = 0.05


class LocalHost:
    """A process group of our own, so that what vLLM started in it ends with it."""

    def __init__(self, process: subprocess.Popen, number: int) -> None:
        self._process = process
        self.name = f"vLLM worker {number} (pid {process.pid})"

    def needs(self) -> str:
        return "its start"

    def alive(self) -> bool:
        return self._process.poll() is None

    def fate(self) -> str:
        try:
            return exit_words(self._process.wait(_GONE_TIMEOUT_S))
        except subprocess.TimeoutExpired:
            return "lives without a connection"

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        deadline = time.monotonic() + _END_TIMEOUT_S
        while _alive_in_group(self._process.pid) and time.monotonic() < deadline:
            time.sleep(_POLL_S)


def launch_local(number: int, port: int, key: bytes, devices: list[str] | None) -> LocalHost:
    """Start a replica; devices: its entries of CUDA_VISIBLE_DEVICES, None on a CPU."""
    environment = {**os.environ, KEY_VARIABLE: key.hex()}
    if devices is not None:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
    process = subprocess.Popen(
        [sys.executable, "-m", _REPLICA, "127.0.0.1", str(port), str(number)],
        env=environment,
        start_new_session=True,
        stdout=sys.stderr.fileno(),
    )
    return LocalHost(process, number)


def share_devices(count: int, per_worker: int) -> list[list[str]]:
    """This process's GPUs, shared out; UsageError where there are too few."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else list(map(str, range(torch.cuda.device_count())))
    if len(names) < count * per_worker:
        raise UsageError(
            f"{count} workers of {per_worker} GPUs each need {count * per_worker} GPUs, "
            f"{len(names)} are visible: lower `workers`"
        )
    return [names[i * per_worker : (i + 1) * per_worker] for i in range(count)]


def _alive_in_group(group: int) -> bool:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(fields[2]) == group and fields[0] not in "ZX":
                return True
    return False
