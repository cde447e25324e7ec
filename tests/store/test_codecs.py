"""The 8-bit codecs against a slow way in float64, against bytes by hand, and their bounds."""

import json
import math
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.contracts import LayerPlan, TokenSample
from paceline.errors import StoreError
from paceline.store import ShardWriter, Store
from paceline.store.codecs import codec_of
from paceline.store.files import shard_path
from tests.float8 import FINITE, e4m3

from .making import make_sample, make_spec, same_bytes, write_store

MASSIVE = 24_960.0
DTYPES = ("bfloat16", "float16", "float32")


# In order of size, so that neighbours can be looked up.
E4M3 = sorted((e4m3(byte), byte) for byte in FINITE)


def bfloat16_at_least(value: float) -> float:
    """The smallest bfloat16 not below a float32: the upper half of its bits, or one more."""
    bits = struct.unpack("<I", struct.pack("<f", np.float32(value)))[0]
    if bits & 0xFFFF:
        bits = (bits & 0xFFFF0000) + 0x10000
    return struct.unpack("<f", struct.pack("<I", bits))[0]


def slow_int8(row: list[float], width: int) -> tuple[list[int], list[float], list[int]]:
    """Codes and scales of one row, one value at a time; and the places of values that lie so near
    the middle of two codes that float32 may round either way."""
    codes, scales, close = [], [], []
    for start in range(0, len(row), width):
        group = row[start : start + width]
        scale = bfloat16_at_least(max(map(abs, group)) / 127)
        scales.append(scale)
        for i, value in enumerate(group):
            exact = value / scale if scale else 0.0
            codes.append(max(-127, min(127, round(exact))))
            if abs(abs(exact - math.floor(exact)) - 0.5) < 1e-5:
                close.append(start + i)
    return codes, scales, close


def slow_fp8(row: list[float]) -> tuple[list[float], float]:
    """Values of the codes nearest to each value, and the row's scale."""
    scale = bfloat16_at_least(max(map(abs, row)) / 448)
    values = [value for value, _ in E4M3]
    nearest = [min(values, key=lambda v: abs(v - x / scale)) if scale else 0.0 for x in row]
    return nearest, scale


def real_like(rows: int, width: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """States with what real models have: a massive first token, channels 30 times the others."""
    states = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))
    states[:, 1] *= 30
    states[:1, 0] = MASSIVE
    return states.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("hidden_size", "width"), [(16, 16), (128, 128), (192, 96), (576, 96)])
def test_int8_is_the_slow_way(dtype: str, hidden_size: int, width: int) -> None:
    codec = codec_of(make_spec("int8", dtype, hidden_size))
    states = real_like(5, hidden_size, getattr(torch, dtype))
    codes, scale = codec.encode(states)
    assert (codes.dtype, scale.dtype) == (torch.int8, torch.bfloat16)
    for i, row in enumerate(states.double().tolist()):
        wanted, scales, close = slow_int8(row, width)
        assert scale[i].double().tolist() == scales
        found = codes[i].tolist()
        wrong = [k for k in range(hidden_size) if found[k] != wanted[k]]
        assert set(wrong) <= set(close)
        assert all(abs(found[k] - wanted[k]) == 1 for k in wrong)


@pytest.mark.parametrize("dtype", DTYPES)
def test_fp8_is_the_slow_way(dtype: str) -> None:
    codec = codec_of(make_spec("fp8", dtype, 24))
    states = real_like(4, 24, getattr(torch, dtype))
    codes, scale = codec.encode(states)
    for i, row in enumerate(states.double().tolist()):
        wanted, of_row = slow_fp8(row)
        assert scale[i].double().tolist() == [of_row]
        found = [e4m3(byte) for byte in codes[i].view(torch.uint8).tolist()]
        for value, nearest, exact in zip(found, wanted, row):
            # Two codes may be as near as float32 can tell.
            gap = abs(value - exact / of_row) - abs(nearest - exact / of_row)
            assert gap <= 1e-6 * abs(exact / of_row)


