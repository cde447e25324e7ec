"""A deterministic run of the extract stage's way with the store, and what a good end looks like."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from safetensors import safe_open

from paceline.contracts import TokenSample
from paceline.store import (
    ShardWriter,
    Store,
    StoreSpec,
    content_fingerprint,
    published_ids,
)
from paceline.store.files import shard_numbers, shard_path
from paceline.store.staging import open_local_store

from .making import assert_holds, make_sample, make_spec, states_of

SAMPLES = [make_sample(i) for i in range(30)]
SPEC = make_spec(shard_bytes=16_000)


def run(
    folder: Path,
    samples: Sequence[TokenSample] = SAMPLES,
    spec: StoreSpec = SPEC,
    on_sample: Callable[[int], None] = lambda count: None,
    num_lanes: int = 1,
) -> None:
    """Open or resume the folder, write what is missing, commit: as `extract` does it."""
    with open_local_store(folder, {"data": {"fingerprint": "d"}}, {"o": 1}) as stage:
        if stage.done:
            return
        published = published_ids(stage.path)
        with ShardWriter(stage.path, spec, num_lanes=num_lanes) as writer:
            for sample in samples:
                if sample.sample_id not in published:
                    writer.add(sample, *states_of(sample, spec))
                    on_sample(writer.num_samples)
        stage.finish({"store": spec.to_dict()}, content_fingerprint(stage.path))


def published_now(folder: Path) -> dict[str, bytes]:
    """Each published sample's own bytes, read with the safetensors library alone. Fails where a
    published shard is not whole."""
    found: dict[str, bytes] = {}
    for number in shard_numbers(folder):
        with safe_open(shard_path(folder, number), framework="np") as file:
            tensors = {
                name: file.get_tensor(name)
                for name in ("samples", "offsets", "input_ids", "sample_checksums")
            }
        ids = json.loads(tensors["samples"].tobytes())["sample_id"]
        for i, sample_id in enumerate(ids):
            assert sample_id not in found
            start, end = tensors["offsets"][i : i + 2, 0].tolist()
            own = tensors["input_ids"][start:end].tobytes()
            found[sample_id] = own + tensors["sample_checksums"][i].tobytes()
    return found


def assert_equal_to_undisturbed(
    folder: Path, undisturbed: Path, samples: Sequence[TokenSample] = SAMPLES
) -> None:
    store, wanted = Store(folder), Store(undisturbed)
    assert_holds(store, samples)
    store.verify()
    assert store.manifest.fingerprint == wanted.manifest.fingerprint
    assert published_now(folder) == published_now(undisturbed)
    leftovers = [p.name for p in (folder / "shards").iterdir() if p.name.startswith(".")]
    assert leftovers == []
