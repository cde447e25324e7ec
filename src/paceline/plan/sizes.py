"""Bytes and files of each stage's folder."""

import math
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from paceline.contracts import LayerPlan
from paceline.dataset import write_part
from paceline.draft.config import DraftConfig
from paceline.draft.model import EMBEDDING_NAME, Draft
from paceline.plan.data import DataSample
from paceline.plan.shape import TargetShape
from paceline.prepare.answering import PART_ROWS as ANSWERS_PER_PART
from paceline.prepare.run import PART_BYTES, PART_ROWS
from paceline.recipe import ExportOptions, ExtractOptions, Recipe, TrainOptions
from paceline.store import StoreSpec
from paceline.store.sizes import StoreSize, store_size

# A manifest, a lock, a log: small beside what they stand with.
_SMALL_BYTES, _SMALL_FILES = 8 << 10, 2
# JSON text of a token: its id with a comma, and its share of the words.
_JSON_TOKEN_BYTES = 10
_LOG_RECORD_BYTES = 800
_PAGE_BYTES = 64 << 10
# The two newest checkpoints stay.
_CHECKPOINTS_KEPT = 2


@dataclass(frozen=True)
class Footprint:
    """bytes: what stays. peak_bytes: the most at any time. how: the arithmetic, in words."""

    bytes: int
    peak_bytes: int
    files: int
    how: str


@dataclass(frozen=True)
class DraftShape:
    """trained: weights that move; frozen: others but the target's embedding. own_bytes: of
    `draft.safetensors`. embedding: weights of the shared embedding (0 where the draft has its own).
    matrices: weights of the fusion and the layers."""

    config: DraftConfig
    trained: int
    frozen: int
    own_bytes: int
    embedding: int
    matrices: int

    def state_bytes(self, optimiser: str) -> int:
        """Masters and moments in float32: two moments by AdamW, one by Muon for the matrices that
        it moves (fusion and layers)."""
        by_muon = self.matrices if optimiser == "muon" else 0
        return 12 * self.trained - 4 * by_muon


def draft_shape(config: DraftConfig, train_head: bool) -> DraftShape:
    """What a draft of this shape weighs; built without memory."""
    with torch.device("meta"):
        draft = Draft(config)
    draft.lm_head.requires_grad_(train_head)
    sizes = {name: parameter.numel() for name, parameter in draft.named_parameters()}
    shared = sizes[EMBEDDING_NAME] if config.shares_embedding else 0
    own = {n: t for n, t in draft.state_dict().items() if n != EMBEDDING_NAME or not shared}
    matrices = sum(n for name, n in sizes.items() if name.startswith(("fc.", "layers.")))
    trained = sum(p.numel() for p in draft.parameters() if p.requires_grad)
    return DraftShape(
        config=config,
        trained=trained,
        frozen=sum(sizes.values()) - shared - trained,
        own_bytes=sum(t.numel() * t.itemsize for t in own.values()),
        embedding=shared,
        matrices=matrices,
    )


def store_spec(
    options: ExtractOptions, shape: TargetShape, layers: LayerPlan, dtype: str
) -> StoreSpec:
    return StoreSpec(
        layers=layers,
        hidden_size=shape.hidden_size,
        dtype=dtype,
        codec=options.codec,
        shard_bytes=options.shard_bytes,
    )


def generate_footprint(data: DataSample) -> Footprint:
    tokens = data.num_tokens
    parts = math.ceil(data.rows / ANSWERS_PER_PART)
    size = tokens * _JSON_TOKEN_BYTES + _SMALL_BYTES
    how = f"{tokens:,} tokens x {_JSON_TOKEN_BYTES} bytes of JSON (an id and its share of words)"
    return Footprint(size, size, parts + _SMALL_FILES, how)


def prepare_footprint(data: DataSample, shape: TargetShape) -> Footprint:
    """Parquet is what it is: a part is really written, and its bytes are scaled."""
    with tempfile.TemporaryDirectory(prefix="paceline-plan-") as folder:
        path = write_part(Path(folder), 0, list(data.samples), data.record.as_dict())
        part_bytes = path.stat().st_size
    counts = 8 * shape.vocab_size
    size = round(part_bytes * data.scale) + counts + _SMALL_BYTES
    rows_per_part = min(PART_ROWS, PART_BYTES / data.row_bytes if data.row_bytes else PART_ROWS)
    parts = math.ceil(data.rows / max(rows_per_part, 1))
    per_token = part_bytes / sum(s.num_tokens for s in data.samples)
    how = (
        f"{data.num_tokens:,} tokens x {per_token:.2f} bytes (a part written as Parquet, and "
        f"weighed) + {counts:,} of token counts"
    )
    return Footprint(size, size, parts + 2 + _SMALL_FILES, how)