@pytest.mark.parametrize("codec", ["int8", "fp8"])
@pytest.mark.parametrize("row_shape", [(3, 512), (512,)], ids=["aux", "last"])
def test_a_long_sample_is_its_rows(codec: str, row_shape: tuple[int, ...]) -> None:
    """Longer than what is encoded at a time: row by row the same bytes."""
    made = codec_of(make_spec(codec, "bfloat16", 512))
    width = math.prod(row_shape)
    states = real_like(2**20 // width + 5, width, torch.bfloat16).view(-1, *row_shape)
    whole, rows = made.encode(states), [made.encode(row[None]) for row in states]
    for part, single in zip(whole, zip(*rows, strict=True), strict=True):
        assert same_bytes(part, torch.cat(single))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1.0, 0.0078125, 3.140625, 196.0])
def test_every_code_decodes_to_its_value(dtype: str, scale: float) -> None:
    for name, codes, values in (
        ("int8", torch.arange(-128, 128).to(torch.int8), [float(i) for i in range(-128, 128)]),
        (
            "fp8",
            torch.tensor([byte for _, byte in E4M3], dtype=torch.uint8).view(torch.float8_e4m3fn),
            [value for value, _ in E4M3],
        ),
    ):
        width = len(codes)
        spec = make_spec(name, dtype, width)
        codec = codec_of(spec)
        groups = width // codec.group_width
        scales = torch.full((1, groups), scale, dtype=torch.bfloat16)
        decoded = codec.decode([codes[None], scales], (1, width))
        exact = torch.tensor(values, dtype=torch.float64) * scale
        assert same_bytes(decoded[0] + 0.0, exact.to(getattr(torch, dtype)) + 0.0), name


def test_bytes_by_hand(tmp_path: Path) -> None:
    """One sample of two tokens in a shard: its codes and scales as anybody can work them out."""
    rows = torch.tensor([[[1.0, -2.0, 0.5, 127.0]], [[0.0, 0.0, 0.0, 0.0]]])
    last = torch.tensor([[448.0, -1.0, 2.0**-9, 0.0]])
    wanted = {
        # 0.5 is half way between 0 and 1 and goes to the even one; 127 / 127 is a scale of 1.
        ("int8", "aux"): bytes([1, 256 - 2, 0, 127]),
        ("int8", "aux.scale"): b"\x80\x3f",
        # 448 / 127 = 3.5275... is 0x40 61 c3 87 as float32, 0x40 62 rounded up; codes by / 3.53125.
        ("int8", "last"): bytes([127, 0, 0, 0]),
        ("int8", "last.scale"): b"\x62\x40",
        # 127 / 448 = 0.28348..., 0x3e 91 24 92; up: 0x3e 92 = 0.28515625. 1 / it = 3.5068 -> 3.5.
        ("fp8", "aux"): bytes([0x46, 0x80 | 0x4E, 0x3E, 0x7E]),
        ("fp8", "aux.scale"): b"\x92\x3e",
        ("fp8", "last"): bytes([0x7E, 0x80 | 0x38, 0x01, 0x00]),
        ("fp8", "last.scale"): b"\x80\x3f",
    }
    sample = TokenSample("one", np.array([5, 6], np.int32), np.array([False, True]))
    for codec in ("int8", "fp8"):
        spec = make_spec(codec, "float32", 4, layers=LayerPlan((2,), 8))
        with ShardWriter(tmp_path / codec, spec) as writer:
            writer.add(sample, rows, last)
        data = shard_path(tmp_path / codec, 0).read_bytes()
        length = struct.unpack("<Q", data[:8])[0]
        header = json.loads(data[8 : 8 + length])
        for (of_codec, name), expected in wanted.items():
            if of_codec == codec:
                start, end = header[name]["data_offsets"]
                assert data[8 + length + start : 8 + length + end] == expected, (codec, name)


@pytest.mark.parametrize("codec", ["int8", "fp8"])
def test_a_massive_first_token_costs_the_others_nothing(codec: str) -> None:
    made = codec_of(make_spec(codec, "bfloat16", 576))
    states = real_like(40, 576, torch.bfloat16)
    plain = states.clone()
    plain[0, 0] = 1.0
    encoded, calm = made.encode(states), made.encode(plain)
    assert all(torch.equal(a[1:].float(), b[1:].float()) for a, b in zip(encoded, calm))
    decoded = made.decode(encoded, (40, 576)).double()
    error = (decoded - states.double()).norm(dim=-1) / states.double().norm(dim=-1)
    assert float(error[1:].max()) < 0.04
    assert float(abs(decoded[0, 0] - MASSIVE)) <= MASSIVE / 16
    # With one scale for all tokens nothing would be left of the others.
    ruined = torch.round(states.double() / (MASSIVE / 127)) * (MASSIVE / 127)
    assert float((ruined - states.double())[1:].norm() / states.double()[1:].norm()) > 0.9


