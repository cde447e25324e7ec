"""The `train` stage: checks its inputs, starts or resumes a run, and leaves a draft."""

import logging
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paceline import fingerprint
from paceline.artefact import StageFolder, describe_input, load_finished, open_stage
from paceline.contracts import HELDOUT_SPLIT, TRAIN_SPLIT
from paceline.device import choose_device, choose_dtype, dtype_name
from paceline.draft.checkpoint import WEIGHTS_FILE, save_draft
from paceline.draft.config import draft_config
from paceline.draft.losses import Teacher
from paceline.draft.model import Draft
from paceline.draft.objectives import OBJECTIVES
from paceline.errors import FingerprintMismatch, TrainingError, UsageError
from paceline.forms.source import open_draft
from paceline.progress import progress_bar
from paceline.recipe import TrainOptions
from paceline.runlog import LOG_FILE
from paceline.store import Store
from paceline.store.cache import Cache
from paceline.target.model import TeacherHead
from paceline.target.spec import Target, open_target
from paceline.train.batches import StepPlan
from paceline.train.checkpoint import load_checkpoint, save_checkpoint
from paceline.train.loop import Trainer, append_record, figures
from paceline.train.optimiser import MasterAdamW
from paceline.train.start import earlier_draft, new_draft
from paceline.vocab import DraftVocabulary, load_vocabulary

logger = logging.getLogger(__name__)

_AUX_RMS_SAMPLES = 32


def run(options: TrainOptions) -> dict[str, Any]:
    """Train a draft on a store. Returns the manifest's result.

    Raises FingerprintMismatch for inputs of different targets, TrainingError for data without
    supervised rows or a loss that is not finite.
    """
    if not (options.store and options.out and (options.vocab or options.start_from)):
        raise UsageError(
            "train: pass `store` (of `extract`), `vocab` (of `align`; or `start_from`, a draft) "
            "and `out`"
        )
    store = Store(options.store, cache=Cache(options.cache_dir, options.cache_bytes))
    target = open_target(options, store.manifest.result["target"])
    target.check_made_by(
        store.manifest.inputs["target"]["fingerprint"], f"{store.folder} holds states of"
    )
    inputs = {
        "store": describe_input(options.store, store.manifest),
        "target": target.describe_input(),
    }
    if options.start_from:
        source = open_draft(options.start_from, options.start_form)
        earlier = earlier_draft(source, target, store)
        vocabulary = DraftVocabulary(earlier.d2t.numpy(), earlier.t2d.numpy())
        inputs["start_from"] = source.describe_input()
    else:
        earlier, vocabulary = None, _vocabulary(options.vocab, target)
        inputs["vocab"] = describe_input(options.vocab, load_finished(options.vocab, "align"))
    with open_stage(options.out, "train", inputs, options.identity(), options.overwrite) as stage:
        if stage.done:
            return stage.result
        return _train(options, stage, store, vocabulary, target, earlier)


def _vocabulary(folder: str, target: Target) -> DraftVocabulary:
    vocabulary = load_vocabulary(folder)
    if len(vocabulary.t2d) != target.vocab_size:
        raise FingerprintMismatch(
            f"{folder} is for a logit width of {len(vocabulary.t2d)}, the target has "
            f"{target.vocab_size}: run `paceline align` on this target's data"
        )
    return vocabulary


def _train(
    options: TrainOptions,
    stage: StageFolder,
    store: Store,
    vocabulary: DraftVocabulary,
    target: Target,
    earlier: Draft | None,
) -> dict[str, Any]:
    torch.manual_seed(options.seed)
    device = choose_device(options.device)
    dtype = choose_dtype(options.dtype, device, target.native_dtype())
    plan = StepPlan(
        samples=_train_samples(store),
        num_rows=store.records.num_supervised,
        num_tokens=store.records.num_aux_rows,
        batch_rows=options.batch_rows,
        seed=options.seed,
    )
    draft = earlier
    if draft is None:
        draft = _new_draft(options, store, plan, vocabulary, target)
    trainer = _build(options, store, plan, draft.to(device), vocabulary, target, dtype)
    start = load_checkpoint(stage.path, trainer.optimiser)
    logger.info(
        "train: %d optimiser steps of %d rows (from step %d), %s on %s, %.1f M trained weights",
        trainer.total_steps,
        options.batch_rows,
        start,
        dtype_name(dtype),
        device,
        sum(p.numel() for p in trainer.optimiser.masters.values()) / 1e6,
    )
    heldout = store.split(HELDOUT_SPLIT).tolist()
    _loop(trainer, stage.path, start, heldout)
    final = trainer.heldout(heldout)
    draft = _float32_draft(trainer)
    save_draft(stage.path, draft)
    result = {
        "target": asdict(target.reference),
        "draft": draft.config.to_dict(),
        "steps": trainer.total_steps,
        "dtype": dtype_name(dtype),
        "device": str(device),
        "heldout": final,
        "train_samples": len(trainer.plan.samples),
    }
    return stage.finish(result, content=fingerprint.of_file(stage.path / WEIGHTS_FILE))


