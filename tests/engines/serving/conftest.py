"""Speculative decoding runs on vLLM's CPU builds from 0.22 on; older environments pass by, and such
whose draft model no test can reach."""

from tests.engines.versions import runs_in_one_process, vllm_version

if vllm_version() < (0, 22) or not runs_in_one_process():
    collect_ignore_glob = ["test_*.py"]
