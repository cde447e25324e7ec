"""The `train` stage: checks its inputs, starts or resumes a run, and leaves a draft."""

import json
import logging
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from paceline import fingerprint
from paceline.artefact import StageFolder, describe_input, load_finished, open_stage, write_json
from paceline.device import choose_dtype, dtype_name
from paceline.draft.checkpoint import WEIGHTS_FILE, build_draft, save_draft
from paceline.draft.config import DraftConfig, draft_config
from paceline.draft.losses import Teacher
from paceline.draft.model import Draft
from paceline.draft.objectives import OBJECTIVES
from paceline.errors import FingerprintMismatch, UsageError
from paceline.forms.source import open_draft
from paceline.recipe import TrainOptions
from paceline.store import Follower, Store
from paceline.target.model import TeacherHead
from paceline.target.spec import Target, open_target
from paceline.train.balance import RankShare
from paceline.train.batches import StepPlan
from paceline.train.checkpoint import load_checkpoint
from paceline.train.loop import Trainer
from paceline.train.optimiser import OPTIMISERS
from paceline.train.parallel import share_draft, whole
from paceline.train.ranks import Ranks, open_ranks
from paceline.train.session import Session
from paceline.train.source import leave, open_store, plan_of
from paceline.train.start import earlier_draft, new_draft
from paceline.train.trackers import open_trackers
from paceline.vocab import DraftVocabulary, load_vocabulary

logger = logging.getLogger(__name__)

START_FILE = "start.json"
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
    with open_ranks(options.device) as ranks, open_store(options, ranks) as (store, store_input):
        target = open_target(options, store.manifest.result["target"])
        target.check_made_by(
            store.manifest.inputs["target"]["fingerprint"], f"{store.folder} holds states of"
        )
        inputs = {"store": store_input, "target": target.describe_input()}
        if options.start_from:
            source = open_draft(options.start_from, options.start_form)
            earlier = earlier_draft(source, target, store)
            vocabulary = DraftVocabulary(earlier.d2t.numpy(), earlier.t2d.numpy())
            inputs["start_from"] = source.describe_input()
        else:
            earlier, vocabulary = None, _vocabulary(options.vocab, target)
            inputs["vocab"] = describe_input(options.vocab, load_finished(options.vocab, "align"))
        with ExitStack() as stack:
            stage = None
            if ranks.is_first:
                owned = open_stage(
                    options.out, "train", inputs, options.identity(), options.overwrite
                )
                stage = stack.enter_context(owned)
            if not ranks.from_first(lambda: stage.done):
                _train(options, ranks, stage, store, vocabulary, target, earlier)
            if ranks.is_first:
                leave(store, options)
            return ranks.from_first(lambda: stage.result)


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
    ranks: Ranks,
    stage: StageFolder | None,
    store: Store | Follower,
    vocabulary: DraftVocabulary,
    target: Target,
    earlier: Draft | None,
) -> None:
    """stage: of the first rank; the others touch nothing in the folder."""
    folder = Path(options.out)
    config = (
        earlier.config
        if earlier is not None
        else draft_config(
            options.draft, target.text_config, store.spec.layers.aux, len(vocabulary.d2t)
        )
    )
    share = RankShare.of_draft(config, options.ttt_steps, ranks.number, ranks.count)
    plan, total_steps = plan_of(options, store, share)
    if stage is not None:
        stage.announce({"steps": total_steps})
    start = ranks.from_first(lambda: _start(options, folder, plan, ranks.device, target))
    torch.manual_seed(options.seed)
    dtype = getattr(torch, start["dtype"])
    draft = earlier
    if draft is None:
        draft = _new_draft(options, config, start, vocabulary, target)
    head = draft.lm_head.weight.detach().clone()
    trainer = _build(options, ranks, store, plan, total_steps, draft, vocabulary, target, dtype)
    next_step = load_checkpoint(folder, trainer.optimiser, ranks)
    logger.info(
        "train: %d optimiser steps of %d rows (from step %d), %s on %s, %.1f M trained weights",
        trainer.total_steps,
        options.batch_rows,
        next_step,
        dtype_name(dtype),
        f"{ranks.count} ranks ({options.parallel})" if ranks.count > 1 else ranks.device,
        sum(p.numel() for p in trainer.optimiser.masters.values()) / 1e6,
    )
    shown = options.trackers if ranks.is_first else []
    with open_trackers(shown, folder, options.model_dump(mode="json"), next_step) as tell:
        session = Session(trainer, folder, next_step, tell)
        session.run()
    final = trainer.heldout()
    draft = _float32_draft(trainer)
    if stage is None:
        return
    if not options.train_head:
        # The arithmetic's copy is rounded; the frozen one is kept as it was.
        draft.lm_head.weight.data.copy_(head)
    save_draft(folder, draft)
    result = {
        "target": asdict(target.reference),
        "draft": draft.config.to_dict(),
        "steps": session.next_step,
        "dtype": dtype_name(dtype),
        "device": str(ranks.device),
        "ranks": ranks.count,
        "heldout": final,
        "train_samples": plan.num_samples(),
    }
    stage.finish(result, content=fingerprint.of_file(folder / WEIGHTS_FILE))


def _start(
    options: TrainOptions, folder: Path, plan: StepPlan, device: torch.device, target: Target
) -> dict[str, Any]:
    """Resolved choices, kept from the first start on: a resumed run must go on in the dtype that it
    began in, and the first samples of a stream may be gone by then."""
    path = folder / START_FILE
    if path.is_file():
        return json.loads(path.read_text())
    start = {
        "dtype": dtype_name(choose_dtype(options.dtype, device, target.native_dtype())),
        "aux_rms": None if options.start_from else aux_rms(plan).tolist(),
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
        head_from_target=not options.train_head,
    )


def _build(
    options: TrainOptions,
    ranks: Ranks,
    store: Store | Follower,
    plan: StepPlan,
    total_steps: int,
    draft: Draft,
    vocabulary: DraftVocabulary,
    target: Target,
    dtype: torch.dtype,
) -> Trainer:
    draft.to(ranks.device)
    draft.lm_head.requires_grad_(options.train_head)
    for module in draft.children():
        module.to(dtype)
    draft.train()
    parallel = share_draft(draft, ranks, options.parallel, options.optimiser)
    return Trainer(
        draft=draft,
        teacher=_teacher(options, store, vocabulary, target, dtype, ranks.device),
        optimiser=OPTIMISERS[options.optimiser](draft, options, parallel),
        store=store,
        plan=plan,
        options=options,
        total_steps=total_steps,
        dtype=dtype,
        ranks=ranks,
        parallel=parallel,
    )


def _teacher(
    options: TrainOptions,
    store: Store | Follower,
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


def aux_rms(plan: StepPlan) -> torch.Tensor:
    """Median RMS of the rows of each auxiliary state over the first samples, float32 [A]."""
    samples = plan.first_samples(_AUX_RMS_SAMPLES)
    rows = torch.cat([plan.store.read(i).aux for i in samples]).float()
    return rows.pow(2).mean(-1).sqrt().median(0).values


def _float32_draft(trainer: Trainer) -> Draft:
    """The trained draft from the float32 masters, on the CPU. All ranks enter."""
    trained = {n: whole(m).detach().cpu() for n, m in trainer.optimiser.masters.items()}
    rest = trainer.draft.state_dict().items()
    tensors = trained | {n: tensor.cpu() for n, tensor in rest if n not in trained}
    return build_draft(trainer.draft.config, tensors, torch.float32, "the trained draft")