states_lists = st.lists(
    st.lists(st.floats(-60_000, 60_000, width=16), min_size=8, max_size=8), min_size=1, max_size=6
)


@settings(max_examples=150, deadline=None)
@given(rows=states_lists, dtype=st.sampled_from(DTYPES), codec=st.sampled_from(["int8", "fp8"]))
def test_no_value_is_further_off_than_its_scale_allows(
    rows: list[list[float]], dtype: str, codec: str
) -> None:
    made = codec_of(make_spec(codec, dtype, 8))
    states = torch.tensor(rows, dtype=torch.float64).to(getattr(torch, dtype))
    parts = made.encode(states)
    decoded = made.decode(parts, tuple(states.shape)).double()
    exact, of_row = states.double(), parts[1].double()
    if codec == "int8":
        allowed = of_row / 2
    else:
        allowed = torch.maximum(exact.abs() / 16, of_row * 2.0**-10)
    # Decoding rounds once more, to the store's dtype.
    allowed = allowed * 1.001 + exact.abs() * torch.finfo(getattr(torch, dtype)).eps
    assert bool(((decoded - exact).abs() <= allowed + 1e-30).all())
    assert bool(decoded.isfinite().all())
    # A row's bytes are its own: the same alone and among others.
    for i in range(len(states)):
        alone = made.encode(states[i : i + 1])
        assert all(same_bytes(a, b[i : i + 1]) for a, b in zip(alone, parts))


@pytest.mark.parametrize("codec", ["int8", "fp8"])
@pytest.mark.parametrize("largest", [65_504.0, -65_504.0, 65_000.0])
def test_the_largest_float16_stays_finite(codec: str, largest: float) -> None:
    made = codec_of(make_spec(codec, "float16", 8))
    states = torch.tensor([[largest, 1.0, -3.0, 0.0, 5.0, largest / 2, 7.0, 8.0]]).half()
    decoded = made.decode(made.encode(states), (1, 8))
    assert bool(decoded.isfinite().all())
    assert float(abs(decoded[0, 0] - largest)) <= abs(largest) / 14


@pytest.mark.parametrize("codec", ["int8", "fp8"])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_is_refused(codec: str, bad: float) -> None:
    made = codec_of(make_spec(codec, "float32", 8))
    states = torch.ones(2, 8)
    states[1, 3] = bad
    with pytest.raises(StoreError, match=f"codec {codec} cannot hold states that are not finite"):
        made.encode(states)


def test_a_width_without_a_fitting_group_is_refused() -> None:
    assert codec_of(make_spec("int8", hidden_size=7168)).group_width == 128
    with pytest.raises(StoreError, match="use fp8 or lossless"):
        codec_of(make_spec("int8", hidden_size=131))


@pytest.mark.parametrize(
    ("codec", "most"), [("raw", 0.88), ("lossless", 0.88), ("int8", 0.47), ("fp8", 0.46)]
)
def test_bytes_per_token_against_four_full_states(tmp_path: Path, codec: str, most: float) -> None:
    """Everything in the folder counts: ids, masks, checksums, index and manifest."""
    spec = make_spec(codec, "bfloat16", 576, shard_bytes=1 << 30)
    samples = [_half_supervised(i) for i in range(8)]
    folder = write_store(tmp_path / "store", spec, samples)
    assert len(Store(folder)) == 8
    total = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    num_tokens = sum(sample.num_tokens for sample in samples)
    share = total / num_tokens / (8 * 576)
    assert 0.4 < share <= most


def _half_supervised(number: int) -> TokenSample:
    sample = make_sample(number, num_tokens=500)
    mask = np.zeros(500, bool)
    mask[250:] = True
    return TokenSample(sample.sample_id, sample.input_ids, mask)
