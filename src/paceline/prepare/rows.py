"""From a raw row to what it means: exact token ids, or a conversation in one canonical form.

Nothing is rendered here. What is wrong with a row is a RowError with a reason from a short list.
"""

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.answers.engine import is_whole
from paceline.contracts import HELDOUT_SPLIT, TOKEN_DTYPE, TRAIN_SPLIT
from paceline.errors import DataError
from paceline.prepare.reading import RawRow, from_json

_ID_KEYS = ("id", "sample_id", "question_id")


class RowError(DataError):
    """A row that cannot be used. `reason`: a word to count by; the message says the rest."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


@dataclass(frozen=True)
class Identity:
    """What a row says of itself, before its content is looked at. Empty id: take the content's
    hash. Empty conversation_id: the row is a conversation of its own. split: where the row names
    one of ours; None leaves it to the options."""

    id: str
    conversation_id: str
    source: str
    split: str | None = None


@dataclass(frozen=True)
class TokenPiece:
    """One sample's tokens: input_ids int32 [T], loss_mask bool [T]."""

    input_ids: np.ndarray
    loss_mask: np.ndarray
    num_past_end: int = 0
    finished: bool | None = None


@dataclass(frozen=True)
class TokenRow:
    """A row that brings its token ids."""

    identity: Identity
    pieces: list[TokenPiece]
    content_hash: str
    prompt_hash: str


def digest(*parts: bytes) -> str:
    """128 bits in hex over byte strings, each with its length, so that borders count."""
    hasher = hashlib.blake2b(digest_size=16)
    for part in parts:
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    return hasher.hexdigest()


def parse_row(row: RawRow) -> dict[str, Any]:
    """The row as an object; a field that is null is not there. Raises RowError."""
    try:
        values = row.parse()
    except ValueError as error:
        raise RowError("invalid_json", f"not JSON: {error}") from error
    if not isinstance(values, dict):
        raise RowError("invalid_json", f"a {type(values).__name__}, not an object")
    return _present(values)


def _present(values: dict[str, Any]) -> dict[str, Any]:
    # Writers of tables give every row all fields, and null where it has none.
    return {key: value for key, value in values.items() if value is not None}


def identify(row: dict[str, Any], default_source: str) -> Identity:
    row_id = _whole(next((row[key] for key in _ID_KEYS if key in row), ""))
    # Not the id: two files may both number their rows from 1.
    conversation = _whole(row.get("conversation_id", ""))
    for name, value in (("id", row_id), ("conversation_id", conversation)):
        if not isinstance(value, str | int):
            raise RowError("bad_field", f"{name} is {value!r}, not a string or a number")
    source = row.get("source") or default_source
    if not isinstance(source, str):
        raise RowError("bad_field", f"source is {source!r}, not a string")
    for name, value in (("id", row_id), ("conversation_id", conversation), ("source", source)):
        if not _is_text(str(value)):
            raise RowError("invalid_text", f"{name} is {value!r}, which is no text")
    split = row.get("split")
    # Data sets have splits of other names, which say nothing about what is to be held out here.
    named = split if split in (TRAIN_SPLIT, HELDOUT_SPLIT) else None
    return Identity(str(row_id), str(conversation), source, named)


def _whole(value: Any) -> Any:
    """Tables write a column of whole numbers as 1.0 where one is missing."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _is_text(value: str) -> bool:
    """JSON can say half a surrogate pair; no file can hold it."""
    return value.encode(errors="replace").decode() == value


def token_row(row: dict[str, Any], identity: Identity, vocab_size: int) -> TokenRow | None:
    """The row's exact token ids, None where it has none. Raises RowError."""
    if "answers" in row:
        answers = decoded(row["answers"])
        if not isinstance(answers, list) or not all(isinstance(a, dict) for a in answers):
            raise RowError("bad_field", "answers is not a list of objects")
        pieces = _joined([_answer(_present(answer), vocab_size) for answer in answers])
    elif "response_ids" in row:
        pieces = [_answer(row, vocab_size)]
    elif "input_ids" in row:
        pieces = [_masked(row, vocab_size)]
    else:
        return None
    pieces = [piece for piece in pieces if len(piece.input_ids)]
    if not pieces:
        raise RowError("empty", "the row has no tokens")
    first = pieces[0]
    prompt = first.input_ids[: int(np.argmax(first.loss_mask))]
    return TokenRow(
        identity,
        pieces,
        digest(*(p.input_ids.tobytes() + p.loss_mask.tobytes() for p in pieces)),
        digest((prompt if len(prompt) else first.input_ids).tobytes()),
    )


