"""The processes that train together: who is who, on which device, and how the first one's word
reaches the others. How weights and gradients are shared is in `parallel`.

`torchrun` starts them and says in the environment which one each is. All enter every collective;
only the first one touches the stage's folder.
"""

import gc
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from paceline.device import choose_device
from paceline.errors import PacelineError, RankError, UsageError
from paceline.train.lifeline import Failure, Lifeline, accept_all, connect, listen

T = TypeVar("T")

# Deaths and errors are told by the lifeline within a second; this is for ranks that hang.
_TIMEOUT = timedelta(minutes=10)
# How long an error waits for news of another rank, whose death may be behind it.
_PATIENCE_S = 2.0
# How long a rank may take to end after the news; then it is ended, wherever it waits.
_GRACE_S = 10.0
_STOPPED = "was stopped by a signal"


@dataclass(frozen=True)
class Ranks:
    """device: of this rank's arithmetic; number: of this rank, from 0; count: of all ranks."""

    device: torch.device
    number: int = 0
    count: int = 1
    lifeline: Lifeline | None = None

    @property
    def is_first(self) -> bool:
        return self.number == 0

    @cached_property
    def mesh(self) -> DeviceMesh:
        """All ranks in a row, for weights that are split between them. All ranks enter."""
        return init_device_mesh(self.device.type, (self.count,))

    def from_first(self, make: Callable[[], T]) -> T:
        """What the first rank makes, on all ranks; the others wait for it. Plain values only."""
        self.check()
        if self.count == 1:
            return make()
        box: list[Any] = [make() if self.is_first else None]
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, on all ranks; in place."""
        if self.count > 1:
            self.check()
            dist.all_reduce(tensor)
        return tensor

    def largest(self, value: float) -> float:
        """The largest of the ranks' values, on all ranks."""
        if self.count == 1:
            return value
        self.check()
        box = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(box, dist.ReduceOp.MAX)
        return float(box)

    def gather(self, value: T) -> list[T]:
        """The values of all ranks in their order, on all ranks. Plain values only."""
        if self.count == 1:
            return [value]
        self.check()
        box: list[Any] = [None] * self.count
        dist.all_gather_object(box, value)
        return box

    def check(self) -> None:
        """Raises RankError where another rank has failed: nothing that a collective gave since then
        is to be believed."""
        if self.lifeline is not None and (failure := self.lifeline.failure) is not None:
            raise RankError(str(failure))


@contextmanager
def open_ranks(device: str) -> Iterator[Ranks]:
    """This process among those that `torchrun` started; alone where it did not.

    device: as in the options; `auto` and `cuda` are the GPU of the local rank. When one rank fails,
    the others raise RankError with its text. Raises UsageError for an environment that makes no
    sense.
    """
    count = _number("WORLD_SIZE", 1)
    if count == 1:
        yield Ranks(choose_device(device))
        return
    number, own = _number("RANK"), _own_device(device)
    _join(own)
    lifeline = Lifeline(number, _connections(number, count), _end_soon)
    with _quiet(number > 0), _telling(lifeline):
        ranks = Ranks(own, number, count, lifeline)
        yield ranks
        dist.barrier()
    _part(ranks)


def _part(ranks: Ranks) -> None:
    """Destroy the process group, and see its threads end.

    A thread of gloo that lets go of its last tensor only when the interpreter is about to end
    aborts the process (torch 2.13, on a busy machine). They end with the group's last owner, and
    DTensor's caches own the mesh, which owns the group, for as long as the process runs.
    """
    dist.destroy_process_group()
    if "mesh" in vars(ranks):
        getattr(ranks.mesh, "_pg_registry", {}).clear()  # torch 2.10 has none
    gc.collect()  # modules that FSDP has wrapped own it too, in cycles


@contextmanager
def _quiet(wanted: bool) -> Iterator[None]:
    """What all ranks would say alike is said by the first."""
    own = logging.getLogger("paceline")
    level = own.level
    if wanted:
        own.setLevel(logging.WARNING)
    try:
        yield
    finally:
        own.setLevel(level)


@contextmanager
def _telling(lifeline: Lifeline) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        failure = _behind(error, lifeline)
        if failure is not None:
            _abort_collectives()
            raise RankError(str(failure)) from error
        lifeline.fail(_told(error))
        _tell_torchrun(error)
        _abort_collectives()
        raise
    finally:
        lifeline.close()


def _told(error: BaseException) -> str:
    if not isinstance(error, Exception):
        return _STOPPED
    kind = "" if isinstance(error, PacelineError) else f"{type(error).__name__}: "
    return f"failed: {kind}{error}"


def _behind(error: BaseException, lifeline: Lifeline) -> Failure | None:
    """The failure of another rank that this one's error comes from."""
    # A collective whose other side has gone fails before the news of it is here.
    may_follow = isinstance(error, Exception) and not isinstance(error, PacelineError)
    failure = lifeline.wait_for_failure(_PATIENCE_S if may_follow else 0.0)
    was_stopped_too = not isinstance(error, Exception) and failure and failure.text == _STOPPED
    return None if was_stopped_too else failure


def _number(name: str, default: int | None = None) -> int:
    value = os.environ.get(name)
    if value is None and default is not None:
        return default
    if value is None or not value.isdigit():
        raise UsageError(
            f"the environment has {name}={value} but WORLD_SIZE={os.environ.get('WORLD_SIZE')}: "
            "start several ranks with torchrun, or unset WORLD_SIZE"
        )
    return int(value)


def _own_device(name: str) -> torch.device:
    device = choose_device(name)
    if device.type != "cuda":
        return device
    if device.index is not None:
        raise UsageError(f"device {name!r}: each rank has a GPU of its own; use device cuda")
    local, wanted = _number("LOCAL_RANK"), _number("LOCAL_WORLD_SIZE", 1)
    if wanted > torch.cuda.device_count():
        raise UsageError(
            f"{wanted} ranks were started on a machine with {torch.cuda.device_count()} GPUs: pass "
            "torchrun that number as --nproc-per-node"
        )
    return torch.device("cuda", local)


def _join(device: torch.device) -> None:
    """The process group: gloo for values of the host, NCCL between GPUs."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl", timeout=_TIMEOUT, device_id=device)
    else:
        dist.init_process_group("gloo", timeout=_TIMEOUT)


def _connections(number: int, count: int) -> dict[int, Any]:
    listener = listen() if number == 0 else None
    place: list[Any] = [listener and listener.getsockname()[1]]
    dist.broadcast_object_list(place, src=0, device=torch.device("cpu"))
    if listener is not None:
        return accept_all(listener, count)
    # torchrun's address is that of the first rank's machine.
    return connect(os.environ["MASTER_ADDR"], place[0], number)


def _end_soon(lifeline: Lifeline) -> None:
    """Wakes a rank that waits for one that is gone, and ends it where that does not help."""
    _abort_collectives()
    if not lifeline.closed.wait(_GRACE_S):
        sys.stderr.write(f"ERROR {lifeline.failure}\n")
        sys.stderr.flush()
        os._exit(1)


def _abort_collectives() -> None:
    # There is nothing left to abort where another thread has done it.
    with suppress(RuntimeError, ValueError, AssertionError):
        dist.distributed_c10d._abort_process_group()


def _tell_torchrun(error: BaseException) -> None:
    """So that the summary that torchrun prints at the end has the error's text."""
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        get_error_handler().record_exception(error)
