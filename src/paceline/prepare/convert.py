"""A batch of raw rows into samples and a record of what became of every row."""

import dataclasses
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from paceline.contracts import HELDOUT_SPLIT, TRAIN_SPLIT, TokenSample
from paceline.errors import DataError
from paceline.prepare.cutting import cut, has_target
from paceline.prepare.reading import RawRow
from paceline.prepare.rows import (
    Identity,
    RowError,
    TokenRow,
    digest,
    identify,
    parse_row,
    token_row,
)
from paceline.prepare.seen import SeenHashes
from paceline.recipe import PrepareOptions

# Rows left out on purpose: they do not count against `max_skipped_share`.
DELIBERATE = ("duplicate", "source_weight")


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
    seen_contents: str = ""
    seen_ids: str = ""
    seen_conversations: str = ""

    def as_dict(self) -> dict[str, Any]:
        return dict(vars(self))


class Converter:
    """Turns rows into samples; remembers contents and ids seen before."""

    def __init__(self, options: PrepareOptions, vocab_size: int) -> None:
        self.options = options
        self.vocab_size = vocab_size
        self.contents = SeenHashes()
        self.ids = SeenHashes()
        self.conversations = SeenHashes()

    def restore(self, record: dict[str, Any]) -> None:
        """Take up the memory of a part that an earlier run published."""
        self.contents.restore(record["seen_contents"])
        self.ids.restore(record["seen_ids"])
        self.conversations.restore(record["seen_conversations"])

    def convert(self, rows: list[RawRow]) -> tuple[list[TokenSample], PartRecord]:
        """Samples in the order of their rows. Raises DataError at a bad row where strict."""
        record = PartRecord(rows=len(rows))
        samples: list[TokenSample] = []
        for row in rows:
            row_id = None
            try:
                values = parse_row(row)
                identity = identify(values, default_source=row.file.name.split(".")[0])
                row_id = identity.id or None
                samples.append(self._from_tokens(values, identity, record))
                record.kept += 1
            except RowError as error:
                self._skip(row, row_id, error, record)
        record.seen_contents = self.contents.take_new()
        record.seen_ids = self.ids.take_new()
        record.seen_conversations = self.conversations.take_new()
        return samples, record

    def _from_tokens(
        self, values: dict[str, Any], identity: Identity, record: PartRecord
    ) -> TokenSample:
        row = token_row(values, identity, self.vocab_size)
        if row is None:
            raise RowError("missing_key", "the row has none of the known forms' columns")
        if not len(row.input_ids):
            raise RowError("empty", "the row has no tokens")
        if not has_target(row.loss_mask):
            raise RowError("no_supervised_tokens", "no token of the row is supervised")
        self._admit(row)
        record.methods["given_ids"] += 1
        return self._cut(self._named(row), record)

    def _admit(self, row: TokenRow) -> None:
        """Refuse duplicates and rows that the source's weight leaves out."""
        weight = self.options.source_weights.get(row.identity.source, 1.0)
        if _unit(row.content_hash[16:24]) >= weight:
            raise RowError("source_weight", f"left out by the weight {weight} of its source")
        if self.options.deduplicate and not self.contents.add(row.content_hash):
            raise RowError("duplicate", "an earlier row has the same content")

    def _named(self, row: TokenRow) -> TokenSample:
        sample_id = row.identity.id or row.content_hash[:16]
        if not self.ids.add(digest(sample_id.encode())):
            # Ids name samples in stores; the content tells apart what the data calls the same.
            sample_id = f"{sample_id}~{row.content_hash[:8]}"
            self.ids.add(digest(sample_id.encode()))
        conversation_id = row.identity.conversation_id or sample_id
        self.conversations.add(digest(conversation_id.encode()))
        return TokenSample(
            sample_id=sample_id,
            input_ids=row.input_ids,
            loss_mask=row.loss_mask,
            source=row.identity.source,
            split=self._split(row.prompt_hash),
            conversation_id=conversation_id,
            num_past_end=row.num_past_end,
            finished=row.finished,
        )

    def _split(self, prompt_hash: str) -> str:
        if self.options.split != "auto":
            return self.options.split
        is_heldout = _unit(prompt_hash[:8]) < self.options.heldout_share
        return HELDOUT_SPLIT if is_heldout else TRAIN_SPLIT

    def _cut(self, sample: TokenSample, record: PartRecord) -> TokenSample:
        where = cut(sample.loss_mask, self.options.max_length)
        if where is None:
            first = int(sample.loss_mask.argmax())
            raise RowError(
                "too_long",
                f"the first answer starts at token {first} of {sample.num_tokens}; "
                f"max_length is {self.options.max_length}",
            )
        removed = sample.num_tokens - where.num_tokens
        if not removed:
            return sample
        record.cut_samples += 1
        record.cut_supervised += where.supervised_lost
        return dataclasses.replace(
            sample,
            input_ids=sample.input_ids[: where.num_tokens],
            loss_mask=sample.loss_mask[: where.num_tokens],
            num_past_end=max(sample.num_past_end - removed, 0),
        )

    def _skip(self, row: RawRow, row_id: str | None, error: RowError, record: PartRecord) -> None:
        if self.options.strict and error.reason not in DELIBERATE:
            raise DataError(
                f"{row.file}, row {row.number}{f' (id {row_id})' if row_id else ''}: "
                f"{error.reason}: {error} (strict: no row may be skipped)"
            ) from error
        record.skipped.append(
            {
                "file": str(row.file),
                "row": row.number,
                "id": row_id,
                "reason": error.reason,
                "detail": str(error),
            }
        )


def _unit(hex_digits: str) -> float:
    """Eight hex digits as a number in [0, 1)."""
    return int(hex_digits, 16) / 16**8
