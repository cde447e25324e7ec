"""The `train` stage: checks its inputs, starts or resumes a run, and leaves a draft."""

import json
import logging
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from paceline.artefact import (
    Manifest,
    StageFolder,
    describe_input,
    load_finished,
    open_stage,
    write_json,
)
from paceline.device import dtype_name, product_flops, reset_peak, training_dtype
from paceline.draft.config import DraftConfig
from paceline.draft.model import Draft
from paceline.errors import FingerprintMismatch, UsageError
from paceline.forms.source import open_draft
from paceline.recipe import TrainOptions
from paceline.runlog import LOG_FILE
from paceline.store import Follower, Store
from paceline.target.spec import Target, open_target
from paceline.train.balance import RankShare
from paceline.train.batches import StepPlan
from paceline.train.best import BestDraft
from paceline.train.checkpoint import load_checkpoint
from paceline.train.heldout import refuse_blind_choice
from paceline.train.loop import Trainer
from paceline.train.optimiser import OPTIMISERS
from paceline.train.parallel import share_draft
from paceline.train.ranks import Ranks, open_ranks
from paceline.train.session import Session
from paceline.train.source import leave, open_store, plan_of
from paceline.train.start import check_early, earlier_draft, new_draft, new_shape
from paceline.train.teacher import open_teacher
from paceline.train.trackers import open_trackers
from paceline.train.weights import finish_draft, frozen_weights, kept_tensors, round_weights
from paceline.vocab import DraftVocabulary, load_vocabulary

logger = logging.getLogger(__name__)

START_FILE = "start.json"
AUX_RMS_SAMPLES = 32


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
    check_early(options)
    with ExitStack() as stack:
        with open_ranks(options.device) as ranks:
            store, store_input = stack.enter_context(open_store(options, ranks))
            target = open_target(options, store.manifest.result["target"])
            target.check_made_by(
                store.manifest.inputs["target"]["fingerprint"], f"{store.folder} holds states of"
            )
            inputs = {"store": store_input, "target": target.describe_input()}
            earlier, vocabulary, named = _beginning(options, target, store)
            inputs |= named
            stage = None
            if ranks.is_first:
                owned = open_stage(
                    options.out, "train", inputs, options.identity(), options.overwrite
                )
                stage = stack.enter_context(owned)
            if not ranks.from_first(lambda: stage.done):
                _train(options, ranks, stage, store, vocabulary, target, earlier)
            result = ranks.from_first(lambda: stage.result)
        # The ranks have parted: this may take as long as the writer does.
        if ranks.is_first:
            leave(store, options)
        return result


def _beginning(
    options: TrainOptions, target: Target, store: Store | Follower
) -> tuple[Draft | None, DraftVocabulary, dict[str, Any]]:
    """The draft that is trained further, if one is; the draft vocabulary; their entries among the
    inputs of the stage."""
    if options.start_from:
        source = open_draft(options.start_from, options.start_form)
        earlier = earlier_draft(source, target, store.spec.layers.aux)
        vocabulary = DraftVocabulary(earlier.d2t.numpy(), earlier.t2d.numpy())
        return earlier, vocabulary, {"start_from": source.describe_input()}
    manifest = load_finished(options.vocab, "align")
    vocabulary = _vocabulary(options.vocab, manifest, target)
    return None, vocabulary, {"vocab": describe_input(options.vocab, manifest)}


def _vocabulary(folder: str, manifest: Manifest, target: Target) -> DraftVocabulary:
    vocabulary, remedy = load_vocabulary(folder), "Run `paceline align` on this target's data."
    if len(vocabulary.t2d) != target.vocab_size:
        raise FingerprintMismatch(
            f"{folder} is for a logit width of {len(vocabulary.t2d)}, the target has "
            f"{target.vocab_size}. {remedy}"
        )
    made_by = {"tokenizer": manifest.result["tokenizer"]}
    target.check_made_by(made_by, f"{folder} holds token ids of", remedy)
    return vocabulary


