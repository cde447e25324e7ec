"""User turns that the target writes itself: it goes on after the user header of its template.

What an instruct model says there is much like what it was trained to be asked; filtered and
without doubles it serves as prompts for those who have none.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from paceline.answers.engine import STOP, Answer, AnswerEngine, Prompt, Sampling
from paceline.errors import DataError, EngineError, TargetError
from paceline.prepare.journal import Journal
from paceline.prepare.parts import write_rows
from paceline.prepare.rows import RowError, digest
from paceline.prepare.seen import SeenHashes
from paceline.prepare.template import SENTINEL, ChatTemplate
from paceline.prepare.tokens import TextTokenizer
from paceline.progress import progress_bar
from paceline.recipe import GenerateOptions
from paceline.target.spec import Target

PROMPTS_FILE = "self_prompts.jsonl"
SOURCE = "self_prompt"
_JOURNAL_NAME = "self_prompt_journal.jsonl"
_SMALLEST_ROUND, _LARGEST_ROUND = 8, 256
# A target that gives fewer usable turns than one in so many is not one to ask.
_MOST_TRIES_PER_PROMPT = 20
_FEWEST_WORDS = 3
_LOOP = re.compile(r"(.{4,60}?)\1{3,}", re.DOTALL)


def write_self_prompts(
    options: GenerateOptions,
    target: Target,
    template: ChatTemplate,
    engine: AnswerEngine,
    folder: Path,
) -> Path:
    """A file of `self_prompt` rows with one user turn each; made once, resumable.

    Raises TargetError where the template has no user header to go on from, DataError where too
    few usable turns come.
    """
    path = folder / PROMPTS_FILE
    if path.exists():
        return path
    tokenizer = TextTokenizer(target.tokenizer, options.begin_token == "once")
    header, end_ids = _user_header(target, template, tokenizer)
    sampling = Sampling(
        max_new_tokens=options.self_prompt_max_tokens,
        end_ids=end_ids,
        temperature=options.self_prompt_temperature,
        top_p=options.self_prompt_top_p,
    )
    seen = SeenHashes()
    turns: list[str] = []
    specials = _special_ids(target)
    with (
        Journal(folder / _JOURNAL_NAME, 0) as journal,
        progress_bar("self-prompt", options.self_prompt, "turns") as bar,
    ):
        for answers in _rounds(options, header, sampling, engine, journal):
            before = len(turns)
            for answer in answers:
                text = _usable(answer, tokenizer, specials, end_ids)
                if text and seen.add(digest(" ".join(text.lower().split()).encode())):
                    turns.append(text)
            bar.advance(min(len(turns), options.self_prompt) - before)
            if len(turns) >= options.self_prompt:
                break
        else:
            raise DataError(
                f"only {len(turns)} of {options.self_prompt} user turns came out usable after "
                f"{_MOST_TRIES_PER_PROMPT} tries each; the target hardly writes any"
            )
        rows = [
            {
                "id": f"self-{number:07d}",
                "source": SOURCE,
                "messages": [{"role": "user", "content": text}],
            }
            for number, text in enumerate(turns[: options.self_prompt], start=1)
        ]
        write_rows(path, rows)
        journal.remove()
    return path


def _rounds(
    options: GenerateOptions,
    header: list[int],
    sampling: Sampling,
    engine: AnswerEngine,
    journal: Journal,
) -> Iterator[list[Answer]]:
    """Answers to the header in rounds of fixed size, so that a resumed run asks the same."""
    known = {record["key"]: record["ids"] for record in journal.records}

    def keep(answer: Answer) -> None:
        if answer.refusal is not None:
            raise EngineError(f"self_prompt: {answer.refusal}")
        if answer.ids is None:
            raise DataError(
                "self_prompt needs an engine that takes and gives token ids; with a server use "
                "server_api completions of one that returns them"
            )
        # An unfinished turn is never used: its ids need not be kept.
        known[answer.key] = answer.ids if answer.finish_reason == STOP else []
        journal.append({"key": answer.key, "ids": known[answer.key]})

    size = max(_SMALLEST_ROUND, min(_LARGEST_ROUND, options.self_prompt))
    num_rounds = -(-options.self_prompt * _MOST_TRIES_PER_PROMPT // size)
    for number in range(num_rounds):
        keys = [f"{number}.{i}" for i in range(size)]
        missing = [
            Prompt(key, header, int(digest(f"{options.seed}/self/{key}".encode())[:12], 16))
            for key in keys
            if key not in known
        ]
        if missing:
            engine.answer(missing, sampling, keep)
        yield [Answer(key, known.pop(key), STOP) for key in keys]


def _user_header(
    target: Target, template: ChatTemplate, tokenizer: TextTokenizer
) -> tuple[list[int], tuple[int, ...]]:
    """Token ids up to where a first user turn begins, and the ids that end such a turn."""
    try:
        text = template.render([{"role": "user", "content": SENTINEL}])
    except RowError as error:
        raise TargetError(f"self_prompt: {error}") from error
    head, found, tail = text.partition(SENTINEL)
    if not found or not head.strip():
        raise TargetError(
            "self_prompt: the chat template prints no header in front of a user turn, so there "
            "is nothing to go on from"
        )
    after = tokenizer.encode([tail])[0].ids.tolist()[len(tokenizer.begin_ids) :]
    special = [i for i in after if i in _special_ids(target)]
    return tokenizer.encode([head])[0].ids.tolist(), (*target.end_of_turn_ids, *special[:1])


def _special_ids(target: Target) -> set[int]:
    added = target.tokenizer.added_tokens_decoder
    return {token_id for token_id, token in added.items() if token.special}


def _usable(
    answer: Answer, tokenizer: TextTokenizer, specials: set[int], end_ids: tuple[int, ...]
) -> str | None:
    """The turn's text if it is a whole, plausible user turn."""
    ids = answer.ids or []
    if not ids or ids[-1] not in end_ids or specials.intersection(ids[:-1]):
        return None
    text = tokenizer.decode(ids[:-1]).strip()
    if len(text.split()) < _FEWEST_WORDS or "\ufffd" in text or _LOOP.search(text):
        return None
    return text
