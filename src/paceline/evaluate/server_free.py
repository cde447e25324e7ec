"""Mode chain: the draft over answers that the target has written, and the baselines beside it."""

from collections.abc import Callable

from paceline.contracts import TRAIN_SPLIT
from paceline.draft.model import Draft
from paceline.errors import EvaluationError, FingerprintMismatch
from paceline.evaluate.acceptance import Answer, walk
from paceline.evaluate.baselines import BigramTable, prompt_lookup_answer
from paceline.evaluate.chain import draft_answers, spans_of
from paceline.evaluate.walks import Measured, Walks
from paceline.progress import progress_bar
from paceline.recipe import EvaluateOptions
from paceline.store import Store, StoredSample
from paceline.store.packing import cut
from paceline.target.spec import Target

_GROUP_TOKENS = 8192


def measure_chain(options: EvaluateOptions, draft: Draft, target: Target) -> Measured:
    """Walk every answer of the store. Raises EvaluationError where the split is empty,
    FingerprintMismatch for a store of another target or other layers."""
    store = Store(options.store)
    _check_store(store, draft, target)
    chosen = store.split(options.split)[: options.limit]
    if not len(chosen):
        raise EvaluationError(f"{store.folder} has no samples of split {options.split!r}")
    longest = max(options.num_draft_tokens)
    drafted = Walks(options.num_draft_tokens)
    baselines = _baselines(store, target, longest) if options.baselines else {}
    others = {name: Walks(options.num_draft_tokens) for name in baselines}
    with progress_bar("evaluate", len(chosen), "sample") as bar:
        groups = cut(chosen, store.records.num_tokens, _GROUP_TOKENS)
        for sample, answers in draft_answers(draft, store, groups, longest):
            _add(drafted, sample, answers)
            for name, answers_of in baselines.items():
                _add(others[name], sample, answers_of(sample))
            bar.advance(1)
    result = {
        "states_dtype": store.spec.dtype,
        "results": drafted.table(options),
        "baselines": {name: walks.table(options) for name, walks in others.items()},
    }
    return Measured(result, [*drafted.rows()])


def _add(walks: Walks, sample: StoredSample, answers: list[Answer]) -> None:
    record = sample.record
    counts = {k: walk(answers, k) for k in walks.lengths}
    walks.add(record.conversation_id or record.sample_id, record.source, counts)


def _baselines(
    store: Store, target: Target, longest: int
) -> dict[str, Callable[[StoredSample], list[Answer]]]:
    training = (store.read(int(i)) for i in store.split(TRAIN_SPLIT))
    bigram = BigramTable(
        ((s.input_ids.numpy(), s.loss_mask.numpy()) for s in training), target.vocab_size
    )

    def by_bigram(sample: StoredSample) -> list[Answer]:
        ids = sample.input_ids.numpy()
        return [bigram.answer(ids, span, longest) for span in spans_of(sample)]

    def by_prompt_lookup(sample: StoredSample) -> list[Answer]:
        ids = sample.input_ids.numpy()
        return [prompt_lookup_answer(ids, span, longest) for span in spans_of(sample)]

    return {"bigram": by_bigram, "prompt_lookup": by_prompt_lookup}


def _check_store(store: Store, draft: Draft, target: Target) -> None:
    if store.spec.layers.aux != draft.config.aux_layers:
        raise FingerprintMismatch(
            f"{store.folder} holds layers {list(store.spec.layers.aux)}, the draft reads "
            f"{list(draft.config.aux_layers)}: extract those layers"
        )
    target.check_made_by(
        store.manifest.inputs["target"]["fingerprint"], f"{store.folder} holds states of"
    )
