"""The data contracts: names, shapes, dtypes and versions of all that stages hand to each other.

Standard library and numpy only: no torch, so that every part of paceline may import it.
Legend: T tokens of a sample, M supervised tokens, A auxiliary layers, D target hidden width,
W draft vocabulary, V logit width of the target.
"""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

MANIFEST_NAME = "manifest.json"
LOCK_NAME = ".lock"

# Whether a stage may start over in a folder: where it holds other work or this work finished
# (True), or only where it holds other work ("other").
Overwrite = bool | Literal["other"]

# Schema versions of artefact folders, by stage. A reader refuses a version that it does not know.
SCHEMA_VERSIONS = {
    "prepare": 1,
    "generate": 1,
    "extract": 1,
    "align": 1,
    "train": 1,
    "evaluate": 1,
    "export": 1,
    "report": 1,
    "export-store": 1,
    "codec-report": 1,
}

TRAIN_SPLIT = "train"
HELDOUT_SPLIT = "heldout"

TOKEN_DTYPE = np.dtype(np.int32)
MASK_DTYPE = np.dtype(np.bool_)

ACCEPTANCE_DEFINITION = (
    "acceptance length = 1 + accepted draft tokens / verify steps, pooled over all conversations; "
    "the bonus token is counted, the prefill token is not; range 1 to K + 1 for a chain of K"
)


@dataclass(frozen=True)
class TokenSample:
    """One sample of a token data set: what the target reads and what the draft is to learn.

    input_ids: int32 [T]. loss_mask: bool [T], true where the assistant wrote the token (its
    end-of-turn marker included). num_past_end: how many tokens at the end of input_ids were
    recorded past the end of the last answer (end of turn ignored), for exact evaluation; their
    loss_mask is false.
    """

    sample_id: str
    input_ids: np.ndarray
    loss_mask: np.ndarray
    source: str = ""
    split: str = TRAIN_SPLIT
    conversation_id: str = ""
    num_past_end: int = 0
    finished: bool | None = None  # False: the last answer was cut by a length limit; None: unknown

    def __post_init__(self) -> None:
        if self.input_ids.dtype != TOKEN_DTYPE or self.input_ids.ndim != 1:
            raise ValueError(
                f"sample {self.sample_id}: input_ids must be int32 [T], "
                f"got {self.input_ids.dtype} {list(self.input_ids.shape)}"
            )
        if self.loss_mask.dtype != MASK_DTYPE or self.loss_mask.shape != self.input_ids.shape:
            raise ValueError(
                f"sample {self.sample_id}: loss_mask must be bool [{len(self.input_ids)}], "
                f"got {self.loss_mask.dtype} {list(self.loss_mask.shape)}"
            )

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    @property
    def num_supervised(self) -> int:
        return int(self.loss_mask.sum())

    @property
    def num_aux_rows(self) -> int:
        """Rows of the auxiliary states that a draft step can read: up to the last supervised
        position but one, since row p is taught at p + 1."""
        supervised = np.flatnonzero(self.loss_mask)
        return int(supervised[-1]) if len(supervised) else 0


@dataclass(frozen=True)
class LayerPlan:
    """The hidden-state indices k of a capture: k = 0 is the embedding output, k = n the output of
    the last layer before the final norm (docs/concepts.md). `last` is k = n."""

    aux: tuple[int, ...]
    last: int

    @property
    def all(self) -> tuple[int, ...]:
        return (*self.aux, self.last)


@dataclass(frozen=True)
class SampleRecord:
    """A sample's line in the index of a store: where it lies and what it is, without its rows."""

    sample_id: str
    source: str
    split: str
    num_tokens: int
    num_aux_rows: int
    num_supervised: int
    num_past_end: int
    shard: int
    position: int  # the sample's number within its shard
    conversation_id: str = ""
    finished: bool | None = None


@dataclass
class Accounting:
    """samples in = stored + quarantined + skipped: nothing is lost in silence."""

    num_in: int = 0
    num_done: int = 0
    quarantined: dict[str, int] = field(default_factory=dict)
    skipped: dict[str, int] = field(default_factory=dict)

    @property
    def balanced(self) -> bool:
        return self.num_in == self.num_done + sum(self.quarantined.values()) + sum(
            self.skipped.values()
        )

    def as_dict(self) -> dict:
        return {
            "in": self.num_in,
            "done": self.num_done,
            "quarantined": dict(self.quarantined),
            "skipped": dict(self.skipped),
        }
