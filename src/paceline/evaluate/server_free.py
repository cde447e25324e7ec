"""Mode chain: the draft over answers that the target has written, and the baselines beside it."""

from collections.abc import Callable, Iterator
from pathlib import Path

from paceline import fingerprint
from paceline.acceptance.chain import draft_answers, spans_of
from paceline.acceptance.counts import Answer, Counts, walk
from paceline.contracts import TRAIN_SPLIT
from paceline.draft.model import Draft
from paceline.errors import FingerprintMismatch
from paceline.evaluate.baselines import BigramTable, prompt_lookup_answer
from paceline.evaluate.expected import draft_chances, expected_counts
from paceline.evaluate.failures import Failures
from paceline.evaluate.prompts import no_samples
from paceline.evaluate.walks import Measured, Walks
from paceline.progress import Bar, progress_bar
from paceline.recipe import EvaluateOptions
from paceline.store import Store, StoredSample
from paceline.store.cache import Cache
from paceline.store.packing import cut
from paceline.target.model import TeacherHead
from paceline.target.spec import Target

_GROUP_TOKENS = 8192
_DRAFT, _BIGRAM, _PROMPT_LOOKUP = "draft", "bigram", "prompt_lookup"


def measure_chain(
    options: EvaluateOptions, draft: Draft, target: Target, beside: Draft | None = None
) -> Measured:
    """Walk every answer of the store, with a second draft too where one is given. Raises
    EvaluationError where the split is empty, StreamError where parts of it were let go,
    FingerprintMismatch for a store of another target or other layers than a draft reads."""
    store = Store(options.store, cache=Cache(options.cache_dir, options.cache_bytes))
    store.require_whole(options.split)
    for one in (draft, beside):
        if one is not None:
            _check_store(store, one, target)
    chosen = store.split(options.split)[: options.limit]
    if not len(chosen):
        raise no_samples(store.folder, options.split)
    groups = cut(chosen, store.records.num_tokens, _GROUP_TOKENS)
    failures = Failures(target.vocab_size)
    with progress_bar("evaluate", len(chosen), "sample") as bar:
        if options.temperature:
            methods = _expect(options, draft, target, store, groups, bar)
        else:
            methods = _walk(options, draft, target, store, groups, bar, failures)
    drafted, baselines = methods.pop(_DRAFT), methods
    told = None if options.temperature else failures.told(target, draft.t2d.cpu().numpy())
    result = {
        "failures": told,
        "states_dtype": store.spec.dtype,
        "results": drafted.table(options),
        "baselines": {name: walks.table(options) for name, walks in baselines.items()},
        "baselines_left_out": {},
    }
    if baselines and _BIGRAM not in baselines:
        result["baselines_left_out"] = {_BIGRAM: _no_bigram(store)}
    if beside is not None:
        groups = cut(chosen, store.records.num_tokens, _GROUP_TOKENS)
        walks = _walk_alone(options, beside, store, groups)
        result["beside"] = {"name": Path(options.beside).name, "results": walks.table(options)}
    return Measured(result, [*drafted.rows()])


def _walk_alone(
    options: EvaluateOptions, draft: Draft, store: Store, groups: Iterator[list[int]]
) -> Walks:
    walks = Walks(options.num_draft_tokens)
    for sample, answers in draft_answers(draft, store, groups, max(options.num_draft_tokens)):
        _add_walks(walks, sample, answers)
    return walks


def _walk(
    options: EvaluateOptions,
    draft: Draft,
    target: Target,
    store: Store,
    groups: Iterator[list[int]],
    bar: Bar,
    failures: Failures,
) -> dict[str, Walks]:
    """Greedy: what the draft and the baselines have right."""
    longest = max(options.num_draft_tokens)
    baselines = _baselines(store, target, longest) if options.baselines else {}
    methods = {name: Walks(options.num_draft_tokens) for name in (_DRAFT, *baselines)}
    for sample, answers in draft_answers(draft, store, groups, longest):
        _add_walks(methods[_DRAFT], sample, answers)
        failures.add(sample, answers)
        for name, answers_of in baselines.items():
            _add_walks(methods[name], sample, answers_of(sample))
        bar.advance(1)
    return methods


def _expect(
    options: EvaluateOptions,
    draft: Draft,
    target: Target,
    store: Store,
    groups: Iterator[list[int]],
    bar: Bar,
) -> dict[str, Walks]:
    """Sampled: what the draft is expected to have accepted. The baselines draw no tokens."""
    weight = draft.fc.weight
    head = TeacherHead(target, weight.dtype, weight.device, is_normed=store.spec.last_is_normed)
    walks = Walks(options.num_draft_tokens)
    longest = max(options.num_draft_tokens)
    chances = draft_chances(draft, head, store, groups, longest, options.temperature)
    for sample, answers in chances:
        counts = {k: [expected_counts(a, k) for a in answers] for k in options.num_draft_tokens}
        _add(walks, sample, counts)
        bar.advance(1)
    return {_DRAFT: walks}


def _add_walks(walks: Walks, sample: StoredSample, answers: list[Answer]) -> None:
    _add(walks, sample, {k: [walk(answers, k)] for k in walks.lengths})


def _add(walks: Walks, sample: StoredSample, counts: dict[int, list[Counts]]) -> None:
    record = sample.record
    name = record.conversation_id or record.sample_id
    ids, mask = sample.input_ids.numpy(), sample.loss_mask.numpy()
    content = fingerprint.of_bytes(ids.tobytes() + mask.tobytes())
    for k, answers in counts.items():
        total = Counts.zero(k)
        for found in answers:
            total.add(found)
        walks.add(name, record.source, {k: total}, content)


def _baselines(
    store: Store, target: Target, longest: int
) -> dict[str, Callable[[StoredSample], list[Answer]]]:
    """Each gives a sample's answers. No bigram table where `_no_bigram` says why."""

    def by_prompt_lookup(sample: StoredSample) -> list[Answer]:
        ids = sample.input_ids.numpy()
        return [prompt_lookup_answer(ids, span, longest) for span in spans_of(sample)]

    if _no_bigram(store):
        return {_PROMPT_LOOKUP: by_prompt_lookup}
    training = (store.read_tokens(i) for i in store.split(TRAIN_SPLIT).tolist())
    bigram = BigramTable(training, target.vocab_size)

    def by_bigram(sample: StoredSample) -> list[Answer]:
        ids = sample.input_ids.numpy()
        return [bigram.answer(ids, span, longest) for span in spans_of(sample)]

    return {_BIGRAM: by_bigram, _PROMPT_LOOKUP: by_prompt_lookup}


def _no_bigram(store: Store) -> str | None:
    """Why the store gives no bigram table: one of a part of the training samples would be weaker
    than what the draft is to be held against. None where it gives one."""
    if not store.is_whole(TRAIN_SPLIT):
        return "training samples were let go from the store"
    if not len(store.split(TRAIN_SPLIT)):
        return "the store holds no training samples"
    return None


def _check_store(store: Store, draft: Draft, target: Target) -> None:
    if store.spec.layers.aux != draft.config.aux_layers:
        raise FingerprintMismatch(
            f"{store.folder} holds layers {list(store.spec.layers.aux)}, the draft reads "
            f"{list(draft.config.aux_layers)}: extract those layers"
        )
    target.check_made_by(
        store.manifest.inputs["target"]["fingerprint"], f"{store.folder} holds states of"
    )
