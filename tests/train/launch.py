"""Ranks of one training as real processes, as torchrun starts them: gloo on the CPU.

They are forked from a server that has loaded paceline and done nothing else.
"""

import multiprocessing
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Loaded once, by the server: FSDP's backward pass asks for dynamo.
import torch._dynamo
import torch.distributed.fsdp
import transformers.models.llama.modeling_llama  # noqa: F401

from paceline.errors import PacelineError

from .pairs import Process, wait

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["tests.train.launch", "tests.train.rank_work"])


def run_ranks(
    work: Callable[..., None], folder: Path, *arguments: Any, count: int = 2
) -> tuple[list[int], list[str]]:
    """work(rank, *arguments) on every rank: exit codes, and the errors that ranks ended with (""
    for none). `folder` is for the errors."""
    folder.mkdir(parents=True, exist_ok=True)
    processes = start_ranks(work, folder, *arguments, count=count)
    codes = wait(*processes)
    texts = [folder / f"error{rank}.txt" for rank in range(count)]
    return codes, [text.read_text() if text.is_file() else "" for text in texts]


def start_ranks(
    work: Callable[..., None], folder: Path, *arguments: Any, count: int = 2
) -> list[Process]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    processes = []
    for rank in range(count):
        values = (work, str(folder), rank, count, port, arguments)
        process = _SERVER.Process(target=_in_child, args=values)
        process.start()
        processes.append(process)
    return processes


def _in_child(
    work: Callable[..., None], folder: str, rank: int, count: int, port: int, arguments: tuple
) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(count),
        LOCAL_WORLD_SIZE=str(count),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
    )
    torch.set_num_threads(1)
    error = Path(folder) / f"error{rank}.txt"
    error.unlink(missing_ok=True)
    try:
        work(rank, *arguments)
    except PacelineError as failure:
        error.write_text(f"{type(failure).__name__}: {failure}")
        raise SystemExit(1) from failure


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
