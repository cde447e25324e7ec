"""Samples and stores for the tests of the store. States are a function of the sample's id alone,
so that any writer, in any order, must give the same bytes."""

import json
import zlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch

from paceline.artefact import open_stage
from paceline.contracts import LayerPlan, TokenSample
from paceline.store import ShardWriter, Store, StoreSpec, content_fingerprint

LAYERS = LayerPlan((2, 3, 5), 8)


def make_spec(
    codec: str = "raw",
    dtype: str = "bfloat16",
    hidden_size: int = 16,
    shard_bytes: int = 12_500,
    layers: LayerPlan = LAYERS,
) -> StoreSpec:
    return StoreSpec(layers, hidden_size, dtype, codec, shard_bytes=shard_bytes)


def make_sample(number: int, num_tokens: int | None = None, split: str = "train") -> TokenSample:
    rng = np.random.default_rng(number)
    length = int(rng.integers(1, 40)) if num_tokens is None else num_tokens
    return TokenSample(
        sample_id=f"sample-{number}",
        input_ids=rng.integers(0, 50_000, length).astype(np.int32),
        loss_mask=rng.random(length) < 0.5,
        source=f"source-{number % 3}",
        split=split,
        conversation_id=f"talk-{number // 2}",
        num_past_end=number % 4,
        finished=(None, True, False)[number % 3],
    )


def states_of(sample: TokenSample, spec: StoreSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """aux [T, A, D] and last [M, D], the same for the same sample wherever they are made."""
    seed = zlib.crc32(sample.sample_id.encode())
    generator = torch.Generator().manual_seed(seed)
    shape = (sample.num_tokens, spec.num_aux + 1, spec.hidden_size)
    states = torch.randn(shape, generator=generator)
    # The first token carries massive activations, as in real models.
    states[:1, :, 0] = 24_960.0
    states = states.to(spec.torch_dtype)
    return states[:, :-1], states[torch.from_numpy(sample.loss_mask), -1]


def write_store(
    folder: Path,
    spec: StoreSpec,
    samples: Iterable[TokenSample],
    inputs: dict | None = None,
    result: dict | None = None,
) -> Path:
    """A finished store of the samples."""
    with open_stage(folder, "extract", inputs or {}, {}) as stage:
        with ShardWriter(stage.path, spec) as writer:
            for sample in samples:
                writer.add(sample, *states_of(sample, spec))
        made = {"store": spec.to_dict(), **(result or {})}
        stage.finish(made, content_fingerprint(stage.path))
    return folder


def write_manifest(folder: Path) -> None:
    """As of a run that is not finished."""
    fields = {"inputs": {}, "options": {}, "versions": {}, "created": ""}
    manifest = {"stage": "extract", "schema": 1, "status": "running", **fields}
    (folder / "manifest.json").write_text(json.dumps(manifest))


def assert_holds(store: Store, samples: Iterable[TokenSample]) -> None:
    """The store holds exactly these samples, and (for codecs without loss) their exact states."""
    wanted = {sample.sample_id: sample for sample in samples}
    assert sorted(store.records.sample_ids()) == sorted(wanted)
    for index in range(len(store)):
        stored = store.read(index)
        sample = wanted[stored.record.sample_id]
        aux, last = states_of(sample, store.spec)
        assert same_bytes(stored.aux, aux[: sample.num_aux_rows])
        assert same_bytes(stored.last, last)
        assert stored.input_ids.tolist() == sample.input_ids.tolist()
        assert stored.loss_mask.tolist() == sample.loss_mask.tolist()
        for name in ("source", "split", "conversation_id", "num_past_end", "finished"):
            assert getattr(stored.record, name) == getattr(sample, name)


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal in dtype, shape and every bit (so that -0.0 and NaN count)."""
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and a.contiguous().view(torch.uint8).equal(b.contiguous().view(torch.uint8))
    )