def _train(
    options: TrainOptions,
    ranks: Ranks,
    stage: StageFolder | None,
    store: Store | Follower,
    vocabulary: DraftVocabulary,
    target: Target,
    earlier: Draft | None,
) -> None:
    """stage: of the first rank; the others touch nothing in the folder."""
    folder = Path(options.out)
    aux_layers, vocab_size = store.spec.layers.aux, len(vocabulary.d2t)
    config = (
        earlier.config
        if earlier is not None
        else new_shape(options, target.text_config, aux_layers, vocab_size)
    )
    share = RankShare.of_draft(config, options.ttt_steps, ranks.number, ranks.count)
    plan = plan_of(options, store, share)
    refuse_blind_choice(store, options)
    if stage is not None:
        _warn_of_warmup(options, plan.length.num_steps)
        stage.announce({"steps": plan.length.num_steps})
    first: list[int] = []
    if not (folder / START_FILE).is_file():
        # For the first shard of a stream each rank waits by itself, as long as it takes: those that
        # wait for another rank do so for ten minutes.
        first = plan.first_samples(AUX_RMS_SAMPLES)
    start = ranks.from_first(lambda: _start(options, folder, store, first, ranks.device))
    torch.manual_seed(options.seed)
    dtype = getattr(torch, start["dtype"])
    draft = earlier
    if draft is None:
        draft = _new_draft(options, config, start, vocabulary, target)
    trainer = _build(options, ranks, store, plan, draft, vocabulary, target, dtype)
    next_step = load_checkpoint(folder, trainer.optimiser, ranks)
    products = product_flops(ranks.device, dtype)
    reset_peak(ranks.device)
    logger.info(
        "train: %d optimiser steps of about %.0f rows (from step %d), %s on %s (%.3g TFLOP/s in "
        "matrix products), %.1f M trained weights",
        trainer.total_steps,
        plan.rows_per_step(),
        next_step,
        dtype_name(dtype),
        f"{ranks.count} ranks ({options.parallel})" if ranks.count > 1 else ranks.device,
        products / 1e12,
        sum(p.numel() for p in trainer.optimiser.masters.values()) / 1e6,
    )
    about = {
        "target": asdict(target.reference),
        "draft": config.to_dict(),
        "dtype": dtype_name(dtype),
        "device": str(ranks.device),
        "ranks": ranks.count,
    }
    best = BestDraft(folder, stage, about)
    shown = options.trackers if ranks.is_first else []
    with open_trackers(shown, folder, options.model_dump(mode="json"), next_step) as tell:
        session = Session(trainer, folder, next_step, products, best, tell)
        session.run()
    tensors = kept_tensors(trainer)
    if stage is not None:
        _finish(stage, trainer, session, tensors)


def _warn_of_warmup(options: TrainOptions, num_steps: int) -> None:
    if options.warmup_steps >= num_steps > 1:
        logger.warning(
            "train: the warm-up of %g steps is no shorter than the run's %d: the learning rate "
            "never reaches %g",
            options.warmup_steps,
            num_steps,
            options.learning_rate,
        )


def _finish(
    stage: StageFolder, trainer: Trainer, session: Session, tensors: dict[str, torch.Tensor]
) -> None:
    """Leave the draft that is the result: the last one, or the best one where that is asked for."""
    best = session.best
    about = {**best.about, "train_samples": trainer.plan.num_samples()}
    result = {
        **about,
        "steps": session.next_step,
        "draft_step": session.next_step,
        "heldout": session.heldout,
        "best": None,
    }
    if found := best.result() if trainer.options.eval_every else None:
        result["best"] = {"step": found["steps"], **found["heldout"]["acceptance"]}
        if trainer.options.load_best_model_at_end:
            result |= {"draft_step": found["steps"], "heldout": found["heldout"]}
            tensors = best.tensors()
    finish_draft(stage, trainer.draft, tensors, result, [LOG_FILE])


def _start(
    options: TrainOptions,
    folder: Path,
    store: Store | Follower,
    first: list[int],
    device: torch.device,
) -> dict[str, Any]:
    """Resolved choices, kept from the first start on: a resumed run must go on in the dtype that it
    began in, and the first samples of a stream may be gone by then. first: these, at that start."""
    path = folder / START_FILE
    if path.is_file():
        return json.loads(path.read_text())
    start = {
        "dtype": dtype_name(training_dtype(options.dtype, device)),
        "aux_rms": None if options.start_from else aux_rms(store, first).tolist(),
    }
    write_json(path, start)
    return start


def _new_draft(
    options: TrainOptions,
    config: DraftConfig,
    start: dict[str, Any],
    vocabulary: DraftVocabulary,
    target: Target,
) -> Draft:
    return new_draft(
        config,
        vocabulary,
        target,
        torch.tensor(start["aux_rms"], dtype=torch.float32),
        options.seed,
        from_target=options.draft.init == "target",
        train_head=options.train_head,
    )


def _build(
    options: TrainOptions,
    ranks: Ranks,
    store: Store | Follower,
    plan: StepPlan,
    draft: Draft,
    vocabulary: DraftVocabulary,
    target: Target,
    dtype: torch.dtype,
) -> Trainer:
    draft.to(ranks.device)
    draft.lm_head.requires_grad_(options.train_head)
    frozen = frozen_weights(draft)
    round_weights(draft, dtype).train()
    parallel = share_draft(draft, ranks, options.parallel, options.optimiser)
    return Trainer(
        draft=draft,
        frozen=frozen,
        teacher=open_teacher(
            options, store.spec.last_is_normed, vocabulary, target, dtype, ranks.device
        ),
        optimiser=OPTIMISERS[options.optimiser](draft, options, parallel),
        store=store,
        plan=plan,
        options=options,
        dtype=dtype,
        ranks=ranks,
        parallel=parallel,
    )


def aux_rms(store: Store | Follower, samples: list[int]) -> torch.Tensor:
    """Median RMS of the rows of each auxiliary state over some samples, float32 [A]."""
    # Sample by sample: the states of 32 long ones would be tens of GB in float32.
    rows = [store.read(i).aux.float().square().mean(-1).sqrt() for i in samples]
    return torch.cat(rows).median(0).values
