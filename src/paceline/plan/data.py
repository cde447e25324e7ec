"""What the recipe's conversations will be as tokens: a sample of them, converted as the stages do.

Everything later is told of that sample; `scale` says how many conversations each of it stands for.
"""

import random
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from paceline.contracts import HELDOUT_SPLIT, TRAIN_SPLIT, TokenSample
from paceline.errors import DataError, TargetError, UsageError
from paceline.extract.engine import num_needed_tokens
from paceline.prepare.convert import Converter, PartRecord
from paceline.prepare.prompts import answer_plan
from paceline.prepare.reading import RawRow, find_files, read_rows
from paceline.prepare.rows import RowError, parse_row
from paceline.prepare.template import ChatTemplate, require_template, template_text
from paceline.prepare.tokens import TextTokenizer
from paceline.recipe import PlanOptions, PrepareOptions, Recipe
from paceline.target.spec import Target

_SEED = 0
_TOKENIZER_FILES = ("tokenizer.*", "tokenization_*", "vocab.*", "*.tiktoken", "*.model")
_ASSUMED_SAMPLES = 200


@dataclass(frozen=True)
class DataSample:
    """samples: token samples as `prepare` makes them. scale: what one stands for. rows: rows of
    the data. num_answers: per row, that `generate` is to write, answer_tokens long on average.
    convert_s: seconds that converting took per row. row_bytes: mean size of a row, where rows were
    read. origin: where it comes from, in words."""

    samples: tuple[TokenSample, ...]
    scale: float
    rows: int
    origin: str
    record: PartRecord
    convert_s: float = 0.0
    row_bytes: float = 0.0
    num_answers: float = 0.0
    answer_tokens: float | None = None

    @property
    def num_samples(self) -> int:
        return round(self.scale * len(self.samples))

    @property
    def num_tokens(self) -> int:
        return round(self.scale * sum(s.num_tokens for s in self.samples))

    @property
    def num_supervised(self) -> int:
        return round(self.scale * sum(s.num_supervised for s in self.samples))

    @property
    def num_forward_tokens(self) -> int:
        """Tokens that extraction runs: none after the last supervised one."""
        return round(self.scale * sum(map(num_needed_tokens, self.samples)))

    @property
    def mean_context(self) -> float:
        """Mean number of tokens that a token attends to."""
        total = sum(s.num_tokens for s in self.samples)
        return sum(s.num_tokens**2 for s in self.samples) / total / 2 if total else 0.0

    def num_supervised_in(self, split: str, at_most: int | None = None) -> int:
        """Supervised tokens of a split, of each sample at most so many."""
        lengths = [s.num_supervised for s in self.samples if s.split == split]
        return round(self.scale * sum(min(length, at_most or length) for length in lengths))

    def num_samples_in(self, split: str) -> int:
        return round(self.scale * sum(s.split == split for s in self.samples))


def sample_data(
    options: PlanOptions,
    recipe: Recipe,
    target: Target,
    vocab_size: int,
    answer_tokens: float | None,
) -> DataSample:
    """A sample of the recipe's data. answer_tokens: mean length of answers to be written, where it
    is known.

    Raises UsageError where there is no data and none is assumed, DataError where none is usable,
    TargetError where the target has no tokenizer.
    """
    if options.rows is not None:
        return _assumed(options, recipe, vocab_size)
    files = _files(recipe)
    limit = recipe.generate.limit if recipe.generate else recipe.prepare.limit
    rows, total = _reservoir(islice(read_rows(files), limit), options.sample_rows)
    if not rows:
        raise DataError(f"{', '.join(map(str, files))}: no rows to plan by")
    _require_tokenizer(target)
    if recipe.generate:
        length = answer_tokens or recipe.generate.max_new_tokens
        return _to_be_answered(recipe, target, vocab_size, rows, total, length)
    return _converted(recipe.prepare, target, rows, total)


def _files(recipe: Recipe) -> list[Path]:
    if recipe.generate and not recipe.generate.data and recipe.generate.self_prompt:
        raise UsageError(
            "plan: the recipe's prompts are yet to be written by the target itself "
            "(generate.self_prompt): pass `rows` (--rows) and `tokens_per_row`"
        )
    patterns = recipe.generate.data if recipe.generate else recipe.prepare.data
    try:
        return find_files(patterns)
    except UsageError as error:
        raise UsageError(
            f"{error}. To plan before the data are there, assume some: --rows 100000 "
            "--tokens-per-row 1024 --supervised-share 0.5"
        ) from error


def _require_tokenizer(target: Target) -> None:
    """Without its files transformers may give an empty tokenizer, and no error."""
    if not any(path for name in _TOKENIZER_FILES for path in target.folder.glob(name)):
        raise TargetError(
            f"{target.folder} has no tokenizer. To plan without one, assume the data: "
            "--rows 100000 --tokens-per-row 1024 --supervised-share 0.5"
        )


def _reservoir(rows: Iterable[RawRow], size: int) -> tuple[list[RawRow], int]:
    """A uniform sample of at most `size` rows in their order, and how many there are (Vitter's
    algorithm R, fixed seed)."""
    generator = random.Random(_SEED)
    kept: list[tuple[int, RawRow]] = []
    total = 0
    for row in rows:
        if total < size:
            kept.append((total, row))
        elif (at := generator.randint(0, total)) < size:
            kept[at] = (total, row)
        total += 1
    return [row for _, row in sorted(kept, key=lambda pair: pair[0])], total


