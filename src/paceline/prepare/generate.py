"""The verb `generate`: on-policy answers by the target itself, exact token ids kept.

Rows in, JSONL parts out (`answers/NNNNN.jsonl`), one row a conversation, which `prepare` reads.
A part appears when whole; answers on the way to it are in a journal, so a kill loses next to
nothing and doubles nothing.
"""

import json
import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any

from paceline import fingerprint
from paceline.answers.engine import Answer, AnswerEngine, Prompt, Sampling, open_engine
from paceline.artefact import StageFolder, open_stage, write_atomically, write_json
from paceline.errors import DataError, UsageError
from paceline.prepare.conversation import ASSISTANT, Message
from paceline.prepare.journal import Journal
from paceline.prepare.prompts import AnswerPlan, answer_plan
from paceline.prepare.reading import RawRow, count_rows, find_files, read_rows
from paceline.prepare.rows import RowError, digest, parse_row
from paceline.prepare.template import ChatTemplate, require_template
from paceline.prepare.tokens import TextTokenizer
from paceline.progress import Bar, progress_bar
from paceline.recipe import GenerateOptions
from paceline.target.spec import Target, open_target
from paceline.verbs import make_callable

logger = logging.getLogger(__name__)

ANSWERS_FOLDER = "answers"
PART_ROWS = 256


@dataclass
class _Work:
    """A row on its way: what was said so far and the answers that were written."""

    index: int
    row: RawRow
    plan: AnswerPlan
    messages: list[Message] = field(default_factory=list)
    answers: list[dict[str, Any]] = field(default_factory=list)
    next_turn: int = 0
    stopped: str | None = None

    def advance(self) -> bool:
        """Take over given turns up to the next answer to be written; False: nothing left."""
        turns = self.plan.turns
        while self.next_turn < len(turns) and turns[self.next_turn] is not None:
            self.messages.append(turns[self.next_turn])
            self.next_turn += 1
        return self.stopped is None and self.next_turn < len(turns)


def run(options: GenerateOptions) -> dict[str, Any]:
    """Write answers; returns the manifest's result. See docs/generate.md.

    Raises UsageError, TargetError, DataError (no row can be answered), EngineError.
    """
    if not options.out:
        raise UsageError("generate: no `out` given: name the folder to write")
    target = open_target(options)
    files = find_files(options.data)
    template = require_template(target, options.chat_template)
    identity = options.identity()
    identity.pop("chat_template")
    inputs = {
        "target": target.describe_input(),
        "template": {"fingerprint": fingerprint.of_bytes(template.encode())},
        "data": {
            "path": [str(file) for file in files],
            "fingerprint": fingerprint.of_json([[f.name, fingerprint.of_file(f)] for f in files]),
        },
    }
    with open_stage(options.out, "generate", inputs, identity, options.overwrite) as folder:
        if folder.done:
            return folder.result
        generation = _Generation(options, target, template, folder.path)
        generation.answer_all(files)
        return _finish(target, options, folder)


