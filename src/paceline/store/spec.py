"""What all shards of a store share: layers, width, dtype, codec, convention of the last state."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from paceline.contracts import LayerPlan
from paceline.errors import StoreError

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
CODEC_NAMES = ("raw", "lossless", "int8", "fp8")
# Whether `last` stands before the target's final norm (paceline's own always) or after it.
PRE_NORM, POST_NORM = "pre", "post"


@dataclass(frozen=True)
class StoreSpec:
    """The frozen description that the manifest and every shard carry.

    dtype: of the states as the engine gave them, and as they are read. shard_bytes: size at which
    a shard is closed; the one field that does not shape what is stored.
    """

    layers: LayerPlan
    hidden_size: int
    dtype: str
    codec: str = "raw"
    last_norm: str = PRE_NORM
    shard_bytes: int = 1 << 30

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise StoreError(f"dtype {self.dtype!r} cannot be stored; known: {', '.join(DTYPES)}")
        if self.codec not in CODEC_NAMES:
            raise StoreError(f"unknown codec {self.codec!r}; known: {', '.join(CODEC_NAMES)}")
        if self.last_norm not in (PRE_NORM, POST_NORM):
            raise StoreError(f"last_norm is {self.last_norm!r}; it must be 'pre' or 'post'")
        if self.hidden_size < 1 or self.shard_bytes < 1 or not self.layers.aux:
            raise StoreError(
                f"a store needs a width, a shard size and an auxiliary layer, got {self}"
            )

    @property
    def num_aux(self) -> int:
        return len(self.layers.aux)

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def last_is_normed(self) -> bool:
        """The last states have been through the target's final norm."""
        return self.last_norm == POST_NORM

    def row_shape(self, kind: str) -> tuple[int, ...]:
        """Shape of one row of `aux` (A, D) or `last` (D,)."""
        return (self.num_aux, self.hidden_size) if kind == "aux" else (self.hidden_size,)

    def identity(self) -> dict[str, Any]:
        """What two stores must share for their samples to be alike."""
        return {
            "aux_layers": list(self.layers.aux),
            "last_layer": self.layers.last,
            "hidden_size": self.hidden_size,
            "dtype": self.dtype,
            "codec": self.codec,
            "last_norm": self.last_norm,
        }

    def to_dict(self) -> dict[str, Any]:
        return {**self.identity(), "shard_bytes": self.shard_bytes}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "StoreSpec":
        """The inverse of to_dict and of identity; StoreError where a key is missing or unknown."""
        rest = dict(values)
        try:
            layers = LayerPlan(tuple(rest.pop("aux_layers")), rest.pop("last_layer"))
            return cls(layers=layers, **rest)
        except (KeyError, TypeError) as error:
            raise StoreError(f"this is no description of a store: {values!r} ({error})") from error
