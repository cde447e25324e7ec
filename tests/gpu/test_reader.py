"""Batches read ahead onto a GPU, through pinned memory and a stream of their own, and the kernel
that decodes 8-bit states there: against single reads on the CPU and against float64."""

import pytest
import torch

from paceline.ops.dequantise import dequantise
from paceline.store import PackedReader, Store, iterate_packed
from tests.float8 import FINITE, e4m3
from tests.store.making import make_sample, make_spec, same_bytes, write_store

pytestmark = pytest.mark.gpu

SAMPLES = [make_sample(i) for i in range(60)] + [make_sample(i, num_tokens=1) for i in (60, 61)]
STATES = ("aux", "last")


@pytest.fixture(scope="module", params=["raw", "lossless", "int8", "fp8"])
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Store:
    folder = tmp_path_factory.mktemp("reader") / request.param
    spec = make_spec(request.param, hidden_size=256, shard_bytes=400_000)
    return Store(write_store(folder, spec, SAMPLES))


def expected(store: Store, group: list[int], name: str) -> torch.Tensor:
    return torch.cat([getattr(store.read(i), name) for i in group])


@pytest.mark.parametrize("keep", [1, 3])
def test_batches_hold_their_samples(store: Store, keep: int) -> None:
    groups = [g for epoch in range(6) for g in iterate_packed(store, "train", 90, seed=epoch)]
    for group, batch in zip(groups, PackedReader(store, groups, device="cuda", keep=keep)):
        for name in STATES:
            states = getattr(batch, name)
            assert states.is_cuda and same_bytes(states.cpu(), expected(store, group, name))
        for name in ("input_ids", "loss_mask"):
            assert getattr(batch, name).is_pinned()
            assert same_bytes(getattr(batch, name), expected(store, group, name))


def test_a_consumer_that_lags_behind_sees_its_own_batch(store: Store) -> None:
    """The GPU works on a batch long after the reader was given its memory back: neither pinned
    memory nor memory of the GPU may be written again before that."""
    groups = [[i, i + 1, i + 2] for i in range(0, 57, 3)] * 2
    consumer = torch.cuda.Stream()
    seen = []
    with torch.cuda.stream(consumer):
        for batch in PackedReader(store, groups, device="cuda", num_threads=3):
            torch.cuda._sleep(20_000_000)
            seen.append({name: getattr(batch, name).clone() for name in STATES})
    torch.cuda.synchronize()
    for group, states in zip(groups, seen, strict=True):
        for name in STATES:
            assert same_bytes(states[name].cpu(), expected(store, group, name))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("kind", "num_scales"), [("int8", 32), ("fp8", 1)])
def test_codes_times_their_scales(kind: str, num_scales: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(254, (300, 3, 4096), generator=generator)
    if kind == "int8":
        values, codes = (drawn - 127).double(), (drawn - 127).to(torch.int8)
    else:
        values = torch.tensor([e4m3(byte) for byte in FINITE], dtype=torch.float64)[drawn]
        codes = torch.tensor(FINITE, dtype=torch.uint8)[drawn].view(torch.float8_e4m3fn)
    scales = torch.rand(300, 3, num_scales, generator=generator).bfloat16()
    exact = values * scales.double().repeat_interleave(4096 // num_scales, -1)
    out = torch.full_like(exact, float("nan"), dtype=dtype, device="cuda")
    given = dequantise(codes.cuda(), scales.cuda(), out).cpu()
    assert torch.equal(given.view(torch.uint8), exact.to(dtype).view(torch.uint8))


def test_more_codes_than_a_32_bit_number_counts() -> None:
    rows = 2**31 // 4096 + 2
    codes = torch.ones(rows, 4096, dtype=torch.int8, device="cuda")
    scales = torch.arange(rows, device="cuda").remainder(251).bfloat16()[:, None]
    out = dequantise(codes, scales, torch.zeros(rows, 4096, device="cuda").bfloat16())
    for row in (0, 1, rows // 2, rows - 2, rows - 1):
        assert out[row].unique().tolist() == [row % 251]