class _Generation:
    """One run over all rows that are not answered yet."""

    def __init__(
        self, options: GenerateOptions, target: Target, template: str, folder: Path
    ) -> None:
        self.options = options
        self.target = target
        self.folder = folder
        self.tokenizer = TextTokenizer(target.tokenizer)
        self.template = ChatTemplate(
            template, target.tokenizer, options.chat_template_kwargs, options.system_prompt
        )
        self.sampling = Sampling(
            max_new_tokens=options.max_new_tokens,
            end_ids=target.end_of_turn_ids,
            temperature=options.temperature,
            top_p=options.top_p,
            num_past_end=options.record_past_end,
        )
        self.longest_prompt = _context_length(target) - (
            options.max_new_tokens + options.record_past_end
        )

    def answer_all(self, files: list[Path]) -> None:
        done = sum(read_part_record(path)["rows"] for path in list_answer_parts(self.folder))
        rows = islice(read_rows(files), done, self.options.limit)
        total = count_rows(files)
        if self.options.limit is not None:
            total = min(total or self.options.limit, self.options.limit)
        batches = _batches(rows)
        first = next(batches, None)
        if first is None:
            return
        engine = open_engine(self.options, self.target)
        try:
            with progress_bar("generate", total, "rows") as bar:
                bar.advance(done)
                start = len(list_answer_parts(self.folder))
                for number, batch in enumerate(chain([first], batches), start):
                    self._answer_part(engine, number, batch, bar)
        finally:
            engine.close()

    def _answer_part(self, engine: AnswerEngine, number: int, rows: list[RawRow], bar: Bar) -> None:
        skipped: list[dict[str, Any]] = []
        works = []
        for index, row in enumerate(rows):
            try:
                plan = answer_plan(parse_row(row), row.file.name.split(".")[0])
                works.append(_Work(index, row, plan))
            except RowError as error:
                skipped.append(_skip(row, error))
        with Journal(self.folder, number) as journal:
            known = {record["key"]: record for record in journal.records}
            self._answer_turns(engine, works, known, journal)
            written = []
            for work in works:
                try:
                    written.append(self._output_row(work))
                except RowError as error:
                    skipped.append(_skip(work.row, error))
            record = {"rows": len(rows), "skipped": skipped, "engine": engine.describe}
            _publish(self.folder, number, written, record)
            journal.remove()
        bar.advance(len(rows))

    def _answer_turns(
        self,
        engine: AnswerEngine,
        works: list[_Work],
        known: dict[str, dict[str, Any]],
        journal: Journal,
    ) -> None:
        """Write all answers, a turn of every conversation at a time."""
        active = [work for work in works if work.advance()]
        while active:
            prompts = self._prompts(active)
            missing = [prompt for prompt in prompts if prompt.key not in known]

            def keep(answer: Answer) -> None:
                known[answer.key] = asdict(answer)
                journal.append(known[answer.key])

            if missing:
                engine.answer(missing, self.sampling, keep)
            by_key = {prompt.key: prompt for prompt in prompts}
            for work in active:
                key = _key(work)
                if key in by_key:
                    self._take(work, by_key[key], known[key])
            active = [work for work in active if work.advance()]

    def _prompts(self, active: list[_Work]) -> list[Prompt]:
        """Prompts of the next turns; a conversation whose prompt is impossible is stopped."""
        texts, ready = [], []
        for work in active:
            tools = work.plan.conversation.tools
            try:
                texts.append(self.template.render(work.messages, tools, generation_prompt=True))
                ready.append(work)
            except RowError as error:
                work.stopped = str(error)
        prompts = []
        for work, encoded in zip(ready, self.tokenizer.encode(texts), strict=True):
            if len(encoded.ids) > self.longest_prompt:
                work.stopped = (
                    f"the prompt has {len(encoded.ids)} tokens; the target's context leaves room "
                    f"for {self.longest_prompt}"
                )
                continue
            key = _key(work)
            content = work.plan.conversation.content_hash
            seed = int(digest(f"{self.options.seed}/{content}/{key}".encode())[:12], 16)
            prompts.append(
                Prompt(
                    key,
                    encoded.ids.tolist(),
                    seed,
                    work.messages,
                    work.plan.conversation.tools,
                )
            )
        return prompts

    def _take(self, work: _Work, prompt: Prompt, answer: dict[str, Any]) -> None:
        ids = answer["ids"]
        if ids is None:
            text = answer["text"]
        else:
            said = ids[: len(ids) - answer["num_past_end"]]
            if said and said[-1] in self.sampling.end_ids:
                said = said[:-1]
            text = self.tokenizer.decode(said)
        work.messages.append({"role": ASSISTANT, "content": text})
        work.next_turn += 1
        work.answers.append(
            {
                "prompt_ids": prompt.ids,
                "response_ids": ids,
                "num_past_end": answer["num_past_end"],
                "finish_reason": answer["finish_reason"],
            }
        )
        if answer["finish_reason"] == "length":
            # Nobody goes on talking to half an answer.
            work.stopped = "the answer before was cut by max_new_tokens"

    def _output_row(self, work: _Work) -> dict[str, Any]:
        if not work.answers:
            raise RowError("no_answer", work.stopped or "nothing to answer")
        conversation = work.plan.conversation
        row: dict[str, Any] = {
            "id": conversation.identity.id or conversation.content_hash[:16],
            "source": conversation.identity.source,
            "messages": work.messages,
            "finished": work.answers[-1]["finish_reason"] == "stop",
            "finish_reason": work.answers[-1]["finish_reason"],
        }
        if conversation.tools:
            row["tools"] = conversation.tools
        if work.answers[0]["response_ids"] is None:
            return row
        if len(work.answers) == 1:
            only = work.answers[0]
            names = ("prompt_ids", "response_ids", "num_past_end")
            return row | {name: only[name] for name in names}
        return row | {"answers": work.answers}


