"""Speculative decoding runs on vLLM's CPU builds from 0.22 on; older environments pass by."""

from tests.engines.versions import vllm_version

if vllm_version() < (0, 22):
    collect_ignore_glob = ["test_*.py"]
