"""Tests that need a CUDA GPU: without one nothing here is collected."""

import torch

if not torch.cuda.is_available():
    collect_ignore_glob = ["test_*.py"]
