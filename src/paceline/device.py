"""Where and in which dtype the arithmetic runs, when the options say `auto`."""

import resource
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from paceline.errors import UsageError

_TRIAL_S = 0.25


def choose_device(name: str) -> torch.device:
    """`auto`: the first GPU where there is one, else the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"device {name!r}: name auto, cpu, cuda or cuda:N") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"device {name!r}: no CUDA GPU is here; use device cpu")
    return device


def choose_dtype(name: str, device: torch.device, native: torch.dtype) -> torch.dtype:
    """`auto`: the checkpoint's own dtype on a GPU; on a CPU the faster of float32 and bfloat16.

    bfloat16 is about six times as fast as float32 on CPUs with AMX and slower on others, so it is
    timed.
    """
    if name != "auto":
        return getattr(torch, name)
    if device.type != "cpu":
        return native
    float32, bfloat16 = (product_flops(device, d) for d in (torch.float32, torch.bfloat16))
    return torch.bfloat16 if bfloat16 > 1.5 * float32 else torch.float32


def training_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto`: bfloat16 on a GPU, whatever the target is kept in. The moved weights are float32
    anyway; products of float32 are ten times as slow there, and gradients of float16 can vanish."""
    return choose_dtype(name, device, torch.bfloat16)


def product_flops(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP per second of large matrix products on this machine, timed for a quarter of a second."""
    size = 8192 if device.type == "cuda" else 1024
    a = torch.randn(size, size, device=device).to(dtype)

    def product() -> None:
        a @ a
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    product()  # the first of a shape pays for set-up
    started, count = time.perf_counter(), 0
    while time.perf_counter() - started < _TRIAL_S:
        product()
        count += 1
    return 2.0 * size**3 * count / (time.perf_counter() - started)


def moved_together(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Vectors of one dtype on a device. To a GPU they go in one copy out of pinned memory: one out
    of other memory would make the host wait for all that the GPU was given before it."""
    if device.type != "cuda" or not tensors or tensors[0].is_cuda:
        return [tensor.to(device) for tensor in tensors]
    sizes = [len(tensor) for tensor in tensors]
    pinned = torch.empty(sum(sizes), dtype=tensors[0].dtype, pin_memory=True)
    torch.cat(list(tensors), out=pinned)
    return list(pinned.to(device, non_blocking=True).split(sizes))


def reset_peak(device: torch.device) -> None:
    """Let `peak_bytes` of a GPU count from now on."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_bytes(device: torch.device) -> int:
    """Most memory so far: what tensors took of a GPU; of a CPU, the whole process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # Linux counts in KiB.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def free_host_bytes() -> int | None:
    """Memory of this machine that programs can still have; None where Linux does not say it."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except FileNotFoundError:
        return None
    return next((int(s.split()[1]) << 10 for s in lines if s.startswith("MemAvailable:")), None)


def dtype_name(dtype: torch.dtype) -> str:
    """torch.float32 -> 'float32'."""
    return str(dtype).removeprefix("torch.")