def _new_draft(
    options: TrainOptions,
    store: Store,
    plan: StepPlan,
    vocabulary: DraftVocabulary,
    target: Target,
) -> Draft:
    config = draft_config(
        options.draft, target.text_config, store.spec.layers.aux, len(vocabulary.d2t)
    )
    return new_draft(
        config,
        vocabulary,
        target,
        aux_rms(store, plan.samples),
        options.seed,
        from_target=options.draft.init == "target",
    )


def _build(
    options: TrainOptions,
    store: Store,
    plan: StepPlan,
    draft: Draft,
    vocabulary: DraftVocabulary,
    target: Target,
    dtype: torch.dtype,
) -> Trainer:
    device = draft.fc.weight.device
    for module in draft.children():
        module.to(dtype)
    return Trainer(
        draft=draft.train(),
        teacher=_teacher(options, store, vocabulary, target, dtype, device),
        optimiser=MasterAdamW(draft, options),
        store=store,
        plan=plan,
        options=options,
        total_steps=options.max_steps or plan.total_steps(options.epochs),
        device=device,
        dtype=dtype,
    )


def _teacher(
    options: TrainOptions,
    store: Store,
    vocabulary: DraftVocabulary,
    target: Target,
    dtype: torch.dtype,
    device: torch.device,
) -> Teacher:
    """Logits over the draft vocabulary, or of all ids where the loss needs the whole softmax."""
    columns = torch.from_numpy(vocabulary.selected)
    whole = OBJECTIVES[options.loss].whole_softmax and len(columns) < target.vocab_size
    rows = None if whole else columns
    head = TeacherHead(target, dtype, device, rows=rows, is_normed=store.spec.last_is_normed)
    return Teacher(head, columns.to(device) if whole else None)


def _train_samples(store: Store) -> np.ndarray:
    samples = store.split(TRAIN_SPLIT)
    samples = samples[store.records.num_supervised[samples] > 0]
    if not len(samples):
        raise TrainingError(f"{store.folder} has no sample of the training split to learn from")
    return samples


def _loop(trainer: Trainer, folder: Path, start: int, heldout: list[int]) -> None:
    options = trainer.options
    began = time.perf_counter()
    with progress_bar("train", trainer.total_steps - start, "step") as bar:
        for record in trainer.run(start):
            step = record["step"] + 1
            last = step == trainer.total_steps
            if step % options.log_every == 0 or last:
                line = _plain_record(record, options, time.perf_counter() - began)
                append_record(folder / LOG_FILE, line)
                bar.advance(0, f"loss {line['loss']:.3f}")
            if options.eval_every and step % options.eval_every == 0 and not last:
                seen = trainer.heldout(heldout)
                append_record(folder / LOG_FILE, {"step": step, "heldout": seen})
            if step % options.checkpoint_every == 0 and not last:
                save_checkpoint(folder, step, trainer.optimiser)
            bar.advance(1)


def _plain_record(
    record: dict[str, Any], options: TrainOptions, elapsed_s: float
) -> dict[str, Any]:
    seen = figures(record.pop("sums"), options.step_decay)
    loss = float(record["loss"])
    if not loss == loss:
        raise TrainingError(f"loss is {loss} at optimiser step {record['step']}")
    speed = {
        "tokens_per_s": record["tokens"] / record["step_s"],
        "rows_per_s": record["rows"] / record["step_s"],
    }
    return {**record, **speed, "loss": loss, "elapsed_s": elapsed_s, "train": seen}


def aux_rms(store: Store, samples: np.ndarray) -> torch.Tensor:
    """Median RMS of the rows of each auxiliary state over some samples, float32 [A]."""
    chosen = samples[:: max(1, len(samples) // _AUX_RMS_SAMPLES)][:_AUX_RMS_SAMPLES]
    rows = torch.cat([store.read(int(i)).aux for i in chosen]).float()
    return rows.pow(2).mean(-1).sqrt().median(0).values


def _float32_draft(trainer: Trainer) -> Draft:
    """The trained draft from the float32 masters, on the CPU."""
    draft = trainer.draft.float().cpu().eval()
    with torch.no_grad():
        weights = dict(draft.named_parameters())
        for name, master in trainer.optimiser.masters.items():
            weights[name].copy_(master.cpu())
    return draft
