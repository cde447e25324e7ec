"""Processes of vLLM's end when their driver does: real processes, a driver killed with SIGKILL."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from paceline.vllm_orphans import EXTENSION, end_with, this_process

# Starts a process as vLLM does, tells its pid and lives on. A spawned one imports the extension
# when it is allowed to, as a worker does between its start and the load of a model.
_DRIVER = """
import multiprocessing, pydoc, sys, time
from pathlib import Path

def work(go):
    while not Path(go).exists():
        time.sleep(0.01)
    pydoc.locate(sys.argv[3])
    time.sleep(600)

if __name__ == "__main__":
    from paceline.vllm_orphans import ending_with, this_process
    method, go = sys.argv[1:3]
    with ending_with([this_process()]):
        worker = multiprocessing.get_context(method).Process(target=work, args=(go,))
        worker.start()
    print(worker.pid, flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize(
    ("method", "is_early"), [("fork", False), ("fork", True), ("spawn", False), ("spawn", True)]
)
def test_a_worker_ends_with_its_driver(method: str, is_early: bool, tmp_path: Path) -> None:
    program, go = tmp_path / "driver.py", tmp_path / "go"
    program.write_text(_DRIVER)
    command = [sys.executable, str(program), method, str(go), EXTENSION]
    driver = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    worker = psutil.Process(int(driver.stdout.readline()))
    try:
        if not is_early:
            go.touch()
            time.sleep(1)
        assert worker.status() != psutil.STATUS_ZOMBIE
        driver.send_signal(signal.SIGKILL)
        driver.wait()
        go.touch()
        wait_for_the_end_of(worker)
    finally:
        driver.kill()
        if worker.is_running():
            worker.kill()


def wait_for_the_end_of(process: psutil.Process) -> None:
    deadline = time.monotonic() + 60
    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, f"{process} lives on"
        time.sleep(0.05)


def test_who_is_on_another_machine_or_is_this_process_is_not_watched() -> None:
    end_with([this_process(), {**this_process(), "pid": os.getppid(), "host": "elsewhere"}])
    time.sleep(0.5)  # it would have ended by now: neither started when this process did


def test_a_process_that_has_another_ones_pid_is_not_taken_for_it() -> None:
    code = (
        "import os, time; from paceline.vllm_orphans import end_with, this_process;"
        "end_with([{**this_process(), 'pid': os.getppid(), 'started': 1}]); time.sleep(600)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 1