def _answer(row: dict[str, Any], vocab_size: int) -> TokenPiece:
    prompt = _ids(row, "prompt_ids", vocab_size)
    response = _ids(row, "response_ids", vocab_size)
    num_past_end = _num_past_end(row, "response_ids", len(response))
    mask = np.zeros(len(prompt) + len(response), bool)
    mask[len(prompt) : len(mask) - num_past_end] = True
    return TokenPiece(np.concatenate([prompt, response]), mask, num_past_end, told_finished(row))


def _masked(row: dict[str, Any], vocab_size: int) -> TokenPiece:
    ids = _ids(row, "input_ids", vocab_size)
    mask = _mask(row, len(ids))
    num_past_end = _num_past_end(row, "input_ids", len(ids))
    # What was recorded past an answer's end follows that end at once.
    after_last = len(ids) - 1 - int(np.flatnonzero(mask)[-1]) if mask.any() else 0
    if num_past_end not in (0, after_last):
        raise RowError(
            "bad_field",
            f"num_past_end is {num_past_end}; after the last supervised token come {after_last}",
        )
    return TokenPiece(ids, mask, num_past_end, told_finished(row))


def _num_past_end(row: dict[str, Any], name: str, num_tokens: int) -> int:
    value = row.get("num_past_end", 0)
    if not isinstance(value, int) or not 0 <= value <= num_tokens:
        raise RowError("bad_field", f"num_past_end is {value!r} of {num_tokens} {name}")
    return value


def _joined(pieces: list[TokenPiece]) -> list[TokenPiece]:
    """Answers of one conversation as few samples: one that is the next one's context joins it."""
    joined: list[TokenPiece] = []
    for piece in pieces:
        before = joined[-1] if joined else None
        if before is not None and not before.num_past_end and _begins_with(piece, before):
            mask = piece.loss_mask.copy()
            mask[: len(before.loss_mask)] |= before.loss_mask
            joined[-1] = TokenPiece(piece.input_ids, mask, piece.num_past_end, piece.finished)
        else:
            joined.append(piece)
    return joined


def _begins_with(piece: TokenPiece, before: TokenPiece) -> bool:
    return np.array_equal(piece.input_ids[: len(before.input_ids)], before.input_ids)


def told_finished(row: dict[str, Any]) -> bool | None:
    """Whether the last answer ended by itself; None where the row does not say. Raises RowError."""
    finished, reason = row.get("finished"), row.get("finish_reason")
    if not isinstance(finished, bool | None):
        raise RowError("bad_field", f"finished is {finished!r}, not true or false")
    if not isinstance(reason, str | None):
        raise RowError("bad_field", f"finish_reason is {reason!r}, not a word")
    return is_whole(reason) if finished is None else finished


def _ids(row: dict[str, Any], name: str, vocab_size: int) -> np.ndarray:
    if name not in row:
        raise RowError("missing_key", f"the row has no {name}")
    array = _flat(decoded(row[name]))
    if array is None or (len(array) and array.dtype.kind not in "iu"):
        raise RowError("bad_ids", f"{name} is not a list of whole numbers")
    outside = np.flatnonzero((array < 0) | (array >= vocab_size))
    if len(outside):
        at = int(outside[0])
        raise RowError(
            "bad_ids",
            f"{name}[{at}] is {array[at]}; the target's logits have ids 0 to {vocab_size - 1}",
        )
    return array.astype(TOKEN_DTYPE)


def _mask(row: dict[str, Any], num_tokens: int) -> np.ndarray:
    if "loss_mask" not in row:
        raise RowError("missing_key", "the row has input_ids but no loss_mask")
    array = _flat(decoded(row["loss_mask"]))
    if array is None:
        raise RowError("bad_ids", "loss_mask is not a list of 0 and 1")
    if len(array) != num_tokens:
        raise RowError(
            "length_mismatch", f"loss_mask has {len(array)} values for {num_tokens} input_ids"
        )
    if len(array) and not np.isin(array, (0, 1)).all():
        raise RowError("bad_ids", "loss_mask holds something else than 0 and 1")
    return array.astype(bool)


def _flat(values: Any) -> np.ndarray | None:
    """A list of single values as an array [N]; None for anything else."""
    try:
        array = np.asarray(values) if isinstance(values, list) else None
    except ValueError:  # lists of different lengths inside
        return None
    return array if array is not None and array.ndim == 1 else None


def decoded(value: Any) -> Any:
    """A value, parsed where it is JSON text: some tables keep lists so."""
    if isinstance(value, str):
        try:
            return from_json(value)
        except ValueError:
            return value
    return value
