"""How many bytes a store will take, before a state is computed: the arithmetic of docs/formats.md.

Exact for codecs of fixed width; an upper bound for `lossless`, whose share only the states know.
"""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass

from paceline.contracts import TokenSample
from paceline.store.codecs import codec_of
from paceline.store.encoded import COLUMNS, STATE_KINDS
from paceline.store.shard import HEADER_BYTES
from paceline.store.spec import StoreSpec

# Per token: an id (int32) and a mask byte. Per sample: three offsets, num_past_end, a checksum.
_TOKEN_BYTES, _ENTRY_BYTES = 5, 44
# Per sample in the index: counts, codes, hash, the ends of two texts.
_INDEX_ENTRY_BYTES, _INDEX_SHARD_BYTES = 49, 40
# Names of the JSON columns, padding, the first entry of each offsets tensor.
_SHARD_BYTES = HEADER_BYTES + 192


@dataclass(frozen=True)
class StoreSize:
    """Bytes of a store by what they hold; `states` are those that a codec shrinks."""

    states: float = 0.0
    tokens: float = 0.0
    entries: float = 0.0
    num_shards: int = 0
    index: float = 0.0

    @property
    def total(self) -> int:
        shards = self.num_shards * _SHARD_BYTES
        return round(self.states + self.tokens + self.entries + shards + self.index)


def store_size(
    spec: StoreSpec, samples: Iterable[TokenSample], scale: float = 1.0, states_share: float = 1.0
) -> StoreSize:
    """The size of a store of `samples`, each standing for `scale` of its kind.

    states_share: by how much the states shrink below what the codec's fixed width (or, for
    `lossless`, the raw width) says.
    """
    row_bytes = {kind: _row_bytes(spec, spec.row_shape(kind)) for kind in STATE_KINDS}
    states = tokens = entries = texts = num_samples = 0.0
    for sample in samples:
        states += sample.num_aux_rows * row_bytes["aux"]
        states += sample.num_supervised * row_bytes["last"]
        tokens += sample.num_tokens * _TOKEN_BYTES
        entries += _ENTRY_BYTES + _columns_bytes(sample) + _blob_bytes(spec)
        texts += len(sample.sample_id.encode()) + len(sample.conversation_id.encode())
        num_samples += 1
    states, tokens, entries = states * states_share * scale, tokens * scale, entries * scale
    num_samples *= scale
    content = states + tokens + entries
    num_shards = _num_shards(spec, content, content / num_samples if num_samples else 0.0)
    index = (
        HEADER_BYTES
        + num_samples * _INDEX_ENTRY_BYTES
        + texts * scale
        + num_shards * _INDEX_SHARD_BYTES
    )
    return StoreSize(states, tokens, entries, num_shards, index)


def _row_bytes(spec: StoreSpec, row_shape: tuple[int, ...]) -> int:
    parts = codec_of(spec).parts(row_shape)
    if any(part.row_shape is None for part in parts):
        return math.prod(row_shape) * spec.torch_dtype.itemsize
    return sum(math.prod(part.row_shape or ()) * part.dtype.itemsize for part in parts)


def _blob_bytes(spec: StoreSpec) -> int:
    """What samples of a codec without fixed rows need besides: plane lengths and blob ends."""
    shapes = map(spec.row_shape, STATE_KINDS)
    variable = [s for s in shapes if codec_of(spec).parts(s)[0].row_shape is None]
    planes = sum(math.prod(s[:-1]) * spec.torch_dtype.itemsize for s in variable)
    return 4 * planes + 8 * len(variable)


def _columns_bytes(sample: TokenSample) -> int:
    texts = (json.dumps(getattr(sample, name), ensure_ascii=False) for name in COLUMNS)
    return sum(len(text.encode()) + 1 for text in texts)


def _num_shards(spec: StoreSpec, content: float, mean_sample: float) -> int:
    """A shard is closed before the sample that would not fit, so half a sample is left free."""
    room = spec.shard_bytes - _SHARD_BYTES - mean_sample / 2
    return math.ceil(content / max(room, mean_sample, 1.0))
