"""Without a CUDA GPU the kernels run in Triton's interpreter: the same arithmetic, on the CPU."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
