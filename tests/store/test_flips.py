"""Single bits that turn over in a finished store, anywhere: `inspect --verify` finds every one."""

import random
from pathlib import Path

import pytest

import paceline
from paceline.errors import StoreCorruption, UsageError

from .making import make_sample, make_spec
from .rounds import ROUNDS
from .working import assert_equal_to_undisturbed, run

SAMPLES = [make_sample(i) for i in range(8)]


@pytest.mark.parametrize("codec", ["raw", "lossless", "int8"])
def test_inspect_finds_every_flipped_bit(tmp_path: Path, codec: str) -> None:
    folder, spec = tmp_path / "store", make_spec(codec)
    run(folder, SAMPLES, spec)
    assert paceline.inspect(str(folder), verify=True)["verified"]
    paths = [*sorted((folder / "shards").iterdir()), folder / "manifest.json"]
    good = {path: path.read_bytes() for path in paths}
    rng = random.Random(codec)
    for _ in range(4 * ROUNDS):
        # Each file as often as another: a manifest is small, and matters as much.
        path = rng.choice(paths)
        bad = bytearray(good[path])
        at = rng.randrange(len(bad))
        bad[at] ^= 1 << rng.randrange(8)
        path.write_bytes(bad)
        with pytest.raises((StoreCorruption, UsageError)) as caught:
            paceline.inspect(str(folder), verify=True)
        assert path.name in str(caught.value), f"bit of byte {at}"
        path.write_bytes(good[path])
    assert paceline.inspect(str(folder), verify=True)["verified"]
    print(f"codec {codec}: {4 * ROUNDS} flipped bits found")


def test_bits_of_the_index_only_cost_making_it_again(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    run(folder, SAMPLES)
    path = folder / "index.safetensors"
    good = path.read_bytes()
    rng = random.Random(0)
    for _ in range(ROUNDS):
        bad = bytearray(good)
        bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
        path.write_bytes(bad)
        assert paceline.inspect(str(folder), verify=True)["verified"]
        assert path.read_bytes() == good
    run(tmp_path / "undisturbed", SAMPLES)
    assert_equal_to_undisturbed(folder, tmp_path / "undisturbed", SAMPLES)
    print(f"{ROUNDS} flipped bits of the index made good")
