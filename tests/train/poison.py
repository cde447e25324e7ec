"""A value that is not finite, in the bytes of a store of tests/lines.py."""

import json
import math
import struct

from paceline.recipe import TrainOptions
from paceline.train.balance import RankShare
from paceline.train.source import plan_of

from ..lines import TINY_LAYERS

LAYER, _WIDTH = 1, 32


def poison(store, index):
    """One value of one row of one auxiliary state of a sample, in the file."""
    record = store.records[index]
    shard = store.shard(record.shard)
    row = int(shard.offsets[record.position, 1]) + 1
    with open(shard.path, "r+b") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        start = json.loads(file.read(size))["aux"]["data_offsets"][0]
        file.seek(8 + size + start + 4 * _WIDTH * (row * len(TINY_LAYERS) + LAYER))
        file.write(struct.pack("<f", math.nan))
    return record.sample_id, shard.path


def samples_of_steps(store, max_steps):
    """Store indices of each optimiser step of `trained`; max_steps None: of one epoch."""
    options = TrainOptions(batch_rows=60, max_steps=max_steps, micro_batch_tokens=128)
    steps = plan_of(options, store, RankShare()).steps(0)
    return [[i for group in step.groups for i in group] for step in steps]
