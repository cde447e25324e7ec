"""Mode decode: real speculative decoding with transformers, and the target alone beside it."""

import time
from typing import Any

from paceline.contracts import LayerPlan
from paceline.draft.model import Draft
from paceline.evaluate.acceptance import served_quotients
from paceline.evaluate.decode import SpeculativeDecoder
from paceline.evaluate.outputs import Difference, Key, compare, summary
from paceline.evaluate.prompts import open_questions
from paceline.evaluate.sampling import rule_of
from paceline.evaluate.serving import speed
from paceline.evaluate.walks import Measured, Walks
from paceline.progress import progress_bar
from paceline.recipe import EvaluateOptions
from paceline.target.model import load_model
from paceline.target.spec import Target


def measure_decode(options: EvaluateOptions, draft: Draft, target: Target) -> Measured:
    """Decode every prompt with each chain length. Raises EvaluationError without prompts."""
    questions = open_questions(options, target)
    weight = draft.fc.weight
    model = load_model(target, weight.dtype, weight.device)
    plan = LayerPlan(draft.config.aux_layers, target.num_layers)
    decoder = SpeculativeDecoder(model, draft, plan)
    rule = rule_of(options.temperature, options.seed)
    limits = (options.max_new_tokens, questions.end_ids, rule)
    walks = Walks(options.num_draft_tokens)
    requests: dict[int, list[tuple[int, int]]] = {k: [] for k in options.num_draft_tokens}
    answers: dict[int, dict[Key, list[int]]] = {k: {} for k in (0, *options.num_draft_tokens)}
    seconds = dict.fromkeys(answers, 0.0)
    with progress_bar("decode", len(questions.chats), "conversation") as bar:
        for chat in questions.chats:
            turn = 0
            while turn < len(chat.prompts):
                prompt = chat.prompts[turn]
                if options.compare_plain or len(chat.turns) > turn + 1:
                    started = time.perf_counter()
                    answers[0][chat.name, turn] = decoder.alone(prompt, *limits)
                    seconds[0] += time.perf_counter() - started
                    questions.take(chat, turn, answers[0][chat.name, turn])
                for k in options.num_draft_tokens:
                    started = time.perf_counter()
                    decoded = decoder.decode(prompt, k, *limits)
                    seconds[k] += time.perf_counter() - started
                    answers[k][chat.name, turn] = decoded.tokens
                    requests[k].append((len(decoded.tokens), decoded.counts.verify_steps))
                    walks.add(chat.conversation, chat.source, {k: decoded.counts})
                turn += 1
            bar.advance(1)
    rates = {k: sum(map(len, a.values())) / seconds[k] for k, a in answers.items() if a}
    result: dict[str, Any] = {
        "results": walks.table(options),
        "baselines": {},
        "speed": {str(k): {"1": speed(rates[k], rates.get(0))} for k in options.num_draft_tokens},
        "quotients": {str(k): served_quotients(*zip(*r, strict=True)) for k, r in requests.items()},
    }
    if options.compare_plain and not options.temperature:
        result["lossless"] = _lossless(decoder, answers, questions.by_key())
    return Measured(result, [*walks.rows()], _answer_rows(answers))


def _lossless(
    decoder: SpeculativeDecoder,
    answers: dict[int, dict[Key, list[int]]],
    prompts: dict[Key, list[int]],
) -> dict[str, Any]:
    own, *others = answers.values()
    gap = lambda key, before, a, b: decoder.gap(prompts[key] + before, a, b)
    differences: list[Difference] = []
    for k in [k for k in answers if k]:
        differences += compare(own, answers[k], k, gap)
    return summary(differences, sum(map(len, others)))


def _answer_rows(answers: dict[int, dict[Key, list[int]]]) -> list[dict[str, Any]]:
    return [
        {"conversation": name, "turn": turn, "num_draft_tokens": k, "ids": ids}
        for k, by_key in answers.items()
        for (name, turn), ids in by_key.items()
    ]