def extract_footprint(
    options: ExtractOptions, spec: StoreSpec, data: DataSample, states_share: float | None
) -> tuple[Footprint, StoreSize]:
    size = store_size(spec, data.samples, data.scale, states_share or 1.0)
    rows = round(data.scale * sum(s.num_aux_rows for s in data.samples))
    share = "" if states_share is None else f" x {states_share:.3f} (measured)"
    bound = " (an upper bound: --measure tells)" if _is_bound(spec, states_share) else ""
    how = (
        f"({rows:,} rows x {spec.num_aux} states + {data.num_supervised:,} last states) x "
        f"{spec.hidden_size:,} x {_value_bytes(spec, size, data):.3f} bytes, codec {spec.codec}"
        f"{share}{bound}, + {round(size.tokens + size.entries + size.index):,} of ids, masks and "
        "index"
    )
    total = size.total
    if options.stream_bytes and options.stream_bytes < total:
        total = options.stream_bytes
        how += f"; of these {size.total:,} at most {total:,} stand at a time (stream_bytes)"
    total += _SMALL_BYTES
    # Besides: the index, start.json, two files that say who writes.
    files = size.num_shards + 4 + _SMALL_FILES + (options.workers - 1)
    return Footprint(total, total, files, how), size


def align_footprint(recipe: Recipe, shape: TargetShape) -> Footprint:
    size = 8 * recipe.align.draft_vocab_size + shape.vocab_size + _SMALL_BYTES
    how = f"8 x {recipe.align.draft_vocab_size:,} offsets + {shape.vocab_size:,} marks"
    return Footprint(size, size, 1 + _SMALL_FILES, how)


def train_footprint(options: TrainOptions, draft: DraftShape, steps: int) -> Footprint:
    state = draft.state_bytes(options.optimiser)
    kept = min(_CHECKPOINTS_KEPT, math.ceil(steps / options.checkpoint_every))
    log = steps // options.log_every * _LOG_RECORD_BYTES
    # The best draft has a folder of its own.
    drafts = 2 if options.eval_every else 1
    size = drafts * draft.own_bytes + kept * state + log + _SMALL_BYTES
    peak = size + max(state, draft.own_bytes if drafts > 1 else 0)
    how = (
        f"{'2 x ' if drafts > 1 else ''}{draft.own_bytes:,} of weights in float32 + {kept} "
        f"checkpoints x {state:,} of masters and moments ({draft.trained:,} trained weights; one "
        "more while it is written)"
    )
    return Footprint(size, peak, 4 + 3 * (drafts - 1) + 2 * kept + _SMALL_FILES, how)


def export_footprint(options: ExportOptions, draft: DraftShape, dtype: str) -> Footprint:
    item = getattr(torch, dtype).itemsize
    one = draft.own_bytes * item // 4
    if options.copy_embedding:
        one += draft.embedding * item
    forms = len(options.server)
    size = forms * (one + _SMALL_BYTES) + _SMALL_BYTES
    how = f"{forms} forms x {one:,} bytes of weights in {dtype}"
    return Footprint(size, size, 3 * forms + _SMALL_FILES, how)


def small_footprint(size: int, files: int, how: str) -> Footprint:
    return Footprint(size + _SMALL_BYTES, size + _SMALL_BYTES, files + _SMALL_FILES, how)


def result_footprint() -> Footprint:
    return small_footprint(48 << 10, 2, "figures alone")


def page_footprint() -> Footprint:
    return small_footprint(_PAGE_BYTES, 1, "one page")


def _is_bound(spec: StoreSpec, states_share: float | None) -> bool:
    return spec.codec == "lossless" and states_share is None


def _value_bytes(spec: StoreSpec, size: StoreSize, data: DataSample) -> float:
    values = data.scale * sum(
        s.num_aux_rows * spec.num_aux + s.num_supervised for s in data.samples
    )
    return size.states / (values * spec.hidden_size) if values else 0.0
