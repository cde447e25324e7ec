"""Fingerprints: short hashes that say whether two inputs are the same thing."""

import hashlib
import importlib.metadata
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

# Files above this size are sampled: hashing 600 GB of weights would take longer than loading them.
_WHOLE_FILE_BYTES = 64 << 20
_SAMPLE_BYTES = 64 << 10
_NUM_SAMPLES = 32
_BLOCK_BYTES = 1 << 20

_RECORDED_PACKAGES = ("paceline", "torch", "transformers", "safetensors", "tokenizers", "vllm")


def of_bytes(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]


def of_json(value: Any) -> str:
    """Fingerprint of anything that JSON can say; the order of keys does not matter."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return of_bytes(text.encode())


def of_file(path: str | Path) -> str:
    """Fingerprint of a file: of all its bytes up to 64 MiB, else of its size, its first and last
    64 KiB and samples evenly spread between."""
    path = Path(path)
    total_bytes = path.stat().st_size
    if total_bytes <= _WHOLE_FILE_BYTES:
        return of_whole_file(path)
    digest = hashlib.sha256(str(total_bytes).encode())
    with path.open("rb") as file:
        for i in range(_NUM_SAMPLES):
            file.seek((total_bytes - _SAMPLE_BYTES) * i // (_NUM_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:32]


def of_whole_file(path: str | Path, advance: Callable[[int], None] = lambda num_bytes: None) -> str:
    """Fingerprint of all bytes of a file, however large; up to 64 MiB that of `of_file`. advance:
    told how many were read, as they are."""
    path = Path(path)
    digest = hashlib.sha256(str(path.stat().st_size).encode())
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
            advance(len(block))
    return digest.hexdigest()[:32]


def of_files(paths: Iterable[str | Path]) -> str:
    """Fingerprint of several files by name and content; the folder that holds them is left out."""
    return of_json({Path(p).name: of_file(p) for p in sorted(map(str, paths))})


def package_versions() -> dict[str, str]:
    """Versions of the packages that shape results, of those that are installed."""
    versions = {}
    for name in _RECORDED_PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
