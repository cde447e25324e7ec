"""The `evaluate` stage: acceptance length of a draft, server-free or in real decoding."""

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from paceline import fingerprint
from paceline.artefact import Manifest, describe_input, load_finished, open_stage, write_json
from paceline.contracts import TRAIN_SPLIT, LayerPlan
from paceline.dataset import TokenDataset
from paceline.device import choose_device, choose_dtype, dtype_name
from paceline.draft.model import Draft
from paceline.errors import EvaluationError, FingerprintMismatch, UsageError
from paceline.evaluate.acceptance import (
    Answer,
    Counts,
    definition,
    served_quotients,
    table,
    walk,
)
from paceline.evaluate.baselines import BigramTable, prompt_lookup_answer
from paceline.evaluate.chain import draft_answers, spans_of
from paceline.evaluate.decode import SpeculativeDecoder
from paceline.forms.source import open_draft
from paceline.progress import progress_bar
from paceline.recipe import EvaluateOptions
from paceline.store import Store, StoredSample
from paceline.store.packing import cut
from paceline.target.model import load_model
from paceline.target.spec import Target, open_target

logger = logging.getLogger(__name__)

RESULT_FILE = "result.json"
_GROUP_TOKENS = 8192


def run(options: EvaluateOptions) -> dict[str, Any]:
    """Measure a draft. Returns what `result.json` holds.

    Raises EvaluationError where nothing can be measured, FingerprintMismatch for a store or data
    of another target or other layers.
    """
    if not (options.draft and options.out):
        raise UsageError(
            "evaluate: pass `draft` (a folder of `train`, or a server's checkpoint) and `out`"
        )
    drafted_by = open_draft(options.draft, options.draft_form)
    target = open_target(options, drafted_by.recorded_target)
    source, manifest = _source(options)
    inputs = {
        "draft": drafted_by.describe_input(),
        "answers": describe_input(source, manifest),
        "target": target.describe_input(),
    }
    with open_stage(
        options.out, "evaluate", inputs, options.identity(), options.overwrite
    ) as stage:
        if stage.done:
            return stage.result
        device = choose_device(options.device)
        dtype = choose_dtype(options.dtype, device, target.native_dtype())
        draft = drafted_by.load(target, dtype).to(device)
        measure = _chain if options.mode == "chain" else _decode
        result = {
            "definition": definition(options.num_draft_tokens),
            "mode": options.mode,
            "dtype": dtype_name(dtype),
            "split": options.split,
            "target": asdict(target.reference),
            **measure(options, draft, target),
        }
        write_json(stage.path / RESULT_FILE, result)
        return stage.finish(result, content=fingerprint.of_json(result))


def _source(options: EvaluateOptions) -> tuple[str, Manifest]:
    folder, stage = (
        (options.store, "extract") if options.mode == "chain" else (options.data, "prepare")
    )
    if not folder:
        name = "store" if options.mode == "chain" else "data"
        raise UsageError(f"evaluate: mode {options.mode} needs `{name}` (a folder of `{stage}`)")
    return folder, load_finished(folder, stage)


@dataclass
class _Walks:
    """Counts of each conversation for one method: conversation id -> K -> Counts."""

    lengths: list[int]
    found: dict[str, dict[int, Counts]]
    sources: dict[str, str]

    def add(self, conversation: str, source: str, counts: dict[int, Counts]) -> None:
        """Samples of one conversation are resampled together, so their counts are added up."""
        self.sources[conversation] = source
        if conversation not in self.found:
            self.found[conversation] = counts
            return
        for k, more in counts.items():
            self.found[conversation][k].add(more)

    def table(self, options: EvaluateOptions) -> dict[str, Any]:
        per_length = {k: [counts[k] for counts in self.found.values()] for k in self.lengths}
        return table(per_length, list(self.sources.values()), options.bootstrap, options.seed)


def _chain(options: EvaluateOptions, draft: Draft, target: Target) -> dict[str, Any]:
    store = Store(options.store)
    _check_store(store, draft, target)
    chosen = store.split(options.split)[: options.limit]
    if not len(chosen):
        raise EvaluationError(f"{store.folder} has no samples of split {options.split!r}")
    longest = max(options.num_draft_tokens)
    methods = {"draft": _Walks(options.num_draft_tokens, {}, {})}
    baselines = _baselines(store, target, longest) if options.baselines else {}
    methods |= {name: _Walks(options.num_draft_tokens, {}, {}) for name in baselines}
    with progress_bar("evaluate", len(chosen), "sample") as bar:
        groups = cut(chosen, store.records.num_tokens, _GROUP_TOKENS)
        for sample, answers in draft_answers(draft, store, groups, longest):
            _add(methods["draft"], sample, answers)
            for name, answers_of in baselines.items():
                _add(methods[name], sample, answers_of(sample))
            bar.advance(1)
    tables = {name: walks.table(options) for name, walks in methods.items()}
    return {
        "states_dtype": store.spec.dtype,
        "results": tables.pop("draft"),
        "baselines": tables,
    }


def _add(walks: _Walks, sample: StoredSample, answers: list[Answer]) -> None:
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


def _decode(options: EvaluateOptions, draft: Draft, target: Target) -> dict[str, Any]:
    data = TokenDataset(options.data)
    end_ids = set(data.manifest.result["end_of_turn_ids"])
    samples = [s for s in data.split(options.split) if s.num_aux_rows][: options.limit]
    if not samples:
        raise EvaluationError(f"{data.folder} has no samples of split {options.split!r}")
    weight = draft.fc.weight
    model = load_model(target, weight.dtype, weight.device)
    plan = LayerPlan(draft.config.aux_layers, target.num_layers)
    decoder = SpeculativeDecoder(model, draft, plan)
    walks = _Walks(options.num_draft_tokens, {}, {})
    equal = total = 0
    requests: dict[int, list[tuple[int, int]]] = {k: [] for k in options.num_draft_tokens}
    with progress_bar("decode", len(samples), "sample") as bar:
        for sample in samples:
            prompt = sample.input_ids[: int(np.flatnonzero(sample.loss_mask)[0])]
            plain = decoder.greedy(prompt, options.max_new_tokens, end_ids)
            counts = {}
            for k in options.num_draft_tokens:
                decoded = decoder.decode(prompt, k, options.max_new_tokens, end_ids)
                counts[k] = decoded.counts
                requests[k].append((len(decoded.tokens), decoded.counts.verify_steps))
                equal += decoded.tokens == plain
                total += 1
            walks.add(sample.conversation_id or sample.sample_id, sample.source, counts)
            bar.advance(1)
    return {
        "results": walks.table(options),
        "baselines": {},
        "lossless": {"equal_outputs": equal, "outputs": total},
        "quotients": {str(k): served_quotients(*zip(*r, strict=True)) for k, r in requests.items()},
    }
