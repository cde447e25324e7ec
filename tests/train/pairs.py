"""`extract` and `train` as two real processes on one store, either of which may be killed.

The processes are forked from a server that has loaded paceline and done nothing else: each starts
at once, and with threads of its own.
"""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import transformers.models.llama.modeling_llama  # noqa: F401 (loaded once, by the server)

import paceline
from paceline.errors import PacelineError
from paceline.extract.sink import Sink
from paceline.store.presence import READER, WRITER
from paceline.train.loop import Trainer

from ..lines import TINY_LAYERS, prepared
from ..presence import wait_until_present

Process = multiprocessing.context.ForkServerProcess

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["tests.train.pairs"])
# A shard holds five samples, the stream eight shards.
STREAM_BYTES = 400_000
# What ends within seconds may take long where both cores are wanted by others.
PATIENCE_S = 300.0


def prepare(folder: Path) -> None:
    """Target, data and draft vocabulary: what may be there before extraction begins."""
    data = prepared(folder, num_rows=150, heldout_share=0.05)
    paceline.align(data=str(data), out=str(folder / "vocab"), draft_vocab_size=64)


def start_extract(folder: Path, store: Path, die_at: int | None = None, **options) -> Process:
    """die_at: kill -9 before this sample is stored, counted from 0; where the store is a stream,
    not before its reader is there."""
    return _start(_extract, folder, str(store), die_at, options)


def start_train(
    folder: Path, store: Path, out: Path, die_at: int | None = None, **options
) -> Process:
    """die_at: kill -9 before this optimiser step, not before the writer is there."""
    return _start(train_on_stream, folder, str(store), str(out), die_at, options)


def wait(*processes: Process, seconds: float = PATIENCE_S) -> list[int]:
    """Exit codes; negative: the signal. Both must end in time."""
    deadline = time.monotonic() + seconds
    for process in processes:
        process.join(max(deadline - time.monotonic(), 0.0))
    codes = [process.exitcode for process in processes]
    for process in processes:
        if process.exitcode is None:
            process.kill()
            process.join()
    assert None not in codes, f"still running after {seconds} s: {codes}"
    return codes


def _start(work: Callable, folder: Path, *arguments: object) -> Process:
    os.environ["OMP_NUM_THREADS"] = "1"
    process = _SERVER.Process(target=_in_child, args=(work, str(folder), *arguments))
    process.start()
    return process


def _in_child(work: Callable, folder: str, *arguments: object) -> None:
    """As the program does it: what went wrong is said on stderr and is the exit code."""
    try:
        work(Path(folder), *arguments)
    except PacelineError as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from error


def _extract(folder: Path, store: str, die_at: int | None, options: dict) -> None:
    settings = {"stream_bytes": STREAM_BYTES, "max_batch_tokens": 128, **options}
    if die_at is not None:
        witness = READER if settings["stream_bytes"] else None
        _die_before(Sink, "add", die_at, store, witness)
    paceline.extract(
        data=str(folder / "prepare"),
        out=store,
        layers=TINY_LAYERS,
        dtype="float32",
        **settings,
    )


def train_on_stream(folder: Path, store: str, out: str, die_at: int | None, options: dict) -> None:
    if die_at is not None:
        _die_before(Trainer, "step", die_at, store, WRITER)
    paceline.train(
        **{
            "store": store,
            "vocab": str(folder / "vocab"),
            "out": out,
            "follow": True,
            "dtype": "float32",
            "batch_rows": 100,
            "micro_batch_tokens": 128,
            "warmup_steps": 2,
            "log_every": 1,
            "checkpoint_every": 2,
            **options,
        }
    )


def _die_before(owner: type, name: str, fatal: int, store: str, witness: str | None) -> None:
    """A side that dies before the other has begun would be one of an earlier pair to it, and it
    would wait for the next: so the other, if one is to come, must be there."""
    real, count = getattr(owner, name), 0

    def counting(*arguments: object, **named: object) -> object:
        nonlocal count
        if count == fatal:
            if witness:
                wait_until_present(Path(store), witness)
            os.kill(os.getpid(), signal.SIGKILL)
        count += 1
        return real(*arguments, **named)

    setattr(owner, name, counting)
