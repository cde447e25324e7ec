"""What modes decode and served ask the target: prompts of a token data set, or prompt sets.

A prompt set is a .jsonl file of rows with `turns` (a list of user turns; or `prompt`, a string),
`question_id` and `category` as the field's question files have them. Its name is the source that
figures are told by.
"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from paceline import fingerprint
from paceline.acceptance.spans import answer_spans
from paceline.artefact import describe_input, load_finished
from paceline.dataset import TokenDataset, source_of
from paceline.errors import DataError, EvaluationError, TargetError, UsageError
from paceline.recipe import EvaluateOptions
from paceline.target.spec import Target


@dataclass
class Chat:
    """A conversation, or a sample of one, in which the target is asked, once or turn by turn.

    name: its own; conversation: what is resampled as a whole. prompts: token ids of the prompts
    that are known; a later turn's prompt holds the answers before it. turns: the user's turns, for
    prompts that are still to be made.
    """

    name: str
    conversation: str
    source: str
    prompts: list[list[int]]
    turns: list[str] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)

    @property
    def content(self) -> str:
        """A digest of what is asked; prompts that are made of answers do not count."""
        known = self.prompts[:1] if self.turns else self.prompts
        return fingerprint.of_json([known, self.turns])


class ChatForm:
    """Turns into prompts, by the target's chat template as servers apply it."""

    def __init__(self, options: EvaluateOptions, target: Target) -> None:
        self._tokenizer = target.tokenizer
        self._variables = options.chat_template_kwargs
        self._system = options.system_prompt
        self._template = None
        if options.chat_template is not None:
            self._template = _template_text(options)
        elif not self._tokenizer.chat_template:
            raise TargetError(
                f"{target.folder}: the tokenizer has no chat template: give a Jinja template in a "
                "file as `chat_template`"
            )

    def begin(self, chat: Chat) -> None:
        """Make the first prompt."""
        chat.prompts.append(self._prompt(chat))

    def go_on(self, chat: Chat, turn: int, answer: Sequence[int], end_ids: set[int]) -> None:
        """Make the next turn's prompt from the answer to `turn`; once made it stays, so that all
        who are measured answer the same prompts."""
        if turn + 1 != len(chat.prompts) or turn + 1 >= len(chat.turns):
            return
        said = [token for token in answer if token not in end_ids]
        chat.answers.append(self._tokenizer.decode(said, skip_special_tokens=False))
        chat.prompts.append(self._prompt(chat))

    def _prompt(self, chat: Chat) -> list[int]:
        messages = [{"role": "system", "content": self._system}] if self._system else []
        for turn, answer in zip(chat.turns, [*chat.answers, None], strict=False):
            messages.append({"role": "user", "content": turn})
            if answer is not None:
                messages.append({"role": "assistant", "content": answer})
        try:
            text = self._tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=True,
                chat_template=self._template,
                **self._variables,
            )
        except (TemplateError, TypeError, ValueError, LookupError) as error:
            raise EvaluationError(f"prompt {chat.name}: the chat template says: {error}") from error
        if chat.turns[len(chat.answers)].strip() not in text:
            raise EvaluationError(
                f"prompt {chat.name}: the chat template does not print "
                "the user's words; use `generate` and `prepare`, and give their folder as `data`"
            )
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]


@dataclass
class Questions:
    """All that is to be asked. form: None where every prompt is known beforehand."""

    chats: list[Chat]
    end_ids: set[int]
    form: ChatForm | None = None

    def by_key(self) -> dict[tuple[str, int], list[int]]:
        """Every prompt that is known, by name of its chat and turn."""
        return {(c.name, turn): p for c in self.chats for turn, p in enumerate(c.prompts)}

    def take(self, chat: Chat, turn: int, answer: Sequence[int]) -> None:
        """Tell what was answered."""
        if self.form is not None:
            self.form.go_on(chat, turn, answer, self.end_ids)

    def longest(self, max_new_tokens: int) -> int:
        """No conversation is longer than so many tokens, the last answer included."""
        return max(
            max(map(len, chat.prompts))
            + max(len(chat.turns), 1) * max_new_tokens
            # A token is at least a byte; the template puts little around a turn.
            + sum(len(turn.encode()) + 64 for turn in chat.turns[len(chat.prompts) :])
            for chat in self.chats
        )


