"""Seconds of each stage: from measured rates where they were measured, else from arithmetic and the
device's rate of matrix products."""

from dataclasses import dataclass

from paceline.contracts import HELDOUT_SPLIT, TRAIN_SPLIT
from paceline.draft.config import DraftConfig
from paceline.plan.activations import taught_rows
from paceline.plan.data import DataSample
from paceline.plan.memory import teacher_width
from paceline.plan.shape import TargetShape
from paceline.plan.sizes import DraftShape
from paceline.recipe import EvaluateOptions, PlanOptions, TrainOptions
from paceline.train.flops import flops_of_rows
from paceline.train.length import RunLength

# Shares of the rate of large matrix products that the work is taken to reach where nothing was
# measured: estimates, so that such times are right to a factor of about two.
TRAIN_SHARE, GENERATE_SHARE = 0.5, 0.1
# Of extraction on GPUs, by engine: seen with 8 billion weights on an H200 (benchmarks/RESULTS.md).
_CPU_EXTRACT_SHARE = 0.5
_GPU_EXTRACT_SHARES = {"vllm": 0.75, "transformers": 0.3}
# A forward pass is a third of a training step; so is a chain of as many steps.
_FORWARD_SHARE = 1 / 3
# A look at held-out data is a forward pass for the loss and about another one for the walk.
_LOOK_SHARE = 2 * _FORWARD_SHARE


@dataclass(frozen=True)
class Measured:
    """What a short run on this machine took: rates, and what does not grow with the data.

    states_share: stored bytes of states over those of their codec's (or raw) width.
    """

    extract_start_s: float
    extract_tokens_per_s: float
    train_start_s: float
    train_s_per_step: float
    states_share: float
    prepare_start_s: float
    answer_tokens: float | None = None
    generate_tokens_per_s: float | None = None
    generate_start_s: float = 0.0


@dataclass(frozen=True)
class Duration:
    """seconds: None where it is not foretold. how: the arithmetic, in words."""

    seconds: float | None
    how: str


def generate_time(
    options: PlanOptions,
    data: DataSample,
    shape: TargetShape,
    flops: float,
    answer_tokens: float,
    measured: Measured | None,
) -> Duration:
    tokens = data.rows * data.num_answers * answer_tokens
    if measured and measured.generate_tokens_per_s:
        rate = measured.generate_tokens_per_s * options.devices
        seconds = measured.generate_start_s + tokens / rate
        return Duration(seconds, f"{tokens:,.0f} answer tokens / {rate:,.0f} a second (measured)")
    per_token = shape.token_flops(data.mean_context, with_head=True)
    rate = flops * options.devices * GENERATE_SHARE
    return Duration(
        tokens * per_token / rate,
        f"{tokens:,.0f} answer tokens x {per_token:.3g} FLOP / ({GENERATE_SHARE} of "
        f"{options.devices} x {flops:.3g} FLOP/s, batches kept large)",
    )


def prepare_time(data: DataSample, measured: Measured | None) -> Duration:
    start = measured.prepare_start_s if measured else 0.0
    if not data.convert_s:
        return Duration(0.0, "not counted: no row was read")
    return Duration(
        start + data.rows * data.convert_s,
        f"{data.rows:,} rows x {1000 * data.convert_s:.2f} ms (measured on the sample)",
    )


def extract_share(engine: str, on_gpu: bool) -> float:
    """The share of the rate of matrix products that extraction is taken to reach."""
    return _GPU_EXTRACT_SHARES[engine] if on_gpu else _CPU_EXTRACT_SHARE


def extract_time(
    options: PlanOptions,
    data: DataSample,
    shape: TargetShape,
    flops: float,
    share: float,
    measured: Measured | None,
) -> Duration:
    """share: see `extract_share`."""
    tokens = data.num_forward_tokens
    if measured:
        rate = measured.extract_tokens_per_s * options.devices
        return Duration(
            measured.extract_start_s + tokens / rate,
            f"{measured.extract_start_s:.1f} s to start and probe + {tokens:,} tokens / "
            f"{rate:,.0f} a second (measured)",
        )
    per_token = shape.token_flops(data.mean_context)
    return Duration(
        tokens * per_token / (flops * options.devices * share),
        f"{tokens:,} tokens x {per_token:.3g} FLOP / ({share} of {options.devices} x "
        f"{flops:.3g} FLOP/s)",
    )


