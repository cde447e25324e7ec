"""The `align` stage: the draft vocabulary from the supervised tokens of the training split."""

import logging
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from paceline.artefact import Manifest, describe_input, load_finished, open_stage
from paceline.contracts import TRAIN_SPLIT
from paceline.errors import UsageError, VocabularyError
from paceline.recipe import AlignOptions
from paceline.side_files import check_side_files
from paceline.store import Store
from paceline.target.spec import open_target
from paceline.verbs import make_callable
from paceline.vocab import DraftVocabulary

logger = logging.getLogger(__name__)

# Sizes at which the coverage curve is told, besides the chosen one.
_CURVE_SIZES = tuple(2**i for i in range(8, 19))


@dataclass(frozen=True)
class Selection:
    """A draft vocabulary and how it came about."""

    vocabulary: DraftVocabulary
    num_filler: int  # ids taken without ever having been seen supervised
    coverage: float  # share of the supervised tokens that the draft can say


def select_vocabulary(
    counts: np.ndarray,
    draft_vocab_size: int,
    num_real_tokens: int,
    always: tuple[int, ...] = (),
) -> Selection:
    """The most frequent supervised tokens, ascending, `always` among them where real.

    counts: int64 [V], V the logit width; num_real_tokens: ids that the tokenizer can say. Ties go
    to the lower id. Too few distinct tokens are filled with the lowest unused real ids, never with
    padding ids of the embedding; a full vocabulary (size V) has them all. Raises VocabularyError
    for a size above V, or between the real ids and V.
    """
    vocab_size = len(counts)
    always = tuple(i for i in always if i < num_real_tokens)
    _check_size(draft_vocab_size, num_real_tokens, vocab_size, len(always))
    if draft_vocab_size == vocab_size:
        chosen = np.arange(vocab_size)
    else:
        rank = counts[:num_real_tokens].astype(np.float64)
        rank[list(always)] = np.inf
        # A stable sort of the negated counts: by count, then by id; unused ids come last, the
        # lowest first.
        chosen = np.argsort(-rank, kind="stable")[:draft_vocab_size]
    total = counts.sum()
    return Selection(
        vocabulary=DraftVocabulary.from_selected(chosen, vocab_size),
        num_filler=int((counts[chosen] == 0).sum()),
        coverage=float(counts[chosen].sum() / total) if total else 0.0,
    )


def coverage_curve(counts: np.ndarray) -> list[dict[str, float]]:
    """Share of the supervised tokens that the W most frequent ids cover, for several W."""
    cumulated = np.cumsum(np.sort(counts)[::-1]) / max(counts.sum(), 1)
    sizes = [s for s in _CURVE_SIZES if s < len(counts)] + [len(counts)]
    return [{"draft_vocab_size": s, "coverage": float(cumulated[s - 1])} for s in sizes]


@dataclass(frozen=True)
class Supervised:
    """What the vocabulary is chosen from. counts: int64 [V], supervised tokens of the training
    split; num_real_tokens, end_of_turn_ids, target: of the target, as manifests keep them;
    tokenizer: its fingerprint."""

    counts: np.ndarray
    num_real_tokens: int
    end_of_turn_ids: tuple[int, ...]
    target: dict[str, Any]
    tokenizer: str


def run(options: AlignOptions) -> dict[str, Any]:
    """Choose the draft vocabulary of a token data set, or of a store. Returns the manifest's
    result."""
    if bool(options.data) == bool(options.store) or not options.out:
        raise UsageError("align: pass `data` (a folder of `prepare`) or `store`, and `out`")
    if options.data:
        manifest = load_finished(options.data, "prepare")
        inputs = {"data": describe_input(options.data, manifest)}
        supervised = partial(_of_data, Path(options.data), manifest)
    else:
        store = Store(options.store)
        store.require_whole(TRAIN_SPLIT)
        inputs = {"store": describe_input(options.store, store.manifest)}
        supervised = partial(_of_store, store, options)
    with open_stage(options.out, "align", inputs, options.identity(), options.overwrite) as stage:
        if stage.done:
            return stage.result
        result, vocabulary = _align(options, supervised())
        vocabulary.save(stage.path)
        return stage.finish(result, vocabulary.content())


