"""Compiles kernels for a GPU of compute capability 9.0 where none is, and prints as JSON how wide
each accesses memory: {kernel: {"ld.global.v4.b32": how many, ...}}. A program of its own, since the
tests' process interprets Triton."""

import json
import re
from collections import Counter

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from paceline.ops import (
    adamw_triton,
    attention_triton,
    dequantise_triton,
    distil_triton,
    heads_triton,
    norm_triton,
    swiglu_triton,
)

FLOATS = {"eps", "unit", "rate", "beta1", "beta2", "decay", "correction1", "correction2"}
# bfloat16 tensors; others are named where a kernel has them.
HALF = (
    "q kv own out grad grad_q grad_kv grad_own x cos sin other student teacher gate up added "
    "weight logits"
)
ATTENTION = {"P": 4, "FULL": True, "BLOCK": 128}
TILED = {**ATTENTION, "ROWS": 64, "KEYS": 64, "PRECISION": "tf32"}
SINGLE = {
    "*fp32": "lse deltas weight_sums teacher_lse log_mass kl accepted agree below by_kl "
    "by_accepted first second",
    "*i64": "key_start key_last row_borders taught_by source",
    "*i32": "teacher_best best",
}
KERNELS = {
    "attention forward": (attention_triton._forward, TILED, {"scale": "fp32"}),
    "attention queries": (attention_triton._backward_queries, TILED, {"scale": "fp32"}),
    "attention keys": (attention_triton._backward_keys, TILED, {"scale": "fp32"}),
    "attention own": (
        attention_triton._backward_own,
        {**ATTENTION, "ROWS": 16},
        {"scale": "fp32"},
    ),
    "swiglu forward": (swiglu_triton._forward, {"BLOCK": 1024}, {}),
    "swiglu backward": (swiglu_triton._backward, {"BLOCK": 1024}, {}),
    "distil peaks": (distil_triton._row_peaks, {"BLOCK": 2048}, {}),
    "distil scores": (distil_triton._scores, {"HAS_MASS": True, "BLOCK": 2048}, {}),
    "distil gradient": (
        distil_triton._gradient,
        {"HAS_MASS": True, "HAS_ACCEPTED": True, "BLOCK": 2048},
        {},
    ),
    "norm forward": (
        norm_triton._forward,
        {"HAS_WEIGHT": True, "BLOCK": 4096},
        {"scales": "*fp32"},
    ),
    "norm backward": (
        norm_triton._backward,
        {"HAS_WEIGHT": True, "HAS_ADDED": True, "BLOCK": 4096},
        {"scales": "*fp32"},
    ),
    "heads": (
        heads_triton._turn_heads,
        {"HALF": 64, "BACKWARD": True, "HAS_OTHER": True, "BLOCK_HEADS": 16, "BLOCK_HALF": 64},
        {},
    ),
    "adamw": (
        adamw_triton._adamw,
        {"HAS_COPY": True, "BLOCK": 1024},
        {"weight": "*fp32", "gradient": "*bf16", "copy": "*bf16", "scale": "*fp32"},
    ),
    "dequantise": (
        dequantise_triton._dequantise,
        {"IS_FP8": False, "BLOCK": 1024},
        {"codes": "*i8", "scales": "*bf16"},
    ),
}


def type_of(name: str, given: dict[str, str]) -> str:
    if name in given:
        return given[name]
    if name in HALF.split():
        return "*bf16"
    for kind, names in SINGLE.items():
        if name in names.split():
            return kind
    return "fp32" if name in FLOATS else "i32"


def accesses(kernel: triton.JITFunction, constants: dict, types: dict[str, str]) -> Counter:
    """With widths and strides that are multiples of 16, as models have them; what a launch does not
    specialise on may be any number."""
    constants = {name: constants[name] for name in kernel.arg_names if name in constants}
    signature, divisible = {}, {}
    for number, (name, parameter) in enumerate(zip(kernel.arg_names, kernel.params, strict=True)):
        signature[name] = "constexpr" if name in constants else type_of(name, types)
        if signature[name][0] in "*i" and not parameter.do_not_specialize:
            divisible[(number,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, divisible)
    compiled = triton.compile(source, GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    return Counter(re.findall(r"\b((?:ld|st)\.global[.\w]*)", compiled.asm["ptx"]))


if __name__ == "__main__":
    print(json.dumps({name: accesses(*how) for name, how in KERNELS.items()}))
