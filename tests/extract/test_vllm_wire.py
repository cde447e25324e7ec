"""What goes over the wire comes out as it went in."""

from dataclasses import fields

import numpy as np
import pytest

from paceline.contracts import TokenSample
from paceline.extract.vllm import wire

# A value for each field that is not its default.
SAMPLE = TokenSample(
    sample_id="s\u00e4mple/1",
    input_ids=np.array([3, 2**31 - 1, 0], np.int32),
    loss_mask=np.array([False, True, True]),
    source="rows.jsonl",
    split="heldout",
    conversation_id="talk-7",
    num_past_end=2,
    finished=False,
)


@pytest.mark.parametrize("field", [f.name for f in fields(TokenSample)])
def test_every_field_of_a_sample_arrives(field: str) -> None:
    default = next(f.default for f in fields(TokenSample) if f.name == field)
    sent = getattr(SAMPLE, field)
    assert not np.array_equal(sent, default), "the test must send another value than the default"
    packed = wire.pack(wire.sample_message(4, SAMPLE))
    number, arrived = wire.read_sample(wire.unpack(packed))
    assert number == 4
    found = getattr(arrived, field)
    assert type(found) is type(sent)
    np.testing.assert_array_equal(found, sent, strict=isinstance(sent, np.ndarray))
