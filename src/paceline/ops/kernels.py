"""The one place that chooses: a Triton kernel on CUDA, its plain-torch twin elsewhere.

The twin is in the module that has the operation, the kernels are in `NAME_triton` beside it.
Importing Triton is left to the first use: only CUDA builds of torch bring it.
"""

import functools
import importlib
from typing import Any

import torch


def use_kernels(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda


@functools.cache
def kernels(name: str) -> Any:
    """Module `paceline.ops.NAME_triton`."""
    return importlib.import_module(f"paceline.ops.{name}_triton")