def _of_data(folder: Path, manifest: Manifest) -> Supervised:
    made = manifest.result
    check_side_files(folder, manifest, made["supervised_token_counts_file"])
    return Supervised(
        counts=np.load(folder / made["supervised_token_counts_file"], allow_pickle=False),
        num_real_tokens=made["num_real_tokens"],
        end_of_turn_ids=tuple(made["end_of_turn_ids"]),
        target=made["target"],
        tokenizer=manifest.inputs["target"]["fingerprint"]["tokenizer"],
    )


def _of_store(store: Store, options: AlignOptions) -> Supervised:
    target = open_target(options, store.manifest.result["target"])
    target.check_made_by(
        store.manifest.inputs["target"]["fingerprint"], f"{store.folder} holds states of"
    )
    training = (store.read_tokens(index) for index in store.split(TRAIN_SPLIT).tolist())
    return Supervised(
        count_supervised(training, target.vocab_size),
        target.num_real_tokens,
        target.end_of_turn_ids,
        asdict(target.reference),
        target.fingerprints["tokenizer"],
    )


def count_supervised(
    samples: Iterable[tuple[np.ndarray, np.ndarray]], vocab_size: int
) -> np.ndarray:
    """How often each token is supervised, int64 [vocab_size]. samples: (input_ids [T], loss_mask
    [T])."""
    counts = np.zeros(vocab_size, np.int64)
    for ids, mask in samples:
        # Not a `bincount` of each sample: that costs the vocabulary's width, not the sample's.
        np.add.at(counts, ids[mask], 1)
    return counts


def _align(options: AlignOptions, supervised: Supervised) -> tuple[dict[str, Any], DraftVocabulary]:
    counts, end_ids = supervised.counts, supervised.end_of_turn_ids
    if not counts.any() and options.draft_vocab_size < len(counts):
        raise VocabularyError(
            f"{options.data or options.store} has no supervised token of split {TRAIN_SPLIT!r} to "
            "choose a draft vocabulary by: prepare data that are to be trained on"
        )
    selection = select_vocabulary(
        counts, options.draft_vocab_size, supervised.num_real_tokens, always=end_ids
    )
    distinct = int((counts > 0).sum())
    if distinct < options.draft_vocab_size:
        logger.warning(
            "align: only %d distinct supervised tokens; %d ids of the draft vocabulary were never "
            "seen and are fillers",
            distinct,
            selection.num_filler,
        )
    result = {
        "target": supervised.target,
        "tokenizer": supervised.tokenizer,
        "draft_vocab_size": options.draft_vocab_size,
        "vocab_size": len(counts),
        "num_filler": selection.num_filler,
        "end_of_turn_ids": list(end_ids),
        "coverage": selection.coverage,
        "lost_share": 1.0 - selection.coverage,
        "curve": coverage_curve(counts),
    }
    return result, selection.vocabulary


def _check_size(size: int, num_real: int, vocab_size: int, num_always: int) -> None:
    if size > vocab_size:
        raise VocabularyError(
            f"draft_vocab_size {size} is above the target's logit width {vocab_size}"
        )
    if num_real < size < vocab_size:
        raise VocabularyError(
            f"draft_vocab_size {size} lies between the tokenizer's {num_real} real ids and the "
            f"logit width {vocab_size}: take at most {num_real}, or {vocab_size} for a full "
            "vocabulary"
        )
    if size < num_always:
        raise VocabularyError(
            f"draft_vocab_size {size} has no room for the {num_always} tokens that end a turn"
        )


VERB = (AlignOptions, run)
make_callable(__name__)
