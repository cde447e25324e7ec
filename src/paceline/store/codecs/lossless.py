"""Codec `lossless`: byte planes under zstd, layer by layer.

The states are laid out as [L, bytes of a value, R, D], so that equal bytes of one layer lie
together: of a bfloat16 the high byte (sign and exponent) shrinks to a third, the low one is noise.
Legend: R rows, L layers, D target hidden width.
"""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property

import numpy as np
import torch
import zstandard

from paceline.errors import StoreCorruption
from paceline.store.codecs.base import Part

# Measured on states of SmolLM2 (docs/store.md): higher levels are slower and not smaller.
_LEVEL = 1


class LosslessCodec:
    """Implements `Codec`.

    A sample's blob begins with the lengths of its planes (uint32 each, in order); the planes
    follow, each a zstd frame, or its own R * D bytes where zstd does not shorten it. A sample
    without rows has an empty blob.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        # zstd lets go of the interpreter lock. One plane is one task, so the bytes are the same
        # for any number of threads.
        return ThreadPoolExecutor(min(8, os.cpu_count() or 1), thread_name_prefix="zstd")

    def parts(self, row_shape: tuple[int, ...]) -> tuple[Part, ...]:
        return (Part("", torch.uint8, None),)

    def encode(self, states: torch.Tensor) -> list[torch.Tensor]:
        if not states.numel():
            return [torch.empty(0, dtype=torch.uint8)]
        planes = _planes_of(states.cpu().contiguous())
        blobs = list(self._pool.map(_shrink, planes))
        table = np.asarray([len(blob) for blob in blobs], dtype="<u4").tobytes()
        return [torch.frombuffer(bytearray(table + b"".join(blobs)), dtype=torch.uint8)]

    def decode(
        self,
        parts: Sequence[torch.Tensor],
        shape: tuple[int, ...],
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if out is None:
            out = torch.empty(shape, dtype=self.dtype)
        if not out.numel():
            return out
        planes = _planes_of(out)
        blob = memoryview(parts[0].numpy())
        start = 4 * len(planes)
        lengths = np.frombuffer(blob, dtype="<u4", count=len(planes)).tolist()
        for plane, length in zip(planes, lengths, strict=True):
            data = _grow(blob[start : start + length], plane.size)
            plane[...] = np.frombuffer(data, np.uint8).reshape(plane.shape)
            start += length
        return out


def _planes_of(states: torch.Tensor) -> list[np.ndarray]:
    """Contiguous states [R, ..., D] -> its byte planes in order, each a view uint8 [R, D]."""
    rows, width = states.shape[0], states.shape[-1]
    as_bytes = states.view(torch.uint8).view(rows, -1, width, states.itemsize).numpy()
    _, num_layers, _, num_bytes = as_bytes.shape
    return [as_bytes[:, k, :, b] for k in range(num_layers) for b in range(num_bytes)]


def _shrink(plane: np.ndarray) -> bytes:
    plane = np.ascontiguousarray(plane)
    packed = zstandard.ZstdCompressor(level=_LEVEL).compress(plane)
    return packed if len(packed) < plane.nbytes else plane.tobytes()


def _grow(data: memoryview, plane_bytes: int) -> memoryview | bytes:
    if len(data) == plane_bytes:
        return data
    try:
        plane = zstandard.ZstdDecompressor().decompress(data, max_output_size=plane_bytes)
    except zstandard.ZstdError as error:
        raise StoreCorruption(f"a compressed plane of states is damaged: {error}") from error
    if len(plane) != plane_bytes:
        raise StoreCorruption(f"a plane of states has {len(plane)} bytes, not {plane_bytes}")
    return plane