def list_answer_parts(folder: Path) -> list[Path]:
    """The published parts, in order."""
    return sorted((folder / ANSWERS_FOLDER).glob("[0-9]*.jsonl"))


def read_part_record(part: Path) -> dict[str, Any]:
    return json.loads(part.with_suffix(".json").read_text())


def _publish(folder: Path, number: int, rows: list[dict[str, Any]], record: dict[str, Any]) -> None:
    path = folder / ANSWERS_FOLDER / f"{number:05d}.jsonl"
    path.parent.mkdir(exist_ok=True)
    # The record first: the part's own name appearing is what makes both count.
    write_json(path.with_suffix(".json"), record)
    lines = [json.dumps(row, ensure_ascii=False, separators=(",", ":")) for row in rows]
    write_atomically(path, "".join(line + "\n" for line in lines).encode())


def _finish(target: Target, options: GenerateOptions, folder: StageFolder) -> dict[str, Any]:
    rows = answered = num_answers = response_tokens = 0
    reasons: Counter[str] = Counter()
    skipped: Counter[str] = Counter()
    parts = list_answer_parts(folder.path)
    engines = []
    for part in parts:
        record = read_part_record(part)
        rows += record["rows"]
        skipped.update(entry["reason"] for entry in record["skipped"])
        if record["engine"] not in engines:
            engines.append(record["engine"])
        with part.open("rb") as file:
            for line in file:
                row = json.loads(line)
                answered += 1
                for answer in row.get("answers", [row]):
                    reasons[answer["finish_reason"]] += 1
                    num_answers += 1
                    ids = answer.get("response_ids") or []
                    response_tokens += len(ids) - answer.get("num_past_end", 0)
    if not answered:
        raise DataError(f"none of the {rows} rows could be answered: {dict(skipped)}")
    result = {
        "target": asdict(target.reference),
        "rows": rows,
        "answered": answered,
        "answers": num_answers,
        "skipped": dict(skipped.most_common()),
        "finish_reasons": dict(reasons.most_common()),
        "response_tokens": response_tokens,
        "chat_template_kwargs": options.chat_template_kwargs,
        "system_prompt": options.system_prompt,
        "engines": engines,
        "parts": len(parts),
    }
    return folder.finish(result, fingerprint.of_files(parts))


def _batches(rows: Iterator[RawRow]) -> Iterator[list[RawRow]]:
    while batch := list(islice(rows, PART_ROWS)):
        yield batch


def _key(work: _Work) -> str:
    return f"{work.index}.{work.next_turn}"


def _skip(row: RawRow, error: RowError) -> dict[str, Any]:
    return {
        "file": str(row.file),
        "row": row.number,
        "reason": error.reason,
        "detail": str(error),
    }


def _context_length(target: Target) -> int:
    """Positions that the target knows; a config that says none sets no limit."""
    length = getattr(target.text_config, "max_position_embeddings", None)
    return length if isinstance(length, int) else 1 << 30


VERB = (GenerateOptions, run)

make_callable(__name__)
