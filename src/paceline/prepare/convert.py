"""A batch of raw rows into samples and a record of what became of every row."""

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import numpy as np

from paceline.contracts import HELDOUT_SPLIT, TRAIN_SPLIT, TokenSample
from paceline.dataset import source_of
from paceline.errors import DataError
from paceline.prepare.conversation import Conversation, conversation
from paceline.prepare.cutting import Cut, cut, has_target
from paceline.prepare.late import count_supervised, split_late
from paceline.prepare.masks import MaskedTokens, Masker
from paceline.prepare.reading import RawRow
from paceline.prepare.rows import (
    Identity,
    RowError,
    TokenPiece,
    TokenRow,
    digest,
    identify,
    parse_row,
    token_row,
    told_finished,
)
from paceline.prepare.seen import SeenHashes
from paceline.prepare.spans import MaskedConversation, SpanFinder
from paceline.prepare.template import ChatTemplate, missing_template
from paceline.prepare.tokens import TextTokenizer
from paceline.recipe import PrepareOptions
from paceline.target.spec import Target

# Rows left out on purpose: they do not count against `max_skipped_share`.
DELIBERATE = ("duplicate", "source_weight")
GIVEN_IDS = "given_ids"


@dataclass
class PartRecord:
    """What became of a part's rows; published with its samples, so that a resumed run knows."""

    rows: int = 0
    kept: int = 0
    skipped: list[dict[str, Any]] = field(default_factory=list)
    split_samples: int = 0
    cut_samples: int = 0
    cut_supervised: int = 0
    methods: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)
    sources: Counter[str] = field(default_factory=Counter)  # of the rows, kept or not
    seen_contents: str = ""
    seen_ids: str = ""
    seen_conversations: str = ""

    def as_dict(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass
class _Pending:
    """A row that was read: its tokens, or its texts that wait for the tokenizer, or an error.
    late_supervised: supervised tokens of texts that are left out, since they begin too late."""

    row: RawRow
    row_id: str | None = None
    content: TokenRow | Conversation | None = None
    masked: MaskedConversation | None = None
    late_supervised: int = 0
    error: RowError | None = None


class Converter:
    """Turns rows into samples; remembers contents and ids seen before."""

    def __init__(self, options: PrepareOptions, target: Target, template: str | None) -> None:
        self.options = options
        self.target = target
        self.contents = SeenHashes()
        self.ids = SeenHashes()
        self.conversations = SeenHashes()
        self._numbers: dict[str, count[int]] = {}
        self._template = template
        self._finder: SpanFinder | None = None
        self._masker: Masker | None = None

    def restore(self, record: dict[str, Any]) -> None:
        """Take up the memory of a part that an earlier run published."""
        self.contents.restore(record["seen_contents"])
        self.ids.restore(record["seen_ids"])
        self.conversations.restore(record["seen_conversations"])

    def convert(self, rows: list[RawRow]) -> tuple[list[TokenSample], PartRecord]:
        """Samples in the order of their rows. Raises DataError at a bad row where strict."""
        record = PartRecord(rows=len(rows))
        pending = [self._read(row, record) for row in rows]
        masked = self._masker.results() if self._masker else iter(())
        samples: list[TokenSample] = []
        for entry in pending:
            try:
                samples += self._samples(entry, masked, record)
                record.kept += 1
            except RowError as error:
                self._skip(entry, error, record)
        record.seen_contents = self.contents.take_new()
        record.seen_ids = self.ids.take_new()
        record.seen_conversations = self.conversations.take_new()
        return samples, record

    @property
    def finder(self) -> SpanFinder:
        """Made when the first conversation comes: rows of ids need no template."""
        if self._finder is None:
            if self._template is None:
                raise missing_template(self.target)
            tokenizer = self.target.tokenizer
            template = ChatTemplate(
                self._template,
                tokenizer,
                self.options.chat_template_kwargs,
                self.options.system_prompt,
            )
            special = [token.content for token in tokenizer.added_tokens_decoder.values()]
            ends = [tokenizer.decode([i]) for i in self.target.end_of_turn_ids]
            self._finder = SpanFinder(template, [*special, *ends], ends)
        return self._finder

    @property
    def masker(self) -> Masker:
        if self._masker is None:
            threads = self.options.num_workers or os.cpu_count() or 1
            add_begin = self.options.begin_token == "once"
            tokenizer = TextTokenizer(self.target.tokenizer, add_begin)
            self._masker = Masker(tokenizer, threads)
        return self._masker

    def template_end_ids(self) -> list[int]:
        """Ids of the marker with which the template ends a turn."""
        token = self.finder.end_token
        return [self.target.tokenizer.convert_tokens_to_ids(token)] if token else []

    def close(self) -> None:
        if self._masker is not None:
            self._masker.close()

    def _read(self, row: RawRow, record: PartRecord) -> _Pending:
        pending = _Pending(row)
        try:
            values = parse_row(row)
            identity = identify(values, default_source=source_of(row.file))
            pending.row_id = identity.id or None
            record.sources[identity.source] += 1
            pending.content = self._content(values, identity)
            self._admit(pending.content)
            if isinstance(pending.content, Conversation):
                pending.masked = self._without_late(self.finder.find(pending.content), pending)
                self.masker.put(pending.masked.samples)
        except RowError as error:
            pending.error = error
        return pending

    def _without_late(self, masked: MaskedConversation, pending: _Pending) -> MaskedConversation:
        """Without the samples that teach nothing for sure, which are counted."""
        tokenizer = self.masker.tokenizer
        samples, late = split_late(masked.samples, tokenizer, self.options.max_length)
        if not late:
            return masked
        pending.late_supervised = count_supervised(late, tokenizer)
        notes = masked.notes + Counter(samples_too_long=len(late))
        return replace(masked, samples=samples, notes=notes)

    def _content(self, values: dict[str, Any], identity: Identity) -> TokenRow | Conversation:
        content = token_row(values, identity, self.target.vocab_size)
        if content is not None:
            return _split_as_messages(content, values)
        told = conversation(values, identity)
        if told is None:
            raise RowError(
                "missing_key",
                "the row has none of messages, conversations, input_ids, response_ids, answers; "
                f"it has {', '.join(sorted(values)) or 'nothing'}",
            )
        return replace(told, finished=told_finished(values))

    def _admit(self, content: TokenRow | Conversation) -> None:
        """Refuse duplicates and rows that the source's weight leaves out."""
        weight = self.options.source_weights.get(content.identity.source, 1.0)
        if _unit(content.content_hash[16:24]) >= weight:
            raise RowError("source_weight", f"left out by the weight {weight} of its source")
        if self.options.deduplicate and not self.contents.add(content.content_hash):
            raise RowError("duplicate", "an earlier row has the same content")

    def _samples(
        self, entry: _Pending, masked: Iterator[MaskedTokens | RowError], record: PartRecord
    ) -> list[TokenSample]:
        """The samples of one row. Raises RowError."""
        if entry.masked is not None:
            results = [next(masked) for _ in entry.masked.samples]
        if entry.error is not None:
            raise entry.error
        content, notes = entry.content, Counter()
        if entry.masked is not None:
            pieces = []
            for text, result in zip(entry.masked.samples, results, strict=True):
                if isinstance(result, RowError):
                    raise result
                notes += result.notes
                ids, mask = result.input_ids, result.loss_mask
                if ids.max(initial=0) >= self.target.vocab_size:
                    raise RowError(
                        "bad_ids",
                        f"the tokenizer gives id {ids.max()}; the target's logits have ids 0 to "
                        f"{self.target.vocab_size - 1}",
                    )
                pieces.append(TokenPiece(ids, mask, finished=text.finished))
            notes += entry.masked.notes
        else:
            pieces = content.pieces
        kept, num_cut, lost = self._cut_all(pieces, notes)
        record.methods[entry.masked.method if entry.masked else GIVEN_IDS] += 1
        record.notes += notes
        record.cut_samples += num_cut
        record.cut_supervised += lost + entry.late_supervised
        record.split_samples += len(kept) - 1
        return self._named(content, kept)

    def _cut_all(
        self, pieces: list[TokenPiece], notes: Counter[str]
    ) -> tuple[list[TokenPiece], int, int]:
        """Pieces within max_length that teach something, how many were cut, and the supervised
        tokens that went. Raises RowError where none is left."""
        kept: list[TokenPiece] = []
        num_cut = lost = 0
        max_length = self.options.max_length
        supervised = [piece for piece in pieces if has_target(piece.loss_mask)]
        if not supervised:
            raise RowError("no_supervised_tokens", "no token of the row is supervised")
        for piece in supervised:
            where = cut(piece.loss_mask, max_length)
            if where is None:
                notes["samples_too_long"] += 1
                lost += int(piece.loss_mask.sum())
                continue
            removed = len(piece.input_ids) - where.num_tokens
            num_cut += removed > 0
            lost += where.supervised_lost
            kept.append(_shortened(piece, where) if removed else piece)
        if not kept:
            raise RowError(
                "too_long",
                f"the first answer starts at token {int(supervised[0].loss_mask.argmax())}; "
                f"max_length is {max_length}",
            )
        return kept, num_cut, lost

    def _named(
        self, content: TokenRow | Conversation, pieces: list[TokenPiece]
    ) -> list[TokenSample]:
        identity = content.identity
        name, sample_ids = self._unused_names(content, len(pieces))
        conversation_id = identity.conversation_id or name
        self.conversations.add(digest(identity.source.encode(), conversation_id.encode()))
        split = self._split(content)
        teaches_all = self.options.train_on_prompts and split == TRAIN_SPLIT
        return [
            TokenSample(
                sample_id=sample_id,
                input_ids=piece.input_ids,
                loss_mask=_with_prompt(piece.loss_mask) if teaches_all else piece.loss_mask,
                source=identity.source,
                split=split,
                conversation_id=conversation_id,
                num_past_end=piece.num_past_end,
                finished=piece.finished,
            )
            for sample_id, piece in zip(sample_ids, pieces, strict=True)
        ]

    def _unused_names(
        self, content: TokenRow | Conversation, num_pieces: int
    ) -> tuple[str, list[str]]:
        """The row's name, and a sample_id for each of its pieces: ids name samples in stores, so
        none is given twice. The content tells apart what the data calls the same, a number what is
        the same."""
        names = self._names(content)
        while True:
            name = next(names)
            parts = [f"{name}#{number}" for number in range(1, num_pieces + 1)]
            parts = parts if num_pieces > 1 else []
            if all(self.ids.add(digest(i.encode())) for i in (name, *parts)):
                return name, parts or [name]

    def _names(self, content: TokenRow | Conversation) -> Iterator[str]:
        base = content.identity.id or content.content_hash[:16]
        other = f"{base}~{content.content_hash[:8]}"
        yield from (base, other)
        # Goes on where the row before stopped: what was tried is taken, and content that is there
        # ten thousand times would be tried as often for each.
        for number in self._numbers.setdefault(other, count(2)):
            yield f"{other}~{number}"

    def _split(self, content: TokenRow | Conversation) -> str:
        identity = content.identity
        if self.options.split != "auto":
            return self.options.split
        if identity.split is not None:
            return identity.split
        # Rows of one conversation may begin at different turns of it: their prompts differ.
        name = identity.conversation_id
        split_hash = digest(name.encode()) if name else content.prompt_hash
        is_heldout = _unit(split_hash[:8]) < self.options.heldout_share
        return HELDOUT_SPLIT if is_heldout else TRAIN_SPLIT

    def _skip(self, entry: _Pending, error: RowError, record: PartRecord) -> None:
        row = entry.row
        if self.options.strict and error.reason not in DELIBERATE:
            raise DataError(
                f"{row.file}, row {row.number}"
                f"{f' (id {entry.row_id})' if entry.row_id else ''}: "
                f"{error.reason}: {error} (strict: no row may be skipped)"
            ) from error
        record.skipped.append(
            {
                "file": str(row.file),
                "row": row.number,
                "id": entry.row_id,
                "reason": error.reason,
                "detail": str(error),
            }
        )


def _split_as_messages(row: TokenRow, values: dict[str, Any]) -> TokenRow:
    """Where a row of ids also has its messages, the split goes by them: ids and text of one
    conversation, before and after `generate`, fall on one side."""
    try:
        told = conversation(values, row.identity)
    except RowError:
        return row
    return replace(row, prompt_hash=told.prompt_hash) if told else row


def _with_prompt(loss_mask: np.ndarray) -> np.ndarray:
    """The mask with all before its last supervised token supervised; nothing predicts the first."""
    whole = loss_mask.copy()
    whole[1 : np.flatnonzero(loss_mask)[-1]] = True
    return whole


def _shortened(piece: TokenPiece, where: Cut) -> TokenPiece:
    end = where.num_tokens
    finished = piece.finished
    if where.supervised_lost:
        # The last answer is another one now: half of one, or an earlier one of which nothing is
        # said.
        finished = False if piece.loss_mask[end - 1] and piece.loss_mask[end] else None
    return TokenPiece(
        piece.input_ids[:end],
        piece.loss_mask[:end],
        max(piece.num_past_end - (len(piece.input_ids) - end), 0),
        finished,
    )


def _unit(hex_digits: str) -> float:
    """Eight hex digits as a number in [0, 1)."""
    return int(hex_digits, 16) / 16**8