def describe_questions(options: EvaluateOptions) -> dict[str, Any]:
    """The questions as an entry of a manifest's `inputs`."""
    if options.prompts:
        files = _files(options)
        parts = {"files": fingerprint.of_files(files)}
        if options.chat_template is not None:
            parts["chat_template"] = fingerprint.of_bytes(_template_text(options).encode())
        return {"path": [str(file) for file in files], "fingerprint": parts}
    return describe_input(options.data, load_finished(options.data, "prepare"))


def no_samples(folder: str | Path, split: str) -> EvaluationError:
    return EvaluationError(
        f"{folder} has no samples of split {split!r}: `heldout_share` of `prepare` decides how "
        "many are held out, `split` of `evaluate` which ones are measured"
    )


def open_questions(options: EvaluateOptions, target: Target) -> Questions:
    """The prompts that the options name. Raises EvaluationError where there are none."""
    if not options.prompts:
        data = TokenDataset(options.data)
        chats = list(_of_samples(data, options))
        if not chats:
            raise no_samples(data.folder, options.split)
        return Questions(chats, set(data.manifest.result["end_of_turn_ids"]))
    form = ChatForm(options, target)
    chats = [chat for file in _files(options) for chat in _of_file(file, options)]
    if not chats:
        raise EvaluationError(f"{', '.join(options.prompts)}: no prompts in there")
    name, times = Counter(chat.name for chat in chats).most_common(1)[0]
    if times > 1:
        raise DataError(f"prompts: {name} is there more than once: sets need names of their own")
    for chat in chats:
        form.begin(chat)
    return Questions(chats, set(target.end_of_turn_ids), form)


def _of_samples(data: TokenDataset, options: EvaluateOptions) -> Iterator[Chat]:
    number = 0
    for sample in data.split(options.split):
        spans = answer_spans(sample.loss_mask, sample.num_past_end)[: options.max_turns]
        if not spans:
            continue
        if number == options.limit:
            return
        number += 1
        prompts = [sample.input_ids[: span.first].tolist() for span in spans]
        conversation = sample.conversation_id or sample.sample_id
        yield Chat(sample.sample_id, conversation, sample.source, prompts)


def _files(options: EvaluateOptions) -> list[Path]:
    files = [Path(name) for name in options.prompts]
    if missing := [str(file) for file in files if not file.is_file()]:
        raise UsageError(f"prompts: no such file: {', '.join(missing)}")
    return files


def _template_text(options: EvaluateOptions) -> str:
    path = Path(options.chat_template or "")
    if not path.is_file():
        raise UsageError(f"chat_template: {path}: no such file")
    return path.read_text()


def _of_file(file: Path, options: EvaluateOptions) -> Iterator[Chat]:
    source = source_of(file)
    numbered = enumerate(file.read_bytes().split(b"\n"), start=1)
    rows = ((number, line) for number, line in numbered if line.strip())
    for number, line in islice(rows, options.limit):
        where = f"{file}, row {number}"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(f"{where} is not JSON: {error}") from error
        turns = row.get("turns", row.get("prompt")) if isinstance(row, dict) else None
        turns = [turns] if isinstance(turns, str) else turns
        if not (turns and isinstance(turns, list) and all(map(_is_text, turns))):
            raise DataError(f"{where} has no `turns` (a list of user turns) and no `prompt`")
        name = next((row[key] for key in ("question_id", "id") if key in row), number)
        yield Chat(f"{source}/{name}", f"{source}/{name}", source, [], turns[: options.max_turns])


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())