def train_steps(options: TrainOptions, data: DataSample) -> int:
    """Optimiser steps of the run, as `train` counts them."""
    return RunLength.of(options, _counted_rows(options, data)).num_steps


def train_time(
    options: PlanOptions,
    train: TrainOptions,
    data: DataSample,
    draft: DraftShape,
    flops: float,
    measured: Measured | None,
) -> Duration:
    steps = train_steps(train, data)
    if measured:
        per_step = measured.train_s_per_step
        rows = _looked_at_rows(train, data, steps)
        as_steps = rows * _LOOK_SHARE / _rows_per_step(train, data)
        return Duration(
            measured.train_start_s + (steps + as_steps) * per_step / options.devices,
            f"{measured.train_start_s:.1f} s to start + ({steps:,} steps + looks at {rows:,} "
            f"held-out rows, as {as_steps:,.1f} steps) x {per_step:.3f} s (measured) / "
            f"{options.devices}",
        )
    per_step = _step_flops(train, data, draft.config)
    return Duration(
        steps * per_step / (flops * options.devices * TRAIN_SHARE),
        f"{steps:,} steps x {per_step:.3g} FLOP / ({TRAIN_SHARE} of {options.devices} x "
        f"{flops:.3g} FLOP/s)",
    )


def _step_flops(train: TrainOptions, data: DataSample, config: DraftConfig) -> float:
    """What an optimiser step needs on average, by the formula that its log goes by."""
    samples = [s for s in data.samples if s.split == TRAIN_SPLIT]
    supervised = sum(s.num_supervised for s in samples)
    taught = taught_rows([s.loss_mask for s in samples], train.ttt_steps)
    whole, warming = (
        flops_of_rows(
            config,
            sum(s.num_aux_rows for s in samples),
            rows,
            supervised,
            trains_head=train.train_head,
            teacher_width=teacher_width(train, config),
        )
        for rows in (taught, taught[:1])
    )
    mean = (1 - train.ttt_warmup) * whole + train.ttt_warmup * warming
    return mean * _rows_per_step(train, data) / max(supervised, 1)


def _counted_rows(train: TrainOptions, data: DataSample) -> int:
    return data.num_supervised_in(TRAIN_SPLIT, train.batch_rows)


def _rows_per_step(train: TrainOptions, data: DataSample) -> float:
    counted = _counted_rows(train, data)
    every = data.num_supervised_in(TRAIN_SPLIT)
    return RunLength.of(train, counted).rows_per_step(counted, every)


def evaluate_time(
    evaluate: EvaluateOptions,
    train: TrainOptions,
    data: DataSample,
    train_seconds: float | None,
    steps: int,
) -> Duration:
    """A chain over the held-out answers, as so many forward steps of training."""
    if evaluate.mode != "chain" or train_seconds is None:
        return Duration(None, f"mode {evaluate.mode} is not foretold")
    rows = _heldout_rows(data)
    per_row = train_seconds / (steps * _rows_per_step(train, data)) / train.ttt_steps
    longest = max(evaluate.num_draft_tokens)
    return Duration(
        rows * per_row * _FORWARD_SHARE * longest,
        f"{rows:,} held-out rows x {longest} steps x a third of a training step's time per row",
    )


def _looked_at_rows(train: TrainOptions, data: DataSample, steps: int) -> int:
    """Held-out rows of all looks of a training."""
    samples = data.num_samples_in(HELDOUT_SPLIT)
    share = min(1.0, (train.eval_samples or samples) / max(samples, 1))
    looks = 1 + ((steps - 1) // train.eval_every if train.eval_every else 0)
    return round(looks * share * _heldout_rows(data))


def _heldout_rows(data: DataSample) -> int:
    return data.num_supervised_in(HELDOUT_SPLIT)
