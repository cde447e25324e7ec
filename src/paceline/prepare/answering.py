"""One run of `generate`: rows to conversations, a turn of each at a time through the engine."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from paceline.answers.engine import STOP, Answer, AnswerEngine, Prompt, Sampling, is_whole
from paceline.dataset import source_of
from paceline.errors import EngineError
from paceline.prepare.conversation import ASSISTANT, Message, canonical_message
from paceline.prepare.journal import Journal
from paceline.prepare.parts import publish_part
from paceline.prepare.prompts import AnswerPlan, answer_plan
from paceline.prepare.reading import RawRow
from paceline.prepare.rows import RowError, digest, parse_row
from paceline.prepare.template import ChatTemplate
from paceline.prepare.tokens import TextTokenizer
from paceline.recipe import GenerateOptions
from paceline.target.spec import Target

# A part is answered a turn at a time: enough rows to keep a large server busy to the end.
PART_ROWS = 512
JOURNAL_NAME = "journal.jsonl"
_TEXTS_AT_A_TIME = 32
# So many refusals, and nothing but refusals, are the server's fault and not the prompts'.
_HOPELESS_REFUSALS = 8


@dataclass
class _Work:
    """A row on its way: what was said so far and the answers that were written."""

    index: int
    row: RawRow
    plan: AnswerPlan
    messages: list[Message] = field(default_factory=list)
    answers: list[dict[str, Any]] = field(default_factory=list)
    num_told: int = 0  # messages up to the last answer
    next_turn: int = 0
    stopped: str | None = None

    @property
    def key(self) -> str:
        return f"{self.index}.{self.next_turn}"

    @property
    def unanswered(self) -> int:
        """Answers that were to be written and were not."""
        return self.plan.num_answers - len(self.answers)

    def advance(self) -> bool:
        """Take over given turns up to the next answer to be written; False: nothing left."""
        turns = self.plan.turns
        if self.stopped is not None or None not in turns[self.next_turn :]:
            return False
        while turns[self.next_turn] is not None:
            self.messages.append(turns[self.next_turn])
            self.next_turn += 1
        return True


class Answerer:
    """Answers parts of the data and publishes them in a folder."""

    def __init__(
        self, options: GenerateOptions, target: Target, template: ChatTemplate, folder: Path
    ) -> None:
        self.options = options
        self.folder = folder
        self.template = template
        self.tokenizer = TextTokenizer(target.tokenizer, options.begin_token == "once")
        self.sampling = Sampling(
            max_new_tokens=options.max_new_tokens,
            end_ids=target.end_of_turn_ids,
            temperature=options.temperature,
            top_p=options.top_p,
            num_past_end=options.record_past_end,
        )
        new_tokens = options.max_new_tokens + options.record_past_end
        self.longest_prompt = context_length(target) - new_tokens

    def answer_part(self, engine: AnswerEngine, number: int, rows: list[RawRow]) -> None:
        """Answer some rows and publish them as part `number`."""
        skipped: list[dict[str, Any]] = []
        works = []
        for index, row in enumerate(rows):
            try:
                plan = answer_plan(parse_row(row), source_of(row.file))
                works.append(_Work(index, row, plan))
            except RowError as error:
                skipped.append(_skip(row, error))
        with Journal(self.folder / JOURNAL_NAME, number) as journal:
            known = {record["key"]: record for record in journal.records}
            self._write_turns(engine, works, known, journal)
            written = []
            for work in works:
                try:
                    written.append(_output_row(work))
                except RowError as error:
                    skipped.append(_skip(work.row, error))
            record = {
                "rows": len(rows),
                "skipped": skipped,
                "shortened": [
                    _shortened(work) for work in works if work.answers and work.unanswered
                ],
                "engine": engine.describe,
            }
            publish_part(self.folder, number, written, record)
            journal.remove()

    def _write_turns(
        self,
        engine: AnswerEngine,
        works: list[_Work],
        known: dict[str, dict[str, Any]],
        journal: Journal,
    ) -> None:
        """Write all answers, a turn of every conversation at a time."""

        def keep(answer: Answer) -> None:
            known[answer.key] = asdict(answer)
            # A refusal is asked again: by then the server may be another one.
            if answer.refusal is None:
                journal.append(known[answer.key])

        active = [work for work in works if work.advance()]
        while active:
            prompts = self._prompts(active)
            missing = [prompt for prompt in prompts.values() if prompt.key not in known]
            if missing:
                engine.answer(missing, self.sampling, keep)
            if not any(work.answers for work in works):
                _stop_if_hopeless([known[key] for key in prompts])
            for work in active:
                if work.key in prompts:
                    self._take(work, prompts[work.key], Answer(**_without_part(known[work.key])))
            active = [work for work in active if work.advance()]

    def _prompts(self, active: list[_Work]) -> dict[str, Prompt]:
        """The prompts of the next turns by key; a conversation that cannot go on is stopped."""
        texts, ready = [], []
        for work in active:
            tools = work.plan.conversation.tools
            try:
                texts.append(self.template.render(work.messages, tools, generation_prompt=True))
                ready.append(work)
            except RowError as error:
                work.stopped = str(error)
        prompts = {}
        for work, ids in zip(ready, self._encode(texts), strict=True):
            if len(ids) > self.longest_prompt:
                work.stopped = (
                    f"the prompt has {len(ids)} tokens; the target's context leaves room "
                    f"for {max(self.longest_prompt, 0)}"
                )
                continue
            conversation = work.plan.conversation
            name = f"{self.options.seed}/{conversation.content_hash}/{work.next_turn}"
            prompts[work.key] = Prompt(
                key=work.key,
                ids=ids,
                seed=int(digest(name.encode())[:12], 16),
                messages=self.template.as_sent(work.messages),
                tools=conversation.tools,
            )
        return prompts

    def _encode(self, texts: list[str]) -> Iterator[list[int]]:
        # A few at a time: the tokenizer's own records are many times as large as the ids.
        for start in range(0, len(texts), _TEXTS_AT_A_TIME):
            group = self.tokenizer.encode(texts[start : start + _TEXTS_AT_A_TIME])
            yield from (encoded.ids.tolist() for encoded in group)

    def _take(self, work: _Work, prompt: Prompt, answer: Answer) -> None:
        """Put an answer into its conversation."""
        if answer.refusal is not None:
            work.stopped = answer.refusal
            return
        if answer.message is not None:
            try:
                message = canonical_message(answer.message, "the server's answer")
            except RowError as error:
                # Such as calls whose arguments were cut: one row's trouble, not the run's.
                work.stopped = str(error)
                return
        else:
            said = answer.ids[: len(answer.ids) - answer.num_past_end]
            ended = bool(said) and said[-1] in self.sampling.end_ids
            text = self.tokenizer.decode(said[:-1] if ended else said)
            message = {"role": ASSISTANT, "content": text}
        work.messages.append(message)
        work.next_turn += 1
        work.num_told = len(work.messages)
        work.answers.append(
            {
                "prompt_ids": answer.prompt_ids or prompt.ids,
                "response_ids": answer.ids,
                "num_past_end": answer.num_past_end,
                "finish_reason": answer.finish_reason,
            }
        )
        if answer.finish_reason != STOP:
            # Nobody goes on talking to half an answer, or before a tool has answered.
            work.stopped = f"the answer before ended by {answer.finish_reason}"


def batches(rows: Iterator[RawRow]) -> Iterator[list[RawRow]]:
    """Rows by parts."""
    while batch := list(islice(rows, PART_ROWS)):
        yield batch


def context_length(target: Target) -> int:
    """Positions that the target knows; a config that says none sets no limit."""
    length = getattr(target.text_config, "max_position_embeddings", None)
    return length if isinstance(length, int) else 1 << 30


def _output_row(work: _Work) -> dict[str, Any]:
    """What `prepare` reads: one row a conversation, exact ids where there are any."""
    if not work.answers:
        raise RowError("no_answer", work.stopped or "nothing to answer")
    conversation = work.plan.conversation
    last = work.answers[-1]["finish_reason"]
    row: dict[str, Any] = {
        "id": conversation.identity.id or conversation.content_hash[:16],
        "source": conversation.identity.source,
        "messages": work.messages[: work.num_told],
        "finished": is_whole(last),
        "finish_reason": last,
    }
    for name in ("conversation_id", "split"):
        # What the split of the data goes by stays with it.
        if value := getattr(conversation.identity, name):
            row[name] = value
    if conversation.tools:
        row["tools"] = conversation.tools
    exact = [answer for answer in work.answers if answer["response_ids"] is not None]
    if len(exact) < len(work.answers):
        # Without ids of every answer the conversation is told by its words.
        return row | {"finish_reasons": [answer["finish_reason"] for answer in work.answers]}
    if len(exact) > 1:
        return row | {"answers": exact}
    return row | exact[0]


def _stop_if_hopeless(answers: list[dict[str, Any]]) -> None:
    refusals = [answer["refusal"] for answer in answers if answer["refusal"]]
    if len(refusals) == len(answers) and len(answers) >= _HOPELESS_REFUSALS:
        raise EngineError(f"the engine refused all of {len(answers)} prompts: {refusals[0]}")


def _without_part(record: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key != "part"}


def _shortened(work: _Work) -> dict[str, Any]:
    return {
        "file": str(work.row.file),
        "row": work.row.number,
        "unanswered": work.unanswered,
        "detail": work.stopped,
    }


def _skip(row: RawRow, error: RowError) -> dict[str, Any]:
    return {
        "file": str(row.file),
        "row": row.number,
        "reason": error.reason,
        "detail": str(error),
    }
