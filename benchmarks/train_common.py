"""What the benchmarks of training share: shapes, documents, the side of paceline."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from time import perf_counter

import numpy as np
import torch

from paceline.draft.batch import PackedBatch, from_packed
from paceline.draft.config import DraftConfig
from paceline.draft.losses import Teacher, distillation_loss
from paceline.draft.model import Draft
from paceline.ops.norm import rms_norm
from paceline.recipe import TrainOptions
from paceline.train.optimiser import MasterAdamW

DECAY = 0.8
CHUNK = 4096


@dataclass(frozen=True)
class Shape:
    """Of a target and the one-layer draft for it."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocab: int
    draft_vocab: int
    num_aux: int = 3

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    def config(self) -> DraftConfig:
        return DraftConfig(
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            num_layers=1,
            target_hidden_size=self.hidden,
            vocab_size=self.vocab,
            draft_vocab_size=self.draft_vocab,
            aux_layers=tuple(range(1, self.num_aux + 1)),
            rms_norm_eps=1e-5,
            max_position_embeddings=131072,
            rope={"rope_type": "default", "rope_theta": 500000.0},
            aux_norm="none",
        )


LLAMA_8B = Shape(4096, 14336, 32, 8, 128256, 32000)
SMOLLM2 = Shape(576, 1536, 9, 3, 49152, 8192)


@dataclass(frozen=True)
class Data:
    """Random documents one after the other. hidden [N, A D], last [N, D], ids [N], mask [N]."""

    hidden: torch.Tensor
    last: torch.Tensor
    ids: torch.Tensor
    mask: torch.Tensor
    lengths: list[int]

    @property
    def document(self) -> torch.Tensor:
        """Each token's document number [N]."""
        return torch.repeat_interleave(torch.arange(len(self.lengths)), torch.tensor(self.lengths))

    @property
    def position(self) -> torch.Tensor:
        """Each token's place in its document [N]."""
        return torch.cat([torch.arange(length) for length in self.lengths])


def make_data(
    shape: Shape, lengths: list[int], share: float, dtype: torch.dtype, device: str, seed: int = 0
) -> Data:
    """The last `share` of each document is supervised."""
    generator = torch.Generator(device).manual_seed(seed)
    random = lambda *size: torch.randn(*size, device=device, generator=generator).to(dtype)
    total = sum(lengths)
    mask = torch.cat([torch.arange(n) >= int(n * (1 - share)) for n in lengths])
    return Data(
        hidden=random(total, shape.num_aux * shape.hidden),
        last=random(total, shape.hidden),
        ids=torch.randint(shape.vocab, (total,), generator=torch.Generator().manual_seed(seed)),
        mask=mask,
        lengths=lengths,
    )


def log_normal_lengths(total: int, seed: int) -> list[int]:
    """Lengths as chats have them: log-normal of median 600, 64 to 4,096, `total` in all."""
    random, lengths = np.random.default_rng(seed), []
    while (left := total - sum(lengths)) > 0:
        length = int(np.clip(random.lognormal(np.log(600), 1.0), 64, 4096))
        lengths.append(left if left - length < 64 else length)
    return lengths


@dataclass(frozen=True)
class _Samples:
    """Implements draft.batch.PackedDocuments."""

    input_ids: torch.Tensor
    loss_mask: torch.Tensor
    aux: torch.Tensor
    last: torch.Tensor
    token_starts: list[int]
    aux_starts: list[int]


def packed(shape: Shape, data: Data) -> PackedBatch:
    """The batch as training gets it: auxiliary rows up to the last supervised
    position but one of each document, `last` of supervised positions only."""
    starts = np.cumsum([0, *data.lengths])
    ends = [int(np.flatnonzero(data.mask[a:b])[-1]) for a, b in pairwise(starts)]
    rows = np.concatenate([np.arange(a, a + n) for a, n in zip(starts, ends, strict=False)])
    where = data.hidden.device
    return from_packed(
        _Samples(
            input_ids=data.ids,
            loss_mask=data.mask,
            aux=data.hidden[torch.from_numpy(rows).to(where)].view(len(rows), shape.num_aux, -1),
            last=data.last[data.mask.to(where)],
            token_starts=starts.tolist(),
            aux_starts=np.cumsum([0, *ends]).tolist(),
        )
    )


def random_draft(
    shape: Shape, dtype: torch.dtype, device: str, train_head: bool
) -> tuple[Draft, Teacher]:
    with torch.device(device):
        draft = Draft(shape.config())
        head = torch.randn(shape.draft_vocab, shape.hidden).mul_(0.02).to(dtype)
    draft.to(dtype)
    for weight in draft.parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=0.02)
    draft.lm_head.requires_grad_(train_head)
    gain = torch.ones(shape.hidden, dtype=dtype, device=device)
    return draft, Teacher(lambda last: rms_norm(last, gain, 1e-5) @ head.T)


class PacelineStep:
    """One optimiser step of paceline's trainer; masters: with its own optimiser (float32 masters,
    clipping) and not torch's fused AdamW on the weights as they are."""

    def __init__(
        self,
        shape: Shape,
        dtype: torch.dtype,
        device: str,
        steps: int,
        train_head: bool,
        masters: bool = False,
    ) -> None:
        self.draft, self.teacher = random_draft(shape, dtype, device, train_head)
        self.steps, self.device, self.dtype = steps, device, dtype
        if masters:
            self._own = MasterAdamW(self.draft, TrainOptions())
        else:
            weights = [w for w in self.draft.parameters() if w.requires_grad]
            self._plain = torch.optim.AdamW(weights, lr=1e-4, fused=True)
        self._masters = masters

    def loss(self, batch: PackedBatch) -> torch.Tensor:
        batch = batch.to(self.device, self.dtype)
        rows = batch.num_supervised_rows
        return distillation_loss(self.draft, batch, self.teacher, self.steps, DECAY, rows, CHUNK)[0]

    def __call__(self, batch: PackedBatch) -> None:
        self.loss(batch).backward()
        if self._masters:
            self._own.accumulate()
            self._own.step(1e-4)
        else:
            self._plain.step()
            self._plain.zero_grad(set_to_none=True)


def median_seconds(
    step: Callable[[], None], count: int, warm: int, wait: Callable[[], None]
) -> float:
    """Median wall time of a step; `wait` returns when the device has done it."""
    for _ in range(warm):
        step()
    wait()
    times = []
    for _ in range(count):
        started = perf_counter()
        step()
        wait()
        times.append(perf_counter() - started)
    return median(times)
