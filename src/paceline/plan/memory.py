"""Memory of each stage, by what it holds: on the device that computes, and on the host beside it.

These are sums of what the code keeps at a time, not measured peaks; an allocator adds its own.
"""

from dataclasses import dataclass

import torch

from paceline.draft.config import DraftConfig
from paceline.draft.objectives import OBJECTIVES
from paceline.ops.attention import BLOCK_ROWS
from paceline.plan.activations import kept_bytes, taught_rows, weight_bytes
from paceline.plan.data import DataSample
from paceline.plan.shape import TargetShape
from paceline.plan.sizes import DraftShape
from paceline.recipe import ExtractOptions, TrainOptions
from paceline.store import StoreSpec
from paceline.store.sizes import StoreSize

# The interpreter with torch and transformers, and a tokenizer.
_PROCESS_BYTES = 700 << 20
# Residual, norm, two halves of a gated MLP and its product live at once in a forward pass.
_STREAM_COPIES = 6
# Of the losses in plain torch: log p, p, both at each student row, q, a gradient.
_TWIN_COPIES = 6


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
    shape: TargetShape,
    draft: DraftShape,
    data: DataSample,
    spec: StoreSpec,
    dtype: str,
    on_gpu: bool,
) -> Memory:
    item = getattr(torch, dtype).itemsize
    config = draft.config
    batch = _micro_batch(train, data)
    own = 0 if dtype == "float32" else draft.trained
    states = (batch.rows * spec.num_aux + batch.supervised) * spec.hidden_size * item
    kept = kept_bytes(config, batch.rows, batch.taught, item, 0 if on_gpu else batch.scores)
    work = {
        "masters and moments (float32)": draft.state_bytes(train.optimiser),
        "weights in " + dtype: (own + draft.frozen) * item,
        "weights with their norms' gains, sum of the head's gradient": weight_bytes(
            config, item, train.train_head
        ),
        "embedding": draft.embedding * item,
        "teacher's head": teacher_width(train, config) * shape.hidden_size * item,
        "states of a micro-batch": states,
        "activations": kept,
        "gradients of other micro-batches (float32)": 0 if batch.is_all else 4 * draft.trained,
        "logits of a chunk, then gradients": sum(batch.taught) * config.hidden_size * item
        + max(
            _logit_bytes(train, config, batch, item, on_gpu),
            (draft.trained + batch.taught[-1] * config.intermediate_size) * item,
        ),
    }
    work = {name: value for name, value in work.items() if value}
    host = {"process": _PROCESS_BYTES, "batches read ahead": 2 * states}
    return Memory(host, work) if on_gpu else Memory(host | work, {})


@dataclass(frozen=True)
class _MicroBatch:
    """rows: with auxiliary states. taught: rows of each TTT step. scores: keys that a query of the
    plain-torch attention is held against, those of other documents in its block included. is_all:
    an optimiser step has no other micro-batch."""

    rows: int
    supervised: int
    taught: list[int]
    scores: int
    is_all: bool


def _micro_batch(train: TrainOptions, data: DataSample) -> _MicroBatch:
    samples = data.samples
    total = max(sum(s.num_tokens for s in samples), 1)
    supervised = sum(s.num_supervised for s in samples)
    step_tokens = round(train.batch_rows * total / max(supervised, 1))
    tokens = min(train.micro_batch_tokens, step_tokens)
    part = lambda count: round(count * tokens / total)
    return _MicroBatch(
        rows=part(sum(s.num_aux_rows for s in samples)),
        supervised=part(supervised),
        taught=[part(n) for n in taught_rows([s.loss_mask for s in samples], train.ttt_steps)],
        scores=min(total // max(len(samples), 1) + BLOCK_ROWS, tokens),
        is_all=step_tokens <= train.micro_batch_tokens,
    )


def teacher_width(train: TrainOptions, config: DraftConfig) -> int:
    """Logits that the teacher makes of a position."""
    return config.vocab_size if _needs_whole_softmax(train, config) else config.draft_vocab_size


def _needs_whole_softmax(train: TrainOptions, config: DraftConfig) -> bool:
    return OBJECTIVES[train.loss].whole_softmax and config.draft_vocab_size < config.vocab_size


def _logit_bytes(
    train: TrainOptions, config: DraftConfig, batch: _MicroBatch, item: int, on_gpu: bool
) -> int:
    """Of a chunk of teacher positions: the teacher's logits and those of one step's students. On
    the CPU also both distributions and what is worked out of them, float32."""
    whole = config.vocab_size if _needs_whole_softmax(train, config) else 0
    narrow = config.draft_vocab_size
    row = max(2 * narrow, whole + narrow) * item
    if not on_gpu:
        row += _TWIN_COPIES * narrow * 4
    return min(train.logit_chunk, batch.supervised) * row


def _held_of_shard(options: ExtractOptions, spec: StoreSpec, size: StoreSize) -> int:
    """What a shard keeps in memory until it is closed: all but its auxiliary states."""
    shard = min(options.shard_bytes, size.total)
    return shard // (spec.num_aux + 1)


def _parallel(engine_options: dict) -> int:
    return engine_options.get("tensor_parallel_size", 1) * engine_options.get(
        "pipeline_parallel_size", 1
    )
