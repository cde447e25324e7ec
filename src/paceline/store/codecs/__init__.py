"""The codecs by name. Each turns a sample's states into parts and back; see `base.Codec`."""

from paceline.errors import StoreError
from paceline.store.codecs.base import Codec, Part
from paceline.store.codecs.eightbit import FP8, INT8, EightBitCodec
from paceline.store.codecs.lossless import LosslessCodec
from paceline.store.codecs.raw import RawCodec
from paceline.store.spec import StoreSpec

__all__ = ["Codec", "Part", "codec_of"]


def codec_of(spec: StoreSpec) -> Codec:
    """The codec of a store; StoreError where it cannot hold states of that width."""
    dtype = spec.torch_dtype
    match spec.codec:
        case "raw":
            return RawCodec(dtype)
        case "lossless":
            return LosslessCodec(dtype)
        case "int8":
            return EightBitCodec(dtype, INT8, spec.hidden_size)
        case "fp8":
            return EightBitCodec(dtype, FP8, spec.hidden_size)
    raise StoreError(f"codec {spec.codec!r} is not known to this paceline")
