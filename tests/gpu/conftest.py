"""Tests that need a CUDA GPU, or two: what this machine has too few of is not collected."""

import torch

if not torch.cuda.is_available():
    collect_ignore_glob = ["test_*.py"]
elif torch.cuda.device_count() < 2:
    collect_ignore_glob = ["test_ranks.py"]
