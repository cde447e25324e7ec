"""Mode decode: real speculative decoding with transformers, and the target alone beside it."""

import time
from typing import Any

from paceline.acceptance.counts import served_quotients
from paceline.contracts import LayerPlan
from paceline.draft.model import Draft
from paceline.evaluate.decode import Decoded, SpeculativeDecoder
from paceline.evaluate.outputs import Difference, Key, answer_rows, compare, summary
from paceline.evaluate.prompts import Chat, Questions, open_questions
from paceline.evaluate.sampling import rule_of
from paceline.evaluate.serving import speed
from paceline.evaluate.walks import Measured, Walks
from paceline.progress import progress_bar
from paceline.recipe import EvaluateOptions
from paceline.target.model import load_model
from paceline.target.spec import Target

_ALONE = 0  # stands for the target without a draft, where chain lengths are keys


def measure_decode(options: EvaluateOptions, draft: Draft, target: Target) -> Measured:
    """Decode every prompt with each chain length. Raises EvaluationError without prompts."""
    questions = open_questions(options, target)
    weight = draft.fc.weight
    model = load_model(target, weight.dtype, weight.device)
    plan = LayerPlan(draft.config.aux_layers, target.num_layers)
    decoding = _Decoding(options, SpeculativeDecoder(model, draft, plan), questions)
    with progress_bar("decode", len(questions.chats), "conversation") as bar:
        for chat in questions.chats:
            decoding.answer(chat)
            bar.advance(1)
    return decoding.measured()


class _Decoding:
    """Answers prompts with each chain length and keeps tokens, counts and seconds."""

    def __init__(
        self, options: EvaluateOptions, decoder: SpeculativeDecoder, questions: Questions
    ) -> None:
        self._options = options
        self._decoder = decoder
        self._questions = questions
        rule = rule_of(options.temperature, options.seed)
        self._limits = (options.max_new_tokens, questions.end_ids, rule)
        self._lengths = options.num_draft_tokens
        self._walks = Walks(self._lengths)
        self._requests: dict[int, list[tuple[int, int]]] = {k: [] for k in self._lengths}
        self._answers: dict[int, dict[Key, list[int]]] = {k: {} for k in (_ALONE, *self._lengths)}
        self._seconds = dict.fromkeys(self._answers, 0.0)

    def answer(self, chat: Chat) -> None:
        turn = 0
        # A prompt that the answer before it belongs to is made on the way.
        while turn < len(chat.prompts):
            prompt = chat.prompts[turn]
            if self._options.compare_plain or turn + 1 < len(chat.turns):
                self._questions.take(chat, turn, self._alone(chat, turn, prompt))
            for k in self._lengths:
                counts = self._with_draft(chat, turn, prompt, k).counts
                self._walks.add(chat.conversation, chat.source, {k: counts}, chat.content)
            turn += 1

    def measured(self) -> Measured:
        written = {k: sum(map(len, answers.values())) for k, answers in self._answers.items()}
        rates = {k: tokens / self._seconds[k] for k, tokens in written.items() if tokens}
        # Without the comparison the target alone has answered no last turn.
        plain = rates.get(_ALONE) if self._options.compare_plain else None
        requests = {k: zip(*pairs, strict=True) for k, pairs in self._requests.items()}
        result: dict[str, Any] = {
            "results": self._walks.table(self._options),
            "baselines": {},
            "speed": {str(k): {"1": speed(rates[k], plain)} for k in self._lengths},
            "quotients": {str(k): served_quotients(*pairs) for k, pairs in requests.items()},
        }
        if self._options.compare_plain and not self._options.temperature:
            result["lossless"] = self._lossless()
        answers = [row for k, by_key in self._answers.items() for row in answer_rows(k, by_key)]
        return Measured(result, [*self._walks.rows()], answers)

    def _alone(self, chat: Chat, turn: int, prompt: list[int]) -> list[int]:
        started = time.perf_counter()
        answer = self._decoder.alone(prompt, *self._limits)
        self._seconds[_ALONE] += time.perf_counter() - started
        self._answers[_ALONE][chat.name, turn] = answer
        return answer

    def _with_draft(self, chat: Chat, turn: int, prompt: list[int], k: int) -> Decoded:
        started = time.perf_counter()
        decoded = self._decoder.decode(prompt, k, *self._limits)
        self._seconds[k] += time.perf_counter() - started
        self._answers[k][chat.name, turn] = decoded.tokens
        self._requests[k].append((len(decoded.tokens), decoded.counts.verify_steps))
        return decoded

    def _lossless(self) -> dict[str, Any]:
        prompts, own = self._questions.by_key(), self._answers[_ALONE]
        gap = lambda key, before, a, b: self._decoder.gap(prompts[key] + before, a, b)
        differences: list[Difference] = []
        for k in self._lengths:
            differences += compare(own, self._answers[k], k, gap)
        return summary(differences, len(own) * len(self._lengths))
