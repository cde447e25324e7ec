"""A sample as its shard keeps it: what can move to another shard without a bit of it changing."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paceline.contracts import TokenSample
from paceline.errors import StoreCorruption
from paceline.store import checksum
from paceline.store.codecs import Codec
from paceline.store.shard import Shard, bytes_of

# What a sample is besides its tensors; kept as JSON columns.
COLUMNS = ("sample_id", "conversation_id", "source", "split", "finished")
STATE_KINDS = ("aux", "last")

Parts = Mapping[str, Sequence[torch.Tensor]]  # the codec's tensors of `aux` and of `last`


@dataclass(frozen=True)
class EncodedSample:
    """parts: views of the file. checksum: the 16 bytes that were stored with the sample."""

    sample: TokenSample
    parts: Parts
    checksum: bytes

    def check(self) -> None:
        """Raises StoreCorruption, which names the sample, where it is not what was stored: a copy
        of it must not get a fresh checksum."""
        if digest_of(self.sample, self.parts) != self.checksum:
            raise StoreCorruption(
                f"sample {self.sample.sample_id} is not what its checksum says: its shard is "
                "damaged (`paceline inspect --verify` names it)"
            )


def describe(sample: TokenSample) -> bytes:
    """What a sample's checksum covers besides its tensors; the lengths keep borders unambiguous."""
    fields = [getattr(sample, name) for name in COLUMNS]
    return json.dumps([*fields, sample.num_tokens, sample.num_past_end]).encode()


def begin_digest(sample: TokenSample) -> checksum.Digest:
    """The checksum of a sample up to its tokens and mask; its states follow."""
    digest = checksum.new()
    digest.update(describe(sample))
    digest.update(sample.input_ids.tobytes())
    digest.update(sample.loss_mask.tobytes())
    return digest


def digest_of(sample: TokenSample, parts: Parts) -> bytes:
    """The checksum of a sample: of its description, tokens, mask and encoded states."""
    digest = begin_digest(sample)
    for kind in STATE_KINDS:
        for tensor in parts[kind]:
            digest.update(bytes_of(tensor))
    return digest.digest()


def read_encoded(
    shard: Shard, codec: Codec, position: int, columns: Mapping[str, Sequence[Any]] | None = None
) -> EncodedSample:
    """The sample at a position of a shard, states not decoded. columns: in place of the shard's."""
    columns = columns or shard.columns
    start, stop = shard.offsets[position : position + 2, 0].tolist()
    sample = TokenSample(
        input_ids=shard.rows("input_ids", start, stop).numpy(),
        loss_mask=shard.rows("loss_mask", start, stop).numpy(),
        num_past_end=int(shard.tensor("num_past_end")[position]),
        **{name: columns[name][position] for name in COLUMNS},
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
