"""A sample as its shard keeps it: what can move to another shard without a bit of it changing."""

from dataclasses import dataclass

import torch

from paceline.contracts import TokenSample
from paceline.store.codecs import Codec
from paceline.store.shard import Shard

STATE_KINDS = ("aux", "last")


@dataclass(frozen=True)
class EncodedSample:
    """parts: for `aux` and `last` the codec's tensors, views of the file. checksum: the 16 bytes
    that were stored with the sample; whoever copies it compares them."""

    sample: TokenSample
    parts: dict[str, list[torch.Tensor]]
    checksum: bytes


def read_encoded(shard: Shard, codec: Codec, position: int) -> EncodedSample:
    """The sample at a position of a shard, states not decoded."""
    start, stop = shard.offsets[position : position + 2, 0].tolist()
    sample = TokenSample(
        input_ids=shard.rows("input_ids", start, stop).numpy(),
        loss_mask=shard.rows("loss_mask", start, stop).numpy(),
        num_past_end=int(shard.tensor("num_past_end")[position]),
        **{name: values[position] for name, values in shard.columns.items()},
    )
    return EncodedSample(
        sample=sample,
        parts={kind: state_parts(shard, codec, kind, position) for kind in STATE_KINDS},
        checksum=shard.tensor("sample_checksums")[position].numpy().tobytes(),
    )


def state_parts(shard: Shard, codec: Codec, kind: str, position: int) -> list[torch.Tensor]:
    """The codec's parts of one sample's states, `aux` or `last`, as views of the file."""
    column = 1 if kind == "aux" else 2
    start, stop = shard.offsets[position : position + 2, column].tolist()
    parts = []
    for part in codec.parts(shard.spec.row_shape(kind)):
        name = kind + part.suffix
        if part.row_shape is None:
            ends = shard.tensor(f"{name}.offsets")[position : position + 2].tolist()
            parts.append(shard.rows(name, *ends))
        else:
            parts.append(shard.rows(name, start, stop))
    return parts
