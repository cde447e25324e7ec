"""Memory of each stage, by what it holds: on the device that computes, and on the host beside it.

These are sums of what the code keeps at a time, not measured peaks; an allocator adds its own.
"""

from dataclasses import dataclass

import torch

from paceline.plan.data import DataSample
from paceline.plan.shape import TargetShape
from paceline.plan.sizes import DraftShape
from paceline.recipe import ExtractOptions, Recipe, TrainOptions
from paceline.store import StoreSpec
from paceline.store.sizes import StoreSize

# The interpreter with torch and transformers, and a tokenizer.
_PROCESS_BYTES = 700 << 20
# Residual, norm, two halves of a gated MLP and its product live at once in a forward pass.
_STREAM_COPIES = 6


@dataclass(frozen=True)
class Memory:
    """Bytes by what they hold. device is empty where the host computes."""

    host: dict[str, int]
    device: dict[str, int]

    @property
    def host_bytes(self) -> int:
        return sum(self.host.values())

    @property
    def device_bytes(self) -> int:
        return sum(self.device.values())


def process_memory() -> Memory:
    return Memory({"process": _PROCESS_BYTES}, {})


def extract_memory(
    options: ExtractOptions,
    shape: TargetShape,
    spec: StoreSpec,
    size: StoreSize,
    on_gpu: bool,
) -> Memory:
    """Of one engine. vLLM: of each of its GPUs, where what is left over becomes its cache."""
    item = spec.torch_dtype.itemsize
    host = {"process": _PROCESS_BYTES, "shard in work": _held_of_shard(options, spec, size)}
    if options.engine == "vllm":
        parallel = _parallel(options.engine_options)
        return Memory(
            host | {"ring of captured rows": 1 << 30},
            {f"weights / {parallel}": shape.weight_bytes // parallel},
        )
    weights = shape.num_weights * item
    tokens = options.max_batch_tokens
    width = shape.intermediate_size
    work = {
        "weights": weights,
        "captured states": tokens * (spec.num_aux + 1) * shape.hidden_size * item,
        "forward pass": tokens * (_STREAM_COPIES * shape.hidden_size + 3 * width) * item,
    }
    if not options.waive_reference:
        work["weights of the probe's own model"] = weights
    copied = {"captured states": work["captured states"]}
    return Memory(host | copied, work) if on_gpu else Memory(host | work, {})


def train_memory(
    train: TrainOptions,
    recipe: Recipe,
    shape: TargetShape,
    draft: DraftShape,
    data: DataSample,
    spec: StoreSpec,
    dtype: str,
    on_gpu: bool,
) -> Memory:
    item = getattr(torch, dtype).itemsize
    vocabulary = recipe.align.draft_vocab_size
    tokens = min(train.micro_batch_tokens, _step_tokens(train, data))
    rows = min(train.batch_rows, tokens)
    states = tokens * (spec.num_aux + 1) * shape.hidden_size * item
    width = shape.intermediate_size
    copies = 0 if dtype == "float32" else 2 * draft.trained * item
    work = {
        "masters, moments, gradients (float32)": draft.state_bytes(train.optimiser)
        + 4 * draft.trained,
        "weights and gradients in " + dtype: copies,
        "embedding": draft.embedding * item,
        "teacher's head": vocabulary * shape.hidden_size * item,
        "states of a micro-batch": states,
        "activations": (
            tokens * 3 * shape.hidden_size
            + rows * train.ttt_steps * (_STREAM_COPIES * shape.hidden_size + 3 * width)
        )
        * item,
        "logits of a chunk": train.logit_chunk * (1 + train.ttt_steps) * vocabulary * 8,
    }
    work = {name: value for name, value in work.items() if value}
    host = {"process": _PROCESS_BYTES, "batches read ahead": 2 * states}
    return Memory(host, work) if on_gpu else Memory(host | work, {})


def _step_tokens(train: TrainOptions, data: DataSample) -> int:
    supervised = sum(s.num_supervised for s in data.samples)
    share = supervised / max(sum(s.num_tokens for s in data.samples), 1)
    return round(train.batch_rows / share) if share else train.micro_batch_tokens


def _held_of_shard(options: ExtractOptions, spec: StoreSpec, size: StoreSize) -> int:
    """What a shard keeps in memory until it is closed: all but its auxiliary states."""
    shard = min(options.shard_bytes, size.total)
    return shard // (spec.num_aux + 1)


def _parallel(engine_options: dict) -> int:
    return engine_options.get("tensor_parallel_size", 1) * engine_options.get(
        "pipeline_parallel_size", 1
    )