def _converted(
    options: PrepareOptions, target: Target, rows: list[RawRow], total: int
) -> DataSample:
    converter = Converter(options, target, template_text(target, options.chat_template))
    started = time.perf_counter()
    try:
        samples, record = converter.convert(rows)
    finally:
        converter.close()
    seconds = time.perf_counter() - started
    if not samples:
        reasons = ", ".join(sorted({entry["reason"] for entry in record.skipped}))
        raise DataError(f"none of {len(rows)} rows looked at can be used: {reasons}")
    return DataSample(
        samples=tuple(samples),
        scale=total / len(rows),
        rows=total,
        origin=f"{len(rows):,} of {total:,} rows, tokenised",
        record=record,
        convert_s=seconds / len(rows),
        row_bytes=sum(row.num_bytes for row in rows) / len(rows),
    )


def _to_be_answered(
    recipe: Recipe,
    target: Target,
    vocab_size: int,
    rows: list[RawRow],
    total: int,
    answer_tokens: float,
) -> DataSample:
    """Prompts with answers of the given length, as `generate` and then `prepare` would leave
    them."""
    generate, prepare = recipe.generate, recipe.prepare
    assert generate is not None
    template = ChatTemplate(
        require_template(target, generate.chat_template),
        target.tokenizer,
        generate.chat_template_kwargs,
        generate.system_prompt,
    )
    tokenizer = TextTokenizer(target.tokenizer, generate.begin_token == "once")
    started = time.perf_counter()
    known = [found for row in rows if (found := _prompt_tokens(row, template, tokenizer))]
    seconds = time.perf_counter() - started
    if not known:
        raise DataError(f"none of {len(rows)} rows looked at asks for an answer")
    maker = _Maker(prepare, vocab_size, generate.record_past_end, len(known))
    samples = [
        maker.sample(i, tokens, round(answers * answer_tokens))
        for i, (tokens, answers) in enumerate(known)
    ]
    return DataSample(
        samples=tuple(samples),
        scale=total / len(rows),
        rows=total,
        origin=(
            f"{len(rows):,} of {total:,} rows, tokenised; answers of {answer_tokens:,.0f} "
            "tokens are assumed"
        ),
        record=PartRecord(rows=len(rows), kept=len(known)),
        convert_s=seconds / len(rows),
        num_answers=sum(answers for _, answers in known) / len(rows),
        answer_tokens=answer_tokens,
    )


def _prompt_tokens(
    row: RawRow, template: ChatTemplate, tokenizer: TextTokenizer
) -> tuple[int, int] | None:
    """Tokens of a row's given turns, and the number of answers to write; None for a bad row."""
    try:
        plan = answer_plan(parse_row(row), row.file.name)
        given = [turn or {"role": "assistant", "content": ""} for turn in plan.turns]
        text = template.render(given, plan.conversation.tools)
    except RowError:
        return None
    return len(tokenizer.encode([text])[0].ids), plan.num_answers


def _assumed(options: PlanOptions, recipe: Recipe, vocab_size: int) -> DataSample:
    assert options.rows is not None
    supervised = max(1, round(options.tokens_per_row * options.supervised_share))
    context = options.tokens_per_row - supervised
    count = min(_ASSUMED_SAMPLES, options.rows)
    maker = _Maker(recipe.prepare, vocab_size, 0, count)
    samples = [maker.sample(i, context, supervised) for i in range(count)]
    return DataSample(
        samples=tuple(samples),
        scale=options.rows / count,
        rows=options.rows,
        origin=(
            f"assumed: {options.rows:,} rows of {options.tokens_per_row:,} tokens, "
            f"{100 * options.supervised_share:.0f}% of them supervised"
        ),
        record=PartRecord(rows=count, kept=count),
        num_answers=1.0 if recipe.generate else 0.0,
        answer_tokens=float(supervised) if recipe.generate else None,
    )


@dataclass(frozen=True)
class _Maker:
    """Makes samples whose answer stands at their end, cut to max_length; ids mean nothing."""

    options: PrepareOptions
    vocab_size: int
    past_end: int
    count: int

    def sample(self, number: int, context: int, supervised: int) -> TokenSample:
        length = min(context + supervised, self.options.max_length)
        mask = np.zeros(length + self.past_end, bool)
        mask[min(context, length - 1) : length] = True
        generator = np.random.default_rng(number)
        return TokenSample(
            sample_id=f"{number:016x}",
            conversation_id=f"{number:016x}",
            source="data",
            split=self._split(number),
            input_ids=generator.integers(0, self.vocab_size, len(mask)).astype(np.int32),
            loss_mask=mask,
            num_past_end=self.past_end,
            finished=True,
        )

    def _split(self, number: int) -> str:
        if self.options.split != "auto":
            return self.options.split
        # The first ones are held out, so that the share is met as nearly as the count allows.
        is_heldout = number < round(self.options.heldout_share * self.count)
        return HELDOUT_SPLIT if is_heldout else TRAIN_SPLIT


def iterate_rows(samples: Iterable[TokenSample]) -> Iterator[dict]:
    """Samples as rows that `prepare` takes."""
    for sample in samples:
        yield {
            "id": sample.sample_id,
            "source": sample.source,
            "input_ids": sample.input_ids.tolist(),
            "loss_mask": sample.loss_mask.tolist(),
        }
